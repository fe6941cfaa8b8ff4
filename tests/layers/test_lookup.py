"""Lookups: the rows are JAX's, and the gradient is float64's to float32's rounding."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import GatherScatterMode as Mode
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import wide

from normfuse.layers import lookup as lookups
from normfuse.layers.lookup import Lookup, define_lookup, lookup

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
FILL, CLIP, PROMISE = Mode.FILL_OR_DROP, Mode.CLIP, Mode.PROMISE_IN_BOUNDS

ours = lookup
theirs = lambda spec, table, indices: define_lookup(spec, table, indices)[0]


def zipf(rng, tokens, rows, beyond=2):
    """Words as frequent as a text's; some lie outside of the table."""
    return jnp.asarray(
        np.minimum(rng.zipf(1.2, tokens) - 1, rows - 1) + rng.integers(-beyond, beyond + 1, tokens),
        jnp.int32,
    )


def exact(dy, indices, rows, mode=FILL):
    """The gradient in float64, and the sum of its terms' magnitudes."""
    indices = np.asarray(indices, np.int64).reshape(-1)
    dy = np.asarray(dy, np.float64).reshape(len(indices), -1)
    indices = np.clip(indices, 0, rows - 1) if mode == CLIP else indices
    inside, sums, sizes = (indices >= 0) & (indices < rows), *np.zeros((2, rows, dy.shape[1]))
    np.add.at(sums, indices[inside], dy[inside])
    np.add.at(sizes, indices[inside], np.abs(dy[inside]))
    return sums, sizes


def assert_exact(found, dy, indices, mode=FILL):
    sums, sizes = exact(dy, indices, len(found), mode)
    off = np.abs(np.asarray(found, np.float64).reshape(sums.shape) - sums)
    rounding = float(jnp.finfo(found.dtype).eps) / 2 * np.abs(sums)
    terms = np.sqrt(max(indices.size, 1))
    assert (off <= (8 + terms) * 2.0**-24 * sizes + rounding).all(), (off / (sizes + 1e-30)).max()


CASES = {  # rows, tokens, features, dtype, table's dtype, mode
    "two rows": (2, 500, 8, bf16, f32, FILL),
    "few rows": (1024, 700, 8, bf16, f32, CLIP),
    "many rows, one block": (2000, 100, 8, bf16, f32, FILL),
    "many rows, two levels": (1500, 3000, 4, bf16, bf16, PROMISE),
    "many rows, three levels": (1500, 40_000, 4, bf16, f32, FILL),
    "whole blocks": (1500, 256, 4, bf16, f32, CLIP),
    "float16": (1500, 3000, 4, f16, f32, FILL),
    "float32": (1500, 3000, 4, f32, f32, FILL),
    "float32, few rows": (32, 3000, 4, f32, f32, CLIP),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_theirs_and_the_gradient_is_that_of_float64(rng, case):
    rows, tokens, n, dtype, stored, mode = CASES[case]
    table = jnp.asarray(rng.standard_normal((rows, n)), stored)
    indices, dy = zipf(rng, tokens, rows), jnp.asarray(rng.standard_normal((tokens, n)), dtype)
    spec = Lookup(jnp.dtype(dtype).name, mode)
    y, pull = jax.vjp(lambda t: ours(spec, t, indices), table)
    np.testing.assert_array_equal(wide(y), wide(theirs(spec, table, indices)))
    (found,) = jax.jit(pull)(dy)
    assert found.dtype == stored and y.dtype == dtype
    assert_exact(found, dy, indices, mode)
    if dtype == bf16 and stored == f32:
        (scattered,) = jax.vjp(lambda t: theirs(spec, t, indices), table)[1](dy)
        sums, _ = exact(dy, indices, rows, mode)
        off = lambda g: np.abs(np.asarray(g, np.float64) - sums).max()
        assert off(scattered) > 100 * off(found)


def test_all_indices_equal_pass_through_every_level(rng, monkeypatch):
    monkeypatch.setattr(lookups, "BLOCK", 4)
    for tokens in 1, 3, 4, 5, 16, 17, 64, 65, 257:
        dy = jnp.asarray(rng.standard_normal((tokens, 3)), f32)
        for indices in np.full(tokens, 7), np.arange(tokens), np.arange(tokens) // 5:
            indices = jnp.asarray(indices, jnp.int32)
            assert_exact(lookups._by_blocks(dy, indices, 300), dy, indices)


def test_numbers_of_float32_keep_all_their_digits(rng):
    dy = jnp.asarray(rng.standard_normal((64, 5)), f32)
    np.testing.assert_array_equal(lookups._by_one_hot(dy, jnp.arange(64), 64), dy)


def test_finite_gradients_meet_no_scatter_of_floats(rng):
    """It is a scatter's order of additions that changes from run to run on a GPU."""
    for rows in 8, 5000:
        program = jax.make_jaxpr(functools.partial(lookups.row_sums, rows=rows))(
            jnp.ones((300, 4), bf16), jnp.zeros(300, jnp.int32)
        )
        (cond,) = [e for e in program.eqns if e.primitive.name == "cond"]
        scattered, summed = cond.params["branches"]
        assert "scatter-add" in str(scattered) or "scatter_add" in str(scattered)
        assert "scatter-add" not in str(summed) and "scatter_add" not in str(summed)


@pytest.mark.parametrize("rows", [8, 3000])
def test_nan_and_infinity_stay_in_their_rows(rng, rows):
    dy = jnp.asarray(rng.standard_normal((400, 4)), bf16)
    dy = dy.at[3, 1].set(jnp.nan).at[5, 2].set(jnp.inf).at[300].set(-jnp.inf)
    indices, table = zipf(rng, 400, rows, 0), jnp.ones((rows, 4))
    spec = Lookup("bfloat16")
    gradient = lambda f: jax.vjp(lambda t: f(spec, t, indices), table)[1](dy)[0]
    found, wanted = gradient(ours), gradient(theirs)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_array_equal(np.isposinf(found), np.isposinf(wanted))
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(wanted))


