"""What `normfuse info` and `normfuse cache` print and do."""

import sys

import pytest

from normfuse.native import cache, compiler, host_compiler, report
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
    text = report.info()
    for line in (
        "CUDA kernels are compiled for: sm_90",
        "NVRTC: {}.{}".format(*compiler.version()),
        f"element-wise ops on the CPU: {host_compiler.find()[1]}",
        f"kernel cache: {folder}",
        "  cpu   rms_norm   native, xla, pallas (interpreted)",
        "  cpu   dense      xla, pallas (interpreted)",
        "  cuda  rms_norm   native, pallas, xla",
        "  cuda  dense      xla, pallas",
        "  tpu   rms_norm   pallas, xla",
        "  cpu   activation xla",
        "  cuda  activation native, xla",
        "  not native: cpu activation (XLA itself makes one loop of it)",
        "rocm rms_norm; rocm activation; tpu rms_norm; tpu activation (this platform has",
        "  not native: cpu dense; cuda dense; rocm dense; tpu dense (no platform has a kernel)",
    ):
        assert line in text, text


def test_info_without_the_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    text = report.info()
    assert "NVRTC: missing: " in text
    assert "  cuda  rms_norm   pallas, xla" in text
    assert "  not native: cuda rms_norm; cuda activation (CUDA kernels are compiled" in text
    assert "pip install 'normfuse[cuda13]'" in text


def test_info_of_a_refused_cache(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod 700"):
        text = report.info()
    assert "not used: kernel cache" in text


def test_cache_warm_then_show_then_clear(capsys, monkeypatch):
    text = printed(capsys, "cache", "warm", "96", "--arch", "sm_90")
    assert "compiled 18 kernels for sm_90" in text
    assert {entry.macros.get("FEATURES") for entry in cache.entries()} == {"96", None}
    assert "rms_norm_backward" in text and "__nv_bfloat16/float/__nv_bfloat16" in text
    assert "compiled 0 kernels" in printed(capsys, "cache", "warm", "96", "--arch", "9.0")
    monkeypatch.setattr(cache, "_memory", {})
    assert "compiled 0 kernels" in printed(capsys, "cache", "warm", "96", "--arch", "90")
    assert printed(capsys, "cache").count("n=96") == 17
    assert "removed 18 files" in printed(capsys, "cache", "clear")
    assert printed(capsys, "cache", "show").count("\n") == 1


def test_cache_warm_has_what_the_layers_use(monkeypatch):
    import jax
    import jax.numpy as jnp

    from normfuse import add_rms_norm, rms_norm

    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "sm_90")
    report.warm([96], ["sm_90"])

    def loss(x, scale):
        h, _ = add_rms_norm(x, x, scale, implementation="native")
        return jnp.sum(rms_norm(h, scale, implementation="native").astype(jnp.float32))

    jax.clear_caches()
    before = compiler.compilations()
    x, scale = jnp.ones((4, 96), jnp.bfloat16), jnp.ones(96)
    for fn in (loss, jax.grad(loss, (0, 1))):
        text = jax.jit(fn).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()
        assert "normfuse_launch" in text
    jax.clear_caches()
    assert compiler.compilations() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cache", "warm", "96", "--arch", "hopper"], "names no architecture"),
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
