"""Indexing: slices, pads and stacks instead of gathers and scatters, and lookups in a table.

JAX makes a scatter of `x.at[..., ::2].set(a)`, gathers and scatters of its derivatives, and XLA
serves these an element at a time. Arithmetic on constant indices proves that they are evenly spaced
along each dimension, within bounds, and all different. A slice reads such positions, a dilated pad
writes them onto a number, and several writes that cover an array are a stack of the updates.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.lax import GatherScatterMode

from .indices import Affine, affine
from .labels import UNCHANGED
from .program import Equation, Facts, Program
from .sites import Left, Site

LONGEST = 64
"""How many writes, one after another, may be read as one."""


# ---------------------------------------------------------------- positions


@dataclasses.dataclass(frozen=True)
class Grid:
    """Evenly spaced positions of an array, each of which is one of an array of elements.

    Attributes:
      shape: that of the array.
      first, step, count: the positions along each of its dimensions; steps are positive.
      order: the elements' dimensions in the order of the array's, those of size 1 last.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]
    count: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def partial(self) -> list[int]:
        """The dimensions along which it has not all positions."""
        return [d for d, (n, all_) in enumerate(zip(self.count, self.shape)) if n != all_]

    def read(self, x: Array, shape: Sequence[int]) -> Array:
        """Returns the elements, an array of this shape."""
        end = [f + s * (n - 1) + 1 for f, s, n in zip(self.first, self.step, self.count)]
        y = lax.slice(x, self.first, end, self.step)
        y = lax.reshape(y, [shape[i] for i in self.order])
        return lax.transpose(y, [int(i) for i in np.argsort(self.order)])

    def placed(self, elements: Array) -> Array:
        """Returns the elements in the array's order of dimensions."""
        return lax.reshape(lax.transpose(elements, self.order), self.count)

    def padded(self, placed: Array, fill: Any) -> Array:
        """Returns the array with `fill` at all other positions."""
        spaces = [
            (f, n - 1 - f - s * (c - 1), s - 1)
            for n, f, s, c in zip(self.shape, self.first, self.step, self.count)
        ]
        return lax.pad(placed, lax.full((), fill, placed.dtype), spaces)


def columns(program: Program, v: int) -> Facts:
    """Finds each index of a gather or scatter as a function of where it stands."""
    made, shape = program.maker.get(v), program.avals[v].shape
    last = len(shape) - 1
    if made is not None and made.name == "concatenate" and made.params["dimension"] == last:
        found: list[Affine] = []
        for one in made.ins:
            if (part := (yield columns, one)) is None:
                return None
            found += part
        return found
    if shape[-1] == 0:
        return []
    if (one := affine(program, v)) is None:
        return None
    *along, step = one.coefficients
    return [Affine(tuple(along), one.constant + k * step) for k in range(shape[-1])]


def grid(program: Program, equation: Equation) -> Grid | None:
    """Returns the positions that an equation reads or writes; None where they are no constants.

    Raises:
      Left: where they are constants, and no grid of different positions within bounds.
    """
    n = equation.params["dimension_numbers"]
    shape = program.avals[equation.ins[0]].shape
    if equation.name == "gather":
        elements = program.avals[equation.outs[0]].shape
        windows, single, starts = n.offset_dims, n.collapsed_slice_dims, n.start_index_map
        batched = n.start_indices_batching_dims
    else:
        elements = program.avals[equation.ins[2]].shape
        windows, single = n.update_window_dims, n.inserted_window_dims
        starts, batched = n.scatter_dims_to_operand_dims, n.scatter_indices_batching_dims
    if not shape or 0 in (*elements, *shape):
        return None
    if (found := program.fact(columns, equation.ins[1])) is None:
        if program.const(equation.ins[1]) is None:
            return None
        raise Left("its indices are not evenly spaced")
    # The elements' dimensions are those of windows, and in order those of the indices.
    outer = [i for i in range(len(elements)) if i not in windows]
    inner = [d for d in range(len(shape)) if d not in single and d not in n.operand_batching_dims]
    window = dict(zip(inner, map(int, windows), strict=True))
    places, order = [], []
    for d, length in enumerate(shape):
        # Positions are first + Σ step · (position along a dimension of the elements).
        first, steps = 0, {window[d]: 1} if d in window else {}
        if d in n.operand_batching_dims:
            steps[outer[batched[n.operand_batching_dims.index(d)]]] = 1
        elif d in starts:
            index = found[starts.index(d)]
            first, steps = index.constant, steps | dict(zip(outer, index.coefficients))
        moves = {i: (step, elements[i]) for i, step in steps.items() if step and elements[i] != 1}
        places.append((first, *_line(length, first, [*moves.values()])))
        order += moves
    # Different elements have different positions if each of their dimensions moves along one of
    # the array's, and no other does.
    others = [i for i in range(len(elements)) if i not in order]
    if len({*order}) < len(order) or any(elements[i] != 1 for i in others):
        raise Left("its indices repeat positions, or take a diagonal")
    first, step, count = zip(*places)
    return Grid(tuple(shape), first, step, count, (*order, *others))


