"""The Equinox modules against Equinox's own: results, gradients, leaves, options and transforms."""

import inspect
import io

import equinox as eqx
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from combinations import half
from parity import assert_nearer, assert_no_worse

from normfuse.layers.eqx import Linear, RMSNorm

pytestmark = [pytest.mark.oldest, pytest.mark.optimized]

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
DTYPES = [(f32, f32), (bf16, f32), (f16, bf16)]
KEY = jax.random.key(3)


def named(dtypes):
    return "-".join(jnp.dtype(d).name for d in dtypes)


def norms(rng, shape, dtype=f32, **options):
    """Ours and Equinox's with the same random weight and bias."""
    theirs = eqx.nn.RMSNorm(shape, dtype=dtype, **options)
    noise = lambda a: a + jnp.asarray(rng.random(a.shape) / 3, a.dtype)
    theirs = jax.tree.map(noise, theirs)
    ours = RMSNorm(shape, dtype=dtype, **options)
    leaves = jax.tree.leaves(theirs)
    return jax.tree.unflatten(jax.tree.structure(ours), leaves), theirs


def gradients(layer, x, dy):
    loss = lambda inputs: jnp.sum(jax.vmap(inputs[0])(inputs[1]).astype(f32) * dy.astype(f32))
    return eqx.filter_grad(loss)((layer, x))


# ---------------------------------------------------------------- RMSNorm


@pytest.mark.parametrize("dtypes, use_bias", half(DTYPES, [True, False]), ids=str)
def test_rms_norm_is_as_exact_as_equinox(rng, dtypes, use_bias):
    x_dtype, param_dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 128)), x_dtype)
    ours, theirs = norms(rng, 128, param_dtype, use_bias=use_bias)
    y, size = normalise(x, ours)
    exact = reference.Expected(y, size, 128)
    assert_no_worse(jax.vmap(ours)(x), jax.vmap(theirs)(x), exact)
    assert ours(x[0]).dtype == x_dtype


def normalise(x, layer, eps=1e-5):
    exact = reference.forward(x, layer.weight, eps=eps)[0]
    bias = 0 if layer.bias is None else reference.wide(layer.bias)
    return exact.value + bias, exact.size + np.abs(bias)


@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
def test_rms_norm_gradients_are_as_exact_as_equinox(rng, dtypes):
    x_dtype, param_dtype = dtypes
    x, dy = (jnp.asarray(rng.standard_normal((6, 128)), x_dtype) for _ in range(2))
    ours, theirs = norms(rng, 128, param_dtype)
    (layer, dx), (layer_eqx, dx_eqx) = gradients(ours, x, dy), gradients(theirs, x, dy)
    exact = reference.backward(dy, x, ours.weight, eps=1e-5)
    dbias = reference.wide(dy).sum(0), np.abs(reference.wide(dy)).sum(0)
    assert_no_worse(dx, dx_eqx, exact[0])
    assert_no_worse(layer.weight, layer_eqx.weight, exact[1])
    assert_no_worse(layer.bias, layer_eqx.bias, reference.Expected(*dbias, 6))


def test_rms_norm_keeps_the_weight_and_rounds_once(rng):
    x = jnp.asarray(rng.standard_normal((16, 256)), bf16)
    ours, _ = norms(rng, 256)
    right = reference.Expected(*normalise(x, ours))
    rounded = jax.tree.map(lambda a: a.astype(bf16), ours)
    assert_nearer(jax.vmap(ours)(x), right, reference.Expected(*normalise(x, rounded)))
    # A second rounding, before the bias, would show: the error would pass half an ulp.
    error = np.abs(reference.wide(jax.vmap(ours)(x)) - right.value)
    assert np.all(error <= right.tolerance(np.dtype(bf16), np.dtype(f32)) * 1.01)


@pytest.mark.parametrize(
    "shape, options",
    [
        ((4, 6), {}),
        ((2, 3, 4), {"use_bias": False}),
        (8, {"use_weight": False}),
        (8, {"use_weight": False, "use_bias": False}),
        (8, {"eps": 0.5}),
        ((), {}),
        (0, {}),
    ],
    ids=str,
)
def test_rms_norm_options(rng, shape, options):
    ours, theirs = norms(rng, shape, **options)
    for dtype in (f32, bf16, jnp.complex64):
        x = jnp.asarray(rng.standard_normal(ours.shape), dtype)
        got, want = ours(x), theirs(x)
        np.testing.assert_allclose(
            np.asarray(got, np.complex64), np.asarray(want, np.complex64), rtol=0.008, atol=1e-6
        )
        assert got.dtype == want.dtype and got.shape == want.shape


def test_strict_implementation_refuses_what_equinox_serves():
    with pytest.raises(NotImplementedError, match="eqx.nn.RMSNorm.*complex64"):
        RMSNorm(8, implementation="native")(jnp.ones(8, jnp.complex64))
    with pytest.raises(NotImplementedError, match="eqx.nn.Linear with .scalar. features"):
        Linear("scalar", 2, key=KEY, implementation="native")(jnp.ones(()))


