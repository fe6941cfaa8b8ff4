"""Compiling the CUDA kernels for every architecture without a GPU, and how that fails."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from norm_kernels import CUDA, Case

from normfuse.layers.norm import cuda
from normfuse.native import compiler, implementation
from normfuse.native.compiler import CompileError, CompilerMissing, Source
from normfuse.native.launch import Target, named_target

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")

WHOLE, HALVES = ("forward", "backward"), ("row_statistics", "apply", "row_dots", "backward_apply")
H100 = Target("sm_90", 132, "NVIDIA H100 80GB HBM3")


@pytest.fixture
def compile_all(monkeypatch):
    """`compile_all(target, case, kernels, **changes)`: [(kernel, log of the assembler)].

    Of what was not compiled before in the same test; `changes` are those of the case's norm.
    """
    done = {}

    def launch(source, kernel, operands, results, *, target, macros, shared=0, **sizes):
        key = (source, tuple(macros.items()), target.arch)
        if key not in done:
            assert shared <= target.shared_memory
            verbose = ["--ptxas-options=-v"] * (not target.portable)
            file = compiler.kernel_source(source)
            log = compiler.compile_image(file, macros, target.arch, *verbose)[1]
            assert "warning" not in log, (kernel, log)
            done[key] = kernel, log
        return [jnp.zeros(r.shape, r.dtype) for r in results]

    monkeypatch.setattr(cuda, "launch", launch)

    def run(target, case, kernels=WHOLE, **changes):
        before = len(done)
        target = named_target(target) if isinstance(target, str) else target
        norm = replace(case.norm, **changes)
        with jax.enable_x64(True):
            for kernel in kernels:
                body = functools.partial(CUDA[kernel], target, norm)
                jax.eval_shape(body, *case.types(kernel, norm))
        return list(done.values())[before:]

    return run


def spilled(log: str) -> int:
    return sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", log))


PLACES = [
    *(("sm_90", (9000, n)) for n in (512, 4096, 12288, 32768)),
    *(("sm_90", shape) for shape in ((64, 4096), (4, 9000, 512), (600, 131072))),
    ("sm_80", (4, 300, 4096)),
    ("sm_120", (4096, 4096)),
]


@pytest.mark.parametrize("arch, shape", PLACES, ids=str)
@pytest.mark.parametrize("op", ["rms_norm", "rms_norm with bias", "layer_norm"])
def test_cuda_kernels_compile_and_spill_no_registers(compile_all, op, arch, shape):
    """Statistics are results or not: without, registers go to other things."""
    if op == "rms_norm with bias" and shape not in ((9000, 512), (9000, 12288)):
        return
    case = Case(shape, centred=op == "layer_norm", bias=op != "rms_norm")
    found = compile_all(arch, case)
    found += compile_all(arch, case, ["forward"], with_mean=False, with_rstd=False)
    assert {name.split("norm_")[-1] for name, _ in found} >= set(WHOLE) or shape[-1] > 100_000
    measured = arch in ("sm_80", "sm_90") and (op != "layer_norm" or shape[-1] <= 32768)
    for name, log in found:
        # at 12288 and 32768 newer compilers keep two or three words aside
        assert not measured or spilled(log) <= (12 if shape[-1] == 32768 else 8), (name, log)


@pytest.mark.parametrize("n", [2048, 32768])
def test_cuda_backward_has_other_layouts_on_an_h100(compile_all, n):
    case = Case((100_000, n))
    compile_all("sm_90", case, ["backward"])
    others = compile_all(H100, case, ["backward"])
    assert "rms_norm_backward" in [name for name, _ in others]
    assert all(spilled(log) == 0 for _, log in others)


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
    case = Case((64 if out == "float32" else 9000, 1000), x, scale, out, out, residual=True)
    compile_all("sm_90", case)
    if x == "float16":
        compile_all("sm_90", case, HALVES)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_cuda_cast_before_compiles_and_spills_nothing(compile_all, arch):
    for n in (128, 4096):
        case = Case((9000, n), residual=n == 4096)
        for name, log in compile_all(arch, case, ["forward"], cast_before=True):
            assert spilled(log) == 0, (name, log)


def test_cuda_portable_image_is_ptx(compile_all):
    ((_, log),) = compile_all("compute_80", Case((64, 4096)), ["forward"])
    assert log == ""
    image, _ = compiler.compile_image(
        Source("a.cu", 'extern "C" __global__ void a() {}'), {}, "compute_80"
    )
    assert b".target sm_80" in image.data


def test_cuda_newer_gpu_than_compiler_gets_ptx():
    source = Source("a.cu", 'extern "C" __global__ void a() {}')
    assert compiler.compile_image(source, {}, "sm_990")[0].data.lstrip().startswith(b"//")


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
