"""How CUDA threads share rows: the numbers behind the macros of `kernels/row.cuh`.

What is fast is known from measurements (`benchmarks/results`), and written here as a few rules on
the number of elements a thread holds, so that every row length has a layout, not only the measured
ones.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from .device import Target

WARP = 32
MAX_THREADS = 1024  # of a block
MOST_THREADS = 1536  # of a multiprocessor: more were no faster, and GeForce has no more
MAX_CLUSTER = 8
_RESERVED_BYTES = 1024  # of shared memory, that CUDA takes from every block


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Threads on rows of contiguous elements; `kernels/row.cuh` says what each number is.

    `max_stages` is the backward kernel's alone, `thread_rows` the forward's: rows a thread has at
    once.
    """

    features: int
    vector: int
    chunks: int
    row_threads: int
    block_rows: int = 1
    slices: int = 1
    min_blocks: int = 1
    hold: bool = False
    max_stages: int = 0
    thread_rows: int = 1

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.row_threads * self.block_rows

    @property
    def tile(self) -> int:
        """Columns of a block."""
        return self.row_threads * self.vector * self.chunks

    def blocks_for(self, rows: int) -> int:
        """Blocks along the rows that cover `rows` once."""
        return -(-rows // (self.block_rows * self.thread_rows))

    def persistent_blocks(self, target: Target, *, cluster: bool) -> int:
        """Blocks along the rows that all run at the same time."""
        if not cluster or self.slices <= 2:
            return max(1, target.multiprocessors * self.min_blocks // self.slices)
        # The blocks of a cluster share a group of multiprocessors (GPC), and a group holds a whole
        # number of clusters: one more would wait until all others are done.
        group = 16 if target.capability == 90 else 18
        return max(1, target.multiprocessors // group * (group * self.min_blocks // self.slices))

    def sum_bytes(self, compute: np.dtype, *, cluster: bool) -> int:
        """Shared memory of `RowSum`."""
        cluster_size = self.slices if cluster else 1
        if self.row_threads <= WARP and cluster_size == 1:
            return 0
        slots = cluster_size * -(-self.row_threads // WARP)
        inboxes = 16 if cluster_size > 1 else 0
        return inboxes + 2 * self.block_rows * self.thread_rows * slots * compute.itemsize

    def fits(self, target: Target, *, read_bytes: int, compute: np.dtype, cluster: bool) -> bool:
        """Whether shared memory has two rows of every block."""
        return self._shared(2, read_bytes, compute, cluster) <= self._block_shared(target)

    def pipeline(
        self, target: Target, read_bytes: int, compute: np.dtype, *, cluster: bool
    ) -> tuple[int, int]:
        """Rows on their way to a block of the backward kernel, and its shared memory in bytes.

        Args:
          read_bytes: what is read for one element.
        """
        depth = self.max_stages
        while depth > 2 and self._shared(depth, read_bytes, compute, cluster) > self._block_shared(
            target
        ):
            depth -= 1
        return depth, self._shared(depth, read_bytes, compute, cluster)

    def _shared(self, depth, read_bytes, compute, cluster) -> int:
        """Shared memory of a block with `depth` rows on their way; dscale is there in the end."""
        sums = round_up(self.sum_bytes(compute, cluster=cluster), 16)
        rows = sums + depth * self.threads * self.chunks * self.vector * read_bytes
        dscale = self.block_rows * self.tile * compute.itemsize if self.block_rows > 1 else 0
        return max(rows, dscale)

    def _block_shared(self, target: Target) -> int:
        return target.shared_memory // self.min_blocks - _RESERVED_BYTES

    def macros(self, *, cluster: bool) -> dict[str, int]:
        """The layout as macros; in a `cluster`, the slices of a row add their sums together."""
        return {
            "FEATURES": self.features,
            "VECTOR": self.vector,
            "CHUNKS": self.chunks,
            "ROW_THREADS": self.row_threads,
            "BLOCK_ROWS": self.block_rows,
            "SLICES": self.slices,
            "CLUSTER": self.slices if cluster else 1,
            "MIN_BLOCKS": self.min_blocks,
        }


def vector_size(features: int, itemsize: int) -> int:
    """Elements that move together: 16 bytes of the widest type, or what divides the row."""
    return math.gcd(features, 16 // itemsize)


class Step(NamedTuple):
    """A layout for rows of at most `vectors` vectors of 16 bytes."""

    vectors: int
    chunks: int
    slices: int = 1
    fill: int = 0  # as many rows to a block as make so many threads
    blocks: int = 1  # to a multiprocessor
    threads: int = 0  # to a multiprocessor, in place of `blocks`
    hold: bool = False
    rows: int = 1  # to a thread at once: the forward kernel's alone
    stages: int = 2  # the backward kernel's alone

    def layout(self, features: int, vector: int) -> RowLayout:
        """For a row of so many features, `vector` of which move together."""
        vectors = features // vector
        row_threads = threads_for(-(-vectors // self.slices), self.chunks)
        layout = RowLayout(
            features,
            vector,
            self.chunks,
            row_threads,
            block_rows=max(1, self.fill // row_threads),
            slices=-(-vectors // (row_threads * self.chunks)),
            min_blocks=self.blocks,
            hold=self.hold,
            max_stages=self.stages,
            thread_rows=self.rows,
        )
        if self.threads:
            blocks = max(1, self.threads // layout.threads)
            layout = dataclasses.replace(layout, min_blocks=blocks)
        return layout


def strided_block(features: int, inner: int) -> tuple[int, int]:
    """Threads along `inner` and along the row, for rows whose elements are `inner` apart."""
    width = min(WARP, power_of_two(inner))
    height = min(256 // width, power_of_two(features))
    return width, max(height, WARP // width)


def strided_blocks(outer: int, features: int, inner: int, target: Target) -> int:
    """Blocks of a persistent grid over such rows."""
    width, _ = strided_block(features, inner)
    return min(outer * -(-inner // width), 8 * target.multiprocessors)


def threads_for(vectors: int, chunks: int) -> int:
    """Threads of a row, each with so many of its vectors: a power of two, or whole warps."""
    needed = -(-vectors // chunks)
    return power_of_two(needed) if needed <= WARP else round_up(needed, WARP)


def power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
