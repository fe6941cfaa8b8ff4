"""How far a reader goes who follows a call through the package; see `trips`."""

import sys

import jax
import jax.numpy as jnp
import pytest
import trips

from normfuse import rms_norm
from normfuse.native import compiler

pytest.importorskip("cuda.bindings", reason="lowering needs cuda-bindings and NVRTC")


def lowered(n: int) -> None:
    loss = lambda x, scale: jnp.sum(rms_norm(x, scale).astype(jnp.float32) ** 2)
    x, scale = jax.ShapeDtypeStruct((16384, n), jnp.bfloat16), jax.ShapeDtypeStruct((n,), "f4")
    jax.jit(jax.grad(loss, (0, 1))).trace(x, scale).lower(lowering_platforms=("cuda",))


def test_a_norm_and_its_gradients_are_a_short_trip(arch, monkeypatch, tmp_path):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    arch("sm_90")
    lowered(2048)  # imports, and reads each kernel's source once
    monkeypatch.setattr(compiler, "kernel_text", None)
    lowered(1024)  # compiles its kernels from the sources that were read
    arch("sm_90")
    trip = trips.counted(lambda: lowered(1024))
    # The derivation of tangents and the norm's operands by name have a file each.
    assert len(trip.files) <= 11, trip
    if sys.version_info >= (3, 12):  # before, comprehensions are calls, too
        assert trip.calls <= 320 and trip.changes <= 75, trip
