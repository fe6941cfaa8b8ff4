"""Tiles as Triton programs, for NVIDIA and AMD GPUs: powers of two, masked at the edges.

JAX has deprecated the back end and will remove it: it serves on request alone.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ..implementation import Unsupported
from .lowering import Target
from .tiles import Call, Ref, cdiv, result_type

try:
    from jax.experimental.pallas.triton import CompilerParams, load, store
except ImportError as error:
    raise Unsupported("this JAX has no Triton back end for Pallas any more") from error


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a kernel is cut: a tile's rows and columns, warps a program, programs a core."""

    rows: int
    columns: int
    warps: int
    programs: int = 4


def fits(n: int) -> bool:
    """Returns whether a kernel can hold whole rows of n."""
    return n <= 16384


def shape_for(call: Call) -> Shape:
    """Returns the shape for a call: see benchmarks/results for the measurements behind it."""
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


def power_of_two(n: int) -> int:
    """Returns the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def run(target: Target, call: Call) -> list[jax.Array]:
    """Returns the results of `call`."""
    m, n = call.shape
    if m * n >= 2**31:
        raise Unsupported(f"Triton kernels index with 32 bits, and {m} x {n} elements need more")
    shape = shape_for(call)
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
        compiler_params=CompilerParams(num_warps=shape.warps, num_stages=2),
        interpret=target.interpret,
        name=call.name,
    )(*call.tiles, *call.columns, *call.rows)
    # a column's sum over the programs, in the order of the programs: the same bits every time
    return [jnp.sum(r, 0) if out.kind == "column sum" else r for out, r in zip(call.outs, results)]


def _kernel(*refs: Ref, call: Call, shape: Shape, steps: tuple[int, int], programs: int) -> None:
    first, second = pl.program_id(0), pl.program_id(1)
    inputs, outputs = refs[: -len(call.outs)], refs[-len(call.outs) :]
    tile = functools.partial(_tile, call, shape, inputs, outputs)
    zeros = lambda *dims: jnp.zeros(dims, call.compute)
    if "row sum" in call.kinds:
        start = [zeros(shape.rows, 1) for _ in call.outs]
        sums = lax.fori_loop(np.int32(0), np.int32(steps[1]), functools.partial(tile, first), start)
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


def _tile(
    call: Call, shape: Shape, inputs: Any, outputs: Any, i: Any, j: Any, sums: Sequence[jax.Array]
) -> list[jax.Array]:
    """Does tile (i, j); returns `sums` with what it adds."""
    down, down_mask = _along(i, shape.rows, call.shape[0])
    across, across_mask = _along(j, shape.columns, call.shape[1])
    mask = _both((down_mask, across_mask), (shape.rows, shape.columns))
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


def _along(step: Any, size: int, end: int) -> tuple[Any, jax.Array | None]:
    """Returns the indices of a step along a dimension, and which exist; None where all do."""
    start = step * size
    mask = None if end % size == 0 else start + jnp.arange(size) < end
    return pl.ds(start, size), mask


def _both(masks: Sequence[jax.Array | None], dims: tuple[int, int]) -> jax.Array | None:
    """Returns the mask of a tile from those along its dimensions."""
    there = [
        lax.broadcast_in_dim(m, dims, (axis,)) for axis, m in enumerate(masks) if m is not None
    ]
    return functools.reduce(lambda a, b: a & b, there) if there else None


def _load(ref: Ref, mask: jax.Array | None, compute: jnp.dtype) -> jax.Array:
    other = None if mask is None else 0.0
    return load(ref, mask=mask, other=other).astype(compute)


def _store(ref: Ref, value: jax.Array, mask: jax.Array | None) -> None:
    store(ref, value.astype(ref.dtype), mask=mask)
