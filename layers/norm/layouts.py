"""How threads share rows in the norms' CUDA kernels: measured layouts as data, and their search.

The fastest layouts are known from measurements (`benchmarks/results`), and written here as ladders
on the length of a row, so that every length has a layout, not only the measured ones. Rows enough
for every block that fits take those; other rows take a ladder of how many vectors a thread can
hold. A layout is None for rows that no block, or cluster of blocks, can hold.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...native.launch import RESERVED_BYTES, Target

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
        return self.row_threads * self.block_rows

    @property
    def tile(self) -> int:
        return self.row_threads * self.vector * self.chunks

    @property
    def registers(self) -> int:
        """Registers, of 4 bytes, that each thread can have."""
        threads = self.min_blocks * round_up(self.threads, 4 * WARP)
        return min(248, REGISTERS // threads // 8 * 8)

    def blocks_for(self, rows: int) -> int:
        """Blocks along the rows that cover `rows` once."""
        return -(-rows // (self.block_rows * self.thread_rows))

    def fills(self, target: Target, rows: int) -> bool:
        """Returns True if so many rows fill the device once."""
        blocks = max(1, target.multiprocessors * self.min_blocks // self.slices)
        return rows > (blocks - 1) * self.block_rows * self.thread_rows

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

    def memory(self, target: Target) -> int:
        """Shared memory for each of the blocks that a multiprocessor has at once."""
        return (target.shared_memory + RESERVED_BYTES) // self.min_blocks - RESERVED_BYTES

    def fits(self, rows: "Rows") -> bool:
        """Returns True if two rows of every block fit in shared memory."""
        return self._shared(2, rows) <= self.memory(rows.target)

    def pipeline(self, rows: "Rows") -> tuple[int, int]:
        """Rows on their way to a block of the backward kernel, and its shared memory in bytes."""
        depth, most = self.max_stages, self.memory(rows.target)
        while depth > 2 and self._shared(depth, rows) > most:
            depth -= 1
        return depth, self._shared(depth, rows)

    def _shared(self, depth: int, rows: "Rows") -> int:
        """Shared memory of a block with `depth` rows on their way; dscale is there in the end."""
        itemsize, elements = rows.compute.itemsize, self.threads * self.chunks * self.vector
        sums = round_up(self.sum_bytes(rows.compute, cluster=rows.whole), _LINE)
        if self.share:
            sums += elements * itemsize
        dscale = self.block_rows * self.tile * itemsize if self.block_rows > 1 else 0
        return max(sums + depth * elements * rows.read_bytes, dscale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a launch, as far as the search for a layout knows them."""

    features: int  # elements of a row
    itemsize: int  # bytes of the widest element that moves
    target: Target
    rows: int  # their number
    compute: np.dtype = np.dtype("float32")  # the type of sums
    residual: bool = False  # a residual, or its gradient, is added
    whole: bool = True  # a row's blocks must form one cluster; otherwise each may work alone
    centred: bool = False  # rows have a mean, and so two sums at a time
    parameters: int = 0  # vectors of them that a thread has: gradients and scale in the backward
    gradients: int = 0  # those of them that are gradients
    bias: bool = False  # the forward has a bias
    read_bytes: int = 4  # that the backward reads for an element of a row

    @functools.cached_property
    def vector(self) -> int:
        """Elements that move together: 16 bytes of the widest type, or what divides the row."""
        return math.gcd(self.features, 16 // self.itemsize)

    @functools.cached_property
    def vectors(self) -> int:
        return self.features // self.vector

    @property
    def aligned(self) -> bool:
        """True if vectors have 16 bytes."""
        return self.vector * self.itemsize == 16

    @property
    def timed(self) -> bool:
        """True if layouts of norms with a mean or a bias were timed on such rows."""
        return self.compute.itemsize == 4 and self.whole and self.aligned and not self.residual


class Step(NamedTuple):
    """A layout for rows of at most `vectors` vectors of 16 bytes."""

    vectors: int
    chunks: int
    slices: int = 1
    fill: int = 0  # target threads per block
    blocks: int = 1  # to a multiprocessor
    threads: int = 0  # to a multiprocessor, in place of `blocks`
    registers: int = 0  # that a thread has at least, in place of `blocks`
    hold: bool = False
    rows: int = 1  # to a thread at once: the forward kernel's alone
    stages: int = 2  # the backward kernel's alone
    persistent: bool = False  # this and the rest as in `RowLayout`
    share: bool = False
    ahead: bool = False

    def layout(self, features: int, vector: int, sums: int = 1) -> RowLayout:
        """For a row of so many features, `vector` of which move together."""
        vectors = features // vector
        row_threads = threads_for(-(-vectors // self.slices), self.chunks)
        block_rows = max(1, self.fill // row_threads)
        threads, blocks = row_threads * block_rows, self.blocks
        if self.threads or self.registers:
            blocks = max(1, (self.threads or MOST_THREADS) // threads)
        layout = RowLayout(
            features,
            vector,
            self.chunks,
            row_threads,
            block_rows,
            slices=-(-vectors // (row_threads * self.chunks)),
            min_blocks=blocks,
            hold=self.hold,
            max_stages=self.stages,
            thread_rows=self.rows,
            sums=sums,
            persistent=self.persistent,
            share=self.share,
            ahead=self.ahead,
        )
        return _fewer_blocks(layout, lambda layout: layout.registers >= self.registers)


def _fewer_blocks(layout: RowLayout, enough: Callable[[RowLayout], bool]) -> RowLayout:
    """Returns the layout with as many blocks to a multiprocessor as are `enough`, or with one."""
    while layout.min_blocks > 1 and not enough(layout):
        layout = replace(layout, min_blocks=layout.min_blocks - 1)
    return layout


def threads_for(vectors: int, chunks: int) -> int:
    """Threads of a row, each with so many of its vectors: a power of two, or whole warps."""
    needed = -(-vectors // chunks)
    return power_of_two(needed) if needed <= WARP else round_up(needed, WARP)


def power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---------------------------------------------------------------- the forward's layouts

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
_FORWARD_FEW_ROWS = (Step(1056, chunks=3, hold=True, fill=128, threads=1024),)

# Ladders for other rows, or for a block's part of one: the registers that a thread needs for so
# many vectors, unspilled. With a residual three vectors a thread were best, or within 2 % of it, up
# to 12288 features of bfloat16, and fewer blocks that hold the scale 1 to 2 % faster. Longer rows
# need more vectors to a thread, because two or three blocks of 512 threads hide what one of 1024
# cannot: it loads, adds up and stores by turns.
_HELD = (
    Step(1, chunks=1, fill=128, registers=32),
    Step(64, chunks=2, fill=128, registers=32),  # a warp or less has the row, without a barrier
    Step(1056, chunks=3, fill=128, registers=40),
    Step(1536, chunks=4, registers=48),
    Step(3072, chunks=6, registers=48),
    Step(8192, chunks=8, registers=64),
)
_HELD_RESIDUAL = (
    Step(1, chunks=1, fill=128, registers=48),
    Step(64, chunks=2, fill=128, registers=64),
    Step(128, chunks=2, fill=128, registers=64, hold=True),
    Step(1056, chunks=3, fill=128, registers=80, hold=True),
    Step(1536, chunks=3, registers=56),
    Step(4096, chunks=4, registers=64),
)
_HELD_DOUBLE = (
    Step(1, chunks=1, fill=128, registers=64),
    Step(128, chunks=2, fill=128, registers=64),
    Step(1536, chunks=3, fill=128, registers=80),
    Step(4096, chunks=4, registers=96),
)

# ---------------------------------------------------------------- the backward's layouts

# Measured on an H200 (benchmarks/results): each is the best, or within 1 % of the best, among some
# 150 that were timed at 256, 1024, 2048, 4096, 7168, 8192, 12288, 16384, 18432 and 32768 features
# of bfloat16, or of 20 to 40 at 1280, 1408, 1536, 1792, 2240, 2560, 2880, 3072,
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
# Devices of these names take these steps for rows of 2 bytes an element. With an H100's memory, of
# 3.0 TB/s in place of 4.2, the steps above reach .91 to .94 of the copy rate, and others .95 to
# 1.01 that are slow on an H200: it wants fewer copies on their way at once. Of some 170 timed at
# each of 256, 1024, 2048, 4096, 5120, 8192 and 32768 features of bfloat16; other lengths have the
# steps above.
_BACKWARD_ON = {
    "NVIDIA H100 80GB HBM3": (
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
}
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

# ---------------------------------------------------------------- the search

_Steps = Sequence[Step]
_Accepts = Callable[[RowLayout], bool]


def _search(
    rows: Rows, tables: Sequence[tuple[_Steps, _Accepts]], ladder: _Steps, part: int, fits: _Accepts
) -> tuple[RowLayout | None, _Steps]:
    """Returns the first layout of `tables` that is accepted, or one of `ladder`, and its steps.

    Where no step of the ladder holds a row it is shared by two blocks, four and so on; from the
    beginning by as many as have `part` vectors each, if these need not form a cluster.
    """
    shape, clusters = (rows.features, rows.vector, 1 + rows.centred), rows.target.clusters
    for steps, accepts in tables:
        step = next((step for step in steps if rows.vectors <= step.vectors), None)
        layout = step and step.layout(*shape)
        if layout and (layout.slices == 1 or (clusters and rows.whole)) and accepts(layout):
            return layout, steps
    slices = 1 if rows.whole else -(-rows.vectors // part)
    while slices == 1 or not rows.whole or (clusters and slices <= MAX_CLUSTER):
        held = -(-rows.vectors // slices)
        if step := next((step for step in ladder if held <= step.vectors), None):
            layout = _fewer_blocks(step._replace(slices=slices).layout(*shape), fits)
            if fits(layout):
                return layout, ladder
        slices *= 2
    return None, ladder


def forward_layout(rows: Rows) -> RowLayout | None:
    """Returns a layout whose threads hold a few vectors of a row, so that many blocks fit."""
    timed = _FORWARD_CENTRED if rows.centred else _FORWARD_BIAS if rows.bias else ()
    double, most = rows.compute.itemsize == 8, rows.target.multiprocessors
    fills = lambda layout: layout.fills(rows.target, rows.rows)
    at_once = lambda layout: layout.blocks_for(rows.rows) <= most * layout.min_blocks
    always = lambda layout: True
    tables = [(timed, fills)] if rows.timed else []
    if 2 * WARP < rows.vectors <= _FORWARD_FEW_ROWS[0].vectors:
        plain = [(_FORWARD_FEW_ROWS, at_once), (_FORWARD, always)]
    else:
        plain = [(_FORWARD, fills)]
    if not (double or rows.residual):
        tables += plain
    ladder = _HELD_DOUBLE if double else _HELD_RESIDUAL if rows.residual else _HELD
    layout, steps = _search(rows, tables, ladder, MAX_THREADS, always)
    eases = layout and steps is not timed and (rows.centred or rows.bias)
    return _eased_forward(rows, layout) if layout and eases else layout


def backward_layout(rows: Rows) -> RowLayout | None:
    """Returns a layout of a few blocks to a multiprocessor, for a persistent grid.

    A thread has the scale and dscale of its columns in registers, and shared memory has two rows or
    more of every block.
    """
    fits, tables = lambda layout: layout.fits(rows), []
    both = rows.timed and rows.centred and rows.gradients == 2
    if both and rows.rows > rows.target.multiprocessors:
        tables.append((_BACKWARD_CENTRED, fits))
    if rows.aligned and rows.whole:
        tables.append((_backward_steps(rows), fits))
    # Other rows: what threads can hold, and 1024 threads to a multiprocessor.
    most = max(1, 64 // rows.compute.itemsize // rows.vector)
    step = Step(512, 1, fill=512, registers=64, stages=4)
    ladder = [step._replace(vectors=512 * chunks, chunks=chunks) for chunks in range(1, most)]
    ladder.append(step._replace(vectors=MAX_THREADS * most, chunks=most))
    layout, steps = _search(rows, tables, ladder, 512 * most, fits)
    eases = steps is not _BACKWARD_CENTRED and (rows.centred or rows.bias)
    return _eased_backward(rows, layout) if layout and eases else layout


def _backward_steps(rows: Rows) -> _Steps:
    few = rows.rows <= rows.target.multiprocessors and rows.target.clusters
    if few and 2 * WARP < rows.vectors <= _BACKWARD_FEW_ROWS[-1].vectors:
        return _BACKWARD_FEW_ROWS
    if rows.residual:
        return _BACKWARD_RESIDUAL
    return _BACKWARD_ON.get(rows.target.name if rows.itemsize == 2 else "", _BACKWARD)


# Spilled registers would pass through the cache again. NVRTC's assembler needs these numbers for
# sm_90, for bfloat16 of 512 to 65536 features.


def _eased_forward(rows: Rows, layout: RowLayout) -> RowLayout:
    """Leaves a kernel that also has a mean or bias the registers it needs; it reads its parameters
    late, and has fewer blocks to a multiprocessor, or fewer rows to a thread."""
    held = layout.chunks * layout.vector * rows.itemsize // _WORD
    enough = lambda layout: layout.registers >= 36 + layout.thread_rows * (8 + held)
    few = lambda layout: enough(layout) or layout.min_blocks * layout.threads <= MAX_THREADS
    layout = _fewer_blocks(replace(layout, hold=False), few)
    while layout.thread_rows > 1 and not enough(layout):
        layout = replace(layout, thread_rows=layout.thread_rows // 2)
    return _fewer_blocks(layout, enough)


def _eased_backward(rows: Rows, layout: RowLayout) -> RowLayout:
    """Leaves a kernel that keeps vectors of parameters in registers those it needs, by fewer blocks
    to a multiprocessor, or more to a row, with as much of it on its way."""

    def enough(layout: RowLayout) -> bool:
        held = rows.parameters * rows.compute.itemsize + 2 * layout.hold * rows.itemsize
        return layout.registers >= 32 + layout.chunks * layout.vector * held // _WORD

    layout = _fewer_blocks(layout, enough)
    if not enough(layout) and layout.max_stages > 1:
        layout = replace(layout, hold=False)
    if not enough(layout) and 1 < layout.slices <= MAX_CLUSTER // 2 and rows.whole:
        chunks = -(-layout.chunks // 2)
        slices = -(-layout.features // (chunks * layout.vector * layout.row_threads))
        stages = 2 * layout.max_stages
        layout = replace(layout, chunks=chunks, slices=slices, max_stages=stages)
    return layout


# ---------------------------------------------------------------- the backward of few rows
# The kernel is rms_norm_backward_in_one_launch.cu. Where dy and x stay in the cache they can be
# read twice, by blocks that make dx and by others that make dscale: a second launch, which adds up
# each block's part of dscale, costs more.


_CACHED_BYTES = 16 << 20  # dy's and x's: beyond, one reading and a second launch are faster


def one_launch_layout(rows: Rows) -> tuple[RowLayout, int] | None:
    """Returns a layout of the blocks that make dx, and how many threads of the others are side by
    side along a row; None where another kernel is faster, or rows are too long.

    Measured on an H200: within 4 % of the best of some 50, but for 17 % at 1024 features and as
    many rows or more. `rows.read_bytes` are those of dy and x.
    """
    vectors, most = rows.vectors, rows.target.multiprocessors
    if rows.rows * rows.features * rows.read_bytes > _CACHED_BYTES or vectors > 2 * MAX_THREADS:
        return None
    few = rows.rows <= most  # only the way through one row counts
    chunks = 4 if vectors >= 1024 or (few and vectors >= 512) else 2
    fill = 128 if few else 512 if vectors <= 256 and rows.rows > 2 * most else 256
    layout = Step(vectors, chunks, fill=fill).layout(rows.features, rows.vector)
    if layout.block_rows == 1 and layout.threads <= 256 and not rows.residual:
        layout = replace(layout, min_blocks=2)
    lanes = 4  # many blocks, each with many threads over the rows
    if vectors > 768:
        lanes = 16 if few or vectors > 1024 else 8 if rows.rows <= 2 * most else 4
    return layout, min(WARP, max(lanes, 64 // (rows.vector * rows.itemsize)))
