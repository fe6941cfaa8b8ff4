"""Lookups in a program: rows of a table by integers, whose gradient is summed in float32.

JAX's derivative of `table[i]` is a scatter in the rows' dtype: each occurrence of a row rounds the
sum to 16 bits, and a GPU adds 16 bits slowly where an index is frequent. A `gather` of whole rows
of what the program is given, or of a cast of it, keeps its equation and has the derivative

    dtable[r] = Σ_t [i_t = r] · dy_t    in float32.
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


@dataclasses.dataclass(eq=False)
class Rows(Site):
    """Rows of a table.

    Attributes:
      compute: returns them from the table and the indices.
    """

    compute: Callable[[Array, Array], Array]

    def emit(self, read: Callable[[int], Any]) -> Sequence[Any]:
        return [self.compute(*map(read, self.reads))]


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
    narrow = table.dtype in (jnp.bfloat16, jnp.float16)
    if not whole or not narrow or tokens == 1 or 0 in (*table.shape, tokens) or rows == 0:
        return None
    if p.get("unique_indices") or (source := _table(program, equation.ins[0])) is None:
        return None
    if table.sharding.mesh.explicit_axes:
        raise Left("its table is on a mesh with Explicit axes")
    return Rows(
        outs=(out,),
        reads=(source, equation.ins[1]),
        dead=(),
        what=f"lookup {tokens} of {' x '.join(map(str, table.shape))}, {table.dtype.name}",
        served="rows by index: its gradient is summed in float32",
        compute=rows_of(equation, table.dtype),
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
