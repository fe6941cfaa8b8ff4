"""Dropout in MLPs and in attention: a pass of its own before it, and a row that names it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_cases import Fused, domain, draw

B, T, H, D = 2, 16, 2, 8
E, F = H * D, 32


def dropped(x, seed=0, rate=0.25):
    keep = jax.random.bernoulli(jax.random.key(seed), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def attend(change, x, wq, wk, wv):
    q, k, v = (jnp.reshape(x @ w, (B, T, H, D)) for w in (wq, wk, wv))
    s = jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e9)
    return jnp.einsum("bhts,bshd->bthd", change(jax.nn.softmax(s)), v)


PROBABILITIES = {
    "dropout": (dropped, "its probabilities are changed (dropout)"),
    "dropout of each head": (
        lambda p: dropped(jnp.ones((1, H, 1, 1))) * p,
        "its probabilities are changed (dropout)",
    ),
    "a mask of heads": (
        lambda p: p * jnp.asarray([1.0, 0.5])[:, None, None],
        "its probabilities are changed (mul)",
    ),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_attention_that_stays_says_what_changes_its_probabilities(name):
    change, why = PROBABILITIES[name]
    args = draw(0, B, T, E), *[draw(i, E, E, scale=0.3) for i in (1, 2, 3)]
    fused = Fused(lambda *args: attend(change, *args), serves=False)
    np.testing.assert_allclose(fused(*args), attend(change, *args), 1e-5, 1e-5)
    assert [row.reason for row in fused.rows if domain(row) == "attention"] == [why], str(fused)


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
