"""Dense layers compiled ahead of time, exported, donated and cached."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import mlp_case
import processes
import pytest
from jax import export
from processes import answers

start = functools.partial(processes.start, pathlib.Path(__file__).with_name("mlp_worker.py"))

ALLOWED = [
    export.DisabledSafetyCheck.custom_call(f"normfuse_{name}")
    for name in ("norm_forward", "norm_backward", "launch")
]


@pytest.fixture(scope="module")
def args():
    return [jnp.asarray(a) for a in mlp_case.draw()]


def test_donated_parameters_and_input(args):
    """The gradients read a donated array before its new value takes its place."""

    def step(*args):
        return [a - g for a, g in zip(args, mlp_case.gradients(*args))]

    mine = [a.copy() for a in args]
    donated = jax.jit(step, donate_argnums=tuple(range(len(args))))
    text = donated.lower(*mine).compile().as_text()
    assert len(re.findall(r"\{\d+\}: \(\d+, \{\}, \w+-alias\)", text.splitlines()[0])) == len(args)
    new = donated(*mine)
    assert all(a.is_deleted() for a in mine)
    limit = 2 * mlp_case.TOLERANCE
    for a, b, want in zip(args, new, mlp_case.expected(), strict=True):
        size = jnp.abs(a).max() + abs(want).max()
        assert jnp.abs((a - want) - b).max() <= limit * size


def test_export_for_cuda_writes_in_place(args, monkeypatch):
    """From a machine without a GPU: activations' gradients take the place of what they read."""
    pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    monkeypatch.setenv("NORMFUSE_CUDA_ARCH", "90")
    exporter = export.export(
        jax.jit(mlp_case.gradients), platforms=["cuda"], disabled_checks=ALLOWED
    )
    text = exporter(*args).mlir_module()
    calls = [line for line in text.splitlines() if 'kernel = "epilogue_backward"' in line]
    assert len(calls) == 2 and all("output_operand_alias" in call for call in calls)


def test_persistent_compilation_cache(tmp_path):
    """A new process compiles nothing, on Auto and Explicit axes too."""
    cache = processes.compilation_cache(tmp_path)
    (cold,) = answers(start(8, **cache))
    (warm,) = answers(start(8, **cache))
    assert list(cold) == list(warm) == ["one device", "auto", "explicit"]
    for name in cold:
        assert cold[name]["misses"] > 0 and cold[name]["hits"] == 0, (name, cold)
        assert warm[name] == {"hits": cold[name]["misses"], "misses": 0}, (name, warm)
    # Our sources decide what a partitioned program does: another version must not reuse it.
    (other,) = answers(start(8, "other", **cache))
    assert other["auto"]["misses"] == cold["auto"]["misses"]
    assert other["one device"]["misses"] == other["explicit"]["misses"] == 0
