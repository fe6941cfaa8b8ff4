"""Lookups that `fuse` serves: the same rows, a gradient nearer to float64's; and what it leaves."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_cases import Fused, domain, draw
from jax import lax

R, E, B, T = 90, 16, 4, 32
f32, bf16 = jnp.float32, jnp.bfloat16


def low(table):
    return table.astype(bf16)


def linen(table, ids):
    return nn.Embed(R, E, dtype=bf16).apply({"params": {"embedding": table}}, ids)


def flax_nnx(table, ids):
    layer = nnx.eval_shape(lambda: nnx.Embed(R, E, dtype=bf16, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda _: table, state))(ids)


def equinox(table, ids):
    return jax.vmap(jax.vmap(eqx.nn.Embedding(weight=low(table))))(ids)


def buckets(table, _):
    """Relative positions, in buckets that the program computes from counting alone."""
    distance = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    return low(table)[jnp.clip(jnp.abs(distance) // 2, 0, 15)]


def scanned(table, ids):
    return lax.scan(lambda total, i: (total + low(table)[i], None), jnp.zeros((T, E), bf16), ids)[0]


SERVED = {  # functions of a float32 table (R, E) and indices (B, T): rows, and how many lookups
    "a cast and an index": (lambda t, i: low(t)[i], 1),
    "take": (lambda t, i: jnp.take(low(t), i, axis=0), 1),
    "take, clipped": (lambda t, i: jnp.take(low(t), i + 40, axis=0, mode="clip"), 1),
    "take, wrapped": (lambda t, i: jnp.take(low(t), i + 80, axis=0, mode="wrap"), 1),
    "negative indices": (lambda t, i: low(t)[i - 45], 1),
    "at, get, promised": (lambda t, i: low(t).at[i].get(mode="promise_in_bounds"), 1),
    "at, get, filled": (lambda t, i: low(t).at[i + 40].get(mode="fill", fill_value=2.0), 1),
    "Linen": (linen, 1),
    "nnx": (flax_nnx, 1),
    "Equinox": (equinox, 1),
    "a vmap": (lambda t, i: jax.vmap(lambda i: low(t)[i])(i), 1),
    "a vmap along the second axis": (lambda t, i: jax.vmap(lambda i: low(t)[i], 1, 1)(i), 1),
    "remat": (lambda t, i: jax.checkpoint(lambda t: jnp.sin(low(t)[i]))(t), 1),
    "a scan": (scanned, 1),
    "a table of 16 bits": (lambda t, i: t[i], 1),
    "positions of each example": (
        lambda t, i: low(t)[jnp.broadcast_to(jnp.arange(T) + 2, (B, T))],
        1,
    ),
    "token types of zeros": (lambda t, i: low(t)[jnp.zeros_like(i)], 1),
    "buckets of distance": (buckets, 1),
    "words and positions": (
        lambda t, i: low(t)[i] + low(t[:T])[jnp.broadcast_to(jnp.arange(T), (B, T))],
        1,
    ),
    "two of one table, as one": (lambda t, i: low(t)[i] * low(t)[i[:, ::-1] // 2], 1),
    "beside rows without a gradient": (
        lambda t, i: low(t)[i] * low(lax.stop_gradient(t))[i],
        1,
    ),
    "a tied head": (lambda t, i: jnp.tanh(low(t)[i]) @ low(t).T, 1),
    "uint8": (lambda t, i: low(t)[i.astype(jnp.uint8)], 1),
    "int8 in float16": (lambda t, i: t.astype(jnp.float16)[i.astype(jnp.int8)], 1),
}


def arguments(name):
    table = draw(0, R, E)
    ids = np.minimum(np.random.default_rng(1).zipf(1.3, (B, T)) - 1, R - 1)
    return (low(table) if name == "a table of 16 bits" else table), jnp.asarray(ids, jnp.int32)


def both(function, table, ids):
    weights = np.cos(1.3 * np.arange(T * E))

    def loss(table):
        y = function(table, ids)
        cotangent = jnp.resize(jnp.asarray(weights, y.dtype), y.shape)
        return jnp.sum((y * cotangent).astype(f32)), y

    gradient, y = jax.jit(jax.grad(loss, has_aux=True))(table)
    return y, gradient


@pytest.mark.parametrize("name", SERVED)
def test_rows_are_the_same_bits_and_gradients_near(name):
    function, count = SERVED[name]
    table, ids = arguments(name)
    fused = Fused(function)
    y, gradient = both(fused, table, ids)
    expected, theirs = both(function, table, ids)
    assert fused.served().get("lookup") == count, str(fused)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(expected, np.float32))
    assert gradient.dtype == table.dtype
    off = np.abs(np.asarray(gradient, np.float64) - np.asarray(theirs, np.float64))
    assert off.max() <= 0.05 * np.abs(np.asarray(theirs, np.float64)).max()


@pytest.mark.parametrize("name", ["a cast and an index", "two of one table", "buckets of distance"])
def test_a_gradient_is_exact_where_theirs_is_rounded(name):
    """Of rows that are only multiplied by a cotangent of 16 bits."""
    table, ids = arguments(name)
    read = {
        "a cast and an index": lambda t: [low(t)[ids]],
        "two of one table": lambda t: [low(t)[ids], low(t)[ids[:, ::-1] // 2]],
        "buckets of distance": lambda t: [buckets(t, ids)],
    }[name]
    index = {
        "a cast and an index": [ids],
        "two of one table": [ids, ids[:, ::-1] // 2],
        "buckets of distance": [
            np.clip(np.abs(np.arange(T)[None] - np.arange(T)[:, None]) // 2, 0, 15)
        ],
    }[name]
    cotangents = [draw(7 + n, *np.shape(i), E).astype(bf16) for n, i in enumerate(index)]
    exact, sizes = np.zeros((2, R, E))
    for i, dy in zip(index, cotangents):
        np.add.at(exact, np.asarray(i), np.asarray(dy, np.float64))
        np.add.at(sizes, np.asarray(i), np.abs(np.asarray(dy, np.float64)))
    off = lambda f: np.abs(np.asarray(jax.vjp(f, table)[1](cotangents)[0], np.float64) - exact)
    assert (off(Fused(read)) <= 2.0**-19 * sizes).all()
    assert off(read).max() > 2.0**-9 * np.abs(exact).max()


LEFT = {  # and what the report says; None without a row
    "float32": (lambda t, i: t[i], None),
    "indices made of the table": (
        lambda t, i: low(t)[jnp.argmax(t[:, 0]) * 0 + i],
        "made of the table",
    ),
    "a stopped gradient": (lambda t, i: low(lax.stop_gradient(t))[i], None),
    "a table that is computed": (lambda t, i: low(jnp.sin(t))[i], None),
    "columns": (lambda t, i: low(t)[:, i % E], None),
    "elements": (lambda t, i: low(t)[i, i % E], None),
    "pairs of rows": (
        lambda t, i: jax.vmap(lambda j: lax.dynamic_slice(low(t), (j, 0), (2, E)))(i[0]),
        None,
    ),
    "a row each of several tables": (
        lambda t, i: jax.vmap(lambda t, i: t[i])(low(t).reshape(6, 15, E), i[0, :6] % 15),
        None,
    ),
    "a one-hot product": (lambda t, i: jax.nn.one_hot(i, R, dtype=bf16) @ low(t), None),
    "a scatter of the user's": (
        lambda t, i: jnp.zeros((R, E), bf16).at[i[0]].add(low(t)[:T]),
        None,
    ),
    "one row": (lambda t, i: low(t)[i[0, 0]], None),
    "a constant table": (lambda t, i: jnp.asarray(np.ones((R, E)), bf16)[i] * t[0, 0], None),
    "different rows, promised": (
        lambda t, i: low(t).at[jnp.arange(T)].get(unique_indices=True),
        None,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_lookup_of_a_parameter_stays(name):
    function, why = LEFT[name]
    table, ids = arguments(name)
    fused = Fused(function)
    y, gradient = both(fused, table, ids)
    expected, theirs = both(function, table, ids)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(expected, np.float32))
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(theirs))
    rows = [row for row in fused.rows if domain(row) == "lookup"]
    assert not [row for row in rows if row.served], str(fused)
    assert bool(rows) == bool(why) and all(why in row.reason for row in rows), str(fused)


def test_two_lookups_of_one_table_are_one_sum():
    function = SERVED["two of one table, as one"][0]
    table, ids = arguments("")
    program = jax.make_jaxpr(jax.grad(lambda t: Fused(function)(t, ids).astype(f32).sum()))(table)
    assert str(program).count("normfuse_lookup_gradient[") == 1
