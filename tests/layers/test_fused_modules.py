"""GatedMLP in each framework, against the layers it stands for."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from normfuse.layers import eqx as ours_eqx
from normfuse.layers import linen as ours_linen
from normfuse.layers import nnx as ours_nnx

pytestmark = pytest.mark.oldest

DIM, HIDDEN = 8, 12
CLOSE = {"rtol": 0, "atol": 1e-5}  # some tens of float32 roundings of numbers of order 1


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((3, 5, DIM)), jnp.float32)


def test_nnx_gated_mlp_is_three_linears(x):
    ours = ours_nnx.GatedMLP(DIM, HIDDEN, use_bias=True, rngs=nnx.Rngs(0))
    want = ours.down(nnx.silu(ours.gate(x)) * ours.up(x))
    np.testing.assert_allclose(ours(x), want, **CLOSE)
    names = {"/".join(path) for path, _ in nnx.to_flat_state(nnx.state(ours))}
    assert names == {f"{a}/{b}" for a in ("gate", "up", "down") for b in ("kernel", "bias")}


def test_linen_gated_mlp_is_its_products(x):
    mlp = ours_linen.GatedMLP(HIDDEN, activation="gelu_tanh")
    params = mlp.init(jax.random.key(0), x)
    gate, up, down = (params["params"][k] for k in ("gate", "up", "down"))
    np.testing.assert_allclose(mlp.apply(params, x), (nn.gelu(x @ gate) * (x @ up)) @ down, **CLOSE)
    biased = ours_linen.GatedMLP(HIDDEN, use_bias=True, bias_init=nn.initializers.normal())
    params = biased.init(jax.random.key(0), x)
    dense = lambda name, x: x @ params["params"][name] + params["params"][f"{name}_bias"]
    want = dense("down", nn.silu(dense("gate", x)) * dense("up", x))
    np.testing.assert_allclose(biased.apply(params, x), want, **CLOSE)


def test_eqx_gated_mlp_is_three_linears(x):
    batched = lambda f: jax.vmap(jax.vmap(f))
    mlp = ours_eqx.GatedMLP(DIM, HIDDEN, key=jax.random.key(0))
    want = batched(lambda x: mlp.down(jax.nn.silu(mlp.gate(x)) * mlp.up(x)))(x)
    np.testing.assert_allclose(batched(mlp)(x), want, **CLOSE)


class Doubled(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


def test_an_nnx_module_calls_what_has_taken_a_place(x):
    mlp = ours_nnx.GatedMLP(DIM, HIDDEN, rngs=nnx.Rngs(0))
    mlp.down = Doubled(HIDDEN, DIM, rngs=nnx.Rngs(1))
    want = mlp.down(nnx.silu(mlp.gate(x)) * mlp.up(x))
    np.testing.assert_allclose(mlp(x), want, **CLOSE)


def test_an_nnx_module_heeds_options_that_flax_serves(x):
    calls = []

    def product(*args, **kwargs):
        calls.append(1)
        return jax.lax.dot_general(*args, **kwargs)

    options = {"rngs": nnx.Rngs(0), "dot_general": product}
    ours_nnx.GatedMLP(DIM, HIDDEN, **options)(x)
    assert len(calls) == 3
    ours = ours_nnx.GatedMLP(DIM, HIDDEN, precision="highest", rngs=nnx.Rngs(0))
    assert "HIGHEST" in str(jax.make_jaxpr(ours)(x))
    assert ours(jnp.ones((2, DIM), jnp.int32)).shape == (2, DIM)


def test_an_activation_that_binds_an_array_is_refused():
    bound = functools.partial(jnp.maximum, jnp.zeros(()))
    with pytest.raises(TypeError, match="activation must hold no arrays"):
        ours_nnx.Linear(DIM, HIDDEN, activation=bound, rngs=nnx.Rngs(0))
    ours_nnx.Linear(
        DIM, HIDDEN, activation=functools.partial(jax.nn.elu, alpha=2.0), rngs=nnx.Rngs(0)
    )


def test_bad_input_is_one_clear_error():
    rngs, key = nnx.Rngs(0), jax.random.key(0)
    with pytest.raises(ValueError, match="activation must be one of .* got 'gleu'"):
        ours_nnx.GatedMLP(DIM, HIDDEN, activation="gleu", rngs=rngs)
    with pytest.raises(ValueError, match="activation must be one of .* got 'gleu'"):
        ours_eqx.GatedMLP(DIM, HIDDEN, activation="gleu", key=key)
    with pytest.raises(ValueError, match="activation must be one of .* got 'gleu'"):
        ours_linen.GatedMLP(HIDDEN, activation="gleu")
    for make in (
        lambda eps: ours_eqx.RMSNorm(8, eps=eps),
        lambda eps: ours_linen.RMSNorm(epsilon=eps),
        lambda eps: ours_nnx.RMSNorm(8, epsilon=eps, rngs=rngs),
    ):
        for eps in ("1e-6", None):
            with pytest.raises(TypeError, match=f"eps(ilon)? must be a number, got {eps!r}"):
                make(eps)
    for mlp, shape in (
        (ours_nnx.GatedMLP(8, 16, rngs=rngs), "in_features=8 as the last axis"),
        (ours_eqx.GatedMLP(8, 16, key=key), r"shape \(8,\), got .*jax\.vmap\(mlp\)"),
    ):
        with pytest.raises(ValueError, match=f"^GatedMLP: x must have {shape}"):
            mlp(jnp.ones((3, 7)))
    with pytest.raises(AttributeError, match="no attribute 'Gated'"):
        ours_nnx.Gated  # noqa: B018