# ---------------------------------------------------------------- Linear


@pytest.mark.parametrize("dtypes, use_bias", half(DTYPES, [True, False]), ids=str)
def test_linear_is_as_exact_as_equinox(rng, dtypes, use_bias):
    x_dtype, param_dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 32)), x_dtype)
    ours, theirs = (c(32, 16, use_bias, param_dtype, key=KEY) for c in (Linear, eqx.nn.Linear))
    got, want = jax.vmap(ours)(x), jax.vmap(theirs)(x)
    compute = jnp.promote_types(x_dtype, param_dtype)
    a, k = (reference.wide(v.astype(compute)) for v in (x, ours.weight))
    bias = reference.wide(ours.bias) if use_bias else 0
    size = np.abs(a) @ np.abs(k.T) + np.abs(bias)
    assert_no_worse(got, want, reference.Expected(a @ k.T + bias, size, 32))


@pytest.mark.parametrize("dtypes", DTYPES, ids=named)
def test_linear_gradients_are_as_exact_as_equinox(rng, dtypes):
    x_dtype, param_dtype = dtypes
    compute = jnp.promote_types(x_dtype, param_dtype)
    x = jnp.asarray(rng.standard_normal((6, 32)), x_dtype)
    dy = jnp.asarray(rng.standard_normal((6, 16)), compute)
    ours, theirs = (c(32, 16, dtype=param_dtype, key=KEY) for c in (Linear, eqx.nn.Linear))
    (layer, dx), (layer_eqx, dx_eqx) = gradients(ours, x, dy), gradients(theirs, x, dy)
    a, g, k = (reference.wide(v.astype(compute)) for v in (x, dy, ours.weight))
    for got, want, exact, size in [
        (dx, dx_eqx, g @ k, np.abs(g) @ np.abs(k)),
        (layer.weight, layer_eqx.weight, g.T @ a, np.abs(g.T) @ np.abs(a)),
        (layer.bias, layer_eqx.bias, g.sum(0), np.abs(g).sum(0)),
    ]:
        assert_no_worse(got, want, reference.Expected(exact, size, 32))


@pytest.mark.parametrize("activation", [None, "tanh"])
def test_linear_options_that_equinox_serves(rng, activation):
    vector = jnp.asarray(rng.standard_normal(8), f32)
    wide_bias = lambda layer: eqx.tree_at(lambda m: m.bias, layer, jnp.ones(4, f32))
    same = lambda layer: layer
    for features, options, change, x in [
        (("scalar", 4), {}, same, vector[0]),
        ((8, "scalar"), {}, same, vector),
        ((8, 4), {"dtype": bf16}, wide_bias, vector.astype(bf16)),
        ((8, 4), {"use_bias": False}, same, jnp.outer(vector, vector[:3])),
        ((8, 4), {}, same, jnp.arange(8)),
        ((8, 4), {}, same, vector + 1j),
        ((0, 4), {}, same, vector[:0]),
    ]:
        ours = change(Linear(*features, **options, key=KEY, activation=activation))
        theirs = change(eqx.nn.Linear(*features, **options, key=KEY))
        got, want = ours(x), theirs(x)
        want = want if activation is None else jnp.tanh(want)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert got.dtype == want.dtype and got.shape == want.shape


# ---------------------------------------------------------------- leaves


PAIRS = {
    "RMSNorm": (lambda c: c[0](16), 0),
    "RMSNorm bf16": (lambda c: c[0]((4, 4), use_bias=False, dtype=bf16), 0),
    "Linear": (lambda c: c[1](16, 8, key=KEY), 1),
    "Linear without bias": (lambda c: c[1](16, "scalar", False, bf16, key=KEY), 1),
}
OURS, EQUINOX = (RMSNorm, Linear), (eqx.nn.RMSNorm, eqx.nn.Linear)


@pytest.mark.parametrize("pair", PAIRS)
def test_leaves_are_equinox_own(pair):
    make, _ = PAIRS[pair]
    ours, theirs = (jax.tree_util.tree_leaves_with_path(make(c)) for c in (OURS, EQUINOX))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, a), (_, b) in zip(ours, theirs):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    static = {k: v for k, v in vars(make(OURS)).items() if not eqx.is_array(v)}
    extras = static.keys() - vars(make(EQUINOX)).keys()
    assert extras <= {"implementation", "activation", "quantization"}


@pytest.mark.parametrize("pair", PAIRS)
def test_serialised_leaves_load_both_ways(pair):
    make, _ = PAIRS[pair]
    for source, target in ((OURS, EQUINOX), (EQUINOX, OURS)):
        layer = jax.tree.map(lambda a: a + 1, make(source))
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, layer)
        file.seek(0)
        loaded = eqx.tree_deserialise_leaves(file, make(target))
        assert type(loaded) is type(make(target))
        for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(layer), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ours, theirs", list(zip(OURS, EQUINOX)))
