"""Tiles as Triton programs, for NVIDIA and AMD GPUs: powers of two, masked at the edges."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..implementation import Unsupported
from .lowering import Target
from .tiles import Call, cdiv, power_of_two, result_type


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a kernel is cut: a tile's rows and columns, warps a program, programs a core."""

    rows: int
    columns: int
    warps: int
    programs: int = 4


def fits(target: Target, n: int) -> bool:
    """Whether a kernel can hold whole rows of n."""
    del target
    return n <= 16384


def shape_for(call: Call) -> Shape:
    """The shape for a call: see benchmarks/results for the measurements behind it."""
    m, n = call.shape
    columns = power_of_two(n) if call.whole else min(power_of_two(n), 2048)
    most = power_of_two(m)
    if "column sum" not in call.kinds:  # 32 elements a thread; fewer for a long row
        rows = min(most, max(2, 1024 // columns))
        return Shape(rows, columns, min(32, max(1, rows * columns // 1024)))
    rows = min(most, max(2 if columns in (1024, 8192) else 1, 1024 // columns))
    each = {2048: 256, 4096: 256, 16384: 1024}.get(columns, 512)
    warps = min(32, max(1, rows * columns // each))
    return Shape(rows, columns, warps, programs=max(1, min(8, (16 if warps < 8 else 32) // warps)))


def run(target: Target, call: Call, shape: Shape | None = None) -> list[jax.Array]:
    """The results of `call`."""
    m, n = call.shape
    if m * n >= 2**31:
        raise Unsupported(f"Triton kernels index with 32 bits, and {m} x {n} elements need more")
    shape = shape or shape_for(call)
    steps = cdiv(m, shape.rows), cdiv(n, shape.columns)
    programs = steps[0]
    if "column sum" in call.kinds:
        programs = min(programs, target.cores * shape.programs)
    grid = (programs, 1 if "row sum" in call.kinds else steps[1])
    of = {"tile": (m, n), "row": (m,), "row sum": (m,), "column sum": (programs, n)}
    results = pl.pallas_call(
        functools.partial(_kernel, call=call, shape=shape, steps=steps, programs=programs),
        grid=grid,
        out_shape=[result_type(of[out.kind], out.dtype) for out in call.outs],
        compiler_params=pltriton.CompilerParams(num_warps=shape.warps, num_stages=2),
        interpret=target.interpret,
        name=call.name,
    )(*call.tiles, *call.columns, *call.rows)
    # a column's sum over the programs, in the order of the programs: the same bits every time
    return [jnp.sum(r, 0) if out.kind == "column sum" else r for out, r in zip(call.outs, results)]


def _kernel(*refs, call, shape, steps, programs):
    first, second = pl.program_id(0), pl.program_id(1)
    inputs = refs[: len(refs) - len(call.outs)]
    outputs = refs[len(inputs) :]
    tile = functools.partial(_tile, call, shape, inputs, outputs)
    zeros = lambda *dims: jnp.zeros(dims, call.compute)
    if "row sum" in call.kinds:
        start = [zeros(shape.rows, 1) for _ in call.outs]
        body = lambda j, sums: tile(first, j, sums)
        sums = lax.fori_loop(np.int32(0), np.int32(steps[1]), body, start)
        at, mask = _along(first, shape.rows, call.shape[0])
        for ref, value in zip(outputs, sums):
            _store(ref.at[at], value.reshape(shape.rows), mask)
    elif "column sum" in call.kinds:
        start = [zeros(1, shape.columns) for out in call.outs if out.kind == "column sum"]
        mine = (steps[0] - first + programs - 1) // programs
        body = lambda i, sums: tile(first + i * programs, second, sums)
        sums = iter(lax.fori_loop(np.int32(0), mine, body, start))
        at, mask = _along(second, shape.columns, call.shape[1])
        for out, ref in zip(call.outs, outputs):
            if out.kind == "column sum":
                _store(ref.at[first, at], next(sums).reshape(shape.columns), mask)
    else:
        tile(first, second, [])


def _tile(call, shape, inputs, outputs, i, j, sums):
    """Does tile (i, j); returns `sums` with what it adds."""
    (m, n), dims = call.shape, (shape.rows, shape.columns)
    down, down_mask = _along(i, shape.rows, m)
    across, across_mask = _along(j, shape.columns, n)
    mask = _both(down_mask, across_mask, dims)
    take, load = iter(inputs), functools.partial(_load, compute=call.compute)
    tiles = [load(next(take).at[down, across], mask) for _ in call.tiles]
    columns = [load(next(take).at[across], across_mask)[None, :] for _ in call.columns]
    rows = [load(next(take).at[down], down_mask)[:, None] for _ in call.rows]
    sums, added = list(sums), iter(range(len(sums)))
    for out, ref, value in zip(call.outs, outputs, call.body(tiles, columns, rows)):
        if out.kind == "tile":
            _store(ref.at[down, across], value, mask)
        elif out.kind == "row":
            _store(ref.at[down], value.reshape(shape.rows), down_mask)
        else:
            k = next(added)
            sums[k] = sums[k] + value
    return sums


def _along(step, size, end):
    """The indices of a step in one dimension, and which of them exist; None where all do."""
    start = step * size
    mask = None if end % size == 0 else start + jnp.arange(size) < end
    return pl.ds(start, size), mask


def _both(down, across, dims):
    if down is None and across is None:
        return None
    down = None if down is None else lax.broadcast_in_dim(down, dims, (0,))
    across = None if across is None else lax.broadcast_in_dim(across, dims, (1,))
    return down if across is None else across if down is None else down & across


def _load(ref, mask, compute):
    other = None if mask is None else 0.0
    return pltriton.load(ref, mask=mask, other=other).astype(compute)


def _store(ref, value, mask):
    pltriton.store(ref, value.astype(ref.dtype), mask=mask)
