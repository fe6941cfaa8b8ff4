"""`Einsum`, `LinearGeneral` and `DenseGeneral` against Flax's own: results, and the calls left."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from flax import nnx

from normfuse.layers import linen
from normfuse.layers import nnx as ours

f32, bf16 = jnp.float32, jnp.bfloat16

EINSUMS = {  # equation: (shape of x, shape of the kernel, of the bias)
    "BTD,DNH->BTNH": ((2, 3, 6), (6, 2, 4), (2, 4)),
    "BTNH,NHD->BTD": ((2, 3, 2, 4), (2, 4, 6), (6,)),
    "...d,df->...f": ((3, 6), (6, 5), (5,)),
    "BTD,VD->BTV": ((2, 3, 6), (5, 6), (5,)),
    "td,nhd->tnh": ((3, 6), (2, 4, 6), (2, 4)),
    "BTNH,DNH->BTD": ((2, 3, 2, 4), (6, 2, 4), None),
}
MOVED = {  # these need a transposition, or a batch of products
    "nta,hab->nthb": ((3, 2, 4), (5, 4, 6), (5, 6)),
    "BTD,NDH->BTNH": ((2, 3, 6), (2, 6, 4), None),
    "BTD,SKDH->SBTKH": ((2, 3, 6), (2, 2, 6, 4), None),
    "bnd,nde->bne": ((3, 2, 4), (2, 4, 5), None),
}


def einsum(cls, equation, bias=True, **options):
    _, kernel, shape = (EINSUMS | MOVED)[equation]
    options |= {"bias_init": nnx.initializers.normal(), "rngs": nnx.Rngs(0)}
    return cls(equation, kernel, shape if bias else None, **options)


def results(layer, x, dy):
    loss = lambda m, x: jnp.sum(m(x).astype(f32) * dy)
    return [layer(x), *jax.tree.leaves(nnx.grad(loss, argnums=(0, 1))(layer, x))]


def assert_same(got, want, eps):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # sums of at most 24 terms of order 1, rounded once
        np.testing.assert_allclose(a, b, rtol=2 * eps, atol=24 * eps)


@pytest.mark.parametrize(
    "equation, dtypes", half([*EINSUMS, *MOVED], [(f32, None), (bf16, bf16)]), ids=str
)
def test_einsum_is_flax(rng, equation, dtypes):
    shape = (EINSUMS | MOVED)[equation][0]
    x = jnp.asarray(rng.standard_normal(shape), dtypes[0])
    mine, flax = (einsum(c, equation, dtype=dtypes[1]) for c in (ours.Einsum, nnx.Einsum))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(mine), nnx.state(flax))
    dy = jnp.asarray(rng.standard_normal(flax(x).shape), f32)
    eps = float(jnp.finfo(dtypes[1] or f32).eps)
    assert_same(results(mine, x, dy), results(flax, x, dy), eps)


def products(layer, x):
    """The shapes of the only product's operands; nothing is transposed."""
    text = str(jax.make_jaxpr(lambda x: layer(x))(x))
    assert "transpose[" not in text
    return text.count("dot_general[")


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum_is_one_product(equation):
    x = jnp.ones(EINSUMS[equation][0])
    layer = einsum(ours.Einsum, equation, activation="silu")
    assert products(layer, x) == 1
    want = nnx.silu(einsum(nnx.Einsum, equation)(x))
    np.testing.assert_allclose(layer(x), want, rtol=1e-5, atol=1e-5)
    einsum(ours.Einsum, equation, implementation="native")(x)  # an error where Flax has to serve


GENERAL = {  # (in, out, axis): shape of x
    (6, (2, 4), -1): (3, 6),
    ((2, 4), 6, (-2, -1)): (3, 5, 2, 4),
    (6, 4, 1): (3, 6),
    ((2, 3), (4, 5), (1, -1)): (7, 2, 3),
    (6, 4, 0): (6, 3),
    ((3, 2), 4, (-1, -2)): (5, 3, 2),
}


@pytest.mark.parametrize("case", GENERAL)
def test_linear_general_is_flax(rng, case):
    n, m, axis = case
    options = {"axis": axis, "bias_init": nnx.initializers.normal()}
    mine, flax = (
        c(n, m, rngs=nnx.Rngs(0), **options) for c in (ours.LinearGeneral, nnx.LinearGeneral)
    )
    x = jnp.asarray(rng.standard_normal(GENERAL[case]), f32)
    dy = jnp.asarray(rng.standard_normal(flax(x).shape), f32)
    assert_same(results(mine, x, dy), results(flax, x, dy), float(jnp.finfo(f32).eps))


