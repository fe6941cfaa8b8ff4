"""How CUDA threads share rows in RMSNorm's backward kernel, whose grid is persistent."""

import dataclasses

import numpy as np

from .cuda_layout import (
    MAX_CLUSTER,
    MAX_THREADS,
    WARP,
    RowLayout,
    Step,
    round_up,
    threads_for,
    vector_size,
)
from .device import Target

# Found with benchmarks/layouts.py on an H200 (docs/kernels.md): each is the best, or within 1 % of
# it, of some 150 that were timed at 256, 1024, 2560, 4096, 5120, 7168, 8192, 12288, 16384, 18432
# and 32768 features of bfloat16. What they have in common: a multiprocessor has few threads (256 to
# 1024) in one block or two, each with many registers; more blocks cost 5 to 15 %. Rows of 16384 and
# more take two blocks, of 288 to 352 threads each.
_BACKWARD = (
    Step(192, chunks=1, fill=128, blocks=6, hold=True),
    Step(512, chunks=2, fill=512, hold=True, stages=3),
    Step(640, chunks=6, blocks=2, hold=True),
    Step(896, chunks=2, slices=2, blocks=2, stages=3),
    Step(1024, chunks=1, hold=True),
    Step(1536, chunks=2),
    Step(2112, chunks=3, slices=2, stages=3),
    Step(2816, chunks=4, slices=2, stages=3),
    Step(3520, chunks=5, slices=2, stages=3),
    Step(4224, chunks=6, slices=2, hold=True),
    Step(8192, chunks=2, slices=8, blocks=2, stages=3),
)
# With an H100's memory, of 3.0 TB/s in place of 4.2, those reach .91 to .94 of the copy rate, and
# others .95 to 1.01 that are slow on an H200: it wants fewer copies on their way at once. Of some
# 170 timed at each of 256, 1024, 2048, 4096, 5120, 8192 and 32768 features of bfloat16; the other
# lengths have the steps above.
_H100 = "NVIDIA H100 80GB HBM3"
_BACKWARD_H100 = (
    Step(64, chunks=1, fill=128, blocks=4, hold=True),
    Step(192, chunks=3, fill=128, blocks=3, stages=3),
    Step(384, chunks=3, blocks=3, hold=True, stages=3),
    Step(512, chunks=3, fill=384, stages=3),
    Step(640, chunks=1, stages=3),
    Step(896, chunks=2, slices=2, blocks=2, stages=3),
    Step(1024, chunks=1),
    Step(1536, chunks=2),
    Step(2112, chunks=3, slices=2, stages=3),
    Step(2816, chunks=4, slices=2, stages=3),
    Step(3520, chunks=5, slices=2, stages=3),
    Step(4224, chunks=5, slices=2),
    Step(8192, chunks=2, slices=8, blocks=2, stages=3),
)
_BACKWARD_RESIDUAL = (
    Step(512, chunks=2, fill=512, stages=3),
    Step(640, chunks=1, stages=3),
    Step(896, chunks=2, slices=2, blocks=3),
    Step(1024, chunks=1, hold=True),
    Step(1536, chunks=3),
    Step(2112, chunks=3, slices=2),
    Step(2816, chunks=4, slices=2),
    Step(3520, chunks=5, slices=2),
    Step(4224, chunks=6, slices=2),
    Step(8192, chunks=2, slices=8, blocks=2),
)

# With x normalised again there are four arrays too, two of them written. At 4096 features 48
# layouts were timed (benchmarks/dense.py --norm-sweep): those that read a row twice from shared
# memory reach .94 to .97 of the copy rate, what is best for three arrays .79. No others were.
_BACKWARD_VALUE = (
    _BACKWARD[0],
    Step(512, chunks=1, fill=512, blocks=2),
    *_BACKWARD_RESIDUAL[1:],
)

# Where there are no more rows than multiprocessors all are read at once, the longer ones by
# clusters of blocks of 128 threads: only the way through one row counts.
_BACKWARD_FEW_ROWS = (
    Step(256, chunks=1, hold=True, stages=1),
    Step(512, chunks=1, slices=4, blocks=2),
    Step(1024, chunks=1, slices=8, blocks=2),
)


def layout_for(
    features: int,
    itemsize: int,
    target: Target,
    *,
    rows: int,
    read_bytes: int,
    compute: np.dtype,
    residual: bool,
    whole_rows: bool,
    value: bool = False,
) -> RowLayout | None:
    """A layout of a few blocks to a multiprocessor, for a persistent grid.

    A thread has the scale and dscale of its columns in registers, and shared memory has two rows or
    more of every block.

    Args:
      read_bytes: what is read for one element.
      compute: the compute type.
      residual: whether there is a residual's gradient to be added.
      value: whether x normalised again is written.
      The others are those of `cuda_forward_layout.layout_for`.
    """
    vector = vector_size(features, itemsize)
    vectors = features // vector
    options = {"read_bytes": read_bytes, "compute": compute, "cluster": whole_rows}
    if vector * itemsize == 16 and whole_rows:
        plain = _BACKWARD_H100 if target.name == _H100 and itemsize == 2 else _BACKWARD
        steps = _BACKWARD_RESIDUAL if residual else _BACKWARD_VALUE if value else plain
        few = rows <= target.multiprocessors and vectors <= _BACKWARD_FEW_ROWS[-1].vectors
        if few and vectors > 2 * WARP and target.clusters:
            steps = _BACKWARD_FEW_ROWS
        for step in steps:
            if vectors > step.vectors:
                continue
            layout = step.layout(features, vector)
            if (layout.slices == 1 or target.clusters) and layout.fits(target, **options):
                return layout
            break

    # Rows that no step is for: what threads can hold, and 1024 threads to a multiprocessor.
    most = max(1, 128 // compute.itemsize // (2 * vector))
    slices = 1 if whole_rows else -(-vectors // (512 * most))
    while slices == 1 or not whole_rows or (target.clusters and slices <= MAX_CLUSTER):
        part = -(-vectors // slices)
        chunks = min(most, -(-part // 512))
        row_threads = threads_for(part, chunks)
        if row_threads <= MAX_THREADS:
            block_rows = max(1, 512 // row_threads) if slices == 1 else 1
            layout = RowLayout(
                features,
                vector,
                chunks,
                row_threads,
                block_rows,
                slices=-(-vectors // (row_threads * chunks)),
                min_blocks=max(1, MAX_THREADS // round_up(row_threads * block_rows, 4 * WARP)),
                max_stages=4,
            )
            while layout.min_blocks > 1 and not layout.fits(target, **options):
                layout = dataclasses.replace(layout, min_blocks=layout.min_blocks - 1)
            if layout.fits(target, **options):
                return layout
        slices *= 2
    return None
