"""Compiles C++ with the system's compiler, for the CPU at hand.

The instruction set is one of the levels that Linux distributions know (x86-64-v2, -v3, -v4), which
the key in the cache holds: machines that share a folder never run each other's instructions.
"""

import functools
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from . import cache
from .compiler import CompileError, CompilerMissing, Image

PORTABLE = "generic"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-s", "-w", "-fdiagnostics-color=never")
_FLAGS += ("-fno-trapping-math",)  # both sides of a condition may be vectorised
_FLAGS += ("-ffp-contract=off",)  # the same values at every level
WITHOUT_ERRNO = "-fno-math-errno"
"""A flag that lets square roots be vectorised. With it GCC also rewrites sin(atan(x)), cos(atan(x))
and pow(x, 0.5), so that NaN becomes 1 or 0, the root of -inf NaN, and that of -0 negative."""
_LEVELS = {  # the flags of /proc/cpuinfo that each level needs, highest first
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    "x86-64-v3": "avx2 bmi1 bmi2 f16c fma abm movbe",
    "x86-64-v2": "sse4_2 popcnt ssse3 cx16",
}


def library(name: str, text: str, arch: str, *flags: str) -> Image:
    """Returns the shared library of C++ `text`, from the cache if it has been compiled before.

    `name` is for messages; `text` is the whole program and reads the system's headers alone; `arch`
    is `host()`, or PORTABLE; `flags` are this program's own.

    Raises:
      CompilerMissing: if there is no compiler.
      CompileError: if the text does not compile, with the compiler's log.
    """
    path, version = find()
    folders = [os.environ.get(name) for name in ("CPATH", "CPLUS_INCLUDE_PATH")]
    described = ["host", text, arch, platform.machine(), version, _FLAGS + flags, folders]
    return cache.fetch(described, lambda: _compile(path, name, text, arch, flags))


def find() -> tuple[str, str]:
    """Returns (command, version) of the compiler that `CXX` names, or else c++, g++ or clang++.

    Raises CompilerMissing if there is none, or if `CXX` names none.
    """
    return _find(os.environ.get("CXX"))


@functools.cache
def _find(named: str | None) -> tuple[str, str]:
    for command in [named] if named else ["c++", "g++", "clang++"]:
        path, *options = shlex.split(command) or [""]
        if (program := shutil.which(path)) is not None:
            words = [program, *options]
            done = subprocess.run([*words, "--version"], capture_output=True, text=True)
            if done.returncode == 0:
                return shlex.join(words), done.stdout.splitlines()[0]
    if named:
        raise CompilerMissing(
            f"the environment variable CXX is {named!r}, and no such C++ compiler runs: set it to "
            "the path of one, or unset it"
        )
    raise CompilerMissing(
        "no C++ compiler (c++, g++, clang++, or what CXX names) is on the PATH; install g++"
    )


@functools.cache
def host() -> str:
    """Returns the instruction set of this machine's CPU: a level's name, or PORTABLE."""
    try:
        info = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return PORTABLE
    match = re.search(r"^flags\s*:(.*)$", info, re.MULTILINE)
    flags = set(match[1].split()) if match and platform.machine() == "x86_64" else set()
    levels = list(_LEVELS)
    for i, level in enumerate(levels):  # each has all of those below it
        if set(" ".join(_LEVELS[one] for one in levels[i:]).split()) <= flags:
            return level
    return PORTABLE


def _compile(path: str, name: str, text: str, arch: str, flags: Sequence[str]) -> Image:
    level = [] if arch == PORTABLE else [f"-march={arch}"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder, "library.so")
            options = [*_FLAGS, *flags, *level, "-x", "c++", "-", "-o", str(output)]
            command = [*shlex.split(path), *options]
            done = subprocess.run(command, input=text, capture_output=True, text=True)
            data = b"" if done.returncode else output.read_bytes()
    except OSError as error:
        raise CompileError(f"{path} could not compile {name}: {error}") from error
    if done.returncode:
        raise CompileError(f"{name} does not compile for the CPU ({path}):\n{done.stderr}")
    return Image(data)
