"""Every handler under AddressSanitizer and UndefinedBehaviourSanitizer, called as no lowering does.

`hostile/hostile.cc` stands in for XLA. Element-wise libraries are made here, with the text that the
operation itself would compile.
"""

import concurrent.futures
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

import normfuse
from normfuse.layers.elementwise import op
from normfuse.native import _ext, host_compiler
from normfuse.native.compiler import Image

NATIVE = pathlib.Path(__file__).parents[2] / "native"
HOSTILE = pathlib.Path(__file__).parent / "hostile"
CALLS = 500
SOURCES = ["cuda/launch.cc", "sha256.cc", "signature.cc"]  # and cpu/*.cc
FLAGS = ["-std=c++17", "-O0", "-w", "-fsanitize=address,undefined"]
FLAGS += ["-fno-sanitize-recover=all", "-fno-sanitize=null,vptr"]  # null ends the process anyway

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(not NATIVE.exists(), reason="needs the sources"),
]


def gpp(*arguments, text=None):
    done = subprocess.run(["g++", *map(str, arguments)], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def build(folder: pathlib.Path) -> pathlib.Path:
    """The program, of the extension's sources."""
    jaxlib = importlib.util.find_spec("jaxlib").submodule_search_locations[0]
    include = ["-isystem", f"{jaxlib}/include", "-I", NATIVE, "-I", HOSTILE]
    sources = [HOSTILE / "hostile.cc", *sorted((NATIVE / "cpu").glob("*.cc"))]
    sources += [NATIVE / name for name in SOURCES]
    sources.sort(key=lambda path: path.name != "norm.cc")  # the longest first
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compile(source, object):
        gpp(*FLAGS, *include, "-c", source, "-o", object)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(compile, sources, objects))
    gpp(*FLAGS, *objects, "-o", folder / "hostile", "-ldl", "-lpthread")
    return folder / "hostile"


def libraries(folder: pathlib.Path, monkeypatch) -> None:
    """Libraries of several dtypes and ways to broadcast, each with a description of its calls."""
    of = functools.partial(jax.ShapeDtypeStruct, (5, 7))
    row = functools.partial(jax.ShapeDtypeStruct, (7,))
    column = functools.partial(jax.ShapeDtypeStruct, (5, 1))
    product = "template <class T> T product(T x, T y) { return x * y; }"
    cases = {
        "same": (product, [of(jnp.float32), of(jnp.float32)]),
        "row": (product, [of(jnp.bfloat16), row(jnp.bfloat16)]),
        "column": (product, [column(jnp.float16), of(jnp.float16)]),
        "larger": (
            "template <class T> bool larger(T x, T y) { return x > y; }",
            [of(jnp.int32), column(jnp.int32)],
        ),
        "mixed": (
            "template <class T> T mixed(T x, float y) { return x + y; }",
            [of(jnp.float32), row(jnp.float32)],
        ),
    }
    for name, (source, arrays) in cases.items():
        text, made = [], []
        keep = lambda name, program, arch, *flags, text=text: text.append(program) or Image(b"")

        def call(target, operands, results, *, image, digest, made=made, **attributes):
            made.append(attributes)
            return [jnp.zeros(r.shape, r.dtype) for r in results]

        monkeypatch.setattr(host_compiler, "library", keep)
        monkeypatch.setattr(op, "call_host", call)
        jax.jit(normfuse.elementwise(source)).trace(*arrays).lower()
        shared = ["-shared", "-fPIC", "-x", "c++", "-", "-o", folder / f"{name}.so"]
        gpp(*FLAGS, *shared, text=text[0])
        (one,) = made
        sizes = " ".join(map(str, one["sizes"]))
        folder.joinpath(f"{name}.txt").write_text(f"{one['layout']}\n{sizes}\n")


def test_no_call_of_a_handler_leaves_its_arrays(tmp_path, monkeypatch):
    try:
        gpp(*FLAGS, "-x", "c++", "-", "-o", tmp_path / "empty", text="int main() {}")
    except AssertionError:
        pytest.skip("g++ has no sanitizers here")
    images = tmp_path / "images"
    images.mkdir()
    libraries(images, monkeypatch)
    # Leaks are not looked for: loaded images stay for the life of the process.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        [build(tmp_path), images, str(CALLS)],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr[:6000]
    called = {line.split(":")[0] for line in done.stdout.splitlines()}
    registered = [entries["targets"] for entries in _ext.registrations().values()]
    assert called == {name for targets in registered for name in targets}, "a handler is not called"
