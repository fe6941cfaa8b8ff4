"""Reads and writes at constant indices: the same bits without gathers and scatters."""

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import normfuse

SHAPE = B, T, E = 3, 4, 8


def draw(seed, shape):
    """Random numbers, with what a sum, a product or a mask by numbers would not keep."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x.flat[: min(4, x.size)] = [np.nan, -0.0, np.inf, 0.0][: x.size]
    return jnp.asarray(np.roll(x, seed))


def interleave(a, b, dtype=jnp.float32):
    return jnp.zeros(SHAPE, dtype).at[..., ::2].set(a).at[..., 1::2].set(b)


def rounded(a, b):
    """Writes of float32 to bfloat16, which JAX casts to float32 and back around each of them."""
    with pytest.warns(FutureWarning, match="incompatible types"):
        return interleave(a, b, jnp.bfloat16)


def apart(x, a):
    """Reads what was there between two writes, so that this is no chain of them."""
    y = x.at[..., ::2].set(a)
    return y.at[..., 1::2].set(2 * a), y


HALF, STACK, PART = (B, T, E // 2), "stack and reshape", "it writes a part of an array"
SERVED = {  # the function, the shapes of its arguments, and what serves each row of the report
    "interleaved": (interleave, [HALF, HALF], [STACK]),
    "interleaved and cast": (rounded, [HALF, HALF], [STACK]),
    "rounded in between": (
        lambda x, a, b: (
            x.at[..., ::2].set(a).astype(jnp.bfloat16).astype(x.dtype).at[..., 1::2].set(b)
        ),
        [SHAPE, HALF, HALF],
        [STACK],
    ),
    "interleaved under vmap": (
        jax.vmap(
            lambda a, b: jnp.zeros(E).at[::2].set(a).at[1::2].set(b), in_axes=(0, 1), out_axes=1
        ),
        [(B, E // 2), (E // 2, B)],
        [STACK],
    ),
    "onto a number": (lambda a: jnp.full((5, 9), 2.0).at[1:4, 1:8:2].set(a), [(3, 4)], ["pad"]),
    "the whole": (lambda x, a: x.at[..., jnp.arange(E)].set(a), [SHAPE, SHAPE], ["its update"]),
    "read": (lambda x: x[..., jnp.arange(1, 8, 2)], [SHAPE], ["strided slice"]),
    "take": (lambda x: jnp.take(x, jnp.arange(1, 8, 3), axis=-1), [SHAPE], ["strided slice"]),
    "read with an index for each example": (
        lambda x: jax.vmap(lambda row, i: row[i])(x, jnp.broadcast_to(jnp.arange(2), (B, 2))),
        [SHAPE],
        ["slice"],
    ),
    "in a scan": (
        lambda x: lax.scan(lambda c, row: (c, row[jnp.arange(1, 8, 2)]), 0.0, x[0])[1],
        [SHAPE],
        ["strided slice"],
    ),
}  # fmt: skip

RAGGED, OUTSIDE = "its indices are not evenly spaced", "its indices are not within bounds"
BACKWARDS = "its indices count backwards"
TWICE = "its indices repeat positions, or take a diagonal"
LEFT = {  # the same, with the reasons
    "ragged": (lambda x: x[:, np.array([0, 1, 3])], [SHAPE], [RAGGED]),
    "twice": (lambda x, a: x.at[np.array([1, 1])].set(a), [SHAPE, (T, E)], [TWICE]),
    "twice, read": (lambda x: x[:, jnp.zeros(2, int)], [SHAPE], [TWICE]),
    "overlapping windows": (
        lambda x: jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, 2, axis=1))(np.arange(3)),
        [SHAPE],
        ["its indices are not one for each position along a dimension"],
    ),
    "a diagonal": (lambda x: x[jnp.arange(3), jnp.arange(3)], [SHAPE], [TWICE]),
    "outside": (lambda x, a: x.at[..., jnp.arange(6, 10)].set(a), [SHAPE, HALF], [OUTSIDE]),
    "the last one outside": (
        lambda x, a: x.at[..., jnp.arange(E - 3, E + 1)].set(a),
        [SHAPE, HALF],
        [OUTSIDE],
    ),
    "outside, filled": (lambda x: jnp.take(x, jnp.arange(6, 10), axis=2), [SHAPE], [OUTSIDE]),
    "a part": (lambda x, a: x.at[..., ::2].set(a), [SHAPE, HALF], [PART]),
    "uneven parts": (
        lambda x, a, b: x.at[:, ::2].set(a).at[:, 1::2].set(b),
        [(2, 5), (2, 3), (2, 2)],
        [PART] * 2,
    ),
    "all but the last": (
        lambda x, a, b: x.at[:, :4:2].set(a).at[:, 1:4:2].set(b),
        [(2, 5), (2, 2), (2, 2)],
        [PART] * 2,
    ),
    "two that write the same": (
        lambda x, a, b: x.at[..., ::2].set(a).at[..., ::2].set(b),
        [SHAPE, HALF, HALF],
        [PART] * 2,
    ),
    "backwards": (lambda x: x[:, np.array([3, 2, 1, 0])], [SHAPE], [BACKWARDS]),
    "added": (lambda x, a: x.at[..., ::2].add(a), [SHAPE, HALF], []),
    "the smaller": (lambda x, a: x.at[..., ::2].min(a), [SHAPE, HALF], []),
    "applied": (lambda x: lax.stop_gradient(x).at[..., ::2].apply(jnp.tanh), [SHAPE], []),
}


def bits(x):
    x = np.asarray(x)
    return np.where(np.isnan(x), 0x7FFF, x.view(np.dtype(f"u{x.dtype.itemsize}")))


def rows(function, args):
    """Checks values and gradients, bit for bit; returns the report's rows, and ours as text."""
    reports = []
    ours = normfuse.fuse(function, report=reports.append)

    def both(*args):
        weigh = lambda y: jnp.sum(jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)) * y)

        def results(f):
            floats = [i for i, x in enumerate(args) if fuse_cases.is_float(x)]
            cost = lambda *args: sum(map(weigh, jax.tree.leaves(f(*args))))
            return f(*args), jax.grad(cost, floats)(*args)

        return results(function), results(ours)

    with fuse_cases.quiet():
        text = str(jax.make_jaxpr(ours)(*args))
        theirs, mine = jax.jit(both)(*args)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))
    return reports[-1].rows, text


