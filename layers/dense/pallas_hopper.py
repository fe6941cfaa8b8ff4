"""The matrix product on Hopper: bulk copies into shared memory, wgmma, and the epilogue on sums
that never left the registers.

One block a multiprocessor takes tiles of the result in turn. Of its three warpgroups one fetches
the next pieces of x and w while two multiply, each its half of the tile; when a tile's sums are
complete those two apply bias and activation to them, piece by piece, and store through shared
memory, while the third fetches for the next tile. Pallas's Mosaic GPU backend schedules the copies.
Copies from beyond an operand's end read zeros, those to beyond it write nothing: tiles need not
fit. But operands must be whole pieces of shared memory, 8 x 64: others are padded.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...native.pallas.lowering import Target
from ...native.pallas.tiles import Ref, cdiv, result_type

_SIDE = 64  # a tile is stored in pieces of this side; shared memory holds two in flight
_WARPGROUPS = 2
# JAX 0.10 asks for an index, which later versions deprecate
_PARAMETERS = inspect.signature(plgpu.load).parameters
EVERY = [()] * ("idx" in _PARAMETERS and _PARAMETERS["idx"].default is inspect.Parameter.empty)


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the product is cut."""

    rows: int = 128  # rows and columns of a warpgroup's tile
    columns: int = 128
    split: str = "columns"  # or "rows": a block's two warpgroups divide these
    depth: int = 64  # columns of x and rows of w that one fetch takes
    stages: int = 4  # fetches in flight or in use
    width: int = 16  # neighbouring tiles, which share w in the cache, before the next step across

    @property
    def block(self) -> tuple[int, int]:
        """The tile of a block."""
        two = {"rows": (_WARPGROUPS, 1), "columns": (1, _WARPGROUPS)}[self.split]
        return self.rows * two[0], self.columns * two[1]


_LARGE = Shape()
_MIDDLE = Shape(rows=64, split="rows", stages=6)
_SMALL = Shape(rows=64, columns=64, stages=8)
_NARROW = Shape(rows=64, columns=64, split="rows", stages=8)  # no copy is wider than the operand


def shape_for(m: int, n: int, cores: int) -> Shape:
    """Returns the shape that should take least time: see benchmarks/results for the measurements.

    The multiprocessors that take most tiles decide. A tile's time is that of its products and of
    fetching their operands.
    """
    if n <= _SIDE:
        return _NARROW

    def time(shape):
        rows, columns = shape.block
        tiles = cdiv(cdiv(m, rows) * cdiv(n, columns), cores)
        return tiles * (rows * columns + 64 * (rows + columns))

    return min((_LARGE, _MIDDLE, _SMALL), key=time)


