"""Rows of a table by integers, whose gradient is summed in float32.

JAX's derivative of `table[i]` is a scatter in the rows' dtype: each occurrence of a row rounds the
sum to 16 bits, and a GPU's atomics take turns where an index is frequent. Here

    dtable[r] = Σ_t [i_t = r] · dy_t

is a product that sums in float32, in an order that does not change from run to run: of one-hot rows
with dy where the table has few; else indices are sorted, and within each block of `BLOCK` a product
adds up dy where indices are equal, so that only the last sum of each block goes on to the next
level. 0 · NaN would spread from a row to others, so a dy that is not finite is scattered.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad
from jax.lax import GatherScatterMode
from jax.sharding import PartitionSpec as P

from ..native.implementation import Order
from .core.op import Op, batch_at, vary, varying_axes
from .core.sharding import axes_of, whole

FEW_ROWS = 1024
"""Tables of up to so many rows take a one-hot product (measured on an H100)."""
FEWEST_ROWS = 64
"""The same of a dy in float32, which a GPU scatters fast into more rows."""
LARGEST_ONE_HOT = 2**28  # elements
BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The static description of a lookup: JAX's mode, and the dtype of the rows.

    `table` is the table's shape and dtype, for its gradient.
    """

    dtype: str
    mode: GatherScatterMode = GatherScatterMode.FILL_OR_DROP
    fill: Any = None  # the value of an index outside the table; None for JAX's own
    table: tuple[tuple[int, ...], str] = ((), "float32")
    op: str = "lookup"


def lookup(spec: Lookup, table: Array, indices: Array) -> Array:
    """Returns the table's rows, `(*tokens, *features)`, in the dtype of `spec`."""
    axes = varying_axes(table, indices)
    return lookup_op(spec, vary(table, axes), vary(indices, axes))[0]