def test_options_that_flax_serves(rng):
    x = jnp.asarray(rng.standard_normal((2, 3, 6)), f32)
    for options in ({"precision": "highest"}, {"preferred_element_type": f32}):
        mine, flax = (einsum(c, "BTD,DNH->BTNH", **options) for c in (ours.Einsum, nnx.Einsum))
        np.testing.assert_array_equal(mine(x), flax(x))
    mine, flax = (
        c(6, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0))
        for c in (ours.LinearGeneral, nnx.LinearGeneral)
    )
    np.testing.assert_array_equal(mine(x), flax(x))
    with pytest.raises(ValueError, match="nnx.Einsum: quantization='fp8' does not go with the eq"):
        einsum(ours.Einsum, "BTD,NDH->BTNH", quantization="fp8")(x)
    with pytest.raises(NotImplementedError, match="nnx.Einsum with a precision has no 'native'"):
        einsum(ours.Einsum, "BTD,DNH->BTNH", precision="highest", implementation="native")(x)
    for wrong in (jnp.ones((2, 6)), jnp.ones((2, 3, 5))):  # Flax's own errors
        with pytest.raises((TypeError, ValueError), match="Einstein sum|[Ss]ize|shape"):
            einsum(ours.Einsum, "BTD,DNH->BTNH")(wrong)


class Heads(nnx.Module):
    def __init__(self):
        self.q = ours.Einsum("BTD,DNH->BTNH", (16, 2, 8), rngs=nnx.Rngs(0))
        self.o = ours.Einsum("BTNH,NHD->BTD", (2, 8, 16), rngs=nnx.Rngs(1))


def test_sharded_heads(rng, eight_devices):
    x, model = jnp.asarray(rng.standard_normal((2, 3, 16)), f32), Heads()
    want = model.o(model.q(x))
    for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        model = Heads()
        mesh = jax.make_mesh((2,), ("heads",), axis_types=(axis_type,), devices=eight_devices[:2])

        def place(a, *spec, mesh=mesh):
            return jax.device_put(a, jax.NamedSharding(mesh, jax.P(*spec)))

        with jax.set_mesh(mesh):
            model.q.kernel.set_value(place(model.q.kernel.get_value(), None, "heads"))
            model.o.kernel.set_value(place(model.o.kernel.get_value(), "heads"))
            y = nnx.jit(lambda m, x: m.o(m.q(x), out_sharding=jax.P()))(model, place(x))
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- Linen


def linen_results(layer, variables, x):
    f = lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x).astype(f32)))
    grad = jax.jit(jax.grad(f, (0, 1)))  # XLA:CPU lacks some bfloat16 products outside of jit
    return [layer.apply(variables, x), *jax.tree.leaves(grad(variables, x))]


@pytest.mark.parametrize("equation", ["BTNH,NHD->BTD", "BTD,VD->BTV", "nta,hab->nthb"])
def test_linen_einsum_is_flax(rng, equation):
    shape, kernel, bias = (EINSUMS | MOVED)[equation]
    options = {"use_bias": bias is not None, "bias_init": nn.initializers.normal()}
    mine, flax = (c(kernel, equation, **options) for c in (linen.Einsum, nn.Einsum))
    x = jnp.asarray(rng.standard_normal(shape), f32)
    variables = flax.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, mine.init(jax.random.key(0), x), variables)
    eps = float(jnp.finfo(f32).eps)
    assert_same(linen_results(mine, variables, x), linen_results(flax, variables, x), eps)


@pytest.mark.parametrize("case", [*GENERAL][1::2])
def test_linen_dense_general_is_flax(rng, case):
    _, features, axis = case
    options = {"axis": axis, "bias_init": nn.initializers.normal(), "dtype": bf16}
    mine, flax = (c(features, **options) for c in (linen.DenseGeneral, nn.DenseGeneral))
    x = jnp.asarray(rng.standard_normal(GENERAL[case]), f32)
    variables = flax.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, mine.init(jax.random.key(0), x), variables)
    eps = float(jnp.finfo(bf16).eps)
    assert_same(linen_results(mine, variables, x), linen_results(flax, variables, x), eps)


def test_linen_options(rng):
    class Model(nn.Module):
        general: type = nn.DenseGeneral
        einsum: type = nn.Einsum

        @nn.compact
        def __call__(self, x):
            y = self.general((2, 16))(x)
            y = self.general(16, axis=(-2, -1))(y)
            return self.einsum((16, 2, 8), "TD,DNH->NTH", use_bias=False)(y)

    x = jnp.asarray(rng.standard_normal((3, 16)), f32)
    variables = Model().init(jax.random.key(0), x)
    want = Model().apply(variables, x)
    got = Model(linen.DenseGeneral, linen.Einsum).apply(variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    layer = linen.DenseGeneral(4, axis=0, activation="silu", quantization="fp8")
    with pytest.raises(ValueError, match="nn.DenseGeneral: quantization='fp8' does not go with"):
        layer.apply(layer.init(jax.random.key(0), x), x)
    layer = linen.DenseGeneral(4, activation="silu")
    y, variables = layer.init_with_output(jax.random.key(0), x)
    np.testing.assert_allclose(y, layer.apply(variables, x), rtol=1e-5, atol=1e-6)
