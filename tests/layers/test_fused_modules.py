"""`GatedMLP` and `quantization="fp8"` in each framework, against the operations they stand for."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normfuse
from normfuse.layers import eqx as ours_eqx
from normfuse.layers import linen as ours_linen
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.dense import gated

KEY = jax.random.key(0)
DIM, HIDDEN = 64, 96
X = jax.random.normal(jax.random.key(1), (32, DIM), jnp.bfloat16)


def of_nnx(layer):
    graph, state = nnx.split(layer)
    names = lambda state: {"/".join(map(str, path)): a for path, a in nnx.to_flat_state(state)}
    return state, lambda state, x: nnx.merge(graph, state)(x), names


def of_linen(layer):
    apply = lambda params, x: layer.apply({"params": params}, x)
    return dict(layer.init(KEY, X)["params"]), apply, dict


def of_eqx(layer):
    arrays, static = eqx.partition(layer, eqx.is_array)
    names = lambda tree: {
        jax.tree_util.keystr(path, simple=True, separator="/"): a
        for path, a in jax.tree.leaves_with_path(tree)
    }
    return arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x), names


# Makes `(parameters, function of them and x, their names)` of a module of ours.
MAKE = {
    ("nnx", "Linear"): lambda **k: of_nnx(
        ours_nnx.Linear(DIM, HIDDEN, activation="silu", rngs=nnx.Rngs(0), **k)
    ),
    ("nnx", "GatedMLP"): lambda **k: of_nnx(ours_nnx.GatedMLP(DIM, HIDDEN, rngs=nnx.Rngs(0), **k)),
    ("linen", "Linear"): lambda **k: of_linen(ours_linen.Dense(HIDDEN, activation="silu", **k)),
    ("linen", "GatedMLP"): lambda **k: of_linen(ours_linen.GatedMLP(HIDDEN, **k)),
    ("eqx", "Linear"): lambda **k: of_eqx(
        ours_eqx.Linear(DIM, HIDDEN, activation="silu", key=KEY, **k)
    ),
    ("eqx", "GatedMLP"): lambda **k: of_eqx(ours_eqx.GatedMLP(DIM, HIDDEN, key=KEY, **k)),
}


def operation(framework, kind, named, x, **options):
    """The module's result by the operations; x and the parameters promote to float32."""
    options |= {"dtype": jnp.float32}
    kernels, biases = {}, {}
    for part in ("gate", "up", "down") if kind == "GatedMLP" else ("",):
        prefix = f"{part}/" * bool(part)
        names = {"nnx": ("kernel", "bias"), "linen": ("kernel", "bias"), "eqx": ("weight", "bias")}
        kernel, bias = (prefix + name for name in names[framework])
        if framework == "linen" and part:
            kernel, bias = part, f"{part}_bias"
        value = named[kernel][...]
        kernels[part] = value.T if framework == "eqx" else value
        biases |= {part: named[bias][...]} if bias in named else {}
    if kind == "Linear":
        return normfuse.dense(x, kernels[""], biases.get(""), activation="silu", **options)
    return gated.mlp(x, kernels, biases, activation="silu", implementation=None, **options)


def distance(got, want):
    a, b = (np.concatenate([np.ravel(l) for l in jax.tree.leaves(t)]) for t in (got, want))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def total(y):
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(y.astype(jnp.float32) * weights)


@pytest.mark.parametrize("framework, kind", MAKE)
def test_a_module_is_its_operation(framework, kind):
    """Values and gradients, in FP8 and without, with biases; the same parameters for both."""
    gradients = {}
    for quantization in "fp8", None:
        options = {"use_bias": True, "quantization": quantization}
        params, apply, names = MAKE[framework, kind](**options)
        params = jax.tree.map(lambda a: a + 0.01, params)  # biases are zero at first
        module = lambda params, x, apply=apply: total(apply(params, x))
        wanted = lambda params, x, names=names, quantization=quantization: total(
            operation(framework, kind, names(params), x, quantization=quantization)
        )
        got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(params, X) for f in (module, wanted))
        # Up to the rounding of programs that XLA fuses differently; FP8 is 4 to 7 % off. Rows that
        # are vmapped share the scale of their codes.
        assert distance(got, want) < 2e-3
        gradients[quantization] = jax.tree.leaves(got[1][0])
    assert 0.01 < distance(gradients["fp8"], gradients[None]) < 0.1


