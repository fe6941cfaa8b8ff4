"""What `normfuse info` and `normfuse cache` print and do."""

import contextlib
import functools
import io
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import (
    dense,
    fuse,
    gated_dense,
    gated_product,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rms_norm_with_rstd,
)
from normfuse.layers import info as report
from normfuse.layers.dense import gated
from normfuse.layers.norm import cuda
from normfuse.native import cache, compiler, host_compiler, implementation
from normfuse.native.launch import named_target
from normfuse.train.cli import main

# JAX's, where Triton serves: the report asks what Pallas would do.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

S = jax.ShapeDtypeStruct

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("NORMFUSE_CUDA_ARCH", raising=False)
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "kernels"


WARM = ("cache", "warm", "96", "--activation", "silu", "--arch")


def compile_each_kernel_once(patch):
    """Takes one image for all macros of a kernel: these tests look at which images are made."""
    run, made = compiler._run, {}

    def once(nvrtc, source, arguments, arch):
        name = next((a for a in arguments if a.startswith("-DKERNEL=")), source.name)
        if (name, arch) not in made:
            made[name, arch] = run(nvrtc, source, arguments, arch)
        return made[name, arch]

    patch.setattr(compiler, "_run", once)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A cache that `WARM` filled for sm_90, not to be changed, and what the command printed."""
    kernels, out = tmp_path_factory.mktemp("warmed") / "kernels", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("NORMFUSE_CACHE_DIR", str(kernels))
        patch.setattr(cache, "_memory", {})
        compile_each_kernel_once(patch)
        assert main([*WARM, "sm_90"]) == 0
    return kernels, out.getvalue()


def printed(capsys, *argv):
    assert main([*argv]) == 0
    return capsys.readouterr().out


def test_info_says_what_serves_where_and_why(monkeypatch, folder):
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    text = report.info(every_platform=True)
    for line in (
        "CUDA kernels are compiled for: sm_90",
        "NVRTC: {}.{}".format(*compiler.version()),
        f"element-wise ops on the CPU: {host_compiler.find()[1]}",
        f"kernel cache: {folder}",
        "  cpu   rms_norm   native, xla, pallas (interpreted)",
        "  cpu   layer_norm native, xla, pallas (interpreted)",
        "  cpu   dense      xla, pallas (interpreted)",
        "  cuda  rms_norm   native, xla",
        "  cuda  dense      xla, pallas",
        "  tpu   rms_norm   pallas, xla",
        "  cpu   activation xla",
        "  cuda  activation native, xla",
        "  cpu   quantize   native, xla",
        "  cuda  quantize   native, xla",
        "  cpu   loss       xla",
        "  cuda  loss       native, xla",
        "  not native: cpu activation; cpu loss (XLA already fuses this into one loop)",
        "  not native: rocm rms_norm; rocm layer_norm; rocm activation; rocm loss; rocm quantize; ",
        "  not native: cpu dense; cuda dense; rocm dense; tpu dense (no platform has a kernel)",
        "  cuda  cuBLASLt's FP8 products, from compute capability 8.9 on\n",
        "in the compute dtype: kernels with a dimension that is not a multiple of 16\n",
    ):
        assert line in text, text
    monkeypatch.setattr(implementation, "_plain", {})  # other tests of this process fell back too
    here = report.info()
    assert "  cpu   rms_norm   native, xla" in here
    assert "  cuda  rms_norm" not in here and "rocm" not in here and "tpu" not in here


@pytest.mark.parametrize("capability, what", [(80, "8.0, has none"), (90, "9.0, has them")])
def test_info_says_whether_this_gpu_has_fp8_products(capability, what, monkeypatch):
    monkeypatch.setattr(report, "compute_capability", lambda device: capability)
    assert f"8.9 on; this GPU, of {what}" in "\n".join(report._fp8_products())


def test_info_says_which_products_of_this_process_are_not_fp8(monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    x, kernel = jnp.ones((16, 16)), jnp.ones((16, 20))
    dense(x, kernel, quantization="fp8")
    shape = "dense: a kernel of shape (16, 20) has a dimension that is no multiple of 16"
    assert f"  {shape}, so it multiplies in the compute dtype" in report.info()


def test_info_without_the_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    text = report.info(every_platform=True)
    assert "NVRTC: missing: " in text
    assert "  cuda  rms_norm   xla" in text
    without = "cuda rms_norm; cuda layer_norm; cuda activation; cuda loss; cuda quantize (CUDA"
    assert f"  not native: {without}" in text
    assert "pip install 'normfuse[cuda13]'" in text


def test_info_of_a_refused_cache(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod 700"):
        text = report.info(every_platform=True)
    assert "not used: kernel cache" in text


def test_cache_warm_then_show_then_clear(capsys, monkeypatch, folder, warmed):
    kernels, text = warmed
    shutil.copytree(kernels, folder)
    count = int(re.search(r"compiled (\d+) kernels for sm_90", text)[1])
    assert count == len(cache.entries()) > 40
    assert {entry.macros.get("FEATURES") for entry in cache.entries()} == {"96", None}
    assert "rms_norm_backward" in text and "__nv_bfloat16/float/__nv_bfloat16" in text
    assert "compiled 0 kernels" in printed(capsys, *WARM, "9.0")
    monkeypatch.setattr(cache, "_memory", {})
    assert "compiled 0 kernels" in printed(capsys, *WARM, "90")
    assert (shown := printed(capsys, "cache")).count("n=96") > 20
    assert len({line.index("n=") for line in shown.splitlines() if " n=" in line}) == 1
    assert f"removed {count} files" in printed(capsys, "cache", "clear")
    assert printed(capsys, "cache", "show").count("\n") == 1


def test_cache_warm_has_what_every_op_uses(monkeypatch, folder, warmed):
    """Whatever the number of rows; the norm's width and the hidden layer's are the warmed one."""
    n, f32, bf16 = 96, jnp.float32, jnp.bfloat16
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    shutil.copytree(warmed[0], folder)
    compile_each_kernel_once(monkeypatch)
    report.warm([n], ["sm_90"], activations=("silu", "gelu"), quantization="fp8")
    total = lambda *results: sum(jnp.sum(r.astype(f32)) for r in results)
    reports = []

    def norms(x, scale):
        y, h = rms_norm(x, scale, residual=x)
        y, h = layer_norm(y, scale, scale, residual=h)
        more = layer_norm(h), layer_norm(h, scale), layer_norm(h, scale, scale)
        return total(rms_norm(y, scale), rms_norm(h), *rms_norm_with_rstd(x, scale), *more)

    def layers(x, scale, kernel, bias, activation):
        h = dense(x, kernel, bias, activation=activation)
        h = gated_product(h, gated_dense(rms_norm(h), kernel, kernel), kernel, bias)
        return total(dense(h, kernel, activation=activation), gated_dense(h, kernel, kernel))

    def quantized(x, scale, kernel):
        kernels = {"gate": kernel, "up": kernel, "down": kernel}
        options = {"quantization": "fp8", "activation": "silu"}
        shared = options | {"dtype": x.dtype.name, "implementation": None}
        y = gated.mlp(dense(x, kernel, **options), kernels, {}, **shared)
        y = gated.mlp(rms_norm(y, scale, residual=x)[0], kernels, {}, **shared)
        y = dense(rms_norm(y, scale), kernel, **options)
        return total(dense(rms_norm(y), kernel, **options))

    coded = fuse(quantized, quantization="fp8", report=reports.append)

    def losses(x, kernel):
        labels = jnp.zeros(x.shape[:1], jnp.int32)
        each = linear_cross_entropy(x, kernel, labels, softcap=5.0, reduction="none")
        return total(each, linear_cross_entropy(x, kernel, labels))

    jax.clear_caches()
    before = compiler.compilations()
    scale, kernel = S((n,), f32), S((n, n), f32)
    many = 7 * 2**24 // n  # large arrays' layouts begin here
    for rows in (1, 5, 8, 132, 133, 4000, 100_000, many, many + 1):
        x = S((rows, n), bf16)
        calls = [(coded, (x, scale, kernel))] if rows in (5, 8, many, many + 1) else []
        calls += [(norms, (x, scale)), (losses, (x, kernel))] if rows < many else []
        for name in () if rows >= many else ("silu", "gelu") if rows == 8 else ("silu",):
            calls.append((functools.partial(layers, activation=name), (x, scale, kernel, scale)))
        for fn, operands in calls:
            for one in (fn, jax.grad(fn, tuple(range(len(operands))))):
                text = jax.jit(one).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
                assert "normfuse_launch" in text
    jax.clear_caches()
    assert compiler.compilations() == before
    assert all(sum(row.domain == "codes" for row in r.fused) == 3 for r in reports)


@pytest.mark.parametrize("n", [96, 1024, 4096, 32768])
def test_every_number_of_rows_has_a_layout_that_is_warmed(n):
    """Beyond the numbers looked at, too."""
    target = named_target("sm_90")
    options = {"compute": np.dtype("float32"), "residual": False, "whole_rows": True}

    def layouts(rows):
        return (
            cuda.forward_layout(n, 2, target, rows=rows, **options),
            cuda.backward_layout(n, 2, target, rows=rows, read_bytes=4, **options),
        )

    counts = cuda.row_counts(n, target, "bfloat16", "float32", "bfloat16")
    assert len(counts) < 16
    warmed = {layouts(rows) for rows in counts}
    assert {layouts(rows) for rows in (*range(1, 40_000, 7), 1 << 22, 10**8)} <= warmed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cache", "warm", "96", "--arch", "hopper"], "archs='hopper' names no architecture"),
        (["cache", "warm", "96", "--arch", f"sm_9{0:025}"], "0' names no architecture"),
        (["cache", "warm", "96", "--arch", "sm_75"], "compute capability 7.5"),
    ],
)
def test_cache_warm_errors_are_one_line(capsys, argv, message):
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_cache_warm_refused_folder_is_an_error(capsys, folder):
    folder.write_text("")
    assert main(["cache", "warm", "96", "--arch", "sm_90"]) == 1
    assert "File exists" in capsys.readouterr().err


def test_cache_warm_rejects_no_features(capsys):
    for argv in (["cache", "warm"], ["cache", "warm", "0"], ["cache", "what"]):
        assert main(argv) == 2


def test_what_serves_attention_is_listed_for_this_gpu(monkeypatch):
    assert "attention:\n  blocks of queries and keys by XLA: cuDNN needs" in report.info()
    for capability, packed, wide in ((90, ", packed if", "cuDNN$"), (80, "$", "blocks.*not 256")):
        monkeypatch.setattr(report, "compute_capability", lambda device, found=capability: found)
        listed = "\n".join(report._attention())
        assert re.search(rf"^  segments +cuDNN{packed}", listed, re.M), listed
        assert re.search(rf"^  heads of 256 +{wide}", listed, re.M), listed
        assert re.search(r"^  softcap +blocks by XLA \(cuDNN has no softcap\)$", listed, re.M)
