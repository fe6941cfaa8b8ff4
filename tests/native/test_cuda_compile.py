"""Compiling the CUDA kernels for every architecture without a GPU, and how that fails."""

import functools
import re
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from combinations import half
from norm_kernels import CUDA, norm_of

from normfuse.layers.norm import cuda
from normfuse.native import compiler, implementation
from normfuse.native.compiler import CompileError, CompilerMissing, Source
from normfuse.native.launch import Target, named_target

pytestmark = pytest.mark.oldest

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
FLAGS = {"scale_offset": 0.0, "has_scale": True}


@pytest.fixture
def compile_all(monkeypatch):
    """`compile_all(target, kernel, operands, params)`: [(kernel, log of the assembler)].

    Of what was not compiled before in the same test.
    """
    done = {}

    def launch(source, kernel, operands, results, *, target, macros, shared=0, **sizes):
        key = (source, tuple(macros.items()), target.arch)
        if key not in done:
            assert shared <= target.shared_memory
            verbose = ["--ptxas-options=-v"] * (not target.portable)
            file = compiler.kernel_source(source)
            done[key] = kernel, compiler.compile_with_log(file, macros, target.arch, *verbose)[1]
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(cuda, "launch", launch)

    def run(target, kernel, operands, params):
        before = len(done)
        target = named_target(target) if isinstance(target, str) else target
        with jax.enable_x64(True):
            structs = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in operands]
            jax.eval_shape(functools.partial(CUDA[kernel], target, norm_of(params)), *structs)
        return list(done.values())[before:]

    return run


def calls_of(shape, x="bfloat16", scale="float32", out="bfloat16", residual=False):
    """Operands and params of every kernel."""
    outer, n, inner = shape
    compute = "float64" if "float64" in (x, scale, out) else "float32"
    large, dy, w, row = (shape, x), (shape, out), ((n,), scale), ((outer, inner), compute)
    flags = FLAGS | {"has_residual": residual}
    out_dtype, more = {"out_dtype": jnp.dtype(out)}, [dy] * residual
    with_rstd = {"eps": 1e-6, "with_rstd": True}
    given = {"with_dscale": True, "count": float(n)}
    return {
        "forward": ([large, *more, w], flags | out_dtype | with_rstd),
        "row_statistics": ([large], {}),
        "apply": ([large, w, row], FLAGS | out_dtype),
        "backward": ([dy, large, w, row, *more], flags | {"with_dscale": True}),
        "row_dots": ([dy, large, w], FLAGS),
        "backward_apply": ([dy, large, w, row, *more, row], flags | given),
    }


def spilled(log: str) -> int:
    return sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", log))


@pytest.mark.parametrize(
    "arch, shape",
    half(ARCHITECTURES, [(9000, 1024, 1), (4096, 32768, 1), (8, 300, 7), (64, 4096, 1)]),
    ids=str,
)
def test_cuda_kernels_compile(compile_all, arch, shape):
    for kernel in ("forward", "backward"):
        for name, log in compile_all(arch, kernel, *calls_of(shape)[kernel]):
            assert "warning" not in log, (name, log)


@pytest.mark.newest  # the oldest assembler compiles the kernels of other tests
@pytest.mark.parametrize(
    ("rows", "n"),
    [
        *((9000, n) for n in (512, 2560, 4096, 7168, 12288, 18432)),
        *((600, n) for n in (32768, 131072)),
        *((64, n) for n in (1000, 4096, 16384)),
        (512, 8192),
    ],
)
def test_cuda_kernels_spill_no_registers_on_hopper(compile_all, rows, n):
    for kernel in ("forward", "backward"):
        for name, log in compile_all("sm_90", kernel, *calls_of((rows, n, 1))[kernel]):
            assert spilled(log) <= 8, (name, log)  # at 12288 newer compilers keep two words aside


@pytest.mark.parametrize("n", [256, 2048, 5120, 32768])
def test_cuda_backward_has_other_layouts_on_an_h100(compile_all, n):
    call = calls_of((100_000, n, 1))["backward"]
    compile_all("sm_90", "backward", *call)
    others = compile_all(Target("sm_90", 132, "NVIDIA H100 80GB HBM3"), "backward", *call)
    assert "rms_norm_backward" in [name for name, _ in others]
    for name, log in others:
        assert spilled(log) == 0, (name, log)


@pytest.mark.parametrize(
    ("x", "scale", "out"),
    [
        ("float32", "float32", "float32"),
        ("float16", "bfloat16", "float32"),
        ("float32", "float16", "bfloat16"),
        ("float64", "float32", "float16"),
        ("bfloat16", "float64", "float64"),
    ],
)
def test_cuda_dtype_mixes_compile(compile_all, x, scale, out):
    rows = 64 if out == "float32" else 9000
    calls = calls_of((rows, 1000, 1), x, scale, out, residual=True)
    for kernel in ("forward", "backward"):
        compile_all("sm_90", kernel, *calls[kernel])