def _line(length: int, first: int, moves: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns step and count of positions along a dimension of an array of that length.

    Args:
      moves: the step and the size of each dimension of the elements that moves along it.

    Raises:
      Left: where they are not different positions within bounds, in their order.
    """
    if len(moves) > 1:
        raise Left("its indices are not one for each position along a dimension")
    (step, count), *_ = *moves, (1, 1)
    if step < 0:
        raise Left("its indices count backwards")
    # In between, an affine function is within bounds, too.
    if first < 0 or first + step * (count - 1) >= length:
        raise Left("its indices are not within bounds")
    return step, count


# ---------------------------------------------------------------- writes that cover an array


@dataclasses.dataclass(frozen=True)
class Write:
    """The update of a scatter, and the dtypes that the array is cast to afterwards."""

    grid: Grid
    update: int
    casts: tuple[Any, ...]

    def placed(self, update: Array) -> Array:
        return functools.reduce(lax.convert_element_type, self.casts, self.grid.placed(update))


def covering(program: Program, last: Equation) -> list[Write]:
    """Returns the writes, the last of which is given, that leave nothing of an array; else []."""
    writes: list[Write] = []
    v, casts = last.outs[0], ()
    while (made := program.maker.get(v)) is not None and len(writes) < LONGEST:
        v = made.ins[0] if made.ins else -1
        if made.name == "convert_element_type":
            casts = (made.params["new_dtype"], *casts)
            continue
        own = program.facts.get((grid, made))
        if made.name != "scatter" or own is None:
            return []
        writes.append(Write(own, made.ins[2], casts))
        n, partial = len(writes), writes[0].grid.partial
        axis = (*partial, 0)[0]  # do they take turns along it?
        if len(partial) > 1 or own.partial != partial:
            return []
        if n * (count := own.count[axis]) == own.shape[axis]:
            writes.sort(key=lambda write: write.grid.first)
            turns = [(w.grid.first[axis], w.grid.step[axis], w.grid.count[axis]) for w in writes]
            return writes if turns == [(i, n, count) for i in range(n)] else []
    return []


def joined(writes: Sequence[Write], *updates: Array) -> Array:
    """Returns the array that writes cover."""
    parts = [write.placed(update) for write, update in zip(writes, updates, strict=True)]
    (axis, *_), shape = (*writes[0].grid.partial, 0), writes[0].grid.shape
    return lax.reshape(jnp.stack(parts, axis + 1), shape) if parts[1:] else parts[0]


# ---------------------------------------------------------------- sites


def written(
    program: Program, equation: Equation
) -> tuple[Sequence[int], str, Callable[..., Array]]:
    """Returns what is read, what serves and what computes the result of a scatter."""
    base, _, update = equation.ins
    one, number = program.facts[grid, equation], program.uniform(base)
    if writes := covering(program, equation):
        served = "stack and reshape" if one.partial else "its update"
        return [w.update for w in writes], served, functools.partial(joined, writes)
    floats = jnp.issubdtype(program.avals[base].dtype, jnp.floating)
    if number is not None and number.exact and number.normal and floats:  # the same bits
        return [update], "pad", lambda u: one.padded(one.placed(u), number.x)
    raise Left("it writes a part of an array")


def site_of(program: Program, equation: Equation) -> Site | None:
    """Returns the read or write at constant indices that a gather or a scatter is; else None.

    Raises:
      Left: where its indices are constants, and it stays.
    """
    (out,), sets = equation.outs, equation.name == "scatter"
    aval = program.avals[out]
    if sets and equation.params["update_jaxpr"] is not None:
        return None
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    if (one := grid(program, equation)) is None:
        return None
    program.facts[grid, equation] = one
    if sets:
        reads, served, compute = written(program, equation)
    elif one.count == one.shape:
        return None  # the whole array: XLA reads it as it is
    else:
        reads, compute = equation.ins[:1], lambda x: one.read(x, aval.shape)
        served = "strided slice" if max(one.step, default=1) > 1 else "slice"
    sizes = (" x ".join(map(str, n)) or "1" for n in (one.count, one.shape))
    what = f"indexing {' of '.join(sizes)}, {aval.dtype.name}"
    emit = lambda read: [compute(*map(read, reads))]
    return Site((out,), tuple(reads), what, served, compute=emit)


# ---------------------------------------------------------------- lookups: rows by other indices
# JAX's derivative of `table[i]` is a scatter in the rows' dtype: each occurrence of a row rounds
# the sum to 16 bits, and a GPU adds 16 bits slowly where an index is frequent. A `gather` of whole
# rows of what the program is given, or of a cast of it, keeps its equation and has the derivative
#
#     dtable[r] = Σ_t [i_t = r] · dy_t    in float32.


def rows_of(gather: Equation, dtype: Any) -> Callable[..., Array]:
    """Returns `(table (rows, *features), indices) -> y`, as a gather of the table in `dtype`."""
    p = gather.params

    def rows(table: Array, indices: Array, fill: Any) -> Array:
        numbers, sizes = p["dimension_numbers"], p["slice_sizes"]
        return lax.gather(table, indices, numbers, sizes, mode=p["mode"], fill_value=fill)

    @jax.custom_jvp
    def read(table: Array, indices: Array) -> Array:
        return rows(table.astype(dtype), indices, p["fill_value"])

    @read.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        y = read(*primals)
        return y, rows(tangents[0].astype(jnp.float32), primals[1], 0).astype(y.dtype)

    return read


def _table(program: Program, v: int) -> int | None:
    """Returns the value that a table is, before the cast it is read in; None if it is computed."""
    made, root = program.maker.get(v), v
    while (maker := program.maker.get(root)) is not None and maker.name in UNCHANGED:
        root = maker.ins[0]
        if not jnp.issubdtype(program.avals[root].dtype, jnp.floating):
            return None
    if maker is not None or program.known(root) is not None:
        return None
    if made is None or made.name != "convert_element_type":
        return v
    (given,) = made.ins
    wide = program.avals[given].dtype.itemsize >= program.avals[v].dtype.itemsize
    return given if wide else v


def lookup_of(program: Program, equation: Equation) -> Site | None:
    """Returns the lookup that a gather is; None of others.

    Raises:
      Left: for a lookup that would gain, and is not served.
    """
    p, n = equation.params, equation.params["dimension_numbers"]
    table, index = (program.avals[v] for v in equation.ins)
    (out,) = equation.outs
    tokens, rows = math.prod(index.shape[:-1]), table.shape[0] if table.ndim > 1 else 0
    whole = (
        tuple(n.collapsed_slice_dims) in ((0,), ())
        and not n.operand_batching_dims
        and tuple(p["slice_sizes"]) == (1, *table.shape[1:])
        and tuple(n.offset_dims) == tuple(range(index.ndim - 1, program.avals[out].ndim))
        and 0 in n.start_index_map  # the starts of whole dimensions are clipped to 0
        and (len(n.start_index_map) == 1 or p["mode"] == GatherScatterMode.CLIP)
    )
    narrow = table.dtype in (jnp.bfloat16, jnp.float16)
    if not whole or not narrow or tokens == 1 or 0 in (*table.shape, tokens) or rows == 0:
        return None
    if p.get("unique_indices") or (source := _table(program, equation.ins[0])) is None:
        return None
    if table.sharding.mesh.explicit_axes:
        raise Left("its table is on a mesh with Explicit axes")
    compute, reads = rows_of(equation, table.dtype), (source, equation.ins[1])
    return Site(
        outs=(out,),
        reads=reads,
        what=f"lookup {tokens} of {' x '.join(map(str, table.shape))}, {table.dtype.name}",
        served="rows by index: its gradient is summed in float32",
        compute=lambda read: [compute(*map(read, reads))],
    )
