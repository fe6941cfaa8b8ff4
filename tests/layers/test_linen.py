"""The Linen modules against Flax's own: results, gradients, parameters, options, transforms."""

import dataclasses

import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from combinations import half
from flax import serialization
from parity import assert_nearer, assert_no_worse

from normfuse.layers.linen import Dense, RMSNorm

pytestmark = [pytest.mark.oldest, pytest.mark.optimized]

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
SOME = [(bf16, f32, None), (bf16, bf16, f32), (f16, f32, bf16)]


def named(dtypes):
    return "-".join("none" if d is None else jnp.dtype(d).name for d in dtypes)


def scaled(rng, n, dtype):
    return {"params": {"scale": jnp.asarray(1 + rng.random(n) / 3, dtype)}}


def gradients(layer, variables, x, dy):
    loss = lambda v, x: jnp.sum(layer.apply(v, x).astype(f32) * dy.astype(f32))
    params, dx = jax.grad(loss, (0, 1))(variables, x)
    return params["params"], dx


# ---------------------------------------------------------------- RMSNorm


@pytest.mark.parametrize("dtypes", SOME, ids=named)
def test_rms_norm_is_as_exact_as_flax(rng, dtypes):
    x_dtype, param_dtype, dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 128)), x_dtype)
    variables = scaled(rng, 128, param_dtype)
    options = {"param_dtype": param_dtype, "dtype": dtype}
    got, want = (layer(**options).apply(variables, x) for layer in (RMSNorm, nn.RMSNorm))
    # x and scale as they are; only the result is rounded
    assert_no_worse(got, want, reference.forward(x, variables["params"]["scale"])[0])


@pytest.mark.parametrize("dtypes", SOME, ids=named)
def test_rms_norm_gradients_are_as_exact_as_flax(rng, dtypes):
    x_dtype, param_dtype, dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 128)), x_dtype)
    variables = scaled(rng, 128, param_dtype)
    options = {"param_dtype": param_dtype, "dtype": dtype}
    dy = jnp.asarray(
        rng.standard_normal((6, 128)), dtype or jnp.promote_types(x_dtype, param_dtype)
    )
    (got, dx), (want, dx_flax) = (
        gradients(layer(**options), variables, x, dy) for layer in (RMSNorm, nn.RMSNorm)
    )
    exact = reference.backward(dy, x, variables["params"]["scale"])
    assert_no_worse(dx, dx_flax, exact[0])
    assert_no_worse(got["scale"], want["scale"], exact[1])


def test_rms_norm_casts_after_the_statistics(rng):
    x, variables = jnp.asarray(rng.standard_normal((16, 256)), f32), scaled(rng, 256, f32)
    scale = variables["params"]["scale"]
    wrong = reference.forward(x.astype(bf16), scale.astype(bf16))[0]
    got = RMSNorm(dtype=bf16).apply(variables, x)
    assert_nearer(got, reference.forward(x, scale)[0], wrong)


@pytest.mark.parametrize("axes", [1, (-1, -2)])
def test_rms_norm_over_other_axes(rng, axes):
    x = jnp.asarray(rng.standard_normal((4, 6, 8)), f32)
    ours, theirs = (c(reduction_axes=axes, feature_axes=axes) for c in (RMSNorm, nn.RMSNorm))
    variables = jax.tree.map(lambda a: a * 3, theirs.init(jax.random.key(0), x))
    mine = ours.init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, variables)
    np.testing.assert_allclose(ours.apply(variables, x), theirs.apply(variables, x), rtol=1e-5)


def test_rms_norm_runs_natively(rng):
    x, variables = jnp.asarray(rng.standard_normal((4, 8)), bf16), scaled(rng, 8, f32)
    layer = RMSNorm(dtype=bf16, implementation="native")
    compiled = jax.jit(layer.apply).lower(variables, x).compile()
    assert hlo.calls(compiled) == {"forward": 1}
    assert hlo.count(compiled, "convert") == 0  # x is not widened in memory


