"""`swap` finds gated MLPs of three linear layers by what they compute."""

import math
import pickle
from collections.abc import Callable

import equinox as eqx
import gpu_compiler
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from normfuse.layers import eqx as ours_eqx
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.dense.epilogue import ACTIVATIONS
from normfuse.layers.recognize_mlp import _ACTIVATIONS

f32, bf16 = jnp.float32, jnp.bfloat16
D, H = 16, 32
UNCHANGED = lambda m, x: x


class Gated(nnx.Module):
    """`c` is down; `hidden` and `after` are what a test adds between the layers and at the end."""

    def __init__(
        self, activation=nnx.silu, *, bias=False, dtype=None, hidden=UNCHANGED, after=UNCHANGED
    ):
        rngs = nnx.Rngs(0)
        linear = lambda n, m: nnx.Linear(n, m, use_bias=bias, dtype=dtype, rngs=rngs)
        self.c, self.b, self.a = linear(H, D), linear(D, H), linear(D, H)
        if bias:
            for layer in (self.a, self.b, self.c):
                layer.bias[...] = jnp.linspace(-1, 1, layer.out_features)
        self.activation, self.hidden, self.after = activation, hidden, after

    def __call__(self, x):
        h = self.hidden(self, self.activation(self.b(x)) * self.a(x))
        return self.after(self, self.c(h))


def swapped(swap, model, **options):
    reports = []
    model = swap(model, report=reports.append, **options)
    return model, {row.layer: row for row in reports[0].rows}


def vjp(model, x):
    graph, state = nnx.split(model)
    return jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "activation": nnx.gelu},
        {"activation": nnx.relu, "hidden": lambda m, h: h.astype(f32)},
        {"dtype": bf16, "activation": lambda z: z * jax.nn.sigmoid(1.702 * z)},
    ],
    ids=["silu", "biases and gelu_tanh", "relu", "bfloat16"],
)
def test_nnx_mlps_are_served(rng, options):
    theirs, model = Gated(**options), Gated(**options)
    graph = nnx.graphdef(model)
    same, rows = swapped(ours_nnx.swap, model)
    assert same is model and isinstance(model, Gated) and type(model) is not Gated
    assert rows["Gated"].served.startswith("gated_product") and rows["Linear"].served
    x = jnp.asarray(rng.standard_normal((3, 4, D)), options.get("dtype", f32))
    assert "op='gated_product'" in str(jax.make_jaxpr(model)(x))
    (want, pullback), (got, ours) = vjp(theirs, x), vjp(model, x)
    dy = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    # Sums of at most 32 terms, or of 12 rows, in float32; in bfloat16 some ten roundings of each.
    tolerance = 1e-5 if x.dtype == f32 else 10 * 2**-8
    for a, b in zip(jax.tree.leaves((got, ours(dy))), jax.tree.leaves((want, pullback(dy)))):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
    assert nnx.graphdef(ours_nnx.unswap(model)) == graph and type(model) is Gated


@pytest.mark.newest
def test_the_implementation_is_that_of_norms(rng):
    for swap, model, x in [
        (ours_nnx.swap, Gated(), rng.standard_normal((2, D))),
        (ours_eqx.swap, EqxGated(jax.random.key(0)), rng.standard_normal(D)),
    ]:
        x = jnp.asarray(x, f32)
        want = model(x)
        again = swap(swap(model, implementation="native"), implementation="native")
        np.testing.assert_allclose(again(x), want, rtol=1e-5, atol=1e-5)


def test_less_is_kept_for_the_backward(rng):
    x = jnp.asarray(rng.standard_normal((7, D)), f32)

    def kept(model):
        arrays = jax.tree.leaves(vjp(model, x)[1])
        return sum(a.shape == (7, H) for a in arrays)

    # gate and up; and not what their activation, or its derivative, is
    assert kept(ours_nnx.swap(Gated())) == 2 < kept(Gated())


