"""The frameworks' LayerNorm by normfuse: values, parameters, options."""

import equinox as eqx
import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx

from normfuse.layers import eqx as ours_eqx
from normfuse.layers import linen as ours_linen
from normfuse.layers import nnx as ours_nnx

pytestmark = pytest.mark.oldest

DTYPES = [("float32", None), ("bfloat16", None), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
SCALE, BIAS = (np.linspace(a, b, 24, dtype=np.float32) for a, b in [(0.5, 2), (-1, 1)])


def given(dtype, shape=(6, 24)):
    """A mean of 30 deviations, which Flax's own default costs three digits."""
    return jnp.asarray(30 + np.random.default_rng(0).standard_normal(shape), dtype)


def check(y, x, scale=SCALE, bias=BIAS, eps=1e-6, slack=1.0):
    expected = reference.layer_forward(np.asarray(x), scale, bias, eps=eps)
    reference.assert_close(y, expected, slack=slack)


@pytest.mark.parametrize("x_dtype, dtype", DTYPES)
def test_nnx(x_dtype, dtype):
    x, options = given(x_dtype), {"dtype": dtype, "rngs": nnx.Rngs(0)}
    theirs = nnx.LayerNorm(24, use_fast_variance=False, **options)
    norm = ours_nnx.LayerNorm(24, implementation="native", **options)
    paths = lambda layer: [path for path, _ in nnx.to_flat_state(nnx.state(layer))]
    assert paths(norm) == paths(theirs)
    for layer in (norm, theirs):
        layer.scale[...], layer.bias[...] = SCALE, BIAS
    y = norm(x)
    assert y.dtype == theirs(x).dtype
    # with a dtype x and the parameters are rounded to it first, as in Flax
    rounded = [np.asarray(jnp.asarray(a, dtype or a.dtype)) for a in (x, SCALE, BIAS)]
    check(y, *rounded)
    compiled = jax.jit(lambda x: norm(x)).lower(x).compile()
    assert hlo.calls(compiled) == {"forward": 1}


@pytest.mark.parametrize("x_dtype, dtype", DTYPES)
def test_linen(x_dtype, dtype):
    x = given(x_dtype)
    theirs = nn.LayerNorm(use_fast_variance=False, dtype=dtype)
    norm = ours_linen.LayerNorm(dtype=dtype, implementation="native")
    init = [layer.init(jax.random.key(0), x) for layer in (norm, theirs)]
    assert jax.tree.all(jax.tree.map(np.array_equal, *init))
    params = {"params": {"scale": jnp.asarray(SCALE), "bias": jnp.asarray(BIAS)}}
    y = norm.apply(params, x)
    assert y.dtype == theirs.apply(params, x).dtype
    check(y, x)


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_equinox(x_dtype):
    x = given(x_dtype)
    set_ = lambda layer: eqx.tree_at(
        lambda layer: (layer.weight, layer.bias), layer, (jnp.asarray(SCALE), jnp.asarray(BIAS))
    )
    theirs = set_(eqx.nn.LayerNorm(24))
    norm = set_(ours_eqx.LayerNorm(24, implementation="native"))
    y = jax.jit(jax.vmap(norm))(x)
    assert y.dtype == jax.vmap(theirs)(x).dtype
    check(y, x, eps=1e-5)
    same, state = norm(x[0], "state")
    assert state == "state" and same.shape == (24,)


@pytest.mark.parametrize("options", [{"use_scale": False}, {"use_bias": False}], ids=str)
def test_without_a_parameter(options):
    x = given("float32")
    used = {"scale": None} if "use_scale" in options else {"bias": None}
    norm = ours_nnx.LayerNorm(24, rngs=nnx.Rngs(0), **options)
    check(norm(x), x, **{"scale": np.ones(24), "bias": np.zeros(24)} | used)
    norm = ours_linen.LayerNorm(**options)
    y, params = norm.init_with_output(jax.random.key(0), x)
    assert len(params["params"]) == 1
    check(y, x, **{"scale": np.ones(24), "bias": np.zeros(24)} | used)


def test_options_that_only_flax_serves():
    x, mask = given("float32"), np.arange(24) < 20
    norm = ours_nnx.LayerNorm(24, rngs=nnx.Rngs(0))
    theirs = nnx.LayerNorm(24, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(norm(x, mask=mask), theirs(x, mask=mask))
    strict = ours_nnx.LayerNorm(24, rngs=nnx.Rngs(0), implementation="native")
    with pytest.raises(NotImplementedError, match="nnx.LayerNorm: .*a mask"):
        strict(x, mask=mask)
    linen = ours_linen.LayerNorm(implementation="native", force_float32_reductions=False)
    with pytest.raises(NotImplementedError, match="force_float32_reductions"):
        linen.init(jax.random.key(0), x)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="nnx.LayerNorm: epsilon must be finite"):
        ours_nnx.LayerNorm(24, epsilon=-1.0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="nnx.LayerNorm: x must have num_features=24"):
        ours_nnx.LayerNorm(24, rngs=nnx.Rngs(0))(jnp.ones((2, 7)))
    with pytest.raises(ValueError, match="nn.LayerNorm: epsilon"):
        ours_linen.LayerNorm(epsilon=float("nan"))
    with pytest.raises(TypeError, match="eqx.nn.LayerNorm: x must be floating, got int32"):
        ours_eqx.LayerNorm(3)(jnp.arange(3))
    with pytest.raises(ValueError, match="eqx.nn.LayerNorm: x must have shape"):
        ours_eqx.LayerNorm(3)(jnp.ones((2, 3)))