NORM_OPTIONS = {
    "without scale": ({"use_scale": False}, {}),
    "slow variance": ({"use_fast_variance": False}, {}),
    "epsilon": ({"epsilon": 0.5}, {}),
    "mask": ({}, {"mask": np.arange(8) < 5}),
    "feature_axes": ({"reduction_axes": (0, 1), "feature_axes": 1}, {}),
    "low precision": ({"force_float32_reductions": False}, {}),
    "epsilon array": ({"epsilon": np.float32(0.5)}, {}),
}


@pytest.mark.parametrize(
    "case, dtype", half(NORM_OPTIONS, [f32, bf16, jnp.int32, jnp.complex64]), ids=str
)
def test_rms_norm_options(rng, case, dtype):
    options, call = NORM_OPTIONS[case]
    x = jnp.asarray(rng.standard_normal((4, 8)) * 5, dtype)
    ours, theirs = RMSNorm(**options), nn.RMSNorm(**options)
    got, variables = ours.init_with_output(jax.random.key(0), x, **call)
    want, expected = theirs.init_with_output(jax.random.key(0), x, **call)
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    np.testing.assert_allclose(
        np.asarray(got, np.complex64), np.asarray(want, np.complex64), rtol=1e-6, atol=1e-6
    )
    assert got.dtype == want.dtype


def test_strict_implementation_refuses_what_flax_serves():
    x = jnp.ones((2, 8))
    layer = RMSNorm(implementation="native")
    with pytest.raises(NotImplementedError, match="nn.RMSNorm: .* cannot serve here: a mask"):
        layer.init(jax.random.key(0), x, mask=jnp.ones((2, 8), bool))
    with pytest.raises(NotImplementedError, match="nn.Dense with a precision has no 'native'"):
        Dense(4, implementation="native", precision="high").init(jax.random.key(0), x)


# ---------------------------------------------------------------- Dense


@pytest.mark.parametrize("dtypes", SOME, ids=named)
def test_dense_is_flax_bit_for_bit(rng, dtypes):
    x_dtype, param_dtype, dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 32)), x_dtype)
    options = {"param_dtype": param_dtype, "dtype": dtype, "bias_init": nn.initializers.normal()}
    ours, theirs = (c(16, **options) for c in (Dense, nn.Dense))
    variables = theirs.init(jax.random.key(3), x)
    got, want = ours.apply(variables, x), theirs.apply(variables, x)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("dtypes", SOME, ids=named)
def test_dense_gradients_are_as_exact_as_flax(rng, dtypes):
    x_dtype, param_dtype, dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 32)), x_dtype)
    options = {"param_dtype": param_dtype, "dtype": dtype}
    compute = jnp.dtype(dtype or jnp.promote_types(x_dtype, param_dtype))
    dy = jnp.asarray(rng.standard_normal((6, 16)), compute)
    variables = nn.Dense(16, **options).init(jax.random.key(3), x)
    (params, dx), (params_flax, dx_flax) = (
        gradients(layer(16, **options), variables, x, dy) for layer in (Dense, nn.Dense)
    )
    a, g, k = (reference.wide(v.astype(compute)) for v in (x, dy, variables["params"]["kernel"]))
    for got, want, exact, size in [
        (dx, dx_flax, g @ k.T, np.abs(g) @ np.abs(k.T)),
        (params["kernel"], params_flax["kernel"], a.T @ g, np.abs(a.T) @ np.abs(g)),
        (params["bias"], params_flax["bias"], g.sum(0), np.abs(g).sum(0)),
    ]:
        assert_no_worse(got, want, reference.Expected(exact, size, 32))