def test_the_reference_activations_are_those_of_the_op():
    a = np.linspace(-6, 6, 97)
    for name, exact in _ACTIVATIONS.items():
        got = np.asarray(ACTIVATIONS[name](jnp.asarray(a, f32)), np.float64)
        # a few float32 roundings, of a itself where a sum cancels; the input has one
        np.testing.assert_allclose(got, exact(a), rtol=2e-6, atol=8 * 2**-23)


class WithDropout(Gated):
    def __init__(self):
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class WithBias(Gated):
    def __init__(self):
        super().__init__(after=lambda m, y: y + m.shift[...])
        self.shift = nnx.Param(jnp.zeros(D))


class Shared(Gated):
    def __init__(self):
        super().__init__()
        self.a.kernel = self.b.kernel


class Counting(Gated):
    def __call__(self, x):
        self.a.kernel[...] = 2 * self.a.kernel[...]
        return super().__call__(x)


NO_MLP = {
    "dropout": (WithDropout, "beside three linear layers it holds dropout"),
    "a parameter": (WithBias, "beside three linear layers it holds shift"),
    "a shared kernel": (Shared, "shares layers or parameters"),
    "state": (Counting, "its call changes its state"),
    "a limit": (lambda: Gated(hidden=lambda m, h: jnp.clip(h, -7, 7)), "the nearest, silu"),
    "rounded": (
        lambda: Gated(hidden=lambda m, h: h.astype(jnp.bfloat16)),
        "its rounding hides whether it is c(silu(b) · a) or c(gelu_tanh(b) · a)",
    ),
    "a large limit": (
        lambda: Gated(hidden=lambda m, h: jnp.clip(h, -6e4, 6e4)),
        "may compute something else for other values (max)",
    ),
    "a guard": (
        lambda: Gated(hidden=lambda m, h: jnp.nan_to_num(h)),
        "may compute something else for other values",
    ),
    "a guard beside relu": (
        lambda: Gated(nnx.relu, hidden=lambda m, h: jnp.maximum(h, -1e4)),
        "it has more pieces than relu",
    ),
    "a factor": (
        lambda: Gated(after=lambda m, y: 1.001 * y),
        "silu, differs by 0.001",
    ),
    "a residual": (lambda: Gated(hidden=lambda m, h: h + 1e-3), "the nearest, silu"),
    "an activation": (lambda: Gated(jnp.sin), "down(activation(gate(x)) · up(x)): the nearest"),
    "a sum": (
        lambda: Gated(hidden=lambda m, h: m.a(jnp.ones(D)) + m.b(jnp.ones(D))),
        "turns shape",
    ),
    "noise": (lambda: Gated(hidden=noise), "draws random numbers"),
    "no gradient": (lambda: Gated(hidden=lambda m, h: jax.lax.stop_gradient(h)), "(stop_gradient)"),
    "rounding": (lambda: Gated(after=lambda m, y: y.astype(f32)), "multiplies bfloat16"),
    "an activation of ours": (lambda: Gated(), "a linear layer has an activation"),
}


def noise(m, h):
    return jax.random.bernoulli(jax.random.key(0), 0.5, h.shape) * h


@pytest.mark.parametrize("name", NO_MLP)
@pytest.mark.newest
def test_what_is_no_mlp_stays_with_its_reason(rng, name):
    make, why = NO_MLP[name]
    model = make()
    if name == "rounding":
        for layer in (model.a, model.b, model.c):
            layer.dtype = bf16
    if name == "an activation of ours":
        ours_nnx.swap(model.a).activation = "gelu"
    x = jnp.asarray(rng.standard_normal((2, D)), f32)
    want = None if name in ("state", "noise") else model(x)
    graph = type(model)
    _, rows = swapped(ours_nnx.swap, model)
    row = rows[graph.__name__]
    assert why in row.reason and not row.served, row
    assert type(model) is graph and rows["Linear"].served  # its layers are swapped as ever
    if want is not None:
        np.testing.assert_allclose(model(x), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "relu",
    [nnx.relu, lambda z: jnp.where(z > 0, z, 0), lambda z: jnp.square(jnp.maximum(z, 0))],
)
def test_each_way_to_write_a_relu_is_served(relu):
    _, rows = swapped(ours_nnx.swap, Gated(relu))
    assert rows["Gated"].served


