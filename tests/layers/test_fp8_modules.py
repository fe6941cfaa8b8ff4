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

KINDS = ["Linear", "GatedMLP"]


def make(framework, kind, **options):
    """A module of ours."""
    ours = {"nnx": ours_nnx, "eqx": ours_eqx, "linen": ours_linen}[framework]
    given = {"nnx": {"rngs": nnx.Rngs(0)}, "eqx": {"key": KEY}, "linen": {}}[framework] | options
    if kind == "Linear":
        given["activation"] = "silu"
        return (
            ours.Dense(HIDDEN, **given)
            if framework == "linen"
            else ours.Linear(DIM, HIDDEN, **given)
        )
    return ours.GatedMLP(*[DIM] * (framework != "linen"), HIDDEN, **given)


def split(framework, kind, **options):
    """(a function of (parameters, x), the parameters, kernels and biases of them)."""
    module, names = make(framework, kind, **options), ("gate", "up", "down")
    linears = lambda layer: [getattr(layer, n) for n in names] if kind == "GatedMLP" else [layer]
    if framework == "linen":
        of = lambda p: (
            [p[n] for n in names] if kind == "GatedMLP" else [p["kernel"]],
            [p.get("bias")],
        )
        variables = make(framework, kind).init(KEY, X)["params"]  # the unquantized ones
        return lambda p, x: module.apply({"params": p}, x), variables, of
    if framework == "eqx":
        params, static = eqx.partition(module, eqx.is_array)
        whole = lambda p: eqx.combine(p, static)
        of = lambda p: tuple(zip(*[(l.weight.T, l.bias) for l in linears(whole(p))]))
        # vmap over one example at a time: a row's own codes have the scale of all of them
        return lambda p, x: jax.vmap(whole(p))(x), params, of
    graph, state = nnx.split(module)
    value = lambda a: None if a is None else a[...]
    pairs = lambda p: [(l.kernel[...], value(l.bias)) for l in linears(nnx.merge(graph, p))]
    return lambda p, x: nnx.merge(graph, p)(x), state, lambda p: tuple(zip(*pairs(p)))


def operation(kind, x, kernels, biases):
    """What the module must compute, from the operations; kernels are stored (in, out)."""
    fp8 = {"quantization": "fp8", "dtype": jnp.float32}  # x and parameters promote to it
    if kind == "Linear":
        return normfuse.dense(x, kernels[0], biases[0], activation="silu", **fp8)
    given = dict(zip(("gate", "up", "down"), kernels))
    return gated.mlp(x, given, {}, activation="silu", implementation=None, **fp8)


def distance(got, want):
    a, b = (np.concatenate([np.ravel(l) for l in jax.tree.leaves(t)]) for t in (got, want))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def total(y):
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(y.astype(jnp.float32) * weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", ["nnx", "eqx", "linen"])
def test_a_module_is_its_operation(framework, kind):
    call, params, of = split(framework, kind, quantization="fp8")
    wanted = lambda p, x: total(operation(kind, x, *of(p)))
    run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(params, X)
    got, want = run(lambda p, x: total(call(p, x))), run(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert distance(a, b) <= 2e-3  # XLA fuses the programs differently; FP8 is 4 to 7 % off
    plain, unquantized, _ = split(framework, kind)
    paths = lambda tree: [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths(unquantized) == paths(params)  # one checkpoint for both
    exact = jax.grad(lambda p: total(plain(p, X)))(unquantized)
    assert 0.01 < distance(got[1][0], exact) < 0.1


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", ["nnx", "eqx", "linen"])
def test_an_unknown_quantization_is_refused(framework, kind):
    with pytest.raises(ValueError, match="quantization must be None or 'fp8', got 'int8'"):
        module = make(framework, kind, quantization="int8")
        module.init(KEY, X)  # Linen's are made when they are called


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
