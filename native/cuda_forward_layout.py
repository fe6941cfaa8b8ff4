"""How CUDA threads share rows in RMSNorm's forward kernel, which holds them in registers."""

import dataclasses

import numpy as np

from .cuda_layout import (
    MAX_CLUSTER,
    MAX_THREADS,
    MOST_THREADS,
    WARP,
    RowLayout,
    Step,
    power_of_two,
    round_up,
    vector_size,
)
from .device import Target

_REGISTERS = 65536  # of a multiprocessor, given to whole fours of warps


@dataclasses.dataclass(frozen=True)
class _Held:
    """What threads of the forward kernel have in registers."""

    registers: tuple[int, ...]  # what a thread needs for 1, 2, ... vectors of a row, unspilled
    steps: tuple[tuple[int, int], ...]  # vectors to a thread for rows of at most so many vectors
    scale: int = 0  # the longest row whose scale is held too, so that it is there when the sum is


_PLAIN = _Held((32, 32, 40, 48, 48, 48, 64, 64), ((1056, 3), (1536, 4), (3072, 6), (8192, 8)))
_RESIDUAL = _Held((48, 64, 80, 64), ((128, 2), (1056, 3)), scale=1056)
_LONG_RESIDUAL = _Held((40, 48, 56, 64), ((1536, 3), (4096, 4)))
_DOUBLE = _Held((64, 64, 80, 96), ((128, 2), (1536, 3), (4096, 4)))

# Where there are rows for every block that fits. Found with benchmarks/layouts.py on an H200
# (docs/kernels.md): each is the best, or within 1 % of it, of 100 to 300 that were timed at some 20
# lengths of bfloat16 rows. What they have in common: 512 to 1024 threads of a multiprocessor have
# many registers each, so that the scale is there when a sum is, and two rows share it.
_FORWARD = (
    Step(32, chunks=2, rows=2, hold=True, fill=512, blocks=2),
    Step(128, chunks=1, rows=2, hold=True, fill=128, threads=MOST_THREADS),
    Step(256, chunks=2, hold=True, threads=MOST_THREADS),
    Step(320, chunks=3, rows=2, hold=True, threads=512),
    Step(448, chunks=2, rows=2, hold=True, threads=768),
    Step(512, chunks=4, hold=True, threads=768),
    Step(640, chunks=2, rows=2, hold=True, threads=768),
    Step(896, chunks=4, hold=True, threads=896),
    Step(1536, chunks=4, rows=2, hold=True, blocks=2),
    Step(2048, chunks=4, hold=True, blocks=2),
    Step(2400, chunks=5, blocks=3),
    Step(3072, chunks=6, rows=2, hold=True),
    Step(4096, chunks=4, rows=2),
    Step(8192, chunks=4, rows=4, hold=True, slices=4),
    Step(16384, chunks=4, rows=4, hold=True, slices=8),
    Step(32768, chunks=6, slices=8, blocks=2),
)
# Where all rows are on their way at once only the way through one counts: three vectors a thread,
# and the scale is read with them.
_FORWARD_FEW_ROWS = Step(1056, chunks=3, hold=True, fill=128, threads=1024)


def _held_for(vectors: int, compute: np.dtype, residual: bool) -> _Held:
    """What threads hold of rows of so many vectors that have no step of their own.

    With a residual three vectors a thread were best, or within 2 % of it, up to 12288 features of
    bfloat16, and fewer blocks that hold the scale 1 to 2 % faster. Longer rows need more vectors to
    a thread, because two or three blocks of 512 threads hide what one of 1024 cannot: it loads,
    adds up and stores by turns.
    """
    if compute.itemsize == 8:
        return _DOUBLE
    if residual:
        return _RESIDUAL if vectors <= _RESIDUAL.scale else _LONG_RESIDUAL
    return _PLAIN


def layout_for(
    features: int,
    itemsize: int,
    target: Target,
    *,
    rows: int,
    compute: np.dtype,
    residual: bool,
    whole_rows: bool,
) -> RowLayout | None:
    """A layout whose threads hold a few vectors of a row, so that many blocks fit at a time.

    Args:
      itemsize: bytes of the widest element that moves.
      compute: the compute type.
      whole_rows: a row's blocks must form one cluster; otherwise each may work alone.
    Returns: None if a row is longer than a block, or a cluster, can hold.
    """
    vector = vector_size(features, itemsize)
    vectors = features // vector
    held = _held_for(vectors, compute, residual)
    if held is _PLAIN:
        layout = _plain_layout(features, vector, target, rows, whole_rows)
        if layout is not None:
            return layout
    if vectors <= 2 * WARP:  # a warp or less has the row, and needs no barrier
        row_threads = min(WARP, power_of_two(-(-vectors // 2)))
        chunks = -(-vectors // row_threads)
        layout = RowLayout(features, vector, chunks, row_threads, 128 // row_threads)
        return _fill(layout, held.registers)
    slices = 1 if whole_rows else -(-vectors // MAX_THREADS)
    while slices == 1 or not whole_rows or (target.clusters and slices <= MAX_CLUSTER):
        if -(-vectors // slices) <= held.steps[-1][0]:
            return _held_layout(features, vector, slices, held)
        slices *= 2
    return None


def _plain_layout(
    features: int, vector: int, target: Target, rows: int, whole_rows: bool
) -> RowLayout | None:
    """A measured layout of the forward kernel, if there is one for so many rows."""
    vectors = features // vector
    least = None  # blocks that fill the device once
    if 2 * WARP < vectors <= _FORWARD_FEW_ROWS.vectors:
        layout = _FORWARD_FEW_ROWS.layout(features, vector)
        if layout.blocks_for(rows) <= target.multiprocessors * layout.min_blocks:
            return layout
        least = 0
    for step in _FORWARD:
        if vectors <= step.vectors:
            layout = step.layout(features, vector)
            if layout.slices > 1 and not (target.clusters and whole_rows):
                return None
            if least is None:
                least = target.multiprocessors * layout.min_blocks // layout.slices
            return layout if layout.blocks_for(rows) >= least else None
    return None


def _held_layout(features: int, vector: int, slices: int, held: _Held) -> RowLayout:
    """The layout of `held.steps` for a row in so many parts."""
    vectors = features // vector
    part = -(-vectors // slices)
    chunks = next(chunks for most, chunks in held.steps if part <= most)
    fill, hold = (128 if slices == 1 else 0), vectors <= held.scale
    step = Step(vectors, chunks, slices, fill, hold=hold, stages=0)
    return _fill(step.layout(features, vector), held.registers)


def _fill(layout: RowLayout, registers: tuple[int, ...]) -> RowLayout:
    """As many blocks to a multiprocessor as its registers allow."""
    needed, blocks = registers[layout.chunks - 1], MOST_THREADS // layout.threads
    while blocks > 1 and _registers(layout.threads, blocks) < needed:
        blocks -= 1
    return dataclasses.replace(layout, min_blocks=blocks)


def _registers(threads: int, blocks: int) -> int:
    """What each thread may use for `blocks` blocks to run on a multiprocessor."""
    return _REGISTERS // (blocks * round_up(threads, 4 * WARP)) // 8 * 8