@pytest.mark.parametrize("mode", [FILL, CLIP, PROMISE])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_indices_of_any_integer_dtype(rng, dtype, mode):
    """Also those that int32 does not hold, and would wrap into the table."""
    info = np.iinfo(dtype)
    far = [info.max, info.max - 1, max(info.min, -1), info.min]
    inside = [0, 1, 5, 5, 99, 100, 101, 127]
    with jax.enable_x64("64" in dtype):
        indices = jnp.asarray(np.array([*inside, *far], dtype))
        table = jnp.asarray(rng.standard_normal((101, 3)), f32)
        dy = jnp.asarray(rng.standard_normal((indices.size, 3)), bf16)
        spec = Lookup("bfloat16", mode)
        y, pull = jax.vjp(lambda t: ours(spec, t, indices), table)
        np.testing.assert_array_equal(wide(y), wide(theirs(spec, table, indices)))
        (found,), (wanted,) = pull(dy), jax.vjp(lambda t: theirs(spec, t, indices), table)[1](dy)
    np.testing.assert_allclose(found, wanted, 2**-6, 2**-6)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1,)])
def test_no_indices_or_one(shape):
    table, indices = jnp.ones((5, 2), f32), jnp.zeros(shape, jnp.int32)
    loss = lambda t: ours(Lookup("bfloat16"), t, indices).astype(f32).sum()
    gradient = jax.grad(loss)(table)
    assert gradient.shape == table.shape and gradient.sum() == 2 * indices.size


def scalar(function, mode=FILL):
    spec = Lookup("float32", mode)
    return lambda table, indices: jnp.sum(jnp.sin(function(spec, table, indices)))