@pytest.mark.parametrize("name", SERVED)
def test_it_is_served(name):
    function, shapes, served = SERVED[name]
    found, text = rows(function, [draw(i, shape) for i, shape in enumerate(shapes)])
    assert [row.served for row in found] == served
    assert all(row.domain == "indexing" for row in found)
    assert "gather" not in text and "scatter" not in text


@pytest.mark.parametrize("name", LEFT)
def test_it_stays(name):
    function, shapes, reasons = LEFT[name]
    found, text = rows(function, [draw(i, shape) for i, shape in enumerate(shapes)])
    assert [(row.served, row.reason) for row in found] == [("", reason) for reason in reasons]
    assert "gather" in text or "scatter" in text


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, a: jnp.ones_like(x).at[..., ::2].set(a).at[..., 1::2].set(a),
        lambda x, a: x[..., jnp.arange(1, 8, 2)],
    ],
)
def test_dtypes(function, dtype):
    args = [draw(0, SHAPE), draw(1, HALF)]
    args = [jnp.nan_to_num(x, posinf=3.0).astype(dtype) for x in args]
    theirs = function(*args)
    reports = []
    ours = normfuse.fuse(function, report=reports.append)(*args)
    assert len(reports[0].fused) == 1 and not reports[0].left
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_what_is_read_between_two_writes_stays():
    """It is a part of an array, and the two are no chain without it."""
    fused, args = fuse_cases.Fused(apart), (draw(0, SHAPE), draw(1, HALF))
    for ours, theirs in zip(fused(*args), apart(*args), strict=True):
        np.testing.assert_array_equal(bits(ours), bits(theirs))
    assert [row.served or row.reason for row in fused.rows] == [STACK, PART]


def test_given_indices_are_not_told():
    """An embedding's lookup is a row of its own domain, and a cache's update none."""
    reports = []
    function = lambda table, ids, cache: (table[ids], cache.at[:, ids[0]].set(1.0))
    args = jnp.eye(6), jnp.array([2, 5, 2]), jnp.zeros((2, 6))
    ours = normfuse.fuse(function, report=reports.append)(*args)
    assert {row.domain for row in reports[0].rows} <= {"lookup"}
    for a, b in zip(ours, function(*args), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_of_what_is_covered_is_read():
    """The operand's gradient is zero, and its own equations are not needed."""
    function = lambda x, a: jnp.log(x).at[..., ::2].set(a).at[..., 1::2].set(a)
    text = str(jax.make_jaxpr(normfuse.fuse(function))(jnp.ones(SHAPE), jnp.ones(HALF)))
    assert "log" not in text and "reshape" in text


def test_second_derivatives():
    function = lambda x, a: (
        x.at[..., ::2].set(a * a).at[..., 1::2].set(a)[..., jnp.arange(0, 8, 4)] ** 3
    ).sum()
    args = draw(5, (2, 8)), draw(6, (2, 4))
    args = [jnp.nan_to_num(x, posinf=2.0) for x in args]
    reports = []
    ours = normfuse.fuse(function, report=reports.append)
    hessian = lambda f: jax.jit(jax.hessian(f, (0, 1)))(*args)
    for a, b in zip(*map(jax.tree.leaves, (hessian(ours), hessian(function))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert len(reports[0].fused) == 2


def test_sizes_that_are_not_known():
    """A batch of any size is no obstacle; an index of any size is."""
    reports = []
    interleaved = lambda x: x.at[:, ::2].set(x[:, 1::2]).at[:, 1::2].set(x[:, ::2])
    function = lambda x: (interleaved(x), x[jnp.arange(x.shape[0])])
    ours = jax.jit(normfuse.fuse(function, report=reports.append))
    x = draw(0, (4, 8))
    exported = export.export(ours)(
        jax.ShapeDtypeStruct(export.symbolic_shape("batch, 8"), jnp.float32)
    )
    for a, b in zip(exported.call(x), function(x), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
    served = [row.served for row in reports[-1].fused]
    assert STACK in served and served.count("strided slice") == 2
    assert [row.reason for row in reports[-1].left] == ["its sizes are not known"]
