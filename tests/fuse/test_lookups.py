"""Lookups that `fuse` serves: the same rows, a gradient nearer to float64's; and what it leaves."""

import equinox as eqx
import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_cases import Fused, domain, draw
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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


SERVED = {  # functions of a float32 table (R, E) and indices (B, T), with one lookup, or two
    "a cast and an index": lambda t, i: low(t)[i],
    "take": lambda t, i: jnp.take(low(t), i, axis=0),
    "take, clipped": lambda t, i: jnp.take(low(t), i + 40, axis=0, mode="clip"),
    "take, wrapped": lambda t, i: jnp.take(low(t), i + 80, axis=0, mode="wrap"),
    "negative indices": lambda t, i: low(t)[i - 45],
    "at, get, promised": lambda t, i: low(t).at[i].get(mode="promise_in_bounds"),
    "at, get, filled": lambda t, i: low(t).at[i + 40].get(mode="fill", fill_value=2.0),
    "Linen": linen,
    "nnx": flax_nnx,
    "Equinox": equinox,
    "a vmap": lambda t, i: jax.vmap(lambda i: low(t)[i])(i),
    "a vmap along the second axis": lambda t, i: jax.vmap(lambda i: low(t)[i], 1, 1)(i),
    "remat": lambda t, i: jax.checkpoint(lambda t: jnp.sin(low(t)[i]))(t),
    "a scan": scanned,
    "a table of 16 bits": lambda t, i: t[i],
    "positions of each example": lambda t, i: low(t)[jnp.broadcast_to(jnp.arange(T) + 2, (B, T))],
    "token types of zeros": lambda t, i: low(t)[jnp.zeros_like(i)],
    "buckets of distance": buckets,
    "words and positions": lambda t, i: (
        low(t)[i] + low(t[:T])[jnp.broadcast_to(jnp.arange(T), (B, T))]
    ),
    "two of one table": lambda t, i: low(t)[i] * low(t)[i[:, ::-1] // 2],
    "beside rows without a gradient": lambda t, i: low(t)[i] * low(lax.stop_gradient(t))[i],
    "a tied head": lambda t, i: jnp.tanh(low(t)[i]) @ low(t).T,
    "uint8": lambda t, i: low(t)[i.astype(jnp.uint8)],
    "indices made of the table": lambda t, i: low(t)[jnp.argmax(t[:, 0]) * 0 + i],
    "int8 in float16": lambda t, i: t.astype(jnp.float16)[i.astype(jnp.int8)],
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
    function, (table, ids) = SERVED[name], arguments(name)
    fused = Fused(function)
    y, gradient = both(fused, table, ids)
    expected, theirs = both(function, table, ids)
    assert fused.served().get("lookup") == 1 + ("two" in name), str(fused)
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


LEFT = {
    "float32": lambda t, i: t[i],
    "a stopped gradient": lambda t, i: low(lax.stop_gradient(t))[i],
    "a table that is computed": lambda t, i: low(jnp.sin(t))[i],
    "columns": lambda t, i: low(t)[:, i % E],
    "elements": lambda t, i: low(t)[i, i % E],
    "pairs of rows": lambda t, i: jax.vmap(lambda j: lax.dynamic_slice(low(t), (j, 0), (2, E)))(
        i[0]
    ),
    "a row each of several tables": lambda t, i: jax.vmap(lambda t, i: t[i])(
        low(t).reshape(6, 15, E), i[0, :6] % 15
    ),
    "a one-hot product": lambda t, i: jax.nn.one_hot(i, R, dtype=bf16) @ low(t),
    "a scatter of the user's": lambda t, i: jnp.zeros((R, E), bf16).at[i[0]].add(low(t)[:T]),
    "one row": lambda t, i: low(t)[i[0, 0]],
    "a constant table": lambda t, i: jnp.asarray(np.ones((R, E)), bf16)[i] * t[0, 0],
    "different rows, promised": lambda t, i: low(t).at[jnp.arange(T)].get(unique_indices=True),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_lookup_of_a_parameter_stays(name):
    function, (table, ids) = LEFT[name], arguments(name)
    fused = Fused(function, serves=False)
    y, gradient = both(fused, table, ids)
    expected, theirs = both(function, table, ids)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(expected, np.float32))
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(theirs))
    assert not [row for row in fused.rows if domain(row) == "lookup"], str(fused)


@pytest.mark.parametrize("rows", [8, 3000])
def test_nan_and_infinity_stay_in_their_rows(rows):
    ids = jnp.asarray(np.random.default_rng(2).integers(0, rows, 400), jnp.int32)
    dy = draw(3, 400, 4).astype(bf16).at[3, 1].set(jnp.nan).at[5, 2].set(jnp.inf)
    read = lambda t: low(t)[ids]
    found, wanted = (jax.vjp(f, jnp.ones((rows, 4)))[1](dy)[0] for f in (Fused(read), read))
    for is_bad in np.isnan, np.isposinf:
        np.testing.assert_array_equal(is_bad(found), is_bad(wanted))


def scalar(read):
    return lambda t, i: jnp.sum(jnp.sin(read(t, i).astype(f32)))


TRANSFORMED = {  # of a function of a table (20, 3) and indices (4, 90), some of them outside
    "in jit and remat": lambda f, t, i: jax.jit(jax.grad(jax.checkpoint(f)))(t, i),
    "of a vmap": lambda f, t, i: jax.grad(lambda t: jax.vmap(f, (None, 1))(t, i).sum())(t),
    "vmap over both": lambda f, t, i: jax.vmap(jax.grad(f))(jnp.stack([t, 2 * t]), i[:2]),
    "scan": lambda f, t, i: jax.grad(lambda t: lax.map(lambda i: f(t, i), i).sum())(t),
    "forward mode": lambda f, t, i: jax.jvp(lambda t: f(t, i), (t,), (t * t,)),
    "forward over reverse": lambda f, t, i: jax.jvp(
        lambda t: jax.grad(f)(t, i), (t,), (jnp.cos(t),)
    )[1],
}


@pytest.mark.parametrize("what", TRANSFORMED)
def test_transformed(what):
    table = draw(0, 20, 3).astype(bf16).astype(f32)
    ids = jnp.asarray(np.random.default_rng(4).integers(-3, 23, (4, 90)), jnp.int32)
    theirs = lambda t, i: t.at[i].get(mode="fill", fill_value=0.5)
    ours = Fused(lambda t, i: theirs(low(t), i))
    found, wanted = (TRANSFORMED[what](scalar(f), table, ids) for f in (ours, theirs))
    assert ours.served() == {"lookup": 1}
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Cotangents are rounded to bfloat16, once each way.
        np.testing.assert_allclose(f, w, 0, 2.0**-7 * float(jnp.abs(w).max()))


MESHES = {  # shape, axes, tokens (8, 16), the table (2048, 32)
    "data and sequence": ((2, 4), ("data", "seq"), P("data", "seq"), P()),
    "FSDP, features": ((8,), ("fsdp",), P("fsdp"), P(None, "fsdp")),
    "FSDP, rows": ((8,), ("fsdp",), P("fsdp"), P("fsdp", None)),
    "tensor": ((4, 2), ("data", "tensor"), P("data"), P("tensor", None)),
}


@pytest.mark.parametrize("name", MESHES)
def test_devices_exchange_what_theirs_do_in_float32(eight_devices, name):
    shape, names, tokens, stored = MESHES[name]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    ids = jnp.asarray(np.random.default_rng(5).integers(0, 2048, (8, 16)), jnp.int32)
    places = [NamedSharding(mesh, spec) for spec in (stored, tokens, tokens)]
    arrays = draw(0, 2048, 32), ids, draw(1, 8, 16, 32).astype(bf16)
    arrays, sizes, gradients = [*map(jax.device_put, arrays, places)], [], []
    read = lambda t, i: low(t)[i]
    for f in Fused(read), read:
        loss = lambda t, i, w, f=f: jnp.vdot(f(t, i), w).astype(f32)
        with jax.set_mesh(mesh):
            compiled = jax.jit(jax.grad(loss), out_shardings=places[0]).lower(*arrays).compile()
        gradients.append(compiled(*arrays))
        sizes.append(hlo.communicated(compiled))
    np.testing.assert_allclose(*gradients, 0, 2.0**-6 * float(jnp.abs(gradients[1]).max()))
    ours, theirs = sizes
    assert ours.keys() <= theirs.keys() and sum(ours.values()) <= 2 * sum(theirs.values()), sizes
