"""The norms' kernels on CUDA: how threads share rows, and launching.

Arrays are viewed as (outer, n, inner). Contiguous rows (inner == 1) move through memory once. Rows
that no block, or cluster of blocks, can hold take two launches: one for the statistics of each
slice of a row, one for the rest.

The fastest layouts are known from measurements (`benchmarks/results`), and written here as a few
rules on the number of elements a thread holds, so that every row length has a layout, not only the
measured ones.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...native.dtypes import CUDA_TYPES, promoted
from ...native.launch import Target, column_sum, cuda_compute_dtype, launch, type_macros
from .spec import Norm

# ---------------------------------------------------------------- layouts: threads on rows

WARP = 32
MAX_THREADS = 1024  # a block's
MOST_THREADS = 1536  # a multiprocessor's: more were no faster, and GeForce has no more
MAX_CLUSTER = 8
REGISTERS = 65536  # a multiprocessor's, given to whole fours of warps
_WORD = 4  # bytes of a register
_LINE = 128  # bytes of shared memory: rows that are copied there begin with one


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Threads on rows of contiguous elements; `kernels/row.cuh` says what each number is."""

    features: int
    vector: int
    chunks: int
    row_threads: int
    block_rows: int = 1
    slices: int = 1
    min_blocks: int = 1
    hold: bool = False
    max_stages: int = 0  # the backward kernel's alone
    thread_rows: int = 1  # that a thread has at once: the forward kernel's alone
    sums: int = 1  # that are taken over each row at a time
    persistent: bool = False  # blocks go through the rows, as the backward's always do
    share: bool = False  # the scale is in shared memory: the backward kernel's alone
    ahead: bool = False  # the next rows come to shared memory meanwhile: the forward kernel's alone

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.row_threads * self.block_rows

    @property
    def tile(self) -> int:
        """Columns of a block."""
        return self.row_threads * self.vector * self.chunks

    @property
    def registers(self) -> int:
        """Registers, of 4 bytes, that each thread can have."""
        threads = self.min_blocks * round_up(self.threads, 4 * WARP)
        return min(248, REGISTERS // threads // 8 * 8)

    def blocks_for(self, rows: int) -> int:
        """Blocks along the rows that cover `rows` once."""
        return -(-rows // (self.block_rows * self.thread_rows))

    def least_rows(self, target: Target) -> int:
        """Rows that fill the device once."""
        blocks = max(1, target.multiprocessors * self.min_blocks // self.slices)
        return (blocks - 1) * self.block_rows * self.thread_rows + 1

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
        rows = self.block_rows * self.thread_rows
        return inboxes + 2 * rows * self.sums * slots * compute.itemsize

    def ahead_bytes(self, itemsize: int, compute: np.dtype) -> int:
        """Shared memory of the forward, where the next rows of a cluster are on their way there."""
        elements = self.thread_rows * self.block_rows * self.tile
        return round_up(self.sum_bytes(compute, cluster=True), _LINE) + elements * itemsize

    def fits(self, target: Target, *, read_bytes: int, compute: np.dtype, cluster: bool) -> bool:
        """Returns True if two rows of every block fit in shared memory, `read_bytes` an element."""
        most = target.shared_memory_of(self.min_blocks)
        return self._shared(2, read_bytes, compute, cluster) <= most

    def pipeline(
        self, target: Target, read_bytes: int, compute: np.dtype, *, cluster: bool
    ) -> tuple[int, int]:
        """Rows on their way to a block of the backward kernel, and its shared memory in bytes."""
        shared = lambda depth: self._shared(depth, read_bytes, compute, cluster)
        depth, most = self.max_stages, target.shared_memory_of(self.min_blocks)
        while depth > 2 and shared(depth) > most:
            depth -= 1
        return depth, shared(depth)

    def _shared(self, depth, read_bytes, compute, cluster) -> int:
        """Shared memory of a block with `depth` rows on their way; dscale is there in the end."""
        sums = round_up(self.sum_bytes(compute, cluster=cluster), _LINE)
        if self.share:
            sums += self.threads * self.chunks * self.vector * compute.itemsize
        rows = sums + depth * self.threads * self.chunks * self.vector * read_bytes
        dscale = self.block_rows * self.tile * compute.itemsize if self.block_rows > 1 else 0
        return max(rows, dscale)

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
    fill: int = 0  # target threads per block
    blocks: int = 1  # to a multiprocessor
    threads: int = 0  # to a multiprocessor, in place of `blocks`
    hold: bool = False
    rows: int = 1  # to a thread at once: the forward kernel's alone
    stages: int = 2  # the backward kernel's alone
    persistent: bool = False  # this and the rest as in `RowLayout`
    share: bool = False
    ahead: bool = False

    def layout(self, features: int, vector: int) -> RowLayout:
        """For a row of so many features, `vector` of which move together."""
        vectors = features // vector
        row_threads = threads_for(-(-vectors // self.slices), self.chunks)
        block_rows = max(1, self.fill // row_threads)
        by_threads = max(1, self.threads // (row_threads * block_rows))
        return RowLayout(
            features,
            vector,
            self.chunks,
            row_threads,
            block_rows,
            slices=-(-vectors // (row_threads * self.chunks)),
            min_blocks=by_threads if self.threads else self.blocks,
            hold=self.hold,
            max_stages=self.stages,
            thread_rows=self.rows,
            persistent=self.persistent,
            share=self.share,
            ahead=self.ahead,
        )


def layout_of(
    steps: Sequence[Step], features: int, vector: int, target: Target
) -> RowLayout | None:
    """The layout of the first of `steps` that takes such a row, if the target has its clusters."""
    vectors = features // vector
    step = next((step for step in steps if vectors <= step.vectors), None)
    layout = step and step.layout(features, vector)
    return layout if layout and (layout.slices == 1 or target.clusters) else None


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


# ---------------------------------------------------------------- layouts of the forward


@dataclasses.dataclass(frozen=True)
class _Held:
    """Registers and vectors of the forward kernel's threads."""

    registers: tuple[int, ...]  # a thread's for 1, 2, ... vectors of a row, unspilled
    steps: tuple[tuple[int, int], ...]  # vectors to a thread for rows of at most so many vectors
    scale: int = 0  # the longest row whose scale is held too, so that it is there when the sum is


_PLAIN = _Held((32, 32, 40, 48, 48, 48, 64, 64), ((1056, 3), (1536, 4), (3072, 6), (8192, 8)))
_RESIDUAL = _Held((48, 64, 80, 64), ((128, 2), (1056, 3)), scale=1056)
_LONG_RESIDUAL = _Held((40, 48, 56, 64), ((1536, 3), (4096, 4)))
_DOUBLE = _Held((64, 64, 80, 96), ((128, 2), (1536, 3), (4096, 4)))

# For rows enough for every block that fits. Measured on an H200
# (benchmarks/results): each is the best, or within 1 % of it, of 100 to 300 that were timed at some
# 20 lengths of bfloat16 rows. What they have in common: 512 to 1024 threads of a multiprocessor
# have many registers each, so that the scale is there when a sum is, and two rows share it.
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
# With a bias, which is held too: the same, at 1024 and 4096 features.
_FORWARD_BIAS = (
    Step(32, chunks=2, rows=2, fill=512, blocks=2),
    Step(128, chunks=4, rows=2, hold=True, fill=256, blocks=2),
    Step(512, chunks=2, rows=2, hold=True, threads=1024),
)
# With a mean: of some 150 to 350 that were timed at 1024, 4096, 8192 and 32768 features, with scale
# and bias, with statistics as results or without. None spills a register.
_FORWARD_CENTRED = (
    Step(32, chunks=2, rows=2, fill=512, blocks=2),
    Step(128, chunks=2, rows=2, fill=128, blocks=8),
    Step(512, chunks=6, rows=2, blocks=6),
    Step(1024, chunks=6, rows=2, blocks=3),
    Step(4096, chunks=4, slices=2, hold=True, persistent=True, ahead=True),
)
# With all rows on their way at once, only the way through one counts: three vectors a thread, and
# the scale is read with them.
_FORWARD_FEW_ROWS = Step(1056, chunks=3, hold=True, fill=128, threads=1024)


def _held_for(vectors: int, compute: np.dtype, residual: bool) -> _Held:
    """Returns the part of rows of so many vectors, which have no step of their own, in threads.

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


def forward_layout(
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

    `itemsize` is that of the widest element that moves. With `whole_rows` a row's blocks must form
    one cluster; otherwise each may work alone. None if a row is longer than these can hold.
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
    has_few = 2 * WARP < vectors <= _FORWARD_FEW_ROWS.vectors
    if has_few:
        layout = _FORWARD_FEW_ROWS.layout(features, vector)
        if layout.blocks_for(rows) <= target.multiprocessors * layout.min_blocks:
            return layout
    layout = layout_of(_FORWARD, features, vector, target)
    if layout is None or (layout.slices > 1 and not whole_rows):
        return None
    return layout if has_few or rows >= layout.least_rows(target) else None


def _held_layout(features: int, vector: int, slices: int, held: _Held) -> RowLayout:
    """The layout of `held.steps` for a row in so many parts."""
    vectors = features // vector
    part = -(-vectors // slices)
    chunks = next(chunks for most, chunks in held.steps if part <= most)
    fill, hold = (128 if slices == 1 else 0), vectors <= held.scale
    step = Step(vectors, chunks, slices, fill, hold=hold, stages=0)
    return _fill(step.layout(features, vector), held.registers)


def _fill(layout: RowLayout, registers: tuple[int, ...]) -> RowLayout:
    """Gives a multiprocessor as many blocks as its registers allow."""
    needed = registers[layout.chunks - 1]
    layout = dataclasses.replace(layout, min_blocks=MOST_THREADS // layout.threads)
    while layout.min_blocks > 1 and layout.registers < needed:
        layout = dataclasses.replace(layout, min_blocks=layout.min_blocks - 1)
    return layout


# ---------------------------------------------------------------- layouts of the backward

# Measured on an H200 (benchmarks/results): each is the best, or within 1 %
# of it, of some 150 that were timed at 256, 1024, 2048, 4096, 7168, 8192, 12288, 16384, 18432 and
# 32768 features of bfloat16, or of 20 to 40 at 1280, 1408, 1536, 1792, 2240, 2560, 2880, 3072,
# 3200, 3584, 4608 and 5120. What they have in common: a multiprocessor has few threads (256 to
# 1024), each with many registers, that work on 24 to 35 KB of dy and x, up to 4096 features: with
# 20 to 23, or with 37, a pass takes 8 to 12 % more time, however deep the copies to each block are.
_BACKWARD = (
    Step(32, chunks=2, fill=128, blocks=3, hold=True),
    Step(128, chunks=1, fill=128, blocks=6, hold=True),
    Step(184, chunks=3, fill=128, blocks=3, hold=True),
    Step(224, chunks=2, blocks=4, hold=True),
    Step(256, chunks=3, blocks=4, hold=True),
    Step(288, chunks=2, blocks=3, hold=True, stages=3),
    Step(368, chunks=3, blocks=3, hold=True),
    Step(400, chunks=2, blocks=2, hold=True, stages=3),
    Step(512, chunks=3, blocks=2, hold=True, stages=3),
    Step(640, chunks=2, slices=2, blocks=3, stages=3),
    Step(896, chunks=2, slices=2, blocks=2, stages=3),
    Step(1024, chunks=1, hold=True),
    Step(1536, chunks=2),
    Step(2112, chunks=3, slices=2, stages=3),
    Step(2816, chunks=4, slices=2, stages=3),
    Step(3520, chunks=5, slices=2, stages=3),
    Step(3584, chunks=3, slices=2, hold=True),
    Step(4096, chunks=3, slices=2),
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
    Step(192, chunks=2, fill=512, stages=3),
    Step(256, chunks=3, blocks=4, hold=True),
    Step(368, chunks=3, blocks=3, hold=True),
    Step(512, chunks=3, blocks=2, hold=True, stages=3),
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

# With a mean and both gradients: as _FORWARD_CENTRED, at 2048 and 16384 features too.
_BACKWARD_CENTRED = (
    Step(32, chunks=2, fill=128, blocks=3, hold=True),
    Step(96, chunks=4, fill=128, blocks=2, hold=True),
    Step(128, chunks=2, fill=128, blocks=4, hold=True),
    Step(512, chunks=4, fill=256, hold=True),
    Step(1024, chunks=2, hold=True),
    Step(2048, chunks=2, slices=2, hold=True, stages=3),
    Step(4096, chunks=4, slices=2, hold=True, share=True),
)
# With no more rows than multiprocessors, all are read at once, the longer ones by clusters of
# blocks of 128 threads: only the way through one row counts.
_BACKWARD_FEW_ROWS = (
    Step(256, chunks=1, hold=True, stages=1),
    Step(512, chunks=1, slices=4, blocks=2),
    Step(1024, chunks=1, slices=8, blocks=2),
)


def backward_layout(
    features: int,
    itemsize: int,
    target: Target,
    *,
    rows: int,
    read_bytes: int,
    compute: np.dtype,
    residual: bool,
    whole_rows: bool,
    sums: int = 1,
) -> RowLayout | None:
    """A layout of a few blocks to a multiprocessor, for a persistent grid.

    A thread has the scale and dscale of its columns in registers, and shared memory has two rows or
    more of every block, `read_bytes` for one element. With `residual` a residual's gradient is
    added; `sums` are taken over each row. The others are `forward_layout`'s.
    """
    vector = vector_size(features, itemsize)
    vectors = features // vector
    options = {"read_bytes": read_bytes, "compute": compute, "cluster": whole_rows}
    if vector * itemsize == 16 and whole_rows:
        plain = _BACKWARD_H100 if target.name == _H100 and itemsize == 2 else _BACKWARD
        steps = _BACKWARD_RESIDUAL if residual else plain
        few = rows <= target.multiprocessors and vectors <= _BACKWARD_FEW_ROWS[-1].vectors
        if few and vectors > 2 * WARP and target.clusters:
            steps = _BACKWARD_FEW_ROWS
        if layout := layout_of(steps, features, vector, target):
            layout = dataclasses.replace(layout, sums=sums)
            if layout.fits(target, **options):
                return layout

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
                sums=sums,
            )
            while layout.min_blocks > 1 and not layout.fits(target, **options):
                layout = dataclasses.replace(layout, min_blocks=layout.min_blocks - 1)
            if layout.fits(target, **options):
                return layout
        slices *= 2
    return None


# ---------------------------------------------------------------- the backward of few rows
# The kernel is rms_norm_backward_in_one_launch.cu. Where dy and x stay in the cache they can be
# read twice, by blocks that make dx and by others that make dscale: a second launch, which adds up
# what each block has of dscale, costs more.


@dataclasses.dataclass(frozen=True)
class OneLaunch:
    """How the two kinds of blocks share threads."""

    rows: RowLayout  # the blocks that make dx; the others have as many threads
    lanes: int  # threads side by side along a row, in the blocks that make dscale

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
        """The layout as macros."""
        sizes = {"LANES": self.lanes, "COLUMN_BLOCKS": self.column_blocks}
        return self.rows.macros(cluster=False) | sizes


_CACHED_BYTES = 16 << 20  # dy's and x's: beyond, one reading and a second launch are faster


def one_launch_layout(
    features: int, itemsize: int, target: Target, *, rows: int, read_bytes: int, residual: bool
) -> OneLaunch | None:
    """A layout for so many rows; None where another kernel is faster, or rows are too long.

    Measured on an H200: within 4 % of the best of some
    50, but for 17 % at 1024 features and as many rows or more. Arguments are `backward_layout`'s.
    """
    vector = vector_size(features, itemsize)
    vectors = features // vector
    if rows * features * read_bytes > _CACHED_BYTES or vectors > 2 * MAX_THREADS:
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
    return OneLaunch(layout, min(WARP, max(lanes, 64 // (vector * itemsize))))


# ---------------------------------------------------------------- the kernels

_MAX_GRID = 2**31 - 1
_MAX_PARTIAL_BYTES = 64 << 20


def by_rows(body: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a body take and return arrays with heads as well: see `Norm.heads`."""

    @functools.wraps(body)
    def run(target: Target, norm: Norm, *operands: Any, **options: Any) -> Any:
        if not norm.heads:
            return body(target, norm, *operands, **options)
        shape = operands[0].shape
        alone = dataclasses.replace(norm, heads=())
        results = body(target, alone, *flat(norm, operands), **options)
        if results is None:
            return None
        own = (shape[0], shape[2]) if norm.per_example else shape[1:]
        shapes = {3: shape, 1: own, 2: shape[:2]}  # x-like, a parameter's, a row statistic
        return [a.reshape(shapes[a.ndim]) for a in results]

    return run


def flat(norm: Norm, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays with heads as one row after another: (outer, heads, n) as (outer · heads, n, 1).

    The first matrices are scale and bias, (heads, n), which stay. So it is with examples, where
    arrays are (examples, tokens, n).
    """
    matrices = [i for i, a in enumerate(operands) if a.ndim == 2]
    own = matrices[: norm.has_scale + norm.has_bias]
    return tuple(a.reshape(flat_struct(a, i in own).shape) for i, a in enumerate(operands))


def flat_struct(array: Any, is_parameter: bool) -> jax.ShapeDtypeStruct:
    """The type of an array with heads as kernels take it."""
    rows = math.prod(array.shape[:2])
    shape = (rows, array.shape[2], 1) if array.ndim == 3 else (rows, 1)
    return jax.ShapeDtypeStruct(array.shape if is_parameter else shape, array.dtype)


def combined(means: Any, squares: Any, counts: Any) -> tuple[jax.Array, jax.Array]:
    """Mean and squared differences of rows, from those of their parts along the first dimension.

    `counts` are the elements of each part, against `means`. References: Chan, Golub and LeVeque,
    "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    counts = jnp.broadcast_to(counts, means.shape)
    mean = jnp.sum(counts * means, 0) / jnp.sum(counts, 0)
    return mean, jnp.sum(squares + counts * (means - mean) ** 2, 0)


@by_rows
def forward(target: Target, norm: Norm, x: Any, *rest: Any) -> list[jax.Array]:
    """`(x[, residual][, scale][, bias]) -> (y[, h][, mean][, rstd])`, h = x + residual."""
    given = {"RESIDUAL": norm.has_residual, "SCALE": norm.has_scale, "BIAS": norm.has_bias}
    dtypes = norm.out_dtype, norm.residual_dtype
    call = Call(target, norm, "forward", named(rest, X=x, **given), *dtypes)
    call.result("Y", x.shape, norm.out_dtype)
    if norm.has_residual:
        h_dtype = norm.residual_dtype or promoted(x.dtype, rest[0].dtype)
        call.result("H", x.shape, h_dtype)
    for name in ["MEAN"] * norm.with_mean + ["RSTD"] * norm.with_rstd:
        call.result(name, call.row_shape, call.compute)
    done = _forward(call, norm, norm.eps)
    if done is not None:
        return done

    h = x
    if norm.has_residual:
        h = (x.astype(call.compute) + rest[0].astype(call.compute)).astype(call.results["H"].dtype)
    *mean, squares = row_statistics(target, norm, h, compute=call.compute)
    rstd = jax.lax.rsqrt(squares / x.shape[1] + norm.eps)
    (y,) = apply(target, norm, h, *rest[norm.has_residual :], *mean, rstd)
    return [y, *[h] * norm.has_residual, *mean * norm.with_mean, *[rstd] * norm.with_rstd]


@by_rows
def row_statistics(target: Target, norm: Norm, x: Any, *, compute: Any = None) -> list[jax.Array]:
    """`x -> ([mean,] Σ (x − mean)²)`, one value a row each."""
    call = Call(target, norm, "row_statistics", {"X": x}, compute)
    for name in ["MEAN"] * norm.centred + ["SQUARES"]:
        call.result(name, call.row_shape, call.compute)
    *means, squares = found(_forward(call, Norm(centred=norm.centred)))  # without parameters
    if squares.shape == call.row_shape or not means:
        return [*means, *call.over_slices([squares])]
    layout = call.layout
    assert layout is not None and layout.slices == squares.shape[1]
    counts = np.full((layout.slices, 1), layout.tile)  # the last slice may be shorter
    counts[-1] = call.features - (layout.slices - 1) * layout.tile
    parts = combined(means[0].T, squares.T, counts.astype(call.compute))
    return [part[:, None] for part in parts]


@by_rows
def apply(target: Target, norm: Norm, x: Any, *rest: Any) -> list[jax.Array]:
    """`(x[, scale][, bias][, mean], rstd) -> y`, for statistics that are already known."""
    given = {"SCALE": norm.has_scale, "BIAS": norm.has_bias, "MEAN": norm.centred, "RSTD": True}
    call = Call(target, norm, "apply", named(rest, X=x, **given), norm.out_dtype)
    call.result("Y", x.shape, norm.out_dtype)
    return found(_forward(call, norm))


@by_rows
def backward(target: Target, norm: Norm, dy: Any, x: Any, *rest: Any) -> list[jax.Array]:
    """`(dy, x[, scale][, mean], rstd[, dh]) -> (dx[, dscale][, dbias])`."""
    call = Call(target, norm, "backward", _gradient_operands(norm, dy, x, rest))
    call.result("DX", x.shape, x.dtype)
    if norm.with_dscale and not (norm.with_dbias or norm.centred):
        done = _backward_in_one_launch(call, norm.scale_offset)
        if done is not None:
            return done
    done = _backward(call, norm)
    if done is not None:
        return done

    known = rest[: norm.has_scale + norm.centred]
    sums = row_dots(target, norm, dy, x, *known, compute=call.compute)
    count = dataclasses.replace(norm, count=float(x.shape[1]))
    return backward_apply(target, count, dy, x, *rest, *sums)


@by_rows
def row_dots(
    target: Target, norm: Norm, dy: Any, x: Any, *rest: Any, compute: Any = None
) -> list[jax.Array]:
    """`(dy, x[, scale][, mean]) -> ([Σ dy · w,] Σ dy · w · (x − mean))`, one value a row each."""
    operands = named(rest, DY=dy, X=x, SCALE=norm.has_scale, MEAN=norm.centred)
    call = Call(target, norm, "row_dots", operands, compute)
    for name in ["SUMS"] * norm.centred + ["DOTS"]:
        call.result(name, call.row_shape, call.compute)
    return call.over_slices(found(_backward(call, norm)))


@by_rows
def backward_apply(target: Target, norm: Norm, dy: Any, x: Any, *rest: Any) -> list[jax.Array]:
    """`(dy, x[, scale][, mean], rstd[, dh][, sums], dots) -> (dx[, dscale][, dbias])`."""
    sums = {"SUMS": norm.centred, "DOTS": True}
    operands = _gradient_operands(norm, dy, x, rest, **sums)
    call = Call(target, norm, "backward_apply", operands)
    call.result("DX", x.shape, x.dtype)
    return found(_backward(call, norm, norm.count))


def _gradient_operands(norm: Norm, dy: Any, x: Any, rest: Any, **more: bool) -> dict[str, Any]:
    given = {"SCALE": norm.has_scale, "MEAN": norm.centred, "RSTD": True, "DH": norm.has_residual}
    return named(rest, DY=dy, X=x, **given, **more)


def found(results: list[jax.Array] | None) -> list[jax.Array]:
    """The results of a kernel that splits a row over blocks, which takes every length."""
    assert results is not None
    return results


_STATISTICS = ("MEAN", "RSTD", "SUMS", "DOTS")  # values of a row, in the compute type


class Call:
    """One launch: operands and results by their names in the kernel, in their order there."""

    def __init__(
        self,
        target: Target,
        norm: Norm,
        kernel: str,
        operands: dict[str, Any],
        *dtypes: Any,  # that are computed with besides the operands', or None
    ):
        compute = cuda_compute_dtype(
            [*(a.dtype for a in operands.values()), *map(jnp.dtype, filter(None, dtypes))]
        )
        self.target = target
        self.name = f"{'layer_norm' if norm.centred else 'rms_norm'}_{kernel}"
        self.compute = compute
        self.operands = {
            name: array.astype(compute) if name in _STATISTICS else array
            for name, array in operands.items()
        }
        self.results: dict[str, jax.ShapeDtypeStruct] = {}
        self.layout: RowLayout | None = None  # of a kernel for contiguous rows
        scale = operands.get("SCALE")
        owners = 1 if scale is None or scale.ndim == 1 else scale.shape[0]
        of_examples = norm.per_example and scale is not None
        self.heads, self.examples = (1, owners) if of_examples else (owners, 0)
        self.outer, self.features, self.inner = operands["X"].shape
        self.row_shape = (self.outer, self.inner)
        self.whole_rows = kernel in ("forward", "backward")  # not one of their halves

    def result(self, name: str, shape: tuple[int, ...], dtype) -> None:
        self.results[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def partial_sums(self, blocks: int, columns: int) -> None:
        """The backward kernel's result after dx: sums over each block's rows for `columns` vectors
        of parameters."""
        if columns:
            self.result("PARTIAL", (blocks, columns * self.features), self.compute)

    def columns(self, norm: Norm) -> int:
        """How many vectors of parameters have gradients among the results."""
        return ("DX" in self.results) * (norm.with_dscale + norm.with_dbias)

    def empty(self) -> list[jax.Array]:
        return [jnp.zeros(r.shape, r.dtype) for r in self.results.values()]

    def moving_bytes(self) -> list[int]:
        """The item sizes of what is as large as x."""
        large = self.operands["X"].shape
        arrays = [*self.operands.values(), *self.results.values()]
        return [a.dtype.itemsize for a in arrays if a.shape == large]

    def flags(self, scale_offset: float) -> dict[str, bool]:
        """The macros that say which operands there are."""
        given = self.operands
        return {
            "HAS_RESIDUAL": "RESIDUAL" in given or "DH" in given,
            "HAS_SCALE": "SCALE" in given,
            "HAS_OFFSET": scale_offset != 0,
        }

    def owners(self) -> dict[str, int]:
        """The macros that say whose scale and bias a row has."""
        return {"HEADS": self.heads, "PER_EXAMPLE": bool(self.examples)}

    def rows(self, source: str, macros, scalars, layout: RowLayout, grid: int, shared: int):
        """Launches a kernel for contiguous rows."""
        self.layout = layout
        results = dict(self.results)
        if not self.whole_rows:  # a statistic for each slice of a row
            for name, result in results.items():
                if result.shape == self.row_shape:
                    results[name] = jax.ShapeDtypeStruct((self.outer, layout.slices), self.compute)
        return self.launch(
            source,
            macros | layout.macros(cluster=self.whole_rows),
            results,
            grid=(grid, layout.slices),
            block=layout.threads,
            cluster=(1, layout.slices if self.whole_rows else 1),
            shared=shared,
            ints=(self.outer, *([self.outer // self.examples] if self.examples else [])),
            **scalars,
        )

    def over_slices(self, sums: list[jax.Array]) -> list[jax.Array]:
        """Sums over each row, from those over its slices."""
        add = lambda a: jnp.sum(a, axis=1, keepdims=True) if a.shape != self.row_shape else a
        return [add(a) for a in sums]

    def strided(self, source: str, macros, scalars, grid: int):
        """Launches a kernel for rows whose elements are `inner` apart."""
        width, height = strided_block(self.features, self.inner)
        return self.launch(
            source,
            macros | {"FEATURES": self.features, "BLOCK_X": width, "BLOCK_Y": height},
            self.results,
            grid=min(grid, self.outer * -(-self.inner // width)),
            block=width * height,
            shared=width * height * self.compute.itemsize,
            ints=(self.outer, self.inner),
            **scalars,
        )

    def launch(self, source: str, macros, results, **sizes):
        types = type_macros(self.operands) | type_macros(results)
        types |= {
            "KERNEL": self.name,
            "COMPUTE_TYPE": CUDA_TYPES[self.compute.name],
        }
        return launch(
            source,
            self.name,
            list(self.operands.values()),
            list(results.values()),
            target=self.target,
            macros=types | {name: int(value) for name, value in macros.items()},
            **sizes,
        )


def _forward(call: Call, norm: Norm, eps: float = 0.0) -> list[jax.Array] | None:
    """Launches norm_forward.cu; None where its rows are too long to be held."""
    if 0 in call.row_shape:
        return call.empty()
    has_bias = "BIAS" in call.operands
    macros: dict[str, Any] = {
        "CENTRED": norm.centred,
        "STATISTICS": "RSTD" not in call.operands,
        "NORMALIZE": "Y" in call.results,
        "CAST_BEFORE": "Y" in call.results and norm.cast_before,
        "HAS_BIAS": has_bias,
        "WITH_MEAN": "MEAN" in call.results,
        "WITH_RSTD": "RSTD" in call.results,
        **call.flags(norm.scale_offset),
    }
    scalars = scalars_of(call.compute, eps, norm.scale_offset)
    if call.inner != 1:
        return call.strided("norm_forward_strided.cu", macros, scalars, _MAX_GRID)
    steps = _FORWARD_CENTRED if norm.centred else _FORWARD_BIAS if has_bias else ()
    layout = timed_forward(call, steps)
    if layout is None:
        layout = forward_layout(
            call.features,
            max(call.moving_bytes()),
            call.target,
            rows=call.outer,
            compute=call.compute,
            residual="RESIDUAL" in call.operands,
            whole_rows=call.whole_rows,
        )
        if layout is None:
            return None
        if norm.centred or has_bias:
            layout = eased_forward(call, layout)
    layout = dataclasses.replace(layout, sums=1 + norm.centred)
    owners = call.heads
    if call.examples:  # rows of a thread are of one example
        owners, tokens = call.examples, call.outer // call.examples
        thread_rows = min(layout.thread_rows, power_of_two(tokens))
        layout = dataclasses.replace(layout, thread_rows=thread_rows, ahead=False)
    macros |= call.owners()
    macros |= {"HOLD": layout.hold, "THREAD_ROWS": layout.thread_rows, "AHEAD": layout.ahead}
    rows = owners * round_up(call.outer // owners, layout.thread_rows)  # blocks see so many
    grid = min(layout.blocks_for(rows), _MAX_GRID)
    if layout.persistent:
        grid = min(grid, layout.persistent_blocks(call.target, cluster=call.whole_rows))
    shared = layout.sum_bytes(call.compute, cluster=call.whole_rows) if macros["STATISTICS"] else 0
    if layout.ahead:
        shared = layout.ahead_bytes(call.operands["X"].dtype.itemsize, call.compute)
    return call.rows("norm_forward.cu", macros, scalars, layout, grid, shared)


def _backward(call: Call, norm: Norm, count: float | None = None) -> list[jax.Array] | None:
    """Launches norm_backward.cu, and the sum over its blocks for dscale and dbias; None where its
    rows are too long to be held. `count` is of the features of whole rows, unless the kernel has
    these."""
    n, owners = call.features, max(call.heads, call.examples)
    columns, gradient = call.columns(norm), "DX" in call.results
    macros: dict[str, Any] = {
        "CENTRED": norm.centred,
        "DOTS": "DOTS" not in call.operands,
        "GRADIENT": gradient,
        "WITH_DSCALE": gradient and norm.with_dscale,
        "WITH_DBIAS": gradient and norm.with_dbias,
        **call.flags(norm.scale_offset),
    }
    scalars = scalars_of(call.compute, norm.scale_offset, n if count is None else count)
    if 0 in call.row_shape:
        sums = [jnp.zeros(owners * n, call.compute)] * columns
        return call.empty() + sums
    row_bytes = columns * n * call.compute.itemsize
    most = max(1, _MAX_PARTIAL_BYTES // row_bytes) if columns else _MAX_GRID
    if call.inner != 1:
        grid = min(most, strided_blocks(call.outer, n, call.inner, call.target))
        call.partial_sums(grid, columns)
        done = call.strided("norm_backward_strided.cu", macros, scalars, grid)
    else:
        read = [call.operands[k].dtype.itemsize for k in ("DY", "X", "DH") if k in call.operands]
        steps = _BACKWARD_CENTRED if norm.centred and columns == 2 else ()
        layout = timed_backward(call, steps, sum(read), 1 + norm.centred)
        if layout is None:
            layout = backward_layout(
                n,
                max(call.moving_bytes()),
                call.target,
                rows=call.outer,
                read_bytes=sum(read),
                compute=call.compute,
                residual="DH" in call.operands,
                whole_rows=call.whole_rows,
                sums=1 + norm.centred,
            )
            if layout is None:
                return None
            if norm.centred or macros["WITH_DBIAS"]:
                layout = eased_backward(call, columns + norm.has_scale, layout)
        grid = layout.persistent_blocks(call.target, cluster=call.whole_rows)
        grid = min(layout.blocks_for(call.outer), grid, most)
        if call.examples:  # rows of a block are of one example
            own = layout.blocks_for(call.outer // call.examples)
            grid = call.examples * max(1, min(own, grid // call.examples))
        if call.heads > 1:  # rows of a group of threads are of one head
            unit = call.heads // math.gcd(call.heads, layout.block_rows)
            grid = max(grid // unit, 1) * unit
        depth, shared = layout.pipeline(
            call.target, sum(read), call.compute, cluster=call.whole_rows
        )
        macros |= call.owners()
        macros |= {"STAGES": depth, "SHARED_BYTES": shared}
        macros |= {"HOLD": layout.hold, "SHARE_WEIGHT": layout.share}
        sums = grid if call.heads == 1 else grid * layout.block_rows
        call.partial_sums(sums, columns)
        done = call.rows("norm_backward.cu", macros, scalars, layout, grid, shared)
    if columns:
        at = list(call.results).index("PARTIAL")
        partial = done[at].reshape(-1, owners * columns * n)
        sums = partial[0] if len(partial) == 1 else column_sum(launch, call.target, partial)
        if columns > 1 and owners > 1:  # those of a head, or an example, are one after another
            sums = sums.reshape(owners, columns, n).swapaxes(0, 1).reshape(-1)
        done[at : at + 1] = jnp.split(sums, columns) if columns > 1 else [sums]
    return done


def timed_forward(call: Call, steps: Sequence[Step]) -> RowLayout | None:
    """The layout of one of `steps`, where rows fill the device once."""
    layout = _timed(call, steps)
    return layout if layout and call.outer >= layout.least_rows(call.target) else None


def timed_backward(
    call: Call, steps: Sequence[Step], read_bytes: int, sums: int
) -> RowLayout | None:
    """The layout of one of `steps`, where there are more rows than multiprocessors."""
    layout = _timed(call, steps)
    if layout is None or call.outer <= call.target.multiprocessors:
        return None
    layout = dataclasses.replace(layout, sums=sums)
    options = {"compute": call.compute, "cluster": call.whole_rows}
    return layout if layout.fits(call.target, read_bytes=read_bytes, **options) else None


def _timed(call: Call, steps: Sequence[Step]) -> RowLayout | None:
    """They were timed in float32, and without a residual."""
    if call.compute.itemsize == 8 or not call.whole_rows or {"RESIDUAL", "DH"} & set(call.operands):
        return None
    return timed_layout(call.features, max(call.moving_bytes()), call.target, steps)


def timed_layout(n: int, itemsize: int, target: Target, steps: Sequence[Step]) -> RowLayout | None:
    """The layout of one of `steps` for rows of n elements that move 16 bytes at a time."""
    vector = vector_size(n, itemsize)
    return layout_of(steps, n, vector, target) if vector * itemsize == 16 else None


def eased_forward(call: Call, layout: RowLayout) -> RowLayout:
    """Leaves a kernel that also has a mean or bias the registers it needs, as
    `eased_backward` does."""

    def spills() -> bool:
        held = layout.chunks * layout.vector * max(call.moving_bytes()) // _WORD
        return layout.registers < 36 + layout.thread_rows * (8 + held)

    layout = dataclasses.replace(layout, hold=False)  # the kernel reads its parameters late
    while spills() and layout.min_blocks > 1 and layout.min_blocks * layout.threads > MAX_THREADS:
        layout = dataclasses.replace(layout, min_blocks=layout.min_blocks - 1)
    while spills() and layout.thread_rows > 1:
        layout = dataclasses.replace(layout, thread_rows=layout.thread_rows // 2)
    while spills() and layout.min_blocks > 1:
        layout = dataclasses.replace(layout, min_blocks=layout.min_blocks - 1)
    return layout


def eased_backward(call: Call, columns: int, layout: RowLayout) -> RowLayout:
    """Leaves a kernel that keeps `columns` vectors of parameters in registers those it needs.

    What spilled would pass through the cache again: fewer blocks to a multiprocessor, or more to a
    row, with as much of it on its way. The numbers are what NVRTC's assembler needs for sm_90, for
    bfloat16 of 512 to 65536 features.
    """

    def spills() -> bool:
        vectors = layout.chunks * layout.vector
        held = columns * vectors * call.compute.itemsize // _WORD
        if layout.hold:
            held += 2 * vectors * max(call.moving_bytes()) // _WORD
        return layout.registers < held + 32

    while spills() and layout.min_blocks > 1:
        layout = dataclasses.replace(layout, min_blocks=layout.min_blocks - 1)
    if spills() and layout.max_stages > 1:
        layout = dataclasses.replace(layout, hold=False)
    if spills() and 1 < layout.slices <= MAX_CLUSTER // 2 and call.whole_rows:
        chunks = -(-layout.chunks // 2)
        slices = -(-layout.features // (chunks * layout.vector * layout.row_threads))
        stages = 2 * layout.max_stages
        layout = dataclasses.replace(layout, chunks=chunks, slices=slices, max_stages=stages)
    return layout


def _backward_in_one_launch(call: Call, scale_offset) -> list[jax.Array] | None:
    """Launches rms_norm_backward_in_one_launch.cu, where rows are few and contiguous."""
    if call.inner != 1 or call.heads > 1 or call.examples or 0 in call.row_shape:
        return None
    read = sum(call.operands[name].dtype.itemsize for name in ("DY", "X"))
    layout = one_launch_layout(
        call.features,
        max(call.moving_bytes()),
        call.target,
        rows=call.outer,
        read_bytes=read,
        residual="DH" in call.operands,
    )
    if layout is None:
        return None
    call.result("DSCALE", (call.features,), call.compute)
    return call.launch(
        "rms_norm_backward_in_one_launch.cu",
        layout.macros() | call.flags(scale_offset),
        call.results,
        ints=(call.outer,),
        **scalars_of(call.compute, scale_offset, call.features),
        grid=layout.blocks_for(call.outer),
        block=layout.rows.threads,
        shared=layout.shared(call.compute),
    )


def named(rest, **present) -> dict[str, Any]:
    """Names the operands: each is given, or taken from `rest` if True, or absent if False."""
    left = list(rest)
    named = {}
    for name, value in present.items():
        if value is True:
            named[name] = left.pop(0)
        elif value is not False:
            named[name] = value
    return named


def scalars_of(compute: jnp.dtype, *values: float) -> dict[str, tuple[float, ...]]:
    return {"doubles" if compute == jnp.float64 else "floats": values}
