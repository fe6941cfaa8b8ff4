"""A product and an activation's gradient in one kernel on Hopper, in Pallas's Mosaic GPU.

    dh = dy · w        (dz[, dup][, value]) = epilogue(dh, z[, up])

dh stays in registers. One block a multiprocessor takes tiles of it in turn. Of its three
warpgroups one fetches, into a ring of slots in shared memory, the pieces of dy and w that a tile
sums over and after them, into the same slots, the tile's pieces of z and up; two multiply, each its
half of the tile's columns, and then apply the epilogue piece by piece. So z and up are on their way
while the last products run, and the next tile's dy and w while the epilogue does. Gradients are
written where z and up were.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...native.implementation import Unsupported
from ...native.launch import uninitialized
from ...native.pallas import portable
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import Ref, cdiv
from .epilogue import GatedScalar
from .pallas_hopper import EVERY

TILE = 128, 256  # a block computes one at a time
PIECE = 64  # depth of a step of a tile's sums, and side of an epilogue's piece
_ROWS, _COLUMNS = TILE
_DEPTH = _SIDE = PIECE
_HALF = _COLUMNS // 2  # columns of a warpgroup


def fits(m: int, n: int, k: int) -> bool:
    """Returns whether the kernel takes an (m, n) result summed over k: at least a tile, in pieces
    that bulk copies can move."""
    return m >= TILE[0] and n >= TILE[1] and not (m % 8 or n % PIECE or k % PIECE)


def run(target: Target, spec: Any, dy: Array, w: Array, *operands: Array) -> list[Array]:
    """`(dy (m, k), w, z (m, n)[, up (m, n)]) -> (dz[, dup][, value])`.

    w is (n, k) or (k, n), its axis `spec.contract` being the one of k; `spec` is a
    `product_gradient.Gradient`. Sums and all that is made of them are in float32, rounded once.

    Raises:
      Unsupported: unless on Hopper, with 16-bit operands of one dtype and sizes that fit.
    """
    if target.capability != 90:
        raise Unsupported("the fused kernel is for GPUs of compute capability 9.0")
    dtypes = {a.dtype for a in (dy, w, *operands)}
    if dtypes not in ({jnp.dtype("bfloat16")}, {jnp.dtype("float16")}):
        raise Unsupported("the fused kernel takes operands of bfloat16 alone, or of float16")
    smooth, with_value = portable.differentiable(spec.epilogue.function), spec.epilogue.with_value

    def epilogue(dh, z, *up):
        if isinstance(spec.epilogue.function, GatedScalar):
            y, pull = jax.vjp(smooth, z, *up)
            return [*pull(dh), *[y] * with_value]
        y, dz = jax.jvp(smooth, (z,), (dh * up[0] if up else dh,))
        return [dz, *[dh * y for _ in up], *[y * up[0] if up else y] * with_value]

    short = dy.dtype == jnp.bfloat16
    epilogue = portable.portable(epilogue, short=short, exact=not short)
    return multiply(target, dy, w, operands, epilogue, with_value, spec.contract)


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the product is scheduled."""

    stages: int = 4  # slots of the ring, 48 KiB each; with 3 the products wait for operands
    staging: int = 2  # results of a warpgroup on their way to memory, 8 KiB each
    width: int = 8  # tiles down before the next across: they share w in the cache


