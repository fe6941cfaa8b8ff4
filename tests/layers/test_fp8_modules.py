"""`quantization="fp8"` on modules and by `swap`: the operations' values, the same checkpoints."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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

# Makes a module of ours, given its options.
NNX = {
    "Linear": lambda **k: ours_nnx.Linear(DIM, HIDDEN, activation="silu", rngs=nnx.Rngs(0), **k),
    "NormDense": lambda **k: ours_nnx.NormDense(DIM, HIDDEN, rngs=nnx.Rngs(0), **k),
    "GatedMLP": lambda **k: ours_nnx.GatedMLP(DIM, HIDDEN, rngs=nnx.Rngs(0), **k),
}
EQX = {
    "Linear": lambda **k: ours_eqx.Linear(DIM, HIDDEN, activation="silu", key=KEY, **k),
    "NormDense": lambda **k: ours_eqx.NormDense(DIM, HIDDEN, key=KEY, **k),
    "GatedMLP": lambda **k: ours_eqx.GatedMLP(DIM, HIDDEN, key=KEY, **k),
}
LINEN = {
    "Linear": lambda **k: ours_linen.Dense(HIDDEN, activation="silu", **k),
    "NormDense": lambda **k: ours_linen.NormDense(HIDDEN, **k),
    "GatedMLP": lambda **k: ours_linen.GatedMLP(HIDDEN, **k),
}
KINDS = list(NNX)


def operation(kind, x, kernels, biases, scale=None, eps=None):
    """What the module must compute, from the operations; kernels are stored (in, out)."""
    fp8 = {"quantization": "fp8", "dtype": jnp.float32}  # what x and parameters promote to
    if kind == "Linear":
        return normfuse.dense(x, kernels[0], biases[0], activation="silu", **fp8)
    if kind == "NormDense":
        return normfuse.norm_dense(x, scale, kernels[0], biases[0], eps=eps, **fp8)
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
        linears = of or [getattr(layer, "linear", layer)]
        kernels = [linear.kernel[...] for linear in linears]
        biases = [None if linear.bias is None else linear.bias[...] for linear in linears]
        norm = {"scale": layer.norm.scale[...], "eps": 1e-6} if kind == "NormDense" else {}
        return total(operation(kind, x, kernels, biases, **norm))

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
        linears = of or [getattr(layer, "linear", layer)]
        kernels = [linear.weight.T for linear in linears]
        norm = {"scale": layer.norm.weight, "eps": 1e-5} if kind == "NormDense" else {}
        return total(operation(kind, x, kernels, [linear.bias for linear in linears], **norm))

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
        norm = {"scale": p["scale"], "eps": 1e-6} if kind == "NormDense" else {}
        return total(operation(kind, x, kernels, [p.get("bias")], **norm))

    module = lambda variables, x: total(layer.apply(variables, x))
    got, want = (jax.jit(jax.value_and_grad(f))(variables, X) for f in (module, wanted))
    assert_same(got, want)


# ---------------------------------------------------------------- swap


class Foreign(nnx.Module):
    """A model of Flax's layers alone."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.first = nnx.Linear(DIM, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.gelu(self.first(self.norm(x))))


def test_one_line_puts_a_flax_model_into_fp8():
    model = ours_nnx.swap(Foreign(nnx.Rngs(0)), quantization="fp8")
    before = nnx.state(Foreign(nnx.Rngs(0)))
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)

    def by_hand(model, x):
        y = x
        for linear in (model.first, model.second):
            y = model.norm(y) if linear is model.first else nnx.gelu(y)
            y = normfuse.dense(
                y, linear.kernel[...], linear.bias[...], quantization="fp8", dtype=jnp.float32
            )
        return y

    got, want = (nnx.jit(f)(model, X) for f in (lambda m, x: m(x), by_hand))
    assert_same(got, want)
    assert distance(got, Foreign(nnx.Rngs(0))(X)) > 0.01


def test_swap_reaches_layers_that_are_ours_and_unswap_forgets():
    model = nnx.Sequential(NNX["GatedMLP"](), NNX["NormDense"](), Foreign(nnx.Rngs(1)).first)
    ours_nnx.swap(model, quantization="fp8")
    mlp, norm_dense, linear = model.layers
    quantized = [mlp, mlp.gate, mlp.up, mlp.down, norm_dense, norm_dense.linear, linear]
    assert [layer.quantization for layer in quantized] == ["fp8"] * 7
    ours_nnx.swap(model)  # says nothing of quantization
    assert [layer.quantization for layer in quantized] == ["fp8"] * 7
    foreign = ours_nnx.unswap(ours_nnx.swap(Foreign(nnx.Rngs(0)), quantization="fp8"))
    assert nnx.graphdef(foreign) == nnx.graphdef(Foreign(nnx.Rngs(0)))


def test_one_line_puts_an_equinox_model_into_fp8_and_training_goes_on():
    model = eqx.nn.MLP(DIM, DIM, HIDDEN, depth=1, key=KEY)
    optimizer = optax.adam(3e-3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    model, opt_state = (ours_eqx.swap(tree, quantization="fp8") for tree in (model, opt_state))
    assert all(layer.quantization == "fp8" for layer in model.layers)

    @eqx.filter_jit
    def step(model, opt_state):
        loss = lambda model: jnp.mean((jax.vmap(model)(X) - X).astype(jnp.float32) ** 2)
        value, gradient = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    losses = []
    for _ in range(30):
        model, opt_state, loss = step(model, opt_state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert "float8_e4m3fn" in str(jax.make_jaxpr(jax.vmap(model))(X))
    assert jax.tree.structure(ours_eqx.unswap(model)) == jax.tree.structure(
        eqx.nn.MLP(DIM, DIM, HIDDEN, depth=1, key=KEY)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_equinox_layers_that_are_ours_are_swapped_with_what_they_hold(kind):
    swapped = ours_eqx.swap(EQX[kind](), quantization="fp8")
    assert eqx.tree_equal(swapped, EQX[kind](quantization="fp8"))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "make",
    [
        *(make for table in (NNX, EQX) for make in table.values()),
        *(lambda m=m, **k: m(**k).init(KEY, X) for m in LINEN.values()),
        lambda **k: ours_nnx.swap(Foreign(nnx.Rngs(0)), **k),
        lambda **k: ours_eqx.swap(eqx.nn.MLP(4, 4, 4, 1, key=KEY), **k),
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


class Precise(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(DIM, precision="highest")(nn.Dense(DIM)(x))


def test_swap_leaves_what_the_framework_serves_unquantized():
    linear = lambda **options: nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0), **options)
    scalar = eqx.nn.Sequential(
        [eqx.nn.Linear(DIM, DIM, key=KEY), eqx.nn.Linear(DIM, "scalar", key=KEY)]
    )
    rows, options = [], {"quantization": "fp8", "report": lambda report: rows.extend(report.rows)}
    model = ours_nnx.swap(nnx.Sequential(linear(), linear(precision="highest")), **options)
    assert [layer.quantization for layer in model.layers] == ["fp8", None]
    model(X)
    linen = Precise()
    ours_linen.swap(linen, **options).apply(linen.init(KEY, X), X)
    scalar = ours_eqx.swap(scalar, **options)
    assert [layer.quantization for layer in scalar.layers] == ["fp8", None]
    scalar(X[0])
    served = [row.served.partition(", ")[2] for row in rows]
    assert served == ["", "without fp8 beside a precision"] * 2 + [
        "",
        'without fp8 beside "scalar" features',
    ]


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