def run(
    target: Target, x: Array, w: Array, bias: Sequence[Array], epilogue: Callable, results: int
) -> list[Array]:
    """Returns the `results` of `epilogue(x · w, *bias)`: see `pallas.serve`."""
    m, n = x.shape[0], w.shape[1]
    shape = shape_for(m, n, target.cores)
    rows = 8 if m >= shape.block[0] else shape.block[0]
    x, w = _padded(x, (rows, 64)), _padded(w, (64, 64))
    steps = [cdiv(size, b) for size, b in zip((m, n), shape.block)]
    across = steps[1] * shape.block[1]
    bias = [jnp.pad(b, (0, across - n)) for b in bias]  # it is read directly: no reads past its end
    made = plgpu.kernel(
        functools.partial(_kernel, shape=shape, steps=steps, epilogue=epilogue, biases=len(bias)),
        out_type=[result_type((x.shape[0], w.shape[1]), x.dtype)] * results,
        grid=(target.cores,),
        grid_names=("blocks",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=x.dtype == jnp.bfloat16,  # tanh to 2^-11: a quarter of a rounding of 1
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(x, w, *bias)
    return [r[:m, :n] for r in made]


def _padded(array: Array, multiples: tuple[int, int]) -> Array:
    """Puts zeros after `array`, up to multiples."""
    padding = [(0, -size % multiple) for size, multiple in zip(array.shape, multiples)]
    return jnp.pad(array, padding) if any(after for _, after in padding) else array


def _transforms(columns: int, dtype: jnp.dtype) -> tuple[Any, Any]:
    """Returns the layout of a piece in shared memory that wgmma and bulk copies agree on."""
    swizzle = plgpu.find_swizzle(columns * dtype.itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def _kernel(
    x: Ref, w: Ref, *refs: Ref, shape: Shape, steps: Any, epilogue: Callable, biases: int
) -> None:
    bias, outs = refs[:biases], refs[biases:]
    block_m, block_n = shape.block
    transforms = _transforms(shape.depth, x.dtype)
    spec = functools.partial(
        plgpu.BlockSpec, memory_space=plgpu.SMEM, delay_release=1, transforms=transforms
    )

    def pipeline(body, context):
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(cdiv(x.shape[1], shape.depth),),
            memory_registers=40,
            in_specs=[
                spec((block_m, shape.depth), lambda i: (0, i)),
                spec((shape.depth, block_n), lambda i: (i, 0)),
            ],
            wg_axis="warpgroup",
            num_compute_wgs=_WARPGROUPS,
            max_concurrent_steps=shape.stages,
            compute_context=context,
        )

    nothing = lambda *_, **__: None

    def scope(buffers, staging):
        mine = lax.axis_index("warpgroup")
        own_m = own_n = slice(None)
        if shape.split == "rows":
            own_m = pl.ds(mine * shape.rows, shape.rows)
        else:
            own_n = pl.ds(mine * shape.columns, shape.columns)

        @plgpu.nd_loop((steps[0] * steps[1],), collective_axes="blocks")
        def _(loop):
            i, j = plgpu.planar_snake(loop.index[0], tuple(steps), 0, shape.width)
            rows, columns = pl.ds(i * block_m, block_m), pl.ds(j * block_n, block_n)

            def multiply(_, x_piece, w_piece, sums):
                plgpu.wgmma(sums, x_piece.at[own_m], w_piece.at[:, own_n])
                plgpu.wgmma_wait(1)
                return sums

            def tile(evaluate):
                def with_sums(sums):
                    some = range(0, shape.columns, _SIDE)
                    parts = [ref.at[columns].at[own_n] for ref in bias]
                    # loaded while the first pieces are fetched
                    own = [{at: _bias(part.at[pl.ds(at, _SIDE)]) for at in some} for part in parts]
                    evaluate(sums)
                    to = [ref.at[rows, columns].at[own_m, own_n] for ref in outs]
                    _finish(sums[...], own, to, staging.at[mine], epilogue)

                size = shape.rows, shape.columns
                pl.run_scoped(with_sums, plgpu.WGMMAAccumulatorRef(size, jnp.float32))

            pipeline(multiply, tile)(x.at[rows, :], w.at[:, columns], allocations=buffers)

    transforms, size = _transforms(_SIDE, x.dtype), (_WARPGROUPS, 2, _SIDE, _SIDE)
    pl.run_scoped(
        scope,
        buffers=pipeline(nothing, nothing).get_allocations(x, w),
        staging=plgpu.SMEM(size, x.dtype, transforms=transforms),
        collective_axes="warpgroup",
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _finish(sums: Array, bias: Any, outs: list[Ref], staging: Ref, epilogue: Callable) -> None:
    """Applies the epilogue to a tile's sums piece by piece, and stores each."""
    m, n = sums.shape
    slot = 0
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has long been written
    for column in range(0, n, _SIDE):
        some = slice(column, column + _SIDE)
        for row in range(0, m, _SIDE):
            b = [lax.broadcast_in_dim(of[column], (_SIDE, _SIDE), (1,)) for of in bias]
            for ref, value in zip(outs, epilogue(sums[row : row + _SIDE, some], *b)):
                value = value.astype(ref.dtype)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the other slot may be in flight
                staging[slot] = value
                plgpu.commit_smem()
                where = pl.ds(row, _SIDE), pl.ds(column, _SIDE)
                plgpu.copy_smem_to_gmem(staging.at[slot], ref.at[where])
                slot = 1 - slot


def _bias(ref: Ref) -> Array:
    """Returns a piece of the bias, in the registers that hold the sums it is for."""
    return plgpu.load(ref, *EVERY, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
