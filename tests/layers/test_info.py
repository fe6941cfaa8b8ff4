"""`normfuse info` and `normfuse cache`: what they print and do."""

import sys

import jax
import jax.numpy as jnp
import pytest

from normfuse import dense, rms_norm
from normfuse.layers import info as report
from normfuse.native import cache, compiler, host_compiler, implementation
from normfuse.train.cli import main

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("NORMFUSE_CUDA_ARCH", raising=False)
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "kernels"


def printed(capsys, *argv):
    assert main([*argv]) == 0
    return capsys.readouterr().out


def test_info_says_what_serves_where_and_why(monkeypatch, folder):
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    every = report._implementations(("cpu", "cuda", "rocm", "tpu"))
    text = "\n".join([report.info(), *every, ""])
    for line in (
        "CUDA kernels are compiled for: sm_90",
        "NVRTC: {}.{}".format(*compiler.version()),
        f"element-wise ops on the CPU: {host_compiler.find()[1]}",
        f"kernel cache: {folder}",
        "  cpu   norms      native, xla, pallas (interpreted)",
        "  cuda  norms      native, xla\n",
        "  rocm  norms      xla\n",
        "  tpu   norms      pallas, xla\n",
        "  cpu   activation xla\n",
        "  cuda  activation native, xla\n",
        "  cpu   quantize   native, xla\n",
        "  cuda  quantize   native, xla\n",
        "  cuda  attention  cudnn, xla (blocks)\n",
        "  cpu   attention  xla (blocks)\n",
        "  cpu   loss       xla\n",
        "  cuda  loss       native, xla\n",
    ):
        assert line in text, text
    monkeypatch.setattr(implementation, "_plain", {})  # other tests of this process fell back too
    here = report.info()
    assert "  cpu   norms      native, xla" in here
    assert "  cuda  norms" not in here and "rocm" not in here and "tpu" not in here


def test_info_says_which_products_of_this_process_are_not_fp8(monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    x, kernel = jnp.ones((16, 16)), jnp.ones((16, 20))
    dense(x, kernel, quantization="fp8")
    shape = "dense: a kernel of shape (16, 20) has a dimension that is no multiple of 16"
    assert f"  {shape}, so it multiplies in the compute dtype" in report.info()


def test_info_without_the_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    text = report.info()
    assert "NVRTC: missing: " in text
    assert "pip install 'normfuse[cuda13]'" in text


def test_info_of_a_refused_cache(folder):
    folder.mkdir()
    folder.chmod(0o777)
    assert "not used: kernel cache" in report.info()


def test_a_kernel_that_was_compiled_is_counted_then_cleared(capsys, monkeypatch):
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    jax.clear_caches()
    rows = jax.ShapeDtypeStruct((1024, 96), "bfloat16")
    jax.jit(rms_norm).trace(rows).lower(lowering_platforms=("cuda",))
    assert ", 1 kernels, 0.0 MiB" in printed(capsys, "cache")
    assert "removed 1 files" in printed(capsys, "cache", "clear")
    assert ", 0 kernels" in printed(capsys, "cache", "show")


def test_a_command_of_the_cache_that_is_unknown_is_refused():
    for argv in (["cache", "warm"], ["cache", "what"]):
        assert main(argv) == 2
