"""Compiles CUDA C++ for one architecture with NVRTC; no toolkit, driver or GPU is needed.

`sm_90` and the like give machine code (a cubin), `compute_80` gives PTX, which the driver finishes
for the device it finds. A cubin loads on any driver of NVRTC's major version; PTX only on a driver
at least as new as NVRTC, so a program exported for older machines is best exported with an older
NVRTC, or for a named architecture (`NORMFUSE_CUDA_ARCH`).
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import cache
from .cache import Image
from .implementation import Unsupported

_KERNELS = pathlib.Path(__file__).parent / "kernels"
_TOOLKIT = "/usr/local/cuda"  # CUDA's installers use this folder
_OPTIONS = ("--std=c++17",)
_INSTALL = "`pip install 'normfuse[cuda13]'` (or `'normfuse[cuda12]'`, to match your jax)"


class CompilerMissing(Unsupported):
    """NVRTC, its Python bindings or CUDA's headers are not installed; the message says which."""


class CompileError(RuntimeError):
    """A source does not compile; the message holds the log of NVRTC, or of the C++ compiler."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A CUDA C++ file.

    Attributes:
      name, text: of the file.
      headers: (name, text) of all that it includes of ours.
      options: for NVRTC.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


@functools.cache
def kernel_source(name: str) -> Source:
    """Reads the kernel file `name` that comes with normfuse, and the headers it includes."""
    text = kernel_text(name)
    headers: dict[str, str] = {}
    pending = [text]
    while pending:
        for header in re.findall(r'^#include "([\w.]+)"', pending.pop(), re.MULTILINE):
            if header not in headers:
                headers[header] = kernel_text(header)
                pending.append(headers[header])
    return Source(name, text, tuple(sorted(headers.items())))


def kernel_text(name: str) -> str:
    return (_KERNELS / name).read_text()


_DIRECTIVE = re.compile(
    r"(?:#|%:|\?\?=)[ \t\f\v]*(?:include|include_next|import|embed)\b[ \t\f\v]*"
    r"(?P<file>\"[^\"\n]*\"|<[^>\n]*>|\w*)"
    r"|\b__has_(?:include|include_next|embed)\b"
)


@functools.lru_cache(maxsize=256)
def files_read(text: str) -> tuple[str, ...]:
    """Returns the files that a C++ text reads or looks for, as its directives write them.

    That is `"row.cuh"`, `<math.h>`, the name of a macro, `__has_include` or `.incbin`, whether or
    not a condition, a string or a comment of several lines leaves the directive out.
    """
    lines = re.sub(r"\r\n?", "\n", text)
    lines = re.sub(r"(?:\\|\?\?/)[ \t\f\v]*\n", "", lines)  # joins continued lines
    lines = re.sub(r"//[^\n]*", "", lines)
    texts = lines, re.sub(r"/\*.*?\*/", " ", lines, flags=re.DOTALL)
    files = [m["file"] or m[0] for whole in texts for m in _DIRECTIVE.finditer(whole)]
    if re.search(r'\.inc(?:bin|lude)\s*\\?"', lines):  # the assembler's
        files.append(".incbin")
    return tuple(dict.fromkeys(file.strip() for file in files))


@functools.lru_cache(maxsize=256)
def check_self_contained(source: Source) -> None:
    """Raises CompileError if `source` reads files of ours that are not among its headers.

    The key in the cache holds the headers' texts, and would not change with another file.
    """
    headers = {f'"{name}"' for name, _ in source.headers}
    for name, text in [(source.name, source.text), *source.headers]:
        for file in files_read(text):
            if file not in headers and not re.fullmatch("<[^>]+>", file):
                raise CompileError(
                    f"{name} reads {file}, which is not among the source's headers: pass its text "
                    "as Source(headers=((name, text), ...)), so that a change is noticed"
                )


def image_of(source: Source, macros: Mapping[str, str | int], arch: str) -> Image:
    """Returns the image of `source` for `arch`; compiles it if no cache has it, `compile_image`."""
    check_self_contained(source)
    described = [dataclasses.astuple(source), options(macros, arch), version()]
    return cache.fetch(described, lambda: compile_image(source, macros, arch)[0])


def compile_image(
    source: Source, macros: Mapping[str, str | int], arch: str, *extra: str
) -> tuple[Image, str]:
    """Compiles `source` for `arch` ("sm_90": a cubin, "compute_80": PTX); returns its log, too.

    `extra` are further options for NVRTC.

    Raises:
      CompilerMissing: if NVRTC, cuda-bindings or CUDA's headers are not installed.
      CompileError: if the source does not compile, with the compiler's log.
      ValueError: for a macro whose name is a single letter: CUDA's own headers use those.
    """
    nvrtc = _nvrtc()
    _, known = nvrtc.nvrtcGetSupportedArchs()
    number = re.fullmatch(r"sm_(\d+)", arch)
    if number and int(number[1]) > max(known):  # newer than NVRTC: PTX for the newest it knows
        arch = f"compute_{max(known)}"
    arguments = [*options(macros, arch), *source.options, *extra]
    folders = filter(None, (include_directory(), standard_library()))
    arguments += [f"--include-path={folder}" for folder in folders]
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    status, program = nvrtc.nvrtcCreateProgram(
        source.text.encode(), source.name.encode(), len(names), texts, names
    )
    _check(nvrtc, status, source, arch, "")
    try:
        encoded = [argument.encode() for argument in arguments]
        (built,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = log.rstrip(b"\0 \n").decode(errors="replace")
        _check(nvrtc, built, source, arch, log)
        if arch.startswith("sm_"):
            return Image(_read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)), log
        ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        return Image(ptx.rstrip(b"\0")), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def options(macros: Mapping[str, str | int], arch: str) -> list[str]:
    """Returns the compiler's options, without the folders of CUDA's headers."""
    for name in macros:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]+", name):
            raise ValueError(
                f"macro {name!r}: a macro's name is two or more upper-case letters, digits or _, "
                "because CUDA's own headers use single letters"
            )
    return [*_OPTIONS, f"--gpu-architecture={arch}", *[f"-D{k}={v}" for k, v in macros.items()]]


def version() -> tuple[int, int]:
    _, major, minor = _nvrtc().nvrtcVersion()
    return major, minor


@functools.cache
def include_directory() -> str:
    """Returns the folder of cuda_bf16.h, from NVIDIA's wheels or a CUDA toolkit."""
    folder = _first_with(("cuda_bf16.h", "cuda_fp16.h"), (_wheel_headers(),), ("", "include"))
    if folder is None:
        raise CompilerMissing(f"CUDA's headers (cuda_bf16.h) are not installed: {_INSTALL}")
    return folder