def define_lookup(spec: Lookup, table: Array, indices: Array) -> list[Array]:
    """`(table (rows, *features), indices (*tokens)) -> (y (*tokens, *features),)`, as JAX reads."""
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(indices.ndim, indices.ndim + table.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    y = lax.gather(
        table.astype(spec.dtype),
        indices[..., None],
        dims,
        (1, *table.shape[1:]),
        mode=spec.mode,
        fill_value=spec.fill,
    )
    return [y]


def define_gradient(spec: Lookup, dy: Array, indices: Array) -> list[Array]:
    """`(dy (*tokens, *features), indices (*tokens)) -> (dtable (rows, *features),)`."""
    (rows, *_), dtype = spec.table
    return [row_sums(dy, known(spec, indices), rows).astype(dtype)]


def known(spec: Lookup, indices: Array) -> Array:
    """Returns indices as int32 from 0 to the number of rows, which has no gradient."""
    rows = spec.table[0][0]
    if jnp.iinfo(indices.dtype).max > jnp.iinfo(jnp.int32).max:
        indices = jnp.clip(indices, jnp.iinfo(indices.dtype).min and -1, rows)
    indices = indices.astype(jnp.int32)
    if spec.mode == GatherScatterMode.CLIP:
        return jnp.clip(indices, 0, rows - 1)
    return jnp.where((indices >= 0) & (indices < rows), indices, rows)


# ---------------------------------------------------------------- sums


def row_sums(dy: Array, indices: Array, rows: int, safe: bool = False) -> Array:
    """Returns float32 sums, `(rows, *features)`, of what has the same index; others are dropped.

    Args:
      dy: `(*tokens, *features)`.
      indices: `(*tokens)` int32.
      safe: by a scatter in any case, as into many rows in float32 or wider.
    """
    features = dy.shape[indices.ndim :]
    flat, indices = dy.reshape(indices.size, math.prod(features)), indices.reshape(-1)
    scatter = functools.partial(_by_scatter, rows=rows)
    if safe or 0 in flat.shape or dy.dtype.itemsize > 2 and rows > FEWEST_ROWS:
        return scatter(flat, indices).reshape(rows, *features)
    few = rows <= FEW_ROWS and rows * len(indices) <= LARGEST_ONE_HOT
    product = functools.partial(_by_one_hot if few else _by_blocks, rows=rows)
    sums = lax.cond(jnp.isfinite(flat).all(), product, scatter, flat, indices)
    return sums.reshape(rows, *features)


def _by_scatter(dy: Array, indices: Array, rows: int) -> Array:
    zeros = jnp.zeros((rows, dy.shape[1]), jnp.float32)
    return zeros.at[indices].add(dy.astype(jnp.float32), mode="drop")


def _by_one_hot(dy: Array, indices: Array, rows: int) -> Array:
    return _selected(jnp.arange(rows)[:, None] == indices, dy)


def _selected(mask: Array, values: Array) -> Array:
    """Returns `mask (*batch, m, k) · values (*batch, k, n)`, exact but for float32's sums.

    Numbers of float32 are three of bfloat16, which a GPU multiplies exactly.
    """
    parts = [values]
    if values.dtype == jnp.float32:
        high = lax.reduce_precision(values, 8, 7)
        middle = lax.reduce_precision(values - high, 8, 7)
        parts = [p.astype(jnp.bfloat16) for p in (high, middle, values - high - middle)]
    batch = tuple(range(mask.ndim - 2))
    dims = ((mask.ndim - 1,), (mask.ndim - 2,)), (batch, batch)
    product = functools.partial(
        lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32
    )
    hot = mask.astype(parts[0].dtype)
    return functools.reduce(jnp.add, [product(hot, part) for part in parts])


def _by_blocks(dy: Array, indices: Array, rows: int) -> Array:
    indices, order = lax.sort((indices, lax.iota(jnp.int32, len(indices))), num_keys=1)
    more = -len(indices) % BLOCK
    values = dy[jnp.pad(order, (0, more))]
    total = jnp.zeros((rows, dy.shape[1]), jnp.float32)
    while True:
        more = -len(indices) % BLOCK
        indices = jnp.pad(indices, (0, more), constant_values=rows)
        values = jnp.pad(values, ((0, len(indices) - len(values)), (0, 0)))
        blocks = indices.reshape(-1, BLOCK)
        equal = blocks[:, :, None] == blocks[:, None]
        sums = _selected(equal, values.reshape(-1, BLOCK, dy.shape[1]))
        # The last of equal indices has their sum; that at a block's end goes on.
        place = lax.iota(jnp.int32, len(indices))
        ends = jnp.append(indices[1:] != indices[:-1], True)
        if len(blocks) > 1:
            ends &= place % BLOCK != BLOCK - 1
        at = jnp.full(rows, -1, jnp.int32)
        at = at.at[jnp.where(ends, indices, rows)].set(place, mode="drop", unique_indices=True)
        found = sums.reshape(-1, dy.shape[1])[jnp.maximum(at, 0)]
        total += jnp.where((at >= 0)[:, None], found, 0)
        if len(blocks) == 1:
            return total
        indices, values = blocks[:, -1], sums[:, -1]


# ---------------------------------------------------------------- derivatives, batches, meshes


def _push(op: str, primals: Any, tangents: Any, *, spec: Lookup, order: Order) -> Any:
    """Both operations are linear in their first operand."""
    (_, indices), (moving, _) = primals, tangents
    bind = functools.partial({"rows": lookup_op, "sums": gradient}[op], order=order)
    y = bind(spec, *primals)
    if type(moving) is ad.Zero:
        return y, [ad.Zero(jax.typeof(y[0]).to_tangent_aval())]
    return y, bind(dataclasses.replace(spec, fill=0), moving, indices)


def _pull(cts: Any, table: Any, indices: Array, *, spec: Lookup, order: Order) -> list[Any]:
    (dy,) = cts
    if type(dy) is ad.Zero:
        return [None, None]
    spec = dataclasses.replace(spec, table=(table.aval.shape, table.aval.dtype.name))
    mesh = jax.typeof(dy).sharding.mesh
    if mesh.manual_axes and any(mesh.shape[a] > 1 for a in mesh.auto_axes):
        # Partly manual: there XLA splits a scatter alone.
        sums = row_sums(dy, known(spec, indices), spec.table[0][0], safe=True)
        return [sums.astype(spec.table[1]), None]
    return [*gradient(spec, dy, indices, order=order), None]


def _pull_gradient(cts: Any, dy: Any, indices: Array, *, spec: Lookup, order: Order) -> list[Any]:
    (ct,) = cts
    if type(ct) is ad.Zero:
        return [None, None]
    spec = dataclasses.replace(spec, dtype=dy.aval.dtype.name, fill=0)
    if spec.mode == GatherScatterMode.PROMISE_IN_BOUNDS:  # an index outside has no gradient
        spec = dataclasses.replace(spec, mode=GatherScatterMode.FILL_OR_DROP)
    return [*lookup_op(spec, ct, indices, order=order), None]


def _batch_lookup(op: Op, args: Any, dims: Any, *, spec: Lookup, order: Order) -> Any:
    """More indices of one table; or the rows of several tables, as those of one."""
    (table, indices), (of_table, of_indices) = args, dims
    if of_table is None:
        return op(spec, table, indices, order=order), [of_indices]
    table = jnp.moveaxis(table, of_table, 0)
    one = dataclasses.replace(spec, table=(table.shape[1:], spec.dtype))
    indices = _in_one_table(one, indices, of_indices, len(table))
    return op(spec, table.reshape(-1, *table.shape[2:]), indices, order=order), [0]


def _batch_gradient(op: Op, args: Any, dims: Any, *, spec: Lookup, order: Order) -> Any:
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    dy = batch_at(args[0], dims[0], 0, size)
    (rows, *features), dtype = spec.table
    indices = _in_one_table(spec, args[1], dims[1], size)
    spec = dataclasses.replace(spec, table=((size * rows, *features), dtype))
    (g,) = op(spec, dy, indices, order=order)
    return [g.reshape(size, rows, *features)], [0]


def _in_one_table(spec: Lookup, indices: Array, batched: int | None, size: int) -> Array:
    """Returns the indices of a batch of tables in the table of all their rows, the batch first."""
    rows = spec.table[0][0]
    indices = batch_at(known(spec, indices), batched, 0, size)
    first = lax.broadcasted_iota(jnp.int32, indices.shape, 0) * rows
    return jnp.where(indices < rows, indices + first, size * rows)


def _gradient_dims(spec: Lookup, dy: int, indices: int) -> tuple[list[Any], list[Any]]:
    every = tuple(range(dy))
    return [every, every[:indices]], [(dy, *every[indices:])]


def _share(
    spec: Lookup, sizes: Mapping[str, int], shapes: Sequence[Any], specs: Sequence[P]
) -> tuple[list[P], Callable[..., list[Array]]]:
    """How devices share the gradient: each adds up its tokens, in its part of the rows.

    Sums over devices are of the rows' dtype, as JAX's own. What splits both the tokens and the
    result is a reduce-scatter.
    """
    tokens = len(shapes[1])
    rows, *features = spec.table[0]
    count = math.prod(shapes[1])
    lengths = [*shapes[0], rows]
    of = [[axes_of(e) for e in whole(s, n)] for s, n in zip(specs, (len(shapes[0]), tokens))]
    last, *others = [axes_of(e) for e in whole(specs[2], 1 + len(features))]
    axes: list[tuple[str, ...]] = [()] * len(lengths)
    if count < rows:  # fewer than rows: they move, rather than the sums
        moving = {name for names in (last, *others) for name in names}
        of = [[tuple(n for n in names if n not in moving) for names in one] for one in of]
    wanted = [*zip(range(tokens), of[0]), *zip(range(tokens), of[1]), (len(lengths) - 1, last)]
    wanted += [*zip(range(tokens, len(lengths)), others), *enumerate(of[0])]
    for d, names in wanted:
        taken = {name for split in axes for name in split}
        divides = lengths[d] % math.prod(sizes[name] for name in names) == 0
        if not axes[d] and not taken & set(names) and divides:
            axes[d] = names
    over = [name for split in axes[:tokens] for name in split]
    result, scatter = [axes[-1], *axes[tokens:-1]], []
    for dim, names in enumerate((last, *others)):
        length = (rows, *features)[dim]
        if len(names) == 1 and names[0] in over and not result[dim]:
            if length % sizes[names[0]] == 0:
                scatter.append((names[0], dim))
                over.remove(names[0])
                result[dim] = names
    split = lambda dims: P(*[names or None for names in dims])
    found = [split(axes[:-1]), split(axes[:tokens]), split(result)]
    part = rows // math.prod(sizes[name] for name in axes[-1])

    def local(dy: Array, indices: Array) -> list[Array]:
        indices = known(spec, indices)
        if axes[-1]:
            indices = indices - lax.axis_index(axes[-1]) * part
            indices = jnp.where((indices >= 0) & (indices < part), indices, part)
        sums = row_sums(dy, indices, part)
        if over or scatter:
            sums = sums.astype(dy.dtype)
        for name, dim in scatter:
            sums = lax.psum_scatter(sums, name, scatter_dimension=dim, tiled=True)
        sums = lax.psum(sums, tuple(over)) if over else sums
        return [sums.astype(spec.table[1])]

    return found, local


lookup_op = Op(
    "lookup",
    define_lookup,
    batch=_batch_lookup,
    jvp=functools.partial(_push, "rows"),
    transpose=_pull,
)
gradient = Op(
    "lookup_gradient",
    define_gradient,
    dims=_gradient_dims,
    leads=(0, 1),
    batch=_batch_gradient,
    share=_share,
    jvp=functools.partial(_push, "sums"),
    transpose=_pull_gradient,
)
