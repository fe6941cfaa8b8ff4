"""Tiles as Pallas's pipelined blocks: for TPUs, whose memory they fit, and interpreted on CPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .lowering import Target
from .tiles import Call, cdiv, clear, result_type

# Elements of a tile. A TPU core has 16 MiB for every operand's tile twice (one is fetched while the
# other is used) and the values in between; a backward has five operands, 0.5 MiB each in float32.
_ELEMENTS = 1 << 17
_ROWS = 16  # bfloat16 is laid out in tiles of (16, 128)
_LANES = 128


def fits(n: int) -> bool:
    """Returns whether a kernel can hold whole rows of n."""
    return n <= _ELEMENTS // _ROWS


def run(target: Target, call: Call) -> list[jax.Array]:
    """Returns the results of `call`."""
    m, n = call.shape
    size_m, size_n = _tile(m, n, call.whole)
    steps = cdiv(m, size_m), cdiv(n, size_n)
    by_columns = "column sum" in call.kinds  # sums run along the second dimension of the grid
    place = lambda *g: g[::-1] if by_columns else g  # the tile of a grid step
    tile = pl.BlockSpec((size_m, size_n), place)
    column = pl.BlockSpec((1, size_n), lambda *g: (0, place(*g)[1]))
    row = pl.BlockSpec((size_m, 1), lambda *g: (place(*g)[0], 0))
    of = {"tile": (tile, (m, n)), "row": (row, (m, 1)), "column sum": (column, (1, n))}
    of["row sum"] = of["row"]

    def kernel(*refs):
        i, j = place(pl.program_id(0), pl.program_id(1))
        masks, left, values = _masks(i, j, (size_m, size_n), (m, n)), iter(refs), []
        for mask, group in zip(masks, (call.tiles, call.columns, call.rows)):
            loaded = [next(left)[...].astype(call.compute) for _ in group]
            # zero beyond the matrix: what is there is anything, and would be summed
            zero = jnp.zeros((), call.compute)
            values.append([v if mask is None else jnp.where(mask, v, zero) for v in loaded])
        for out, ref, value in zip(call.outs, left, call.body(*values)):
            if out.kind in ("tile", "row"):
                ref[...] = value.astype(ref.dtype)
                continue
            pl.when(pl.program_id(1) == 0)(lambda ref=ref: clear(ref))
            ref[...] += value

    results = pl.pallas_call(
        kernel,
        grid=place(*steps),
        in_specs=[tile] * len(call.tiles) + [column] * len(call.columns) + [row] * len(call.rows),
        out_specs=[of[out.kind][0] for out in call.outs],
        out_shape=[result_type(of[out.kind][1], out.dtype) for out in call.outs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=target.interpret,
        name=call.name,
    )(*call.tiles, *[a[None] for a in call.columns], *[a[:, None] for a in call.rows])
    flat = {"tile": (m, n), "row": (m,), "row sum": (m,), "column sum": (n,)}
    return [r.reshape(flat[out.kind]) for out, r in zip(call.outs, results)]


def _tile(m: int, n: int, whole: bool) -> tuple[int, int]:
    """Returns rows and columns of a tile: all there are, or multiples of the machine's tiles."""
    size_n = n if whole or n * _ROWS <= _ELEMENTS else _ELEMENTS // _ROWS
    padded = cdiv(size_n, _LANES) * _LANES
    size_m = max(_ROWS, _ELEMENTS // padded // _ROWS * _ROWS)
    return min(m, size_m), size_n


def _masks(i: Any, j: Any, size: tuple[int, int], shape: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Returns which elements of tiles, columns and rows are in the matrix; None where all are."""
    (tm, tn), (m, n) = size, shape

    def inside(step, tile, end, dims, axis):
        index = step * tile + jax.lax.broadcasted_iota(jnp.int32, dims, axis)
        return index < end if end % tile else None

    down, across = inside(i, tm, m, (tm, tn), 0), inside(j, tn, n, (tm, tn), 1)
    both = down if across is None else across if down is None else down & across
    return both, inside(j, tn, n, (1, tn), 1), inside(i, tm, m, (tm, 1), 0)
