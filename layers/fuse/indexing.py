"""Reads and writes at constant indices: slices, pads and stacks instead of gathers and scatters.

JAX makes a scatter of `x.at[..., ::2].set(a)`, gathers and scatters of its derivatives, and XLA
serves these an element at a time. Arithmetic on constant indices proves that they are evenly spaced
along each dimension, within bounds, and all different. A slice reads such positions, a dilated pad
writes them onto a number, and several writes that cover an array are a stack of the updates.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .indices import Affine, affine
from .program import Equation, Program
from .sites import Left, Site

LONGEST = 64
"""How many writes, one after another, may be read as one."""


@dataclasses.dataclass(eq=False)
class Indexed(Site):
    """Elements at constant indices, read or written.

    Attributes:
      compute: returns the result from the values of `reads`.
    """

    compute: Callable[..., Array]

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        return [self.compute(*map(read, self.reads))]


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


def columns(program: Program, v: int) -> list[Affine] | None:
    """Returns each index of a gather or scatter as a function of where it stands; else None."""
    made, shape = program.maker.get(v), program.avals[v].shape
    last = len(shape) - 1
    if made is not None and made.name == "concatenate" and made.params["dimension"] == last:
        parts = [columns(program, one) for one in made.ins]
        return None if None in parts else [c for part in parts if part for c in part]
    if shape[-1] == 0:
        return []
    if (found := affine(program, v)) is None:
        return None
    *along, step = found.coefficients
    return [Affine(tuple(along), found.constant + k * step) for k in range(shape[-1])]


def grid(program: Program, equation: Equation) -> Grid | None:
    """Returns the positions that an equation reads or writes; None where they are no constants.

    Raises:
      Left: where they are constants, and no grid of different positions within bounds.
    """
    n = equation.params["dimension_numbers"]
    shape, indices = (program.avals[v].shape for v in equation.ins[:2])
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
    if (found := columns(program, equation.ins[1])) is None:
        if program.const(equation.ins[1]) is None:
            return None
        raise Left("its indices are not evenly spaced")
    # The elements' dimensions are those of windows, and in order those of the indices. Each of the
    # array's is read at `first` + `step` · (position along one of them): an index's column, or a
    # window of `sizes[d]` in a row.
    outer = [i for i in range(len(elements)) if i not in windows]
    inner = [d for d in range(len(shape)) if d not in single and d not in n.operand_batching_dims]
    window = dict(zip(inner, map(int, windows), strict=True))
    sizes = [elements[window[d]] if d in window else 1 for d in range(len(shape))]
    places: list[tuple[int, int, int, int | None]] = []
    for d in range(len(shape)):
        first, along = 0, {}
        if d in n.operand_batching_dims:
            along = {int(batched[n.operand_batching_dims.index(d)]): 1}
        elif d in starts:
            column = found[starts.index(d)]
            first, along = column.constant, dict(enumerate(column.coefficients))
        along = {i: c for i, c in along.items() if c and indices[i] != 1}
        if len(along) > 1 or along and sizes[d] != 1:
            raise Left("its indices are not one for each position along a dimension")
        step, count, source = 1, sizes[d], window.get(d)
        if along:
            ((i, step),) = along.items()
            count, source = indices[i], outer[i]
        if step < 0:
            raise Left("its indices count backwards")
        # In between, an affine function is within bounds, too.
        if first < 0 or first + step * (count - 1) >= shape[d]:
            raise Left("its indices are not within bounds")
        places.append((first, step, count, source))
    # Different elements have different positions if each of their dimensions moves along one of
    # the array's, and no other does.
    order = [source for _, _, count, source in places if source is not None and count != 1]
    others = [i for i in range(len(elements)) if i not in order]
    if len({*order}) < len(order) or any(elements[i] != 1 for i in others):
        raise Left("its indices repeat positions, or take a diagonal")
    first, step, count, _ = zip(*places)
    return Grid(tuple(shape), first, step, count, (*order, *others))


# ---------------------------------------------------------------- writes that cover an array


@dataclasses.dataclass(frozen=True)
class Write:
    """The update of a scatter, and the dtypes that the array is cast to afterwards."""

    grid: Grid
    update: int
    casts: tuple[Any, ...]

    def placed(self, update: Array) -> Array:
        return functools.reduce(lax.convert_element_type, self.casts, self.grid.placed(update))


def covering(program: Program, last: Equation, grids: Mapping[Equation, Grid]) -> list[Write]:
    """Returns the writes, the last of which is given, that leave nothing of an array; else []."""
    writes: list[Write] = []
    v, casts = last.outs[0], ()
    while (made := program.maker.get(v)) is not None and len(writes) < LONGEST:
        v = made.ins[0] if made.ins else -1
        if made.name == "convert_element_type":
            casts = (made.params["new_dtype"], *casts)
            continue
        if made.name != "scatter" or made not in grids:
            return []
        writes.append(Write(grids[made], made.ins[2], casts))
        partial = writes[0].grid.partial
        if not partial:
            return writes
        if len(partial) != 1 or grids[made].partial != partial:
            return []
        (axis,), one = partial, writes[0].grid
        if len(writes) * one.count[axis] == one.shape[axis]:  # do they take turns along it?
            writes.sort(key=lambda write: write.grid.first)
            turns = [(w.grid.first[axis], w.grid.step[axis], w.grid.count[axis]) for w in writes]
            n = len(writes)
            return writes if turns == [(i, n, one.count[axis]) for i in range(n)] else []
    return []


def joined(writes: Sequence[Write], *updates: Array) -> Array:
    """Returns the array that writes cover."""
    parts = [write.placed(update) for write, update in zip(writes, updates, strict=True)]
    if not writes[0].grid.partial:
        return parts[0]
    (axis,) = writes[0].grid.partial
    return lax.reshape(jnp.stack(parts, axis + 1), writes[0].grid.shape)


# ---------------------------------------------------------------- sites


def written(
    program: Program, equation: Equation, grids: Mapping[Equation, Grid]
) -> tuple[Sequence[int], str, Callable[..., Array]]:
    """Returns what is read, what serves and what computes the result of a scatter."""
    base, _, update = equation.ins
    one, number = grids[equation], program.uniform(base)
    if writes := covering(program, equation, grids):
        served = "stack and reshape" if one.partial else "its update"
        return [w.update for w in writes], served, functools.partial(joined, writes)
    floats = jnp.issubdtype(program.avals[base].dtype, jnp.floating)
    if number is not None and number.exact and number.normal and floats:  # the same bits
        return [update], "pad", lambda u: one.padded(one.placed(u), number.x)
    raise Left("it writes a part of an array")


def found(program: Program) -> Iterator[Site | tuple[int, str]]:
    """Yields the reads and writes at constant indices; a value and the reason where one is left."""
    grids: dict[Equation, Grid] = {}
    for equation in program.equations:
        sets = equation.name == "scatter" and equation.params["update_jaxpr"] is None
        if not sets and equation.name != "gather":
            continue
        (out,) = equation.outs
        aval = program.avals[out]
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            continue
        try:
            one = grid(program, equation)
            if one is None:
                continue
            grids[equation] = one
            if sets:
                reads, served, compute = written(program, equation, grids)
            elif one.count == one.shape:
                continue  # the whole array: XLA reads it as it is
            else:
                reads = equation.ins[:1]
                served = "strided slice" if max(one.step, default=1) > 1 else "slice"
                compute = lambda x, one=one, shape=aval.shape: one.read(x, shape)
        except Left as reason:
            yield out, str(reason)
            continue
        except jax.errors.InconclusiveDimensionOperation:
            yield out, "its sizes are not known"
            continue
        sizes = (" x ".join(map(str, n)) or "1" for n in (one.count, one.shape))
        what = f"indexing {' of '.join(sizes)}, {aval.dtype.name}"
        yield Indexed((out,), tuple(reads), (), what, served, compute)
