"""`swap` and `unswap` on models that are not ours, in NNX and in Equinox."""

import equinox as eqx
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

from normfuse.layers import eqx as ours_eqx
from normfuse.layers import nnx as ours_nnx

KEY = jax.random.key(0)
EPS32 = float(jnp.finfo(jnp.float32).eps)


def assert_all_close(got, want, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- a Llama of Flax's layers


class Attention(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.heads = heads
        linear = lambda: nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear() for _ in range(4))

    def __call__(self, x):
        split = lambda y: y.reshape(*y.shape[:-1], self.heads, -1)
        q, k, v = (split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class MLP(nnx.Module):
    def __init__(self, dim, hidden, rngs):
        self.gate_proj = nnx.Linear(dim, hidden, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(dim, hidden, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(hidden, dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, dim, rngs):
        self.input_layernorm = nnx.RMSNorm(dim, epsilon=1e-5, rngs=rngs)
        self.self_attn = Attention(dim, 4, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(dim, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP(dim, 3 * dim, rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    def __init__(self, rngs, vocabulary=32, dim=16, layers=1):
        self.embed_tokens = nnx.Embed(vocabulary, dim, rngs=rngs)
        self.layers = nnx.List([Layer(dim, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(dim, epsilon=1e-5, rngs=rngs)
        metadata = {"note": "kept"}
        self.lm_head = nnx.Linear(
            dim, vocabulary, use_bias=False, kernel_metadata=metadata, rngs=rngs
        )

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tokens(rng):
    return jnp.asarray(rng.integers(0, 32, (4, 9)))


@pytest.mark.newest
def test_llama_gives_the_same_logits_and_gradients(rng):
    model, data = Llama(nnx.Rngs(0)), tokens(rng)
    both = nnx.value_and_grad(lambda m, data: (loss(m, data), m(data)), has_aux=True)
    want = nnx.jit(both)(model, data)
    swapped = ours_nnx.swap(model)
    assert swapped is model
    found = [type(m).__module__ for _, m in nnx.iter_graph(model) if isinstance(m, nnx.RMSNorm)]
    assert found == ["normfuse.layers.nnx"] * 3
    assert_all_close(nnx.jit(both)(swapped, data), want)
    calls = hlo.calls(
        jax.jit(lambda s: loss(nnx.merge(nnx.graphdef(model), s), data))
        .lower(nnx.state(model))
        .compile()
    )
    assert calls == {"forward": 3}


def test_unswap_restores_the_very_model():
    model = Llama(nnx.Rngs(0))
    graph, state = nnx.split(model)
    variables = [id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    ours_nnx.swap(model)
    assert nnx.graphdef(model) != graph
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(state)
    assert model.lm_head.kernel.get_metadata()["note"] == "kept"
    ours_nnx.unswap(model)
    assert nnx.graphdef(model) == graph
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), state)
    assert [id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)] == variables


def test_a_swapped_model_is_what_ours_would_be():
    ours, flax = ours_nnx.RMSNorm(4, rngs=nnx.Rngs(0)), nnx.RMSNorm(4, rngs=nnx.Rngs(0))
    assert nnx.graphdef(ours_nnx.swap(flax)) == nnx.graphdef(ours)
    ours = ours_nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    assert nnx.graphdef(ours_nnx.swap(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))) == nnx.graphdef(ours)


def test_nnx_training_goes_on_after_a_swap(rng):
    data = tokens(rng)

    def train(swap_at):
        model = Llama(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(loss)(model, data)
            optimizer.update(model, grads)
            return value

        losses = []
        for i in range(4):
            if i == swap_at:
                ours_nnx.swap(model)
            losses.append(float(step(model, optimizer)))
        return losses, model

    (swapped, model), (plain, _) = train(2), train(None)
    # Adam's steps are of the learning rate's size whatever the gradient's.
    np.testing.assert_allclose(swapped, plain, rtol=1e-4)
    assert plain[-1] < plain[0] and type(model.norm) is ours_nnx.RMSNorm


def test_nnx_tied_layers_stay_tied(rng):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.again = self.first
            self.norms = nnx.Dict(a=nnx.RMSNorm(4, rngs=rngs))
            self.norms["b"] = self.norms["a"]

    model = ours_nnx.swap(Tied(nnx.Rngs(0)))
    assert model.again is model.first and model.norms["a"] is model.norms["b"]
    assert type(model.first) is ours_nnx.Linear and type(model.norms["b"]) is ours_nnx.RMSNorm
    assert len(jax.tree.leaves(nnx.state(model))) == 3


class Mine(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 0 * super().__call__(inputs, out_sharding)


def test_nnx_leaves_subclasses_and_our_own_layers_alone():
    ours = ours_nnx.Linear(4, 4, activation="gelu", rngs=nnx.Rngs(0))
    model = nnx.Sequential(
        Mine(4, 4, rngs=nnx.Rngs(0)), ours, nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0))
    )
    graph = nnx.graphdef(model)
    assert nnx.graphdef(ours_nnx.swap(model)) == graph
    with pytest.raises(ValueError, match="activation='gelu', which nnx.Linear cannot express"):
        ours_nnx.unswap(model)
    assert nnx.graphdef(model) == graph


def test_nnx_swap_of_containers_and_implementation():
    layers = [nnx.RMSNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))]
    assert ours_nnx.swap(layers, implementation="xla") is layers
    assert [layer.implementation for layer in layers] == ["xla", None]
    ours_nnx.swap(layers)  # says nothing of those that are ours
    assert layers[0].implementation == "xla"
    ours_nnx.swap(layers, implementation="native")
    assert [layer.implementation for layer in layers] == ["native", None]
    with pytest.raises(ValueError, match="implementation must name one of"):
        ours_nnx.swap(layers, implementation="cuda")


IN_PLACE = {
    "jit": nnx.jit,
    "grad": nnx.grad,
    "vmap": lambda f: nnx.vmap(f, in_axes=(None, 0)),
    "remat": nnx.remat,
    "cond": lambda f: lambda model, x: nnx.cond(True, f, f, model, x),
}


@pytest.mark.parametrize("change", [ours_nnx.swap, ours_nnx.unswap])
@pytest.mark.parametrize("transform", IN_PLACE.values(), ids=IN_PLACE)
def test_nnx_swap_of_what_a_transformation_was_given_says_why_not(transform, change):
    """Flax would find another class than it gave, and leave the model without its parts."""
    model = nnx.Dict(norm=nnx.RMSNorm(8, rngs=nnx.Rngs(0)), up=nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
    if change is ours_nnx.unswap:
        ours_nnx.swap(model)
    before = nnx.graphdef(model)

    def call(model, x):
        change(model)
        return jnp.sum(model["up"](model["norm"](x)))

    x = jnp.ones((8, 8))
    name = change.__name__
    with pytest.raises(TraceContextError, match=rf"{name}: \w+ \(\w+\) was given to a"):
        transform(call)(model, x)
    with pytest.raises(TraceContextError, match=rf"{name}: \w+ \(\w+\) is from outside"):
        transform(lambda _, x: call(model, x))(nnx.Dict(), x)
    assert nnx.graphdef(model) == before  # and all of it is there
    copied = transform(lambda model, x: call(nnx.clone(model), x))(model, x)
    assert jax.tree.all(jax.tree.map(lambda a: bool(jnp.all(jnp.isfinite(a))), copied))
    assert nnx.graphdef(model) == before


def test_nnx_swap_of_what_was_made_in_a_transformation():
    make = lambda rngs: ours_nnx.swap(nnx.Linear(8, 8, rngs=rngs))
    assert type(nnx.jit(make)(nnx.Rngs(0))) is ours_nnx.Linear
    layers = nnx.split_rngs(splits=3)(nnx.vmap(make))(nnx.Rngs(0))
    assert type(layers) is ours_nnx.Linear and layers.kernel.shape == (3, 8, 8)
    nothing = nnx.jit(lambda model: ours_nnx.swap(model) is model)
    assert nothing(layers)  # all is swapped already


def test_nnx_swap_of_stacked_layers(rng):
    x = jnp.asarray(rng.standard_normal((2, 16)), jnp.float32)
    create = nnx.vmap(lambda key: Layer(16, nnx.Rngs(key)), in_axes=0, out_axes=0)
    stack = create(jax.random.split(KEY, 3))

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return layer(x)

    want = forward(stack, x[None])
    np.testing.assert_allclose(forward(ours_nnx.swap(stack), x[None]), want, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- an Equinox transformer


class EqxBlock(eqx.Module):
    """Of Equinox's own attention, norm and MLP, one sequence at a time."""

    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.RMSNorm
    norm2: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP
    note: str = eqx.field(static=True)

    def __init__(self, dim, key):
        a, b = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, dim, use_output_bias=True, key=a)
        self.norm1, self.norm2 = eqx.nn.RMSNorm(dim), eqx.nn.RMSNorm(dim, use_bias=False)
        self.mlp = eqx.nn.MLP(dim, dim, 3 * dim, depth=2, activation=jax.nn.silu, key=b)
        self.note = "kept"

    def __call__(self, x, *, key=None):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(lambda row: self.mlp(self.norm2(row)))(x)


def eqx_model():
    return eqx.nn.Sequential([EqxBlock(16, KEY), eqx.nn.Lambda(jnp.tanh)])


def eqx_loss(model, x):
    return jnp.mean(jnp.sin(jax.vmap(model)(x)) ** 2)


def kinds(model, classes):
    is_layer = lambda node: isinstance(node, (eqx.nn.RMSNorm, eqx.nn.Linear))
    nodes = jax.tree.leaves(model, is_leaf=is_layer)
    return sum(type(node) in classes for node in nodes if is_layer(node))


def test_equinox_transformer_gives_the_same_values_and_gradients(rng):
    x = jnp.asarray(rng.standard_normal((3, 6, 16)), jnp.float32)
    model = eqx_model()
    swapped = ours_eqx.swap(model)
    assert kinds(swapped, (ours_eqx.RMSNorm, ours_eqx.Linear)) == 2 + 4 + 3
    assert kinds(model, (eqx.nn.RMSNorm, eqx.nn.Linear)) == 2 + 4 + 3  # is as it was
    assert swapped.layers[0].note == "kept"
    f = eqx.filter_jit(eqx.filter_value_and_grad(eqx_loss))
    assert_all_close(f(swapped, x), f(model, x))
    arrays, static = eqx.partition(swapped, eqx.is_array)
    forward = jax.jit(lambda arrays: jax.vmap(eqx.combine(arrays, static))(x))
    assert hlo.calls(forward.lower(arrays).compile()) == {"forward": 2}


def test_equinox_swap_keeps_leaves_and_inverts():
    model = eqx_model()
    swapped = ours_eqx.swap(model)
    for a, b in zip(jax.tree.leaves(swapped), jax.tree.leaves(model), strict=True):
        assert a is b
    assert jax.tree.structure(ours_eqx.unswap(swapped)) == jax.tree.structure(model)
    assert ours_eqx.swap(swapped) is swapped and ours_eqx.unswap(model) is model
    assert swapped.layers[1] is model.layers[1]  # nothing in it to swap


def test_equinox_swap_again_says_what_serves():
    layers = [eqx.nn.RMSNorm(4), eqx.nn.Linear(4, 4, key=jax.random.key(0))]
    layers = ours_eqx.swap(layers, implementation="xla")
    assert ours_eqx.swap(layers)[0].implementation == "xla"
    again = ours_eqx.swap(layers, implementation="native")
    assert [layer.implementation for layer in again] == ["native", None]
    assert again[0].weight is layers[0].weight


def test_equinox_swap_makes_what_ours_would_be():
    pairs = [
        (eqx.nn.Linear(3, 4, key=KEY), ours_eqx.Linear(3, 4, key=KEY)),
        (eqx.nn.RMSNorm(3), ours_eqx.RMSNorm(3, implementation="xla")),
    ]
    for theirs, ours in pairs:
        swapped = ours_eqx.swap(theirs, implementation="xla")
        assert jax.tree.structure(swapped) == jax.tree.structure(ours)
        assert bool(eqx.tree_equal(swapped, ours))


@pytest.mark.newest
def test_equinox_training_goes_on_after_a_swap(rng):
    x = jnp.asarray(rng.standard_normal((3, 6, 16)), jnp.float32)
    optimizer = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=1)

    @eqx.filter_jit
    def step(model, state):
        value, grads = eqx.filter_value_and_grad(eqx_loss)(model, x)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    def train(swap_at):
        model = eqx_model()
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        losses = []
        for i in range(4):
            if i == swap_at:
                model, state = ours_eqx.swap(model), ours_eqx.swap(state)
                fresh = optimizer.init(eqx.filter(model, eqx.is_array))
                assert jax.tree.structure(state) == jax.tree.structure(fresh)
            model, state, value = step(model, state)
            losses.append(float(value))
        return losses

    swapped, plain = train(2), train(None)
    np.testing.assert_allclose(swapped, plain, rtol=1e-4)
    assert plain[-1] < plain[0]


class EqxMine(eqx.nn.Linear):
    pass


class Pair(eqx.Module):
    a: eqx.Module
    b: eqx.Module


def test_equinox_tied_layers_stay_tied():
    block = EqxBlock(16, KEY)
    swapped = ours_eqx.swap(Pair(block, [block, (block.norm1, EqxMine(2, 2, key=KEY))]))
    assert swapped.b[0] is swapped.a and swapped.b[1][0] is swapped.a.norm1
    assert type(swapped.b[1][1]) is EqxMine
    embedding, head = eqx.nn.Embedding(5, 4, key=KEY), eqx.nn.Linear(4, 5, False, key=KEY)
    shared = eqx.nn.Shared(
        (embedding, head), where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
    )
    embedding, head = ours_eqx.swap(shared)()
    assert head.weight is embedding.weight and type(head) is ours_eqx.Linear


def test_equinox_unswap_refuses_an_activation():
    model = ours_eqx.Linear(2, 3, key=KEY, activation="gelu")
    with pytest.raises(ValueError, match="activation='gelu', which eqx.nn.Linear cannot express"):
        ours_eqx.unswap([model])