def test_a_layer_of_other_sizes_is_computed_as_the_class_does(rng):
    x = jnp.asarray(rng.standard_normal((2, D)), f32)
    theirs, model = Gated(), ours_nnx.swap(Gated())
    for one in (theirs, model):
        one.c = nnx.Linear(H, 3, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(model(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_other_layers_are_no_candidates():
    class Attention(nnx.Module):
        def __init__(self):
            make = lambda m: nnx.Linear(D, m, rngs=nnx.Rngs(0))
            self.q, self.k, self.v = make(H), make(H), make(H)

        def __call__(self, x):
            return self.q(x) + self.k(x) * self.v(x)

    _, rows = swapped(ours_nnx.swap, Attention())
    assert "Attention" not in rows


@pytest.mark.newest
def test_what_is_placed_on_a_mesh_stays_placed(rng, eight_devices):
    def hidden(m, h):
        mesh = jax.sharding.get_abstract_mesh()
        return h if mesh.empty else jax.lax.with_sharding_constraint(h, jax.P(None, "m"))

    model = ours_nnx.swap(Gated(hidden=hidden))
    x = jnp.asarray(rng.standard_normal((2, D)), f32)
    graph, state = nnx.split(model)
    text = lambda: str(jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, x))
    assert "gated_product" in text()
    auto = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((4,), ("m",), axis_types=auto, devices=eight_devices[:4])):
        assert "gated_product" not in text() and "sharding_constraint" in text()
    assert "gated_product" in text()


class Branching(Gated):
    """A long x has another activation."""

    def __call__(self, x):
        if len(x) <= 8:
            return super().__call__(x)
        return self.c(jnp.tanh(self.b(x)) * self.a(x))


def test_a_class_that_branches_on_the_length_of_x(rng):
    model, theirs = ours_nnx.swap(Branching()), Branching()
    for shape, served in (((4, D), True), ((9, D), False), ((1, D), True), ((9, 1, D), False)):
        x = jnp.asarray(rng.standard_normal(shape), f32)
        text = str(jax.make_jaxpr(lambda x: model(x))(x))
        assert ("gated_product" in text) == served, shape
        np.testing.assert_allclose(model(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.newest
@pytest.mark.parametrize("activation", [nnx.silu, nnx.relu], ids=["silu", "relu"])
def test_devices_that_are_described_compute_no_probe(activation):
    """An x of a new rank is probed where the model is traced: by the host."""
    graph, state = nnx.split(ours_nnx.swap(Gated(activation)))
    mesh = gpu_compiler.mesh((1,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((2, 3, 2, D), bf16)
    with jax.set_mesh(mesh):
        text = str(jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, x))
    assert "gated_product" in text


@pytest.mark.newest
def test_fp8_is_that_of_our_gated_mlp(rng):
    theirs, ours = Gated(), ours_nnx.GatedMLP(D, H, quantization="fp8", rngs=nnx.Rngs(0))
    ours.gate.kernel, ours.up.kernel = theirs.b.kernel, theirs.a.kernel
    ours.down.kernel = theirs.c.kernel
    model = ours_nnx.swap(theirs, quantization="fp8")
    x = jnp.asarray(rng.standard_normal((16, D)), bf16)
    (want, _), (got, pullback) = vjp(ours, x), vjp(model, x)
    np.testing.assert_array_equal(np.asarray(got, f32), np.asarray(want, f32))
    assert "uint8" in {a.dtype.name for a in jax.tree.leaves(pullback)}  # codes
    ours_nnx.unswap(model)
    assert not any(hasattr(layer, "quantization") for layer in (model.a, model.b, model.c))


# ---------------------------------------------------------------- Equinox


class EqxGated(eqx.Module):
    w1: eqx.nn.Linear
    w2: eqx.nn.Linear
    w3: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        linear = lambda n, m, key: eqx.nn.Linear(n, m, use_bias=m == D, key=key)
        self.w1, self.w3 = (linear(D, H, key) for key in keys[:2])
        self.w2 = linear(H, D, keys[2])

    def __call__(self, x, *, key=None):
        if x.ndim == 2:
            return jax.vmap(self)(x)
        y = self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))
        return y if key is None else y * jax.random.bernoulli(key, 0.5, y.shape)


def eqx_model():
    return [EqxGated(jax.random.key(i)) for i in range(2)]


def loss(model, x):
    return jnp.mean(jnp.sin(jax.vmap(model[0])(x) + model[1](x)))


def test_equinox_mlps_are_served(rng):
    x = jnp.asarray(rng.standard_normal((5, D)), f32)
    theirs = eqx_model()
    model, rows = swapped(ours_eqx.swap, theirs)
    assert rows["EqxGated"].served == "gated_product, silu" and len(rows) == 2
    assert isinstance(model[0], EqxGated) and type(theirs[0]) is EqxGated
    f = eqx.filter_value_and_grad(loss)
    for a, b in zip(jax.tree.leaves(f(model, x)), jax.tree.leaves(f(theirs, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # sums of 32 terms or five rows
    assert str(jax.make_jaxpr(lambda x: loss(model, x))(x)).count("op='gated_product'") == 2
    own = lambda x: model[0](x, key=jax.random.key(0))
    assert "gated_product" not in str(jax.make_jaxpr(own)(x[0]))
    assert jax.tree.structure(ours_eqx.unswap(model)) == jax.tree.structure(theirs)
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(theirs)))
    assert ours_eqx.swap(model) is model
    for again in (pickle.loads(pickle.dumps(model[0])), ours_eqx.swap(ours_eqx.unswap(model))[0]):
        assert type(again) is type(model[0])
        np.testing.assert_array_equal(again(x), model[0](x))


def test_equinox_optimizer_state_is_swapped_likewise():
    model = eqx_model()
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    nothing = eqx.filter(model, lambda leaf: False)
    model = ours_eqx.swap(model)
    fresh = optimizer.init(eqx.filter(model, eqx.is_array))
    assert jax.tree.structure(ours_eqx.swap(state)) == jax.tree.structure(fresh)
    empty = eqx.filter(model, lambda leaf: False)
    assert jax.tree.structure(ours_eqx.swap(nothing)) == jax.tree.structure(empty)


class WithActivation(EqxGated):
    """Its activation is a leaf, which an optimizer's state has not."""

    act: Callable

    def __init__(self, key):
        super().__init__(key)
        self.act = jax.nn.silu

    def __call__(self, x, *, key=None):
        del key
        return self.w2(self.act(self.w1(x)) * self.w3(x))


def test_equinox_optimizer_state_of_an_mlp_with_an_activation():
    theirs, optimizer = WithActivation(jax.random.key(0)), optax.adam(1e-2)
    state = optimizer.init(eqx.filter(theirs, eqx.is_array))
    model = ours_eqx.swap(theirs)
    assert type(model) is not WithActivation
    gradients = eqx.filter(model, eqx.is_array)
    optimizer.update(gradients, ours_eqx.swap(state))  # of one structure


@pytest.mark.newest
def test_equinox_fp8(rng):
    x = jnp.asarray(rng.standard_normal((16, D)), f32)
    theirs = EqxGated(jax.random.key(0))
    model = ours_eqx.swap(theirs, quantization="fp8")
    ours = ours_eqx.GatedMLP(D, H, key=jax.random.key(0), quantization="fp8")
    where = lambda m: (m.gate, m.up, m.down)
    ours = eqx.tree_at(where, ours, (model.w1, model.w3, model.w2))
    got, want = jax.vmap(model)(x), jax.vmap(ours)(x)
    np.testing.assert_array_equal(got, want)
    error = float(jnp.linalg.norm(got - jax.vmap(theirs)(x)) / jnp.linalg.norm(want))
    assert 1e-3 < error < 3 * math.sqrt(3) * 2**-4  # three products of e4m3 operands
