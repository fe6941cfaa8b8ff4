"""Lookups in a program: rows of a table by integers, whose gradient is summed in float32.

JAX's derivative of `table[i]` is a scatter in the rows' dtype: each occurrence of a row rounds the
sum to 16 bits, and a GPU adds 16 bits slowly where an index is frequent. A `gather` of whole rows
of what the program is given, or of a cast of it, keeps its equation and has the derivative

    dtable[r] = Σ_t [i_t = r] · dy_t    in float32.

Few rows are summed in several copies of the table, or a GPU's atomics would take turns.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import GatherScatterMode

from .labels import UNCHANGED
from .program import Equation, Program
from .sites import Left, Site

FEWEST_ROWS, MANY = 64, 2**16
"""A float32 table of no more rows is served for so many indices: a GPU scatters others fast."""
ROWS_OF_COPIES, FEWEST_INDICES = 1024, 64
"""Copies of a table have no more rows together, and each sums no fewer indices."""


@dataclasses.dataclass(eq=False)
class Rows(Site):
    """Rows of a table.

    Attributes:
      compute: returns them from the table and the indices.
    """

    compute: Callable[[Array, Array], Array]

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        return [self.compute(*map(read, self.reads))]


def rows_of(gather: Equation, dtype: Any, rows: int, tokens: int) -> Callable[..., Array]:
    """Returns `(table (rows, *features), indices) -> y`, as a gather of the table in `dtype`."""
    p = gather.params
    numbers = p["dimension_numbers"]
    column = numbers.start_index_map.index(0)
    copies = max(1, min(ROWS_OF_COPIES // rows, tokens // FEWEST_INDICES))

    @jax.custom_jvp
    def read(table: Array, indices: Array) -> Array:
        return lax.gather(
            table.astype(dtype),
            indices,
            numbers,
            p["slice_sizes"],
            mode=p["mode"],
            fill_value=p["fill_value"],
        )

    @read.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        y, (table, indices) = read(*primals), (tangents[0], primals[1])
        index = indices[..., column : column + 1]
        index = index.astype(jnp.promote_types(index.dtype, jnp.int32))
        turns = lax.iota(index.dtype, index.size).reshape(index.shape) % copies
        each = range(index.ndim - 1, index.ndim - 1 + table.ndim - 1)
        dims = lax.GatherDimensionNumbers(tuple(each), (0, 1), (0, 1))
        moving = lax.gather(
            jnp.broadcast_to(table.astype(jnp.float32), (copies, *table.shape)),
            jnp.concatenate([turns, index], -1),
            dims,
            (1, 1, *table.shape[1:]),
            mode=p["mode"],
            fill_value=0,
        )
        return y, moving.reshape(y.shape).astype(y.dtype)

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


def _site(program: Program, equation: Equation) -> Rows | None:
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
    floats = table.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    if not whole or not floats or tokens == 1 or 0 in (*table.shape, tokens) or rows == 0:
        return None
    if p.get("unique_indices") or (source := _table(program, equation.ins[0])) is None:
        return None
    if table.dtype == jnp.float32 and (rows > FEWEST_ROWS or tokens < MANY):
        return None  # its gradient is summed in float32 as it is
    if table.sharding.mesh.explicit_axes:
        raise Left("its table is on a mesh with Explicit axes")
    return Rows(
        outs=(out,),
        reads=(source, equation.ins[1]),
        dead=(),
        what=f"lookup {tokens} of {' x '.join(map(str, table.shape))}, {table.dtype.name}",
        served="rows by index: its gradient is summed in float32",
        compute=rows_of(equation, table.dtype, rows, tokens),
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