def test_constructors_take_what_equinox_takes(ours, theirs):
    mine, given = (list(inspect.signature(c).parameters.values()) for c in (ours, theirs))
    key = lambda p: (p.name, p.kind, p.default)
    assert [key(p) for p in mine[: len(given)]] == [key(p) for p in given]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in mine[len(given) :])


def test_layers_are_static_where_they_should_be():
    layer = Linear(4, 4, key=KEY, activation="gelu", implementation=["pallas", "xla"])
    assert len(jax.tree.leaves(layer)) == 2
    assert hash(jax.tree.structure(layer)) == hash(jax.tree.structure(layer))


# ---------------------------------------------------------------- transformations


class Block(eqx.Module):
    """A residual block of a norm and two projections, of one example."""

    norm: eqx.Module
    up: eqx.Module
    down: eqx.Module

    def __init__(self, layers, key):
        norm, linear = layers
        a, b = jax.random.split(key)
        self.norm, self.up, self.down = norm(16), linear(16, 32, key=a), linear(32, 16, key=b)

    def __call__(self, x):
        return x + self.down(jax.nn.silu(self.up(self.norm(x))))


def loss(model, x):
    """Of a batch of sequences."""
    return jnp.sum(jnp.sin(jax.vmap(jax.vmap(model))(x)))


def scanned(layers, x):
    blocks = eqx.filter_vmap(lambda key: Block(layers, key))(jax.random.split(KEY, 3))
    arrays, static = eqx.partition(blocks, eqx.is_array)

    def total(arrays):
        body = lambda x, a: (jax.vmap(jax.vmap(eqx.combine(a, static)))(x), None)
        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(body), x, arrays)[0]))

    return eqx.filter_jit(eqx.filter_grad(total))(arrays)


TRANSFORMS = {
    "vmap of grad": lambda layers, x: eqx.filter_jit(
        eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(None, 0))
    )(Block(layers, KEY), x[:, None]),
    "ensemble": lambda layers, x: eqx.filter_jit(
        eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(0, None))
    )(eqx.filter_vmap(lambda key: Block(layers, key))(jax.random.split(KEY, 3)), x),
    "scan and checkpoint": scanned,
    "hessian": lambda layers, x: eqx.filter_jit(
        lambda m, x: jax.hessian(lambda x: jnp.sum(jnp.sin(m(x))))(x)
    )(Block(layers, KEY), x[0, 0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(rng, name):
    x = jnp.asarray(rng.standard_normal((4, 3, 16)), f32)
    got, want = (
        jax.tree.leaves(eqx.filter(TRANSFORMS[name](layers, x), eqx.is_array))
        for layers in (OURS, EQUINOX)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_vmap_twice_is_one_kernel_and_one_product(rng):
    x = jnp.asarray(rng.standard_normal((4, 3, 16)), f32)
    model = eqx.nn.Sequential([RMSNorm(16, use_bias=False), Linear(16, 8, key=KEY)])
    f = jax.jit(jax.vmap(jax.vmap(model)))
    assert hlo.calls(f.lower(x).compile()) == {"forward": 1}
    text = f.lower(x).as_text()
    assert "(tensor<4x3x16xf32>, tensor<8x16xf32>) -> tensor<4x3x8xf32>" in text
    assert "transpose" not in text


# ---------------------------------------------------------------- bad input


def test_bad_input():
    norm, linear = RMSNorm(8), Linear(8, 4, key=KEY)
    for eps in (float("nan"), float("inf"), -1e-6):
        with pytest.raises(ValueError, match="eps must be finite and at least 0"):
            RMSNorm(8, eps=eps)
    for dtype in (jnp.int32, bool):
        with pytest.raises(TypeError, match=r"x must be floating, got .*; cast it first"):
            norm(jnp.ones(8, dtype))
    for layer, name in ((norm, "norm"), (linear, "linear")):
        for shape in ((5, 8), (7,), (), (8, 1)):
            with pytest.raises(ValueError, match=rf"shape \(8,\), got .*; .* jax.vmap\({name}\)"):
                layer(jnp.ones(shape))
    with pytest.raises(ValueError, match="activation must be one of"):
        Linear(8, 4, key=KEY, activation="swoosh")
    with pytest.raises(TypeError, match="activation must hold no arrays, got PReLU"):
        Linear(8, 4, key=KEY, activation=eqx.nn.PReLU())
    with pytest.raises(ValueError, match="implementation must name one of"):
        RMSNorm(8, implementation="cuda")
    with pytest.raises(jax.dtypes.TypePromotionError):
        norm(jnp.ones(8, jnp.float8_e4m3fn))
