"""Lookups in a program: rows of a table by integers, whose gradient is summed in float32.

A `gather` of whole rows of what the program is given, or of a cast of it, is served where JAX's own
gradient would be summed in 16 bits, or an element at a time. The rows are the same bits.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..lookup import FEWEST_ROWS, Lookup, lookup
from .indexing import columns
from .indices import Affine
from .labels import UNCHANGED
from .program import Equation, Program
from .sites import Left, Site, together

MANY = 2**16
"""In float32 a GPU scatters fast, but for this many indices of few rows."""


@dataclasses.dataclass(eq=False)
class Rows(Site):
    """Rows of a table.

    Attributes:
      compute: returns them from the table and the indices.
      column: that of the indices that has the rows.
      spec: of the lookup, if it is one by run-time indices.
      aval: the type of the result.
    """

    compute: Callable[[Array, Array], Array]
    column: int
    spec: Any
    aval: Any

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        return [self.result(self.compute(read(self.reads[0]), self.indices(read)))]

    def indices(self, read: Callable[[int], Any]) -> Array:
        return read(self.reads[1])[..., self.column]

    def result(self, y: Array) -> Array:
        return y.reshape(self.aval.shape).astype(self.aval.dtype)


@dataclasses.dataclass(eq=False)
class Joined(Site):
    """Several lookups of one table as one, so that its gradient is one sum."""

    parts: tuple[Rows, ...]

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        indices = [part.indices(read).reshape(-1) for part in self.parts]
        y = self.parts[0].compute(read(self.parts[0].reads[0]), jnp.concatenate(indices))
        ends = list(itertools.accumulate(map(len, indices)))
        rows = [y[end - len(one) : end] for one, end in zip(indices, ends)]
        return [part.result(own) for part, own in zip(self.parts, rows)]


def joined(program: Program, sites: list[Site]) -> list[Site]:
    """Returns sites with the lookups of one table as one, where no index needs another's rows."""

    def key_of(site: Site) -> Any:
        if not isinstance(site, Rows) or site.spec is None:
            return None
        return site.reads[0], site.spec, program.avals[site.reads[1]].dtype

    def one(outs: tuple[int, ...], reads: tuple[int, ...], group: list[Rows]) -> Site:
        served = f"{group[0].served}, with {len(group) - 1} more"
        return Joined(outs, reads, (), group[0].what, served, tuple(group))

    return together(program, sites, key_of, one)


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


def _repeated(shape: tuple[int, ...], index: Affine, rows: int) -> Callable[..., Array] | None:
    """Returns what repeats rows that follow each other, where the index is proved to be such."""
    along = [i for i, c in enumerate(index.coefficients) if c and shape[i] != 1]
    if len(along) > 1 or any(index.coefficients[i] != 1 for i in along):
        return None
    first, count = index.constant, shape[along[0]] if along else 1
    if first < 0 or first + count > rows:
        return None

    def compute(table: Array, _: Array) -> Array:
        y = lax.slice_in_dim(table, first, first + count).astype(jnp.float32)
        y = y if along else y[0]
        every = range(len(shape), len(shape) + table.ndim - 1)
        return lax.broadcast_in_dim(y, (*shape, *table.shape[1:]), (*along, *every))

    return compute


def _column(equation: Equation, found: Sequence[Affine] | None) -> int | None:
    """Returns which column of a gather's indices has the rows; None if another one matters, too.

    The start of a slice that is all of a dimension matters where it can be outside.
    """
    starts = [*equation.params["dimension_numbers"].start_index_map]
    if 0 not in starts:
        return None
    zero = lambda a: not a.constant and not any(a.coefficients)
    others = [i for i, d in enumerate(starts) if d]
    clips = "CLIP" in str(equation.params["mode"])
    fine = clips or not others or found is not None and all(zero(found[i]) for i in others)
    return starts.index(0) if fine else None


def _site(program: Program, equation: Equation) -> Rows | None:
    """Returns the lookup that a gather is; None of others.

    Raises:
      Left: for a lookup that would gain, and is not proved to be one.
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
    )
    floats = table.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    if not whole or not floats or tokens == 1 or 0 in (*table.shape, tokens) or rows == 0:
        return None
    if p.get("unique_indices") or (source := _table(program, equation.ins[0])) is None:
        return None
    found = columns(program, equation.ins[1])
    if (column := _column(equation, found)) is None:
        return None
    shape = index.shape[:-1]
    repeated = _repeated(shape, found[column], rows) if found else None
    if table.dtype == jnp.float32 and (rows > FEWEST_ROWS or tokens < MANY or repeated):
        return None  # its gradient is summed in float32 as it is
    if program.depends(equation.ins[1], (source,)):
        raise Left("its indices are made of the table")
    if table.sharding.mesh.explicit_axes:
        raise Left("its table is on a mesh with Explicit axes")
    fill = p.get("fill_value")
    spec = Lookup(table.dtype.name, p["mode"], None if fill is None else float(fill))
    compute = repeated or functools.partial(lookup, spec)
    sizes = " x ".join(map(str, table.shape))
    served = "a slice, repeated" if repeated else "rows by index"
    return Rows(
        outs=(out,),
        reads=(source, equation.ins[1]),
        dead=(),
        what=f"lookup {tokens} of {sizes}, {table.dtype.name}",
        served=f"{served}: its gradient is summed in float32",
        compute=compute,
        column=column,
        spec=None if repeated else spec,
        aval=program.avals[out],
    )


def found(program: Program) -> Iterator[Site | tuple[int, str]]:
    """Yields the lookups of a program; a value and the reason where one is left."""
    for equation in program.equations:
        if equation.name != "gather" or equation in program.shadowing:
            continue
        try:
            if (site := _site(program, equation)) is not None:
                yield site
        except Left as reason:
            yield equation.outs[0], str(reason)
        except jax.errors.InconclusiveDimensionOperation:
            yield equation.outs[0], "its sizes are not known"
