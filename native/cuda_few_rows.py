"""RMSNorm's backward of few rows on CUDA: dx and dscale by one launch.

The kernel is rms_norm_backward_at_once.cu. Where dy and x stay in the cache they can be read twice,
by blocks that make dx and by others that make dscale: a second launch, which adds up what each
block has of dscale, costs more.
"""

import dataclasses

import numpy as np

from .cuda_layout import MAX_THREADS, WARP, RowLayout, threads_for, vector_size
from .device import Target


@dataclasses.dataclass(frozen=True)
class AtOnce:
    """How the two kinds of blocks share threads.

    Attributes:
      rows: the blocks that make dx. The others have as many threads.
      lanes: threads side by side along a row, in the blocks that make dscale.
    """

    rows: RowLayout
    lanes: int

    @property
    def column_blocks(self) -> int:
        """Blocks that make dscale."""
        return -(-self.rows.features // (self.lanes * self.rows.vector))

    def blocks_for(self, rows: int) -> int:
        """Blocks of both kinds."""
        return self.column_blocks + self.rows.blocks_for(rows)

    def shared(self, compute: np.dtype) -> int:
        """Bytes of shared memory: the sums along a row, or those over rows of each warp."""
        tile = self.rows.threads // WARP * self.lanes * self.rows.vector * compute.itemsize
        return max(tile, self.rows.sum_bytes(compute, cluster=False))

    def macros(self) -> dict[str, int]:
        """For the kernel."""
        sizes = {"LANES": self.lanes, "COLUMN_BLOCKS": self.column_blocks}
        return self.rows.macros(cluster=False) | sizes


_MOST_BYTES = 16 << 20  # of dy and x: beyond, one reading and a second launch are faster


def at_once(
    features: int, itemsize: int, target: Target, *, rows: int, read_bytes: int, residual: bool
) -> AtOnce | None:
    """A layout for so many rows; None where another kernel is faster, or rows are too long.

    Found with `benchmarks/layouts.py --kernel at_once` on an H200 (docs/kernels.md): within 4 % of
    the best of some 50, but for 17 % at 1024 features and as many rows or more.

    Args:
      itemsize: bytes of the widest element that moves.
      read_bytes: of the elements of dy and x that are read for one of dx.
      residual: whether there is a residual's gradient to be added.
    """
    vector = vector_size(features, itemsize)
    vectors = features // vector
    if rows * features * read_bytes > _MOST_BYTES or vectors > 2 * MAX_THREADS:
        return None
    few = rows <= target.multiprocessors  # only the way through one row counts
    chunks = 4 if vectors >= 1024 or (few and vectors >= 512) else 2
    threads = threads_for(vectors, chunks)
    fill = 128 if few else 512 if vectors <= 256 and rows > 2 * target.multiprocessors else 256
    block_rows = max(1, fill // threads)
    layout = RowLayout(features, vector, chunks, threads, block_rows)
    if block_rows == 1 and threads <= 256 and not residual:
        layout = dataclasses.replace(layout, min_blocks=2)
    lanes = 4  # many blocks, each with many threads over the rows
    if vectors > 768:
        lanes = 16 if few or vectors > 1024 else 8 if rows <= 2 * target.multiprocessors else 4
    return AtOnce(layout, min(WARP, max(lanes, 64 // (vector * itemsize))))