@pytest.mark.parametrize("arch", ("sm_80", "sm_90", "sm_100"))
def test_cuda_cast_before_compiles_and_spills_nothing(compile_all, arch):
    for shape in ((9000, 128, 1), (9000, 4096, 1), (8, 300, 7)):
        operands, params = calls_of(shape, residual=shape[1] == 4096)["forward"]
        for name, log in compile_all(arch, "forward", operands, params | {"cast_before": True}):
            assert "warning" not in log and spilled(log) == 0, (name, log)


@pytest.mark.parametrize("arch, n", [("sm_80", 64), ("sm_90", 128), ("sm_100", 256)])
def test_cuda_heads_compile_and_spill_nothing(compile_all, arch, n):
    heads, x, row = (32, n), ((4096, 32, n), "bfloat16"), ((4096, 32), "float32")
    seen = FLAGS | {"axes": (2,), "heads": (1,), "out_dtype": "bfloat16", "with_rstd": True}
    scale = (heads, "float32")
    found = compile_all(arch, "forward", [x, scale], seen)
    found += compile_all(arch, "backward", [x, x, scale, row], seen | {"with_dscale": True})
    for name, log in found:
        assert "warning" not in log and spilled(log) == 0, (name, log)


@pytest.mark.parametrize("shape", [(64, 1000, 1), (4, 257, 3)], ids=str)
def test_cuda_halves_compile(compile_all, shape):
    calls = calls_of(shape, "float16", "float32", "bfloat16", residual=True)
    for kernel in ("row_statistics", "apply", "row_dots", "backward_apply"):
        compile_all("sm_90", kernel, *calls[kernel])


def test_cuda_portable_image_is_ptx(compile_all):
    ((_, log),) = compile_all("compute_80", "forward", *calls_of((64, 4096, 1))["forward"])
    assert log == ""
    image = compiler.compile_image(
        Source("a.cu", 'extern "C" __global__ void a() {}'), {}, "compute_80"
    )
    assert b".target sm_80" in image.data


def test_cuda_first_compile_is_quick(compile_all, capsys):
    compile_all("sm_90", "row_statistics", *calls_of((64, 96, 1))["row_statistics"])  # opens NVRTC
    began = time.process_time()
    compile_all("sm_90", "forward", *calls_of((64, 4096, 1))["forward"])
    forward = time.process_time() - began
    compile_all("sm_90", "backward", *calls_of((64, 4096, 1))["backward"])
    backward = time.process_time() - began - forward
    with capsys.disabled():
        print(f"\ncompiling for sm_90: forward {forward:.2f} s, backward {backward:.2f} s")
    assert forward < 5 and backward < 10  # 0.2 and 0.3 on an idle machine


def test_cuda_newer_gpu_than_compiler_gets_ptx():
    source = Source("a.cu", 'extern "C" __global__ void a() {}')
    assert compiler.compile_image(source, {}, "sm_990").data.lstrip().startswith(b"//")


def test_cuda_bad_source_names_file_and_line():
    with pytest.raises(CompileError, match=r"(?s)broken\.cu.*sm_90.*broken\.cu\(2\): error"):
        compiler.compile_image(Source("broken.cu", "\nint x = ;"), {}, "sm_90")


def test_cuda_unknown_architecture_says_what_the_compiler_is():
    with pytest.raises(CompileError, match=r"does NVRTC \d+\.\d+ know sm_10\?"):
        compiler.compile_image(Source("a.cu", ""), {}, "sm_10")


@pytest.mark.parametrize("name", ["N", "rows", "A-B", ""])
def test_cuda_macro_names_are_checked(name):
    with pytest.raises(ValueError, match="macro"):
        compiler.compile_image(Source("a.cu", ""), {name: 1}, "sm_90")


def test_cuda_missing_bindings_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        CompilerMissing, match=r"cuda-bindings is not installed.*normfuse\[cuda13\]"
    ):
        compiler.compile_image(Source("a.cu", ""), {}, "sm_90")


def test_cuda_missing_nvrtc_names_the_extra(monkeypatch):
    from cuda.bindings import nvrtc

    def absent():
        raise RuntimeError("Failed to find libnvrtc.so")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    with pytest.raises(CompilerMissing, match=r"(?s)NVRTC.*normfuse\[cuda13\].*libnvrtc\.so"):
        compiler.compile_image(Source("a.cu", ""), {}, "sm_90")


def test_cuda_missing_headers_name_the_extra(monkeypatch, tmp_path):
    compiler.include_directory.cache_clear()
    monkeypatch.setattr(compiler, "_wheel_headers", lambda: str(tmp_path))
    monkeypatch.setattr(compiler, "_TOOLKIT", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(CompilerMissing, match=r"headers .*normfuse\[cuda13\]"):
        compiler.compile_image(Source("a.cu", ""), {}, "sm_90")
    assert issubclass(
        CompilerMissing, implementation.Unsupported
    )  # implementation=None goes on without
