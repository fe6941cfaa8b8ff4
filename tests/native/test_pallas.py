"""The Pallas kernels: values, interpreted, and lowered programs."""

import functools
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from norm_kernels import KERNELS, norm_of
from reference import Expected, assert_close, wide

from normfuse import rms_norm
from normfuse.layers.norm import pallas
from normfuse.native import implementation
from normfuse.native.implementation import Order

FLAGS = {"scale_offset": 1.0}


def calls(shape, x="bfloat16", residual=True):
    """kernel -> (operands, params) for x of `shape`, (rows, n)."""
    rng = np.random.default_rng(0)
    draw = lambda shape, dtype: jnp.asarray(rng.standard_normal(shape), dtype)
    count, n = shape
    big = [draw(shape, x) for _ in range(3)]
    scale, rows = draw(n, "float32"), jnp.abs(draw(count, "float32")) + 0.5
    more, to = big[2] if residual else None, {"out_dtype": jnp.dtype(x)}
    last = {"with_dscale": True}
    return {
        "forward": ([big[0], more, scale], FLAGS | to | {"eps": 1e-6, "with_rstd": True}),
        "backward": ([*big[:2], scale, None, rows, more], FLAGS | last),
    }


def check(got, want, terms):
    """Both round once to their own dtype, and sum `terms` terms in float32 in orders of theirs."""
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        value = wide(b)
        size = np.full(value.shape, 2 * np.abs(value).max())
        twice = 2 * np.abs(value)  # two roundings may differ by a whole unit
        assert_close(a, Expected(value, size, terms, twice))


@pytest.mark.parametrize(
    "name, shape",
    half(calls((1, 1)), [(37, 100), (12, 7), (2, 8192)]),
    ids=str,
)
def test_kernels_match_the_definition(monkeypatch, name, shape):
    monkeypatch.setattr(pallas, "_ELEMENTS", 16 * 128)  # several blocks, the last beyond the end
    operands, params = calls(shape)[name]
    kernel, norm = KERNELS[name], norm_of(params)
    got = jax.jit(functools.partial(kernel.bodies["pallas"], "cpu", norm))(*operands)
    check(got, kernel.definition(norm, *operands), terms=shape[1] + shape[0])


# ---------------------------------------------------------------- lowering

S = jax.ShapeDtypeStruct
PALLAS = {"implementation": "pallas"}


def lowered(fn, *args, platform):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def count(text, target):
    return text.count(f"custom_call @{target}(")


@pytest.mark.parametrize("x64", [False, True])
def test_norms_lower_to_kernels_on_tpus_alone(x64):
    def loss(x, r, scale):
        y, h = rms_norm(x, scale, residual=r, **PALLAS)
        return jnp.sum(jnp.sin(y.astype("float32"))) + jnp.sum(h.astype("float32"))

    with jax.enable_x64(x64):
        x = S((24, 100), "bfloat16")
        text = lowered(jax.grad(loss, (0, 1, 2)), x, x, S((100,), "float32"), platform="tpu")
        assert count(text, "tpu_custom_call") == 2
    with pytest.raises(NotImplementedError, match="take rows of at most 8192, not 40000"):
        lowered(functools.partial(rms_norm, **PALLAS), S((24, 40000), "bfloat16"), platform="tpu")
    for platform in ("cuda", "rocm"):
        jax.clear_caches()
        with pytest.raises(NotImplementedError, match=f"on {platform}, there are no Pallas"):
            lowered(functools.partial(rms_norm, **PALLAS), x, platform=platform)


def test_nothing_asked_for_is_pallas_on_tpus_alone(caplog, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    x = S((8, 64), "bfloat16")
    assert count(lowered(rms_norm, x, platform="tpu"), "tpu_custom_call") == 1
    assert not implementation.fallbacks()
    assert "custom_call" not in lowered(rms_norm, x, platform="rocm")
    assert implementation.fallbacks() == [("rms_norm", "on rocm, this platform has no kernel")]
    with caplog.at_level(logging.INFO, "normfuse"):
        text = lowered(rms_norm, S((8, 64), "float16"), platform="tpu")
    assert "custom_call" not in text
    assert "served by plain HLO: on tpu, Pallas kernels take" in caplog.text


def test_cuda_without_the_compiler_is_plain_and_logged(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(implementation, "_plain", {})
    x = S((1024, 72), "bfloat16")
    with caplog.at_level(logging.INFO, "normfuse"):
        assert "custom_call" not in lowered(rms_norm, x, platform="cuda")
    assert "is served by plain HLO: on cuda, CUDA kernels are compiled" in caplog.text


# ---------------------------------------------------------------- unserved contexts


def test_symbolic_shapes_are_refused():
    from jax import export

    (b,) = export.symbolic_shape("b")
    with pytest.raises(NotImplementedError, match="this is symbolic"):
        export.export(jax.jit(functools.partial(rms_norm, **PALLAS)))(S((b, 8), "float32"))


def test_kernels_of_the_local_tier_take_an_order():
    x, norm = jnp.full((3, 4), 2.0), norm_of({"out_dtype": jnp.dtype("float32")})
    got, *_ = KERNELS["forward"](norm, x, order=Order(("pallas",), strict=True))
    np.testing.assert_array_equal(got, np.ones((3, 4)))
    with pytest.raises(NotImplementedError, match="there is no Pallas kernel for this"):
        KERNELS["row_statistics"](norm, x, order=Order(("pallas",), strict=True))
