"""Dropout in MLPs and in attention: a pass of its own before it, and a row that names it."""

import equinox as eqx
import flax.linen as nn
import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_cases import Fused, domain, draw

from normfuse.layers.fuse import attention as fused_attention

B, T, H, D = 2, 16, 2, 8
E, F = H * D, 32


def dropped(x, seed=0, rate=0.25):
    keep = jax.random.bernoulli(jax.random.key(seed), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def kept(shape, seed=0, rate=0.25):
    return jax.random.bernoulli(jax.random.key(seed), 1 - rate, shape)


SCALE = D**-0.5
LENGTHS = jnp.array([9, T])
PADDED = (jnp.arange(T) < LENGTHS[:, None])[:, None, None]
CAUSAL = jnp.tril(jnp.ones((T, T), bool))
EMPTY = (jnp.arange(T) < jnp.array([0, 5])[:, None])[:, None, None]  # all of a sequence


def attend(change, x, wq, wk, wv, mask=lambda s: jnp.where(CAUSAL, s, -1e9)):
    q, k, v = (jnp.reshape(x @ w, (B, T, H, D)) for w in (wq, wk, wv))
    s = mask(jnp.einsum("bthd,bshd->bhts", q, k) * SCALE)
    return jnp.einsum("bhts,bshd->bthd", change(jax.nn.softmax(s)), v)


def weights():
    return draw(0, B, T, E), *[draw(i, E, E, scale=0.3) for i in (1, 2, 3)]


def agree(function, args, served=1, rounding=1e-5):
    """Values and gradients of `fuse(function)` are the function's, whose attention is served."""
    fused = Fused(function, serves=False)
    want, got = fuse_cases.run(function, fused, args=args, jit=False)["float32"]
    for a, b in zip(got[:2], want[:2]):
        errors = fuse_cases.errors(a, b, fuse_cases.floor_of(b))
        assert max(errors) <= rounding, errors
    assert fused.served().get("attention", 0) == served, str(fused)
    return [row for row in fused.rows if domain(row) == "attention"]


FACTORS = {  # of the probabilities
    "where(keep, p / q, 0)": dropped,
    "where(drop, 0, p / q)": lambda p: jnp.where(~kept(p.shape), 0, p / 0.75),
    "select": lambda p: jax.lax.select(kept(p.shape), p / 0.75, jnp.zeros_like(p)),
    "p * (keep / q)": lambda p: p * (kept(p.shape).astype(p.dtype) / 0.75),
    "keep * p / q": lambda p: kept(p.shape) * p / 0.75,
    "one mask": lambda p: p * (jnp.broadcast_to(kept((1, 1, T, T)), p.shape) / 0.75),
    "one mask of each example": lambda p: p * jnp.where(kept((B, 1, T, T)), 1 / 0.75, 0),
    "of each head": lambda p: dropped(jnp.ones((1, H, 1, 1))) * p,
    "of each row": lambda p: dropped(jnp.ones((B, H, T, 1))) * p,
    "the same mask twice": lambda p: (m := kept(p.shape)) * jnp.where(m, p / 0.75, 0),
    "two masks": lambda p: p * kept(p.shape) * kept(p.shape, 1) / 0.75**2,
    "less than 1": lambda p: p * kept(p.shape) * 0.5,
    "a number alone": lambda p: p * 0.5,
    "no random mask": lambda p: p * (jnp.arange(T) % 3 > 0),
    "uniform < rate": lambda p: jnp.where(
        jax.random.uniform(jax.random.key(2), p.shape) < 0.25, 0, p / 0.75
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_of_two_values_is_dropout(name):
    (row,) = agree(lambda *args: attend(FACTORS[name], *args), weights())
    assert ("dropout" in row.served) == (name != "a number alone")


OTHERS = {  # and the reason that the attention stays
    "three values": (
        lambda p: p * jax.random.randint(jax.random.key(0), p.shape, 0, 3).astype(p.dtype),
        "its probabilities are read by mul at",
    ),
    "two values, neither 0": (
        lambda p: p * jnp.where(kept(p.shape), 1.0, 0.5),
        "its probabilities are read by mul at",
    ),
    "a mask of heads": (
        lambda p: p * jnp.asarray([1.0, 0.5])[:, None, None],
        "its probabilities are read by mul at",
    ),
    "a threshold of themselves": (lambda p: jnp.where(p > 0.1, p, 0), "its scores are read by gt"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_factor_of_probabilities_stays(name):
    change, why = OTHERS[name]
    (row,) = agree(lambda *args: attend(change, *args), weights(), served=0)
    assert row.reason.startswith(why), row


def test_a_factor_before_the_sum_is_a_mask():
    """What is dropped before the division is in no sum: the rest has the weight 1."""

    def function(x, wq, wk, wv):
        q, k, v = (jnp.reshape(x @ w, (B, T, H, D)) for w in (wq, wk, wv))
        s = jnp.einsum("bthd,bshd->bhts", q, k) * SCALE
        e = jnp.where(kept(s.shape), jnp.exp(s - s.max(-1, keepdims=True)), 0)
        return jnp.einsum("bhts,bshd->bthd", e / e.sum(-1, keepdims=True), v)

    (row,) = agree(function, weights())
    assert "dropout" not in row.served and "mask" in row.served


def test_weights_that_are_returned_too_stay():
    def function(x, *w):
        out = []
        y = attend(lambda p: out.append(dropped(p)) or out[0], x, *w)
        return y, out[0]

    agree(function, weights(), served=0)


HIDDEN_BY = {  # masks of the scores, by which rows may see nothing
    "padding": lambda s: jnp.where(PADDED, s, -1e9),
    "empty, written": lambda s: jnp.where(EMPTY, s, -1e9),
    "empty, added": lambda s: s + jnp.where(EMPTY, 0, jnp.finfo(s.dtype).min),
    "empty, 1e4 added": lambda s: s + jnp.where(EMPTY, 0, -1e4),
    "empty rows, written": lambda s: jnp.where(PADDED & PADDED.swapaxes(-1, -2), s, -1e9),
    "empty rows, added": lambda s: (
        s + jnp.where(PADDED & PADDED.swapaxes(-1, -2), 0, jnp.finfo(s.dtype).min)
    ),
    "empty rows of zeros": lambda s: jnp.where(
        PADDED & PADDED.swapaxes(-1, -2), s, -jnp.inf
    ),  # NaN
    "a bias": lambda s: s + jnp.where(PADDED, jnp.sin(jnp.arange(T)), -jnp.inf),
}


@pytest.mark.parametrize("name", HIDDEN_BY)
def test_dropout_of_masked_scores(name):
    function = lambda *args: attend(dropped, *args, mask=HIDDEN_BY[name])
    agree(function, weights(), rounding=4e-3 if "1e4" in name else 1e-5)


def linen(broadcast, x):
    layer = nn.MultiHeadDotProductAttention(H, dropout_rate=0.2, broadcast_dropout=broadcast)
    variables = layer.init(jax.random.key(0), x, deterministic=True)
    mask = nn.make_attention_mask(*[jnp.arange(T) < LENGTHS[:, None]] * 2)
    return lambda x: layer.apply(
        variables, x, mask=mask, deterministic=False, rngs={"dropout": jax.random.key(1)}
    )


def of_nnx(x):
    rngs = nnx.Rngs(0)
    layer = nnx.MultiHeadAttention(H, E, dropout_rate=0.2, decode=False, rngs=rngs)
    graph, state = nnx.split(layer)
    return lambda x: nnx.merge(graph, state)(
        x, mask=CAUSAL, deterministic=False, rngs=nnx.Rngs(dropout=3)
    )


def equinox(x):
    layer = eqx.nn.MultiheadAttention(H, E, dropout_p=0.2, key=jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), B)
    return jax.vmap(lambda x, key: layer(x, x, x, mask=CAUSAL, key=key)), keys


def scanned(change, x, *w):
    def layer(x, key):
        return jax.checkpoint(change)(x, key), None

    return jax.lax.scan(layer, x, jax.random.split(jax.random.key(0), 2))[0]


def one_layer(x, key, w):
    change = lambda p: jnp.where(jax.random.bernoulli(key, 0.75, p.shape), p / 0.75, 0)
    return x + attend(change, x, *w).reshape(x.shape)


def in_a_scan_with_remat(x, *w):
    return scanned(lambda x, key: one_layer(x, key, w), x)


def with_learned_bias(x, wq, wk, wv, table):
    near = jnp.clip(jnp.arange(T)[:, None] - jnp.arange(T), -3, 3) + 3
    bias = table[near].transpose(2, 0, 1)[None]
    mask = lambda s: s + (bias + jnp.where(EMPTY, 0, jnp.finfo(s.dtype).min))
    return attend(lambda p: p * (kept((1, 1, T, T)) / 0.75), x, wq, wk, wv, mask=mask)


MODELS = {
    "Linen, one mask": lambda x, *_: (linen(True, x), [x]),
    "Linen, a mask of each head": lambda x, *_: (linen(False, x), [x]),
    "nnx": lambda x, *_: (of_nnx(x), [x]),
    "Equinox": lambda x, *_: ((lambda f, keys: lambda x: f(x, keys))(*equinox(x)), [x]),
    "in a scan, with remat": lambda *args: (in_a_scan_with_remat, args),
    "T5's bias": lambda *args: (with_learned_bias, [*args, draw(5, 7, H)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_dropout_of_models(name):
    function, args = MODELS[name](*weights())
    agree(function, list(args))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_the_factor_is_the_programs(dtype):
    """1 / 0.9 is 1.109 in bfloat16, 0.2 % less than in float32."""
    with jax.enable_x64(dtype == jnp.float64):
        x, one = jnp.zeros((B, T, H, D), dtype), jnp.ones((B, T, H, D), dtype)
        factor = 1 / jnp.asarray(0.9, dtype)

        def function(q, k, v, keep):
            p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
            return jnp.einsum("bhts,bshd->bthd", jnp.where(keep, p * factor, 0), v)

        fused = Fused(function)
        found = fused(x, x, one, jnp.ones((B, H, T, T), bool))
        rounding = 1e-15 if dtype == jnp.float64 else 0
        np.testing.assert_allclose(np.float64(found), float(factor), rounding)


@pytest.mark.parametrize("width, length, served", [(60, 16, ""), (60, 4096, "blocks: heads of 60")])
def test_blocks_that_would_be_slower_on_a_gpu_serve_nothing(width, length, served, monkeypatch):
    """Where cuDNN cannot serve and the scores take little memory, your own code is faster."""
    monkeypatch.setattr("normfuse.layers.attention.serving._capability", lambda: 90)
    fused_attention._kernel.cache_clear()
    fused = Fused(fuse_cases.attend(), serves=False)
    jax.eval_shape(fused, *[jax.ShapeDtypeStruct((4, length, width), jnp.bfloat16)] * 3)
    fused_attention._kernel.cache_clear()
    (row,) = fused.rows
    if served:
        assert row.served == f"attention: {served}"
    else:
        assert row.reason == "it is slower in blocks: heads of 60"


def test_a_router_has_no_row():
    args = draw(0, B, T, E), draw(1, E, 4), draw(2, 4, E, F)

    def routed(x, router, experts):
        p = jax.nn.softmax(x @ router)
        return jnp.einsum("bte,bte,edf,btd->btf", p, p * 2, experts, x)

    fused = Fused(routed, serves=False)
    fused(*args)
    assert not [row for row in fused.rows if domain(row) == "attention"], str(fused)


HIDDEN = {  # dropout scales these; and the activation's name in the report
    "gelu, gated": (lambda g, u: jax.nn.gelu(g) * u, "gelu_tanh"),
    "silu, gated, the other way round": (lambda g, u: u * jax.nn.silu(g), "silu"),
    "gelu": (lambda g, u: jax.nn.gelu(g, approximate=False), "gelu"),
    "Linen's dropout": (None, "gelu_tanh"),
}


def mlp(hidden, x, gate, up, down):
    if hidden is None:
        layer = nn.Dropout(0.25, deterministic=False, rng_collection="params")
        y = jax.nn.gelu(x @ gate) * (x @ up)
        return layer.apply({}, y, rngs={"params": jax.random.key(0)}) @ down
    return dropped(hidden(x @ gate, x @ up)) @ down


@pytest.mark.parametrize("name", HIDDEN)
def test_a_gated_activation_before_dropout_is_one_pass(name):
    hidden, activation = HIDDEN[name]
    args = draw(0, B, T, E), draw(1, E, F), draw(2, E, F), draw(3, F, E)
    theirs = lambda *args: jnp.sum(jnp.sin(mlp(hidden, *args)))
    fused = Fused(theirs)
    found, wanted = (jax.value_and_grad(f, (0, 1, 2, 3))(*args) for f in (fused, theirs))
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(f, w, 1e-4, 1e-5 * float(jnp.abs(w).max()))
    (row,) = [row for row in fused.rows if row.served]
    assert row.what.startswith("mlp 32 x 32, ") and activation in row.what, str(fused)
    assert "dropout comes before" in row.served


LEFT = {
    "a constant mask": lambda h: jnp.where(jnp.arange(F) > 3, h, 0),
    "a mask of the data": lambda h: jnp.where(h > 0.1, h, 0),
    "random numbers elsewhere": lambda h: jnp.where(
        jax.random.bernoulli(jax.random.key(0), 0.5, h.shape), h, 0.5
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_dropout_stays(name):
    args = draw(0, B, T, E), draw(1, E, F), draw(3, F, E)
    function = lambda x, gate, down: LEFT[name](jax.nn.gelu(x @ gate)) @ down
    fused = Fused(function, serves=False)
    np.testing.assert_allclose(fused(*args), function(*args), 1e-5, 1e-5)
    assert not fused.served(), str(fused)