def test_dense_options_that_flax_serves(rng):
    values = jnp.asarray(rng.standard_normal((3, 8)), f32)
    doubled = lambda *args, **kwargs: jax.lax.dot_general(*args, **kwargs) * 2
    promote = lambda *args, dtype=None: [None if a is None else a.astype(f32) for a in args]
    for options, x in [
        ({"precision": "highest"}, values),
        ({"dot_general": doubled}, values),
        ({"dot_general_cls": lambda: doubled}, values),
        ({"promote_dtype": promote}, values.astype(bf16)),
        ({"use_bias": False}, values),
        ({}, jnp.arange(8)),
        ({}, values + 1j),
    ]:
        want, variables = nn.Dense(4, **options).init_with_output(jax.random.key(0), x)
        got = Dense(4, **options).apply(variables, x)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype
        got = Dense(4, activation="tanh", **options).apply(variables, x)
        np.testing.assert_allclose(got, jnp.tanh(want), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- parameters


class Model(nn.Module):
    """Layers with names that Linen makes up from their classes."""

    norm: type
    dense: type

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            y = self.dense(12)(self.norm()(x))
            x = x + self.dense(8, use_bias=False)(nn.silu(y))
        return x


def models():
    return Model(RMSNorm, Dense), Model(nn.RMSNorm, nn.Dense)


def test_parameters_are_flax_own(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), f32)
    ours, theirs = (model.init(jax.random.key(7), x) for model in models())
    assert list(ours["params"]) == list(theirs["params"])
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_checkpoints_load_both_ways(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), f32)
    for source, target in (models(), models()[::-1]):
        variables = jax.tree.map(lambda a: a + 1, source.init(jax.random.key(0), x))
        stored = serialization.to_bytes(variables)
        loaded = serialization.from_bytes(target.init(jax.random.key(1), x), stored)
        np.testing.assert_allclose(
            target.apply(loaded, x), source.apply(variables, x), rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("ours, theirs", [(RMSNorm, nn.RMSNorm), (Dense, nn.Dense)])
def test_constructors_take_what_flax_takes(ours, theirs):
    assert ours.__name__ == theirs.__name__
    mine, flax = ([f for f in dataclasses.fields(c) if not f.kw_only] for c in (ours, theirs))
    assert [(f.name, f.default) for f in mine] == [(f.name, f.default) for f in flax]
    extras = {f.name for f in dataclasses.fields(ours)} - {
        f.name for f in dataclasses.fields(theirs)
    }
    assert extras <= {"implementation", "activation", "quantization"}


# ---------------------------------------------------------------- transformations


def loss(model, variables, x):
    return jnp.sum(jnp.sin(model.apply(variables, x)))


class Block(nn.Module):
    norm: type
    dense: type

    @nn.compact
    def __call__(self, x, _=None):
        return x + self.dense(8)(self.norm()(x)), None


def stacked(wrap):
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    return {
        "scan of remat": lambda: nn.scan(nn.remat(Block, prevent_cse=False), length=3, **options),
        "vmap": lambda: nn.vmap(Block, in_axes=(0, None), **options),
        "jit": lambda: nn.jit(Block),
    }[wrap]()


@pytest.mark.parametrize("wrap", ["scan of remat", "vmap", "jit"])
def test_linen_transform(rng, wrap):
    x = jnp.asarray(rng.standard_normal((4, 5, 8)), f32)
    results = []
    for layers in ((RMSNorm, Dense), (nn.RMSNorm, nn.Dense)):
        model = stacked(wrap)(*layers)
        variables = model.init(jax.random.key(0), x, None)
        f = lambda v, model=model: jnp.sum(jnp.sin(model.apply(v, x, None)[0]))
        results.append((variables, jax.jit(jax.grad(f))(variables)))
    (ours, got), (theirs, want) = results
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, got, want)


# ---------------------------------------------------------------- bad input


def test_bad_input():
    x = jnp.ones((2, 8))
    for epsilon in (float("nan"), float("inf"), -1e-6):
        with pytest.raises(ValueError, match="epsilon must be finite and at least 0"):
            RMSNorm(epsilon=epsilon)
    with pytest.raises(ValueError, match="activation must be one of"):
        Dense(4, activation="swoosh")
    with pytest.raises(ValueError, match="implementation must name one of"):
        Dense(4, implementation="cuda")
    with pytest.raises(ValueError, match="nn.RMSNorm: x must have an axis .* a scalar"):
        RMSNorm().init(jax.random.key(0), jnp.ones(()))
    with pytest.raises(ValueError, match="nn.Dense: inputs must be .* a scalar"):
        Dense(4).init(jax.random.key(0), jnp.ones(()))
    with pytest.raises(Exception, match="scale"):  # Flax's own error names the parameter
        RMSNorm().apply(RMSNorm().init(jax.random.key(0), x), x[:, :7])
    with pytest.raises(Exception, match="kernel"):
        Dense(4).apply(Dense(4).init(jax.random.key(0), x), x[:, :7])