def multiply(
    target: Target,
    dy: Array,
    w: Array,
    tiles: Sequence[Array],
    epilogue: Callable[..., Sequence[Array]],
    with_value: bool,
    contract: int,
    interpret: Any = False,
) -> list[Array]:
    """Returns the gradients of `tiles`, in their places, and the value if `with_value`.

    The arrays are those of `run`; `contract` is the axis of w that has k elements, and
    `epilogue(dh, *tiles)` takes and returns pieces of 64 x 64, in float32.

    Raises:
      Unsupported: for sizes that are less than a tile or not whole pieces.
    """
    (m, k), n = dy.shape, w.shape[1 - contract]
    if not fits(m, n, k):
        raise Unsupported(
            f"the fused kernel takes at least {_ROWS} rows, in eights, {_COLUMNS} columns and sums "
            f"over multiples of {_DEPTH}; these are {m}, {n} and {k}"
        )
    blocks = {"grid": (target.cores,), "grid_names": ("blocks",)}
    kernel = pl.kernel(
        functools.partial(
            _kernel, inputs=len(tiles), shape=Shape(), epilogue=epilogue, contract=contract
        ),
        out_type=[],
        mesh=plgpu.Mesh(**blocks, num_threads=3, thread_name="warpgroup"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exponentials and reciprocals to 2^-22; tanh, in bfloat16, to 2^-11
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=interpret,
        name="dense_gradient",
    )
    places = [*tiles]
    if with_value:
        like = jax.ShapeDtypeStruct((m, n), dy.dtype)
        places.append(lax.empty((m, n), dy.dtype) if interpret else uninitialized(dy, like))
    run = pl.run_state(lambda refs: kernel(dy, w, *refs))  # pyright: ignore[reportCallIssue]
    with jax.enable_x64(False):  # indices are of 32 bits
        return list(run(places))


# The layout of 64 columns in shared memory that wgmma and bulk copies agree on.
_LAYOUT = (plgpu.TilingTransform((8, _SIDE)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


def _kernel(
    dy: Ref, w: Ref, *refs: Ref, inputs: int, shape: Shape, epilogue: Callable, contract: int
) -> None:
    """`refs` are the operands of the epilogue, whose gradients take their places, and the value."""
    (m, k), n = dy.shape, w.shape[1 - contract]
    count = cdiv(m, _ROWS), cdiv(n, _COLUMNS)
    total = k // _DEPTH + len(_pairs(inputs))  # steps of a tile

    def each_tile(body):
        """`body(row, column, first)` for this block's tiles; `first` counts the steps before."""

        @plgpu.nd_loop((count[0] * count[1],), collective_axes="blocks")
        def _(loop):
            i, j = plgpu.planar_snake(loop.index[0], count, 0, shape.width)
            body(i * _ROWS, j * _COLUMNS, loop.local_index * total)

    def scope(xs, ws, staging, filled, free):
        block = _Block(dy, w, refs, inputs, epilogue, xs, ws, filled, free, shape, contract)

        def fetch():
            plgpu.set_max_registers(40, action="decrease")
            each_tile(block.fetch)

        def multiply():
            plgpu.set_max_registers(232, action="increase")
            own = staging.at[lax.axis_index("warpgroup")]
            each_tile(functools.partial(block.multiply, own))

        lax.cond(lax.axis_index("warpgroup") == 2, fetch, multiply)

    piece = (_COLUMNS, _DEPTH) if contract else (2, _DEPTH, _HALF)
    slots = functools.partial(plgpu.SMEM, dtype=dy.dtype, transforms=_LAYOUT)
    pl.run_scoped(
        scope,
        slots((shape.stages, _ROWS, _DEPTH)),
        slots((shape.stages, *piece)),
        slots((2, shape.staging, _SIDE, _SIDE)),
        plgpu.Barrier(num_arrivals=2 if contract else 4, num_barriers=shape.stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        collective_axes="warpgroup",
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block: its operands, and the ring of slots that pieces pass through in the order of steps.

    A slot has a piece of dy, (128, 64), and one of w: (256, 64), or two of (64, 128) where w is
    (k, n). z's and up's pieces lie where those of w do, two in a slot, each half as large.
    """

    dy: Ref
    w: Ref
    refs: Sequence[Ref]  # operands of the epilogue, and the value
    inputs: int  # number of operands
    epilogue: Callable[..., Sequence[Array]]
    xs: Ref
    ws: Ref
    filled: Ref  # barriers of the copies that fill a slot,
    free: Ref  # and of the warpgroups that have read it
    shape: Shape
    contract: int

    @property
    def _steps(self) -> int:
        return self.dy.shape[1] // _DEPTH

    def _at(self, step: Any) -> Any:
        """Returns the slot of a step."""
        return lax.rem(step, self.shape.stages)

    def _claimed(self, step: Any) -> tuple[Any, Callable[..., None]]:
        """Returns the slot of a step, once its content has been read, and a function to fill it."""
        slot = self._at(step)
        pl.when(step >= self.shape.stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        return slot, functools.partial(plgpu.copy_gmem_to_smem, barrier=self.filled.at[slot])

    def _factor(self, slot: Any, half: Any) -> Ref:
        """Returns half of w's piece, as it is multiplied: (64, 128)."""
        if not self.contract:
            return self.ws.at[slot, half]
        return self.ws.at[slot, pl.ds(half * _HALF, _HALF)].transpose((1, 0))

    def _load(self, slot: Any, half: Any, at: int) -> Array:
        """Returns one of the two (64, 64) of a piece of z or up, in the registers of its sums."""
        if self.contract:
            ref = self.ws.at[slot, pl.ds(half * _HALF + at * _SIDE, _SIDE)]
        else:
            ref = self.ws.at[slot, half, :, pl.ds(at * _SIDE, _SIDE)]
        return plgpu.load(ref, *EVERY, layout=plgpu.Layout.WGMMA)

    def fetch(self, row: Any, column: Any, first: Any) -> None:
        """Copies a tile's operands into the ring."""
        whole = pl.ds(row, _ROWS), pl.ds(column, _COLUMNS)

        def summed(step, _):
            (slot, copy), piece = self._claimed(first + step), pl.ds(step * _DEPTH, _DEPTH)
            if self.contract:
                copy(self.dy.at[whole[0], piece], self.xs.at[slot])
                copy(self.w.at[whole[1], piece], self.ws.at[slot])
                return
            for half in range(2):
                rows, half_columns = pl.ds(row + half * _SIDE, _SIDE), column + half * _HALF
                copy(self.dy.at[rows, piece], self.xs.at[slot, pl.ds(half * _SIDE, _SIDE)])
                copy(self.w.at[piece, pl.ds(half_columns, _HALF)], self.ws.at[slot, half])

        lax.fori_loop(0, self._steps, summed, None)
        for step, pair in enumerate(_pairs(self.inputs)):
            slot, copy = self._claimed(first + self._steps + step)
            for half, (which, group, at) in enumerate(pair):
                tile = self.refs[which]
                if self.contract:  # all rows, 64 columns
                    columns = pl.ds(column + group * _HALF + at * _SIDE, _SIDE)
                    to = self.ws.at[slot, pl.ds(half * _HALF, _HALF)]
                    copy(tile.at[whole[0], columns], to)
                    continue
                columns, few = pl.ds(column + group * _HALF, _HALF), _SIDE // 2
                for r in range(0, _SIDE, few):  # 64 rows, all columns of the warpgroup
                    piece = tile.at[pl.ds(row + at * _SIDE + r, few), columns]
                    copy(piece, self.ws.at[slot, half, pl.ds(r, few)])

    def multiply(self, staging: Ref, row: Any, column: Any, first: Any) -> None:
        """Does a warpgroup's half of a tile."""
        mine = lax.axis_index("warpgroup")

        def with_sums(sums):
            def add(step, _):
                slot = self._at(first + step)
                plgpu.barrier_wait(self.filled.at[slot])
                plgpu.wgmma(sums, self.xs.at[slot], self._factor(slot, mine))
                plgpu.wgmma_wait(1)  # the one before has read its slot
                before = self._at(first + step + self.shape.stages - 1)
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(self.free.at[before]))

            lax.fori_loop(0, self._steps, add, None)
            values = sums[...]
            plgpu.barrier_arrive(self.free.at[self._at(first + self._steps - 1)])
            self._finish(staging, values, row, column + mine * _HALF, first + self._steps, mine)

        pl.run_scoped(with_sums, plgpu.WGMMAAccumulatorRef((_ROWS, _HALF), jnp.float32))

    def _finish(
        self, staging: Ref, sums: Array, row: Any, column: Any, first: Any, mine: Any
    ) -> None:
        """Applies the epilogue to a warpgroup's half of a tile piece by piece, and stores each."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has long been written
        turns = itertools.cycle(range(self.shape.staging))
        for at in range(2):
            slots = [self._at(first + at * self.inputs + i) for i in range(self.inputs)]
            for slot in slots:
                plgpu.barrier_wait(self.filled.at[slot])
            halves = (0, 1) if self.inputs == 2 else (mine,)
            for other in range(2):
                # Slots as in `_pairs`: two operands have one a warpgroup; one operand's is shared.
                own = self._at(first + at * self.inputs + (mine if self.inputs == 2 else 0))
                r, c = (_SIDE * i for i in ((other, at) if self.contract else (at, other)))
                operands = [self._load(own, half, other) for half in halves]
                dh = sums[r : r + _SIDE, c : c + _SIDE]
                results = self.epilogue(dh, *[o.astype(jnp.float32) for o in operands])
                results = [v.astype(self.dy.dtype) for v in results]
                where = pl.ds(row + r, _SIDE), pl.ds(column + c, _SIDE)
                self._store([ref.at[where] for ref in self.refs], results, staging, turns)
            for slot in slots:
                plgpu.barrier_arrive(self.free.at[slot])

    def _store(self, to: list[Ref], values: list[Array], staging: Ref, turns: Any) -> None:
        """Starts to write `values`, as many together as half of the staging has room for."""
        room = self.shape.staging
        some = max(1, room // 2)
        for at in range(0, len(to), some):
            group = list(zip(to[at : at + some], values[at : at + some], turns))
            plgpu.wait_smem_to_gmem(room - len(group), wait_read_only=True)
            for _, value, slot in group:
                staging[slot] = value
            plgpu.commit_smem()
            for ref, _, slot in group:
                plgpu.copy_smem_to_gmem(staging.at[slot], ref)


def _pairs(inputs: int) -> list[tuple[Any, Any]]:
    """Returns the contents of the slots after the products: two (operand, warpgroup, half) in each.

    They come in the order of use. A warpgroup's half of a tile is taken in two parts, of columns,
    or of rows if w is (k, n).
    """
    every = [(k, group, at) for at in range(2) for group in range(2) for k in range(inputs)]
    return list(zip(every[::2], every[1::2], strict=True))
