"""Kernels over blocks of whole rows, pipelined by Pallas: for TPUs and, interpreted, for CPUs.

A `Body` is a function of values in registers, in the compute type:

    (tiles (rows, n), columns (1, n), rows (rows, 1)) -> results, one for each `Out`

Elements beyond the matrix are zero where they are summed, whatever they are elsewhere.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .lowering import Target
from .tiles import before, cdiv, clear, result_type

Arrays = Sequence[jax.Array]
Body = Callable[[Arrays, Arrays, Arrays], Sequence]

# Elements of a block. A TPU core has 16 MiB for every operand's block twice (one is fetched while
# the other is used) and the values in between; a backward has five operands, 0.5 MiB each in
# float32.
_ELEMENTS = 1 << 17
_ROWS = 16  # bfloat16 is laid out in tiles of (16, 128)
_LANES = 128
LONGEST = _ELEMENTS // _ROWS  # elements of a row


@dataclasses.dataclass(frozen=True)
class Out:
    """A result: "tile", of the matrix's shape, "row", one value a row, or "column sum", over all
    blocks, kept in the compute type."""

    kind: str
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel and its operands."""

    name: str  # in profiles
    body: Body
    tiles: Arrays  # (m, n) each
    columns: Arrays  # (n,) each
    rows: Arrays  # (m,) each
    outs: Sequence[Out]
    compute: jnp.dtype  # dtype of values in the body


def run(target: Target, call: Call) -> list[jax.Array]:
    """Returns the results of `call`, whose rows have `LONGEST` elements at most."""
    m, n = call.tiles[0].shape
    size = min(m, max(_ROWS, _ELEMENTS // (cdiv(n, _LANES) * _LANES) // _ROWS * _ROWS))
    tile = pl.BlockSpec((size, n), lambda i: (i, 0))
    column = pl.BlockSpec((1, n), lambda i: (0, 0))
    row = pl.BlockSpec((size, 1), lambda i: (i, 0))
    of = {"tile": (tile, (m, n)), "row": (row, (m, 1)), "column sum": (column, (1, n))}

    def kernel(*refs):
        i, left, values = pl.program_id(0), iter(refs), []
        for group in (call.tiles, call.columns, call.rows):
            loaded = [next(left)[...].astype(call.compute) for _ in group]
            if m % size and group is not call.columns:
                # zero beyond the matrix: what is there is anything, and would be summed
                loaded = [before(value, m - i * size, 0) for value in loaded]
            values.append(loaded)
        for out, ref, value in zip(call.outs, left, call.body(*values)):
            if out.kind != "column sum":
                ref[...] = value.astype(ref.dtype)
                continue
            pl.when(i == 0)(lambda ref=ref: clear(ref))
            ref[...] += value

    sums = any(out.kind == "column sum" for out in call.outs)
    order: Any = ("arbitrary" if sums else "parallel",)
    results = pl.pallas_call(
        kernel,
        grid=(cdiv(m, size),),
        in_specs=[tile] * len(call.tiles) + [column] * len(call.columns) + [row] * len(call.rows),
        out_specs=[of[out.kind][0] for out in call.outs],
        out_shape=[result_type(of[out.kind][1], out.dtype) for out in call.outs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        interpret=target.interpret,
        name=call.name,
    )(*call.tiles, *[a[None] for a in call.columns], *[a[:, None] for a in call.rows])
    flat = {"tile": (m, n), "row": (m,), "column sum": (n,)}
    return [r.reshape(flat[out.kind]) for out, r in zip(call.outs, results)]
