"""The compiled step: which implementation it says serves, and where its program is kept."""

import dataclasses
import math
import os
import re

import jax
import pytest
from tiny_model import CONFIG, first_devices

from normfuse.models.functional import build
from normfuse.train import UsageError, compilation
from normfuse.train.compilation import implementations
from normfuse.train.config import OptimConfig
from normfuse.train.step import Program, make_optimizer, schedule

pytestmark = pytest.mark.oldest


def program_text(lower=Program.lower, **changes) -> str:
    """The compiled step of the tiny model with `changes` of its configuration."""
    if jax.default_backend() != "cpu":
        pytest.skip("of CPUs")
    optim, mesh = OptimConfig(lr=1e-2), first_devices(1, 1, 1)
    model = build("nnx", dataclasses.replace(CONFIG, **changes))
    program = Program(model, make_optimizer(optim, 9), schedule(optim, 9), mesh, 1, 0)
    with jax.set_mesh(mesh):
        return lower(program, 2, 8).compile().as_text()


@pytest.mark.parametrize(
    ("implementation", "norms"),
    [
        ("xla", "plain XLA"),
        (("pallas", "xla"), "interpreted Pallas kernels"),
    ],
)
def test_the_program_tells_which_implementation_serves(implementation, norms):
    assert implementations(program_text(implementation=implementation))["norms"] == norms


@pytest.mark.parametrize("implementation", ["native", "pallas"])
def test_one_implementation_alone_must_serve_every_op(implementation):
    """On a CPU there is no native kernel for gated products, nor a Pallas one for float32."""
    refusal = {
        "native": "gated_product: implementation='native' cannot serve",
        "pallas": "gated_product has no 'pallas' implementation; it has 'xla', 'native'",
    }[implementation]
    with pytest.raises(NotImplementedError, match=refusal):
        program_text(implementation=implementation)
    with pytest.raises(UsageError, match=f"{refusal}.*Use --implementation auto to let "):
        program_text(compilation.lower, implementation=implementation)


_NATIVE = 'custom_call_target="normfuse_launch", backend_config={image = "0x7F", kernel = "%s"}'
_TRITON = (
    'custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/%s/pallas_call"}, '
    'backend_config={name = "%s"}'
)
_MOSAIC = 'custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/dense_gradient/mpmd_map"}'


def test_kernels_of_gpus_are_told_by_their_names():
    """Lines as XLA writes them for H200s."""
    forward, backward = "rms_norm_forward", "rms_norm_backward"
    native = "\n".join(_NATIVE % name for name in (forward, backward, "epilogue_forward"))
    served = {"norms": "native kernels", "softmax": "plain XLA", "activations": "native kernels"}
    assert implementations(native) == served
    pallas = "\n".join(_TRITON % (2 * (f"pallas_{name}",)) for name in (forward, backward))
    served = {"norms": "Pallas kernels", "softmax": "plain XLA", "activations": "plain XLA"}
    assert implementations(pallas) == served
    assert implementations(_NATIVE % "quantize_softmax")["softmax"] == "native kernels"
    both = implementations(f"{native}\n{_MOSAIC}")
    assert both["activations"] == "native kernels, Pallas kernels"
    # Operations that XLA moved into a kernel's scope are no kernel.
    fused = (
        'ROOT %c = concatenate(), metadata={op_name="jit(f)/pallas_rms_norm_forward/pallas_call"}'
    )
    assert implementations(fused)["norms"] == "plain XLA"


def test_reasons_follow_their_family():
    reasons = [("rms_norm_forward", "float8"), ("epilogue_forward", "one loop")]
    reasons += [("linear_cross_entropy", "a chunk has 99 rows")]
    assert implementations(_NATIVE % "rms_norm_backward", reasons) == {
        "norms": "native kernels, plain XLA (float8)",
        "softmax": "plain XLA (a chunk has 99 rows)",
        "activations": "plain XLA (one loop)",
    }


def test_a_run_prints_what_serves(finished):
    assert re.search(r"^norms +(native|Pallas) kernels$", finished[1], re.M)
    assert re.search(r"^activations +(native kernels|plain XLA)", finished[1], re.M)


def test_a_run_says_how_long_it_compiles(finished):
    seconds = r"in \d+\.\d s"
    said = rf"^program +traced {seconds}.*; XLA compiles it next$.*^program +compiled {seconds}$"
    assert re.search(said, finished[1], re.M | re.S)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_programs_of_others_are_not_loaded(mode, tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    (tmp_path / "xla").mkdir(0o700)
    tmp_path.chmod(mode)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.warns(RuntimeWarning, match="lets others write code") as caught:
            compilation.keep_compiled_programs()
            compilation.keep_compiled_programs()
        assert len(caught) == 1
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_programs_are_read_where_none_can_be_written(tmp_path, monkeypatch):
    """JAX would warn for each that it cannot write."""
    kept = "jax_persistent_cache_"
    names = [f"{kept}min_compile_time_secs", f"{kept}enable_xla_caches"]
    names.append("jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        compilation.keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
        assert jax.config.jax_persistent_cache_min_compile_time_secs == math.inf
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_programs_are_kept_without_being_asked(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        compilation.keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
        jax.config.update("jax_compilation_cache_dir", "elsewhere")
        compilation.keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == "elsewhere"  # the user's own choice stays
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