@functools.cache
def standard_library() -> str | None:
    """Returns the folder of <cuda/std/…>, with CUDA's headers or elsewhere; None without."""
    folders = (include_directory(), _wheel_headers("cccl"))
    return _first_with(("cuda/std/complex",), folders, ("", "cccl", "include", "include/cccl"))


def _first_with(
    files: Sequence[str], folders: Sequence[str | None], inner: Sequence[str]
) -> str | None:
    """Returns the first of `folders` and CUDA's own, or an `inner` one of it, that has `files`."""
    own = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), _TOOLKIT]
    for folder, part in itertools.product(filter(None, [*folders, *own]), inner):
        path = pathlib.Path(folder, part)
        if all((path / file).exists() for file in files):
            return str(path)
    return None


def _wheel_headers(name: str = "cudart") -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # renamed: releases before 1.2.3 have no such name
        return None
    return find_nvidia_header_directory(name)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise CompilerMissing(
            f"CUDA kernels are compiled when they are first used, and cuda-bindings is not "
            f"installed ({error}): {_INSTALL}"
        ) from error
    try:
        nvrtc.nvrtcVersion()  # opens the library
    except Exception as error:  # cuda-pathfinder's own exceptions share no public base
        raise CompilerMissing(
            f"NVRTC, CUDA's run-time compiler, cannot be opened: {_INSTALL}. {error}"
        ) from error
    _open_builtins()
    return nvrtc


@functools.cache
def _open_builtins() -> None:
    """Opens the library that NVRTC opens by its bare name when it first compiles.

    NVRTC 13.0 does not look in its own folder, and cuda-pathfinder opens the library only where it
    opens NVRTC too: not where JAX's plugin has done that before.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:  # renamed: NVRTC says what it misses
        return
    beside = pathlib.Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "").parent
    for path in beside.glob("libnvrtc-builtins.so*"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path))


def _read(size: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
    _, count = size(program)
    data = bytearray(count)
    get(program, data)
    return bytes(data)


def _check(nvrtc: Any, result: Any, source: Source, arch: str, log: str) -> None:
    if result == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return
    _, text = nvrtc.nvrtcGetErrorString(result)
    reason = text.decode() if isinstance(text, bytes) else str(text)
    hint = ""
    if result == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
        hint = " (does NVRTC {}.{} know {}?)".format(*version(), arch)
    raise CompileError(f"{source.name} does not compile for {arch}: {reason}{hint}\n{log}".rstrip())