TRANSFORMED = {  # transformations of a function of a table (20, 3) and indices (4, 9)
    "gradient": lambda f, t, i: jax.grad(f)(t, i),
    "in jit and remat": lambda f, t, i: jax.jit(jax.grad(jax.checkpoint(f)))(t, i),
    "vmap over indices": lambda f, t, i: jax.vmap(jax.grad(f), (None, 1))(t, i),
    "of a vmap": lambda f, t, i: jax.grad(lambda t: jax.vmap(f, (None, 1))(t, i).sum())(t),
    "vmap over tables": lambda f, t, i: jax.vmap(jax.grad(f), (1, None))(
        jnp.stack([t, 2 * t], 1), i
    ),
    "vmap over both": lambda f, t, i: jax.vmap(jax.grad(f))(jnp.stack([t, 2 * t]), i[:2]),
    "of a vmap over both": lambda f, t, i: jax.grad(
        lambda t: jax.vmap(f)(jnp.stack([t, 2 * t]), i[:2]).sum()
    )(t),
    "scan": lambda f, t, i: jax.grad(lambda t: jax.lax.map(lambda i: f(t, i), i).sum())(t),
    "forward mode": lambda f, t, i: jax.jvp(lambda t: f(t, i), (t,), (t * t,)),
    "forward over reverse": lambda f, t, i: jax.jvp(
        lambda t: jax.grad(f)(t, i), (t,), (jnp.cos(t),)
    )[1],
    "reverse over reverse": lambda f, t, i: jax.grad(lambda t: jnp.sum(jax.grad(f)(t, i) ** 2))(t),
}


@pytest.mark.parametrize("mode", [FILL, CLIP, PROMISE])
@pytest.mark.parametrize("what", TRANSFORMED)
def test_transformed(rng, what, mode):
    table = jnp.asarray(rng.standard_normal((20, 3)), f32)
    beyond = 0 if mode == FILL else 3  # NaN is compared elsewhere
    indices = jnp.asarray(rng.integers(-beyond, 20 + beyond, (4, 9)), jnp.int32)
    found, wanted = (TRANSFORMED[what](scalar(f, mode), table, indices) for f in (ours, theirs))
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(f, w, 1e-5, 1e-5)


MESHES = {  # shape, axes, tokens (8, 16), the table (2048, 32)
    "data": ((8,), ("data",), P("data"), P()),
    "data and sequence": ((2, 4), ("data", "seq"), P("data", "seq"), P()),
    "FSDP, features": ((8,), ("fsdp",), P("fsdp"), P(None, "fsdp")),
    "FSDP, rows": ((8,), ("fsdp",), P("fsdp"), P("fsdp", None)),
    "data and FSDP": ((2, 4), ("data", "fsdp"), P(("data", "fsdp")), P("fsdp", None)),
    "tensor": ((4, 2), ("data", "tensor"), P("data"), P("tensor", None)),
    "rows and features": ((2, 4), ("tensor", "fsdp"), P("fsdp"), P("tensor", "fsdp")),
}


def moved(compiled):
    return sum(hlo.communicated(compiled).values())


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("rows", [64, 2048])
def test_devices_exchange_no_more_than_theirs(eight_devices, rng, name, rows):
    shape, names, tokens, stored = MESHES[name]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    table = jnp.asarray(rng.standard_normal((rows, 32)), f32)
    indices = jnp.asarray(zipf(rng, 128, rows, 0)).reshape(8, 16)
    weights = jnp.asarray(rng.standard_normal((8, 16, 32)), bf16)
    places = [NamedSharding(mesh, spec) for spec in (stored, tokens, tokens)]
    arrays = [jax.device_put(*pair) for pair in zip((table, indices, weights), places)]
    spec, found = Lookup("bfloat16"), {}
    for function in ours, theirs:
        loss = lambda t, i, w, f=function: jnp.vdot(f(spec, t, i), w).astype(f32)
        with jax.set_mesh(mesh):
            compiled = jax.jit(jax.grad(loss), out_shardings=places[0]).lower(*arrays).compile()
            found[function] = compiled(*arrays), moved(compiled)
    gradient, bytes_ = found[ours]
    np.testing.assert_allclose(
        gradient, exact(weights, indices, rows)[0], 2**-6, 2**-6 * float(jnp.abs(gradient).max())
    )
    assert bytes_ <= found[theirs][1], (bytes_, found[theirs][1])


def test_in_shard_map(eight_devices, rng):
    table = jnp.asarray(rng.standard_normal((50, 4)), f32)
    indices = jnp.asarray(rng.integers(0, 50, (8, 6)), jnp.int32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def run(table, indices):
        return jax.grad(scalar(ours))(table, indices)

    np.testing.assert_allclose(
        jax.jit(run)(table, indices), jax.grad(scalar(theirs))(table, indices), 1e-5, 1e-5
    )