# ---------------------------------------------------------------- other layers in their place


class Doubled(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


class DoubledEqx(eqx.nn.Linear):
    def __call__(self, x, *, key=None):
        return 2 * super().__call__(x, key=key)


@pytest.mark.parametrize("place", ["gate", "down"])
def test_what_has_taken_a_place_is_called(place):
    x = X.astype(jnp.float32)
    sizes = (HIDDEN, DIM) if place == "down" else (DIM, HIDDEN)
    mlp = ours_nnx.GatedMLP(DIM, HIDDEN, rngs=nnx.Rngs(0))
    setattr(mlp, place, Doubled(*sizes, rngs=nnx.Rngs(1)))
    plain = lambda mlp, x: mlp.down(nnx.silu(mlp.gate(x)) * mlp.up(x))
    assert_same_both_ways(lambda mlp, x: mlp(x), plain, mlp, x, nnx.value_and_grad)

    mlp = ours_eqx.GatedMLP(DIM, HIDDEN, key=KEY)
    mlp = eqx.tree_at(lambda m: getattr(m, place), mlp, DoubledEqx(*sizes, key=KEY))
    assert_same_both_ways(lambda mlp, x: mlp(x), plain, mlp, x[0], eqx.filter_value_and_grad)


def assert_same_both_ways(ours, theirs, model, x, value_and_grad):
    total = lambda call: lambda model: jnp.sum(jnp.sin(call(model, x)))
    got, want = (value_and_grad(total(call))(model) for call in (ours, theirs))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


# ---------------------------------------------------------------- bad input


def test_an_activation_that_binds_an_array_is_refused():
    bound = functools.partial(jnp.maximum, jnp.zeros(()))
    with pytest.raises(TypeError, match="activation must hold no arrays"):
        ours_nnx.Linear(DIM, HIDDEN, activation=bound, rngs=nnx.Rngs(0))
    ours_nnx.Linear(
        DIM, HIDDEN, activation=functools.partial(jax.nn.elu, alpha=2.0), rngs=nnx.Rngs(0)
    )


@pytest.mark.parametrize("framework, kind", MAKE)
def test_unknown_options_are_refused(framework, kind):
    with pytest.raises(ValueError, match="quantization must be None or 'fp8', got 'int8'"):
        MAKE[framework, kind](quantization="int8")
    if kind == "GatedMLP":
        with pytest.raises(ValueError, match="activation must be one of .* got 'gleu'"):
            MAKE[framework, kind](activation="gleu")


def test_shapes_and_names_that_are_wrong_are_refused():
    for mlp, shape in (
        (ours_nnx.GatedMLP(8, 16, rngs=nnx.Rngs(0)), "in_features=8 as the last axis"),
        (ours_eqx.GatedMLP(8, 16, key=KEY), r"shape \(8,\), got .*jax\.vmap\(mlp\)"),
    ):
        with pytest.raises(ValueError, match=f"^GatedMLP: x must have {shape}"):
            mlp(jnp.ones((3, 7)))
    with pytest.raises(AttributeError, match="no attribute 'Gated'"):
        ours_nnx.Gated  # noqa: B018


def test_quantization_of_what_the_framework_serves_is_refused():
    rngs, fp8 = nnx.Rngs(0), {"quantization": "fp8"}
    mlp = ours_nnx.GatedMLP(DIM, HIDDEN, **fp8, rngs=rngs)
    mlp.down = nnx.Linear(HIDDEN, DIM, rngs=rngs)
    for call, message in (
        (lambda: ours_nnx.Linear(DIM, 4, precision="highest", **fp8, rngs=rngs)(X), ".*leave one"),
        (lambda: ours_linen.Dense(4, precision="highest", **fp8).init(KEY, X), ".*leave one out"),
        (lambda: ours_eqx.Linear(DIM, "scalar", **fp8, key=KEY)(X[0]), ".*leave one out"),
        (lambda: mlp(X), "a Linear in place of its Linear"),
    ):
        with pytest.raises(ValueError, match=f"quantization='fp8' does not go with {message}"):
            call()
    with jax.enable_x64(True):
        layer = nn.Sequential([ours_linen.Dense(4, **fp8, dtype=jnp.float64)])
        with pytest.raises(TypeError, match="takes float32, bfloat16 and float16, got float64"):
            layer.init(KEY, X)
