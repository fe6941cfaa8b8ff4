"""How CUDA threads share rows: the numbers behind the macros of `kernels/row.cuh`.

What is fast is known from measurements (`benchmarks/results`), and written here as a few rules on
the number of elements a thread holds, so that every row length has a layout, not only the measured
ones.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from normfuse.native.device import Target

WARP = 32
MAX_THREADS = 1024  # of a block
MOST_THREADS = 1536  # of a multiprocessor: more were no faster, and GeForce has no more
MAX_CLUSTER = 8
_REGISTERS = 65536  # of a multiprocessor, given to whole fours of warps
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
        sums = _round_up(self.sum_bytes(compute, cluster=cluster), 16)
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


class _Step(NamedTuple):
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


@dataclasses.dataclass(frozen=True)
class Held:
    """What threads of the forward kernel have in registers."""

    registers: tuple[int, ...]  # what a thread needs for 1, 2, ... vectors of a row, unspilled
    steps: tuple[tuple[int, int], ...]  # vectors to a thread for rows of at most so many vectors
    scale: int = 0  # the longest row whose scale is held too, so that it is there when the sum is


_PLAIN = Held((32, 32, 40, 48, 48, 48, 64, 64), ((1056, 3), (1536, 4), (3072, 6), (8192, 8)))
_RESIDUAL = Held((48, 64, 80, 64), ((128, 2), (1056, 3)), scale=1056)
_LONG_RESIDUAL = Held((40, 48, 56, 64), ((1536, 3), (4096, 4)))
_DOUBLE = Held((64, 64, 80, 96), ((128, 2), (1536, 3), (4096, 4)))

# Where there are rows for every block that fits. Found with benchmarks/layouts.py on an H200
# (docs/kernels.md): each is the best, or within 1 % of it, of 100 to 300 that were timed at some 20
# lengths of bfloat16 rows. What they have in common: 512 to 1024 threads of a multiprocessor have
# many registers each, so that the scale is there when a sum is, and two rows share it.
_FORWARD = (
    _Step(32, chunks=2, rows=2, hold=True, fill=512, blocks=2),
    _Step(128, chunks=1, rows=2, hold=True, fill=128, threads=MOST_THREADS),
    _Step(256, chunks=2, hold=True, threads=MOST_THREADS),
    _Step(320, chunks=3, rows=2, hold=True, threads=512),
    _Step(448, chunks=2, rows=2, hold=True, threads=768),
    _Step(512, chunks=4, hold=True, threads=768),
    _Step(640, chunks=2, rows=2, hold=True, threads=768),
    _Step(896, chunks=4, hold=True, threads=896),
    _Step(1536, chunks=4, rows=2, hold=True, blocks=2),
    _Step(2048, chunks=4, hold=True, blocks=2),
    _Step(2400, chunks=5, blocks=3),
    _Step(3072, chunks=6, rows=2, hold=True),
    _Step(4096, chunks=4, rows=2),
    _Step(8192, chunks=4, rows=4, hold=True, slices=4),
    _Step(16384, chunks=4, rows=4, hold=True, slices=8),
    _Step(32768, chunks=6, slices=8, blocks=2),
)
# Where all rows are on their way at once only the way through one counts: three vectors a thread,
# and the scale is read with them.
_FORWARD_FEW_ROWS = _Step(1056, chunks=3, hold=True, fill=128, threads=1024)


def forward_held(vectors: int, compute: np.dtype, residual: bool) -> Held:
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

    Args:
      itemsize: bytes of the widest element that moves.
      compute: the compute type.
      whole_rows: a row's blocks must form one cluster; otherwise each may work alone.
    Returns: None if a row is longer than a block, or a cluster, can hold.
    """
    vector = vector_size(features, itemsize)
    vectors = features // vector
    held = forward_held(vectors, compute, residual)
    if held is _PLAIN:
        layout = _plain_layout(features, vector, target, rows, whole_rows)
        if layout is not None:
            return layout
    if vectors <= 2 * WARP:  # a warp or less has the row, and needs no barrier
        row_threads = min(WARP, _power_of_two(-(-vectors // 2)))
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


def _held_layout(features: int, vector: int, slices: int, held: Held) -> RowLayout:
    """The layout of `held.steps` for a row in so many parts."""
    vectors = features // vector
    part = -(-vectors // slices)
    chunks = next(chunks for most, chunks in held.steps if part <= most)
    fill, hold = (128 if slices == 1 else 0), vectors <= held.scale
    step = _Step(vectors, chunks, slices, fill, hold=hold, stages=0)
    return _fill(step.layout(features, vector), held.registers)


# Found with benchmarks/layouts.py on an H200 (docs/kernels.md): each is the best, or within 1 % of
# it, of some 150 that were timed at 256, 1024, 2560, 4096, 5120, 7168, 8192, 12288, 16384, 18432
# and 32768 features of bfloat16. What they have in common: a multiprocessor has few threads (256 to
# 1024) in one block or two, each with many registers; more blocks cost 5 to 15 %. Rows of 16384 and
# more take two blocks, of 288 to 352 threads each.
_BACKWARD = (
    _Step(192, chunks=1, fill=128, blocks=6, hold=True),
    _Step(512, chunks=2, fill=512, hold=True, stages=3),
    _Step(640, chunks=6, blocks=2, hold=True),
    _Step(896, chunks=2, slices=2, blocks=2, stages=3),
    _Step(1024, chunks=1, hold=True),
    _Step(1536, chunks=2),
    _Step(2112, chunks=3, slices=2, stages=3),
    _Step(2816, chunks=4, slices=2, stages=3),
    _Step(3520, chunks=5, slices=2, stages=3),
    _Step(4224, chunks=6, slices=2, hold=True),
    _Step(8192, chunks=2, slices=8, blocks=2, stages=3),
)
_BACKWARD_RESIDUAL = (
    _Step(512, chunks=2, fill=512, stages=3),
    _Step(640, chunks=1, stages=3),
    _Step(896, chunks=2, slices=2, blocks=3),
    _Step(1024, chunks=1, hold=True),
    _Step(1536, chunks=3),
    _Step(2112, chunks=3, slices=2),
    _Step(2816, chunks=4, slices=2),
    _Step(3520, chunks=5, slices=2),
    _Step(4224, chunks=6, slices=2),
    _Step(8192, chunks=2, slices=8, blocks=2),
)

# With x normalised again there are four arrays too, two of them written. At 4096 features 48
# layouts were timed (benchmarks/dense.py --norm-sweep): those that read a row twice from shared
# memory reach .94 to .97 of the copy rate, what is best for three arrays .79. No others were.
_BACKWARD_VALUE = (
    _BACKWARD[0],
    _Step(512, chunks=1, fill=512, blocks=2),
    *_BACKWARD_RESIDUAL[1:],
)

# Where there are no more rows than multiprocessors all are read at once, the longer ones by
# clusters of blocks of 128 threads: only the way through one row counts.
_BACKWARD_FEW_ROWS = (
    _Step(256, chunks=1, hold=True, stages=1),
    _Step(512, chunks=1, slices=4, blocks=2),
    _Step(1024, chunks=1, slices=8, blocks=2),
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
      The others are those of `forward_layout`.
    """
    vector = vector_size(features, itemsize)
    vectors = features // vector
    options = {"read_bytes": read_bytes, "compute": compute, "cluster": whole_rows}
    if vector * itemsize == 16 and whole_rows:
        steps = _BACKWARD_RESIDUAL if residual else _BACKWARD_VALUE if value else _BACKWARD
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
                min_blocks=max(1, MAX_THREADS // _round_up(row_threads * block_rows, 4 * WARP)),
                max_stages=4,
            )
            while layout.min_blocks > 1 and not layout.fits(target, **options):
                layout = dataclasses.replace(layout, min_blocks=layout.min_blocks - 1)
            if layout.fits(target, **options):
                return layout
        slices *= 2
    return None


def strided_block(features: int, inner: int) -> tuple[int, int]:
    """Threads along `inner` and along the row, for rows whose elements are `inner` apart."""
    width = min(WARP, _power_of_two(inner))
    height = min(256 // width, _power_of_two(features))
    return width, max(height, WARP // width)


def strided_blocks(outer: int, features: int, inner: int, target: Target) -> int:
    """Blocks of a persistent grid over such rows."""
    width, _ = strided_block(features, inner)
    return min(outer * -(-inner // width), 8 * target.multiprocessors)


def threads_for(vectors: int, chunks: int) -> int:
    """Threads of a row, each with so many of its vectors: a power of two, or whole warps."""
    needed = -(-vectors // chunks)
    return _power_of_two(needed) if needed <= WARP else _round_up(needed, WARP)


def _fill(layout: RowLayout, registers: tuple[int, ...]) -> RowLayout:
    """As many blocks to a multiprocessor as its registers allow."""
    needed, blocks = registers[layout.chunks - 1], MOST_THREADS // layout.threads
    while blocks > 1 and _registers(layout.threads, blocks) < needed:
        blocks -= 1
    return dataclasses.replace(layout, min_blocks=blocks)


def _registers(threads: int, blocks: int) -> int:
    """What each thread may use for `blocks` blocks to run on a multiprocessor."""
    return _REGISTERS // (blocks * _round_up(threads, 4 * WARP)) // 8 * 8


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
