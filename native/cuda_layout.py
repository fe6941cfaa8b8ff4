"""How CUDA threads share rows: the numbers behind the macros of `kernels/row.cuh`.

What is fast is known from measurements (`benchmarks/results`), and written here as a few rules on
the number of elements a thread holds, so that every row length has a layout, not only the measured
ones.
"""

import dataclasses
import math

import numpy as np

from normfuse.native.device import Target

WARP = 32
MAX_THREADS = 1024
MAX_CLUSTER = 8
_REGISTERS = 65536  # of a multiprocessor, given to whole fours of warps
_RESERVED_BYTES = 1024  # of shared memory, that CUDA takes from every block


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Threads on rows of contiguous elements; `kernels/row.cuh` says what each number is.

    `hold` and `max_stages` are the backward kernel's alone.
    """

    features: int
    vector: int
    chunks: int
    row_threads: int
    block_rows: int = 1
    slices: int = 1
    min_blocks: int = 1
    hold: bool = False
    max_stages: int = 4

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
        return -(-rows // self.block_rows)

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
        return inboxes + 2 * self.block_rows * slots * compute.itemsize

    def pipeline(
        self, target: Target, read_bytes: int, compute: np.dtype, *, cluster: bool
    ) -> tuple[int, int]:
        """Rows on their way to a block of the backward kernel, and its shared memory in bytes.

        Args:
          read_bytes: what is read for one element.
        """
        sums = _round_up(self.sum_bytes(compute, cluster=cluster), 16)
        stage = self.threads * self.chunks * self.vector * read_bytes
        depth, shared = 0, sums
        for depth in range(self.max_stages, 0, -1):
            shared = sums + depth * stage
            if (shared + _RESERVED_BYTES) * self.min_blocks <= target.shared_memory:
                break
        dscale = self.block_rows * self.tile * compute.itemsize if self.block_rows > 1 else 0
        return depth, max(shared, dscale)

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


def forward_registers(compute: np.dtype, residual: bool) -> tuple[int, ...]:
    """What a thread of rms_norm_forward.cu needs to hold 1, 2, ... vectors of a row unspilled."""
    if compute.itemsize == 8:
        return (64, 64, 80, 96)
    return (40, 48, 64, 64) if residual else (32, 32, 40, 40, 64, 64, 64, 64)


def forward_layout(
    features: int,
    itemsize: int,
    target: Target,
    *,
    registers: tuple[int, ...],
    whole_rows: bool,
) -> RowLayout | None:
    """A layout whose threads hold a few vectors of a row, so that many blocks fit at a time.

    Args:
      itemsize: bytes of the widest element that moves.
      registers: what a thread needs to hold 1, 2, ... vectors of a row.
      whole_rows: a row's blocks must form one cluster; otherwise each may work alone.
    Returns: None if a row is longer than a block, or a cluster, can hold.
    """
    vector = vector_size(features, itemsize)
    vectors, most = features // vector, len(registers)
    if vectors <= WARP * min(4, most):  # a warp or less has the row, and needs no barrier
        row_threads = min(WARP, _power_of_two(vectors))
        chunks = -(-vectors // row_threads)
        return _fill(
            RowLayout(features, vector, chunks, row_threads, 128 // row_threads), registers
        )
    slices = 1 if whole_rows else -(-vectors // (256 * min(4, most)))
    while slices == 1 or not whole_rows or (target.clusters and slices <= MAX_CLUSTER):
        part = -(-vectors // slices)
        for limit, most_chunks in ((512, min(4, most)), (MAX_THREADS, most)):
            choices = [c for c in (2, 1, 3, 4, 6, 8) if c <= most_chunks and c * limit >= part]
            if choices:
                chunks = min(choices, key=lambda c: c * _round_up(-(-part // c), WARP))
                row_threads = _round_up(-(-part // chunks), WARP)
                slices = -(-vectors // (row_threads * chunks))
                return _fill(
                    RowLayout(features, vector, chunks, row_threads, slices=slices), registers
                )
        slices *= 2
    return None


def backward_layout(
    features: int,
    itemsize: int,
    target: Target,
    *,
    read_bytes: int,
    compute: np.dtype,
    whole_rows: bool,
) -> RowLayout | None:
    """A layout of blocks that give a multiprocessor 1024 threads, for a persistent grid.

    A thread has the scale and dscale of its columns in registers, up to 16 of them (8 in float64),
    and shared memory has two rows or more of every block.

    Args:
      read_bytes: what is read for one element.
      compute: the compute type.
      The others are those of `forward_layout`.
    """
    vector = vector_size(features, itemsize)
    budget = target.shared_memory - 8 * _RESERVED_BYTES
    fits = [e for e in (16, 8, 4, 2, 1) if 2 * MAX_THREADS * e * read_bytes <= budget]
    held = max(vector, min(fits[0], 64 // compute.itemsize))
    if _row_threads(features, held // 2) <= 512 and held // 2 >= vector:
        held //= 2  # short rows: fewer elements to a thread, so that it can hold them
    row_threads = _row_threads(features, held)
    registers = held * (read_bytes + 2 * compute.itemsize) // 4
    layout = RowLayout(features, vector, held // vector, row_threads, hold=registers <= 28)
    if row_threads <= 512:
        return _blocks(dataclasses.replace(layout, block_rows=512 // row_threads))
    if not whole_rows:
        return _sliced(layout, -(-features // (512 * held)))
    for threads in (512, MAX_THREADS):
        slices = _power_of_two(-(-features // (threads * held)))
        if slices == 1 or (target.clusters and slices <= MAX_CLUSTER):
            return _sliced(layout, slices)
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


def _sliced(layout: RowLayout, slices: int) -> RowLayout:
    held = layout.chunks * layout.vector
    row_threads = _row_threads(-(-layout.features // slices), held)
    slices = -(-layout.features // (row_threads * held))
    return _blocks(dataclasses.replace(layout, row_threads=row_threads, slices=slices))


def _blocks(layout: RowLayout) -> RowLayout:
    """As many blocks as 1024 threads are; a block takes registers for whole fours of warps."""
    blocks = max(1, MAX_THREADS // _round_up(layout.threads, 4 * WARP))
    return dataclasses.replace(layout, min_blocks=blocks)


def _row_threads(features: int, held: int) -> int:
    needed = -(-features // held)
    return _power_of_two(needed) if needed <= WARP else _round_up(needed, WARP)


def _fill(layout: RowLayout, registers: tuple[int, ...]) -> RowLayout:
    """As many blocks to a multiprocessor as its registers allow."""
    needed, blocks = registers[layout.chunks - 1], 2048 // layout.threads
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
