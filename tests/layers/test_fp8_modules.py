"""`quantization="fp8"` on modules: the operations' values, the same checkpoints."""

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

pytestmark = pytest.mark.oldest

KEY = jax.random.key(0)
DIM, HIDDEN = 64, 96
X = jax.random.normal(jax.random.key(1), (32, DIM), jnp.bfloat16)

# Makes a module of ours, given its options.
NNX = {
    "Linear": lambda **k: ours_nnx.Linear(DIM, HIDDEN, activation="silu", rngs=nnx.Rngs(0), **k),
    "GatedMLP": lambda **k: ours_nnx.GatedMLP(DIM, HIDDEN, rngs=nnx.Rngs(0), **k),
}
EQX = {
    "Linear": lambda **k: ours_eqx.Linear(DIM, HIDDEN, activation="silu", key=KEY, **k),
    "GatedMLP": lambda **k: ours_eqx.GatedMLP(DIM, HIDDEN, key=KEY, **k),
}
LINEN = {
    "Linear": lambda **k: ours_linen.Dense(HIDDEN, activation="silu", **k),
    "GatedMLP": lambda **k: ours_linen.GatedMLP(HIDDEN, **k),
}
KINDS = list(NNX)


def operation(kind, x, kernels, biases):
    """What the module must compute, from the operations; kernels are stored (in, out)."""
    fp8 = {"quantization": "fp8", "dtype": jnp.float32}  # x and parameters promote to it
    if kind == "Linear":
        return normfuse.dense(x, kernels[0], biases[0], activation="silu", **fp8)
    given = dict(zip(("gate", "up", "down"), kernels))
    return gated.mlp(x, given, {}, activation="silu", implementation=None, **fp8)


def assert_same(got, want):
    """The same up to the rounding of programs that XLA fuses differently; FP8 is 4 to 7 % off."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b)


def distance(got, want):
    a, b = (np.concatenate([np.ravel(l) for l in jax.tree.leaves(t)]) for t in (got, want))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def total(y):
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(y.astype(jnp.float32) * weights)


@pytest.mark.parametrize("kind", KINDS)
def test_an_nnx_module_is_its_operation(kind):
    graph, state = nnx.split(NNX[kind](quantization="fp8"))

    def wanted(state, x):
        layer = nnx.merge(graph, state)
        of = [layer.gate, layer.up, layer.down] if kind == "GatedMLP" else None
        linears = of or [layer]
        kernels = [linear.kernel[...] for linear in linears]
        biases = [None if linear.bias is None else linear.bias[...] for linear in linears]
        return total(operation(kind, x, kernels, biases))

    module = lambda state, x: total(nnx.merge(graph, state)(x))
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(state, X) for f in (module, wanted))
    assert_same(got, want)
    plain = nnx.split(NNX[kind]())
    assert jax.tree.structure(plain[1]) == jax.tree.structure(state)  # one checkpoint for both
    exact = jax.grad(lambda state: total(nnx.merge(plain[0], state)(X)))(state)
    assert 0.01 < distance(got[1][0], exact) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_an_equinox_module_is_its_operation(kind):
    layer = EQX[kind](quantization="fp8")

    def wanted(layer, x):
        of = [layer.gate, layer.up, layer.down] if kind == "GatedMLP" else None
        linears = of or [layer]
        kernels = [linear.weight.T for linear in linears]
        return total(operation(kind, x, kernels, [linear.bias for linear in linears]))

    module = lambda layer, x: total(jax.vmap(layer)(x))
    got, want = (eqx.filter_jit(eqx.filter_value_and_grad(f))(layer, X) for f in (module, wanted))
    # vmap over one example at a time: a row's own codes have the scale of all of them
    assert_same(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array))
    exact = eqx.filter_grad(module)(EQX[kind](), X)
    assert 0.01 < distance(*(eqx.filter(t, eqx.is_array) for t in (got[1], exact))) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_linen_module_is_its_operation(kind):
    layer = LINEN[kind](quantization="fp8")
    variables = LINEN[kind]().init(KEY, X)  # those of the unquantized module

    def wanted(variables, x):
        p = variables["params"]
        kernels = [p[n] for n in ("gate", "up", "down")] if kind == "GatedMLP" else [p["kernel"]]
        return total(operation(kind, x, kernels, [p.get("bias")]))

    module = lambda variables, x: total(layer.apply(variables, x))
    got, want = (jax.jit(jax.value_and_grad(f))(variables, X) for f in (module, wanted))
    assert_same(got, want)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "make",
    [
        *(make for table in (NNX, EQX) for make in table.values()),
        *(lambda m=m, **k: m(**k).init(KEY, X) for m in LINEN.values()),
    ],
)
def test_an_unknown_quantization_is_refused(make):
    with pytest.raises(ValueError, match="quantization must be None or 'fp8', got 'int8'"):
        make(quantization="int8")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ours_nnx.Linear(DIM, 4, precision="highest", quantization="fp8", rngs=nnx.Rngs(0))(
            X
        ),
        lambda: ours_linen.Dense(4, precision="highest", quantization="fp8").init(KEY, X),
        lambda: ours_eqx.Linear(DIM, "scalar", quantization="fp8", key=KEY)(X[0]),
    ],
)
def test_what_the_framework_would_serve_is_refused(call):
    with pytest.raises(ValueError, match="quantization='fp8' does not go with .*; leave one out"):
        call()


def test_a_part_that_is_not_quantized_is_refused():
    layer = ours_nnx.GatedMLP(DIM, HIDDEN, quantization="fp8", rngs=nnx.Rngs(0))
    layer.down = nnx.Linear(HIDDEN, DIM, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="does not go with a Linear in place of its Linear"):
        layer(X)


def test_float64_is_refused():
    with jax.enable_x64(True):
        layer = nn.Sequential([ours_linen.Dense(4, quantization="fp8", dtype=jnp.float64)])
        with pytest.raises(TypeError, match="takes float32, bfloat16 and float16, got float64"):
            layer.init(KEY, X)
