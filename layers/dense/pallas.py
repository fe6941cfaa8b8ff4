"""A dense layer in one Pallas kernel (`implementation="pallas"`): product, bias and activation.

    y = activation(x · kernel + bias)

It serves arrays of one device: by pipelined blocks on TPUs and, interpreted, on CPUs, and on Hopper
GPUs by bulk copies into shared memory, wgmma, and an epilogue on sums that never left the
registers. Its backward is that of ordinary operations: XLA's products, and the activation's
gradient from z = x · kernel + bias, which the kernel also writes where something is differentiated.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...native.dtypes import compute_dtype
from ...native.implementation import BEST, Order, Unsupported, report
from ...native.kernel import Kernel
from ...native.pallas import lowering
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import Ref, before, cdiv, clear, result_type
from ..core.activations import SCALARS, Activation, Scalar, scalar_of
from ..core.op import Op, Split, equally_varying, match, tangents_of
from . import epilogue
from .epilogue import Epilogue, finish
from .matmul import matmul

# ---------------------------------------------------------------- activations within a kernel

# erf(x) = x P(x²) / Q(x²) for |x| < 3.75, highest power first; it is 1 in float32 beyond.
_ERF_P = (2.2905065e-4, 3.4082910e-3, 5.0955695e-2, 1.8520832e-1, 1.1283791)
_ERF_Q = (-1.1791603e-7, 2.3547966e-5, 1.0179625e-3, 1.4070470e-2, 1.1098505e-1, 4.9746925e-1, 1.0)
_ERF_ONE = 3.7439211
# erf(x) = x S(2 (x / 3.2)² − 1) for |x| < 3.2, to 1.4e-5: no division, which takes GPUs long.
_SHORT = (-5.8029973e-3, 1.4789448e-2, -1.7704743e-2, 2.7749924e-2, -5.3089137e-2, 8.2372638e-2)
_SHORT += (-1.1403461e-1, 1.5416110e-1, -2.1728352e-1, 4.4133758e-1)
_SHORT_ONE = 3.2


def _polynomial(x: Array, coefficients: Sequence[float]) -> Any:
    return functools.reduce(lambda sum, c: sum * x + c, coefficients[1:], coefficients[0])


def _erf(x: Array, short: bool) -> Array:
    x = jnp.clip(x, -_SHORT_ONE, _SHORT_ONE) if short else jnp.clip(x, -_ERF_ONE, _ERF_ONE)
    square = x * x
    if short:
        return x * _polynomial(square * (2 / _SHORT_ONE**2) - 1.0, _SHORT)
    return x * (_polynomial(square, _ERF_P) / _polynomial(square, _ERF_Q))


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(x: Array) -> Array:
    u = jnp.exp(-jnp.abs(x))
    v = 1.0 + u  # log(1 + u) is log(v) · u / (v − 1): the rounding of v cancels (Kahan)
    log = jnp.where(v == 1.0, u, jnp.log(v) * u / jnp.where(v == 1.0, 1.0, v - 1.0))
    return jnp.maximum(x, 0.0) + log


def _expm1(x: Array) -> Array:
    """e^x − 1 for x up to 0."""
    t = jnp.tanh(0.5 * x)
    return 2.0 * t / (1.0 - t)


# The activations whose functions in plain JAX have operations that some Pallas back end misses.
_WITHIN: dict[str, Callable[[Array, bool], Array]] = {
    "elu": lambda x, _: jnp.where(x > 0, x, _expm1(jnp.minimum(x, 0.0))),
    "gelu": lambda x, short: 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5), short)),
    "mish": lambda x, _: x * jnp.tanh(_softplus(x)),
    "quick_gelu": lambda x, _: x * _sigmoid(1.702 * x),
    "relu": lambda x, _: jnp.maximum(x, 0.0),
    "sigmoid": lambda x, _: _sigmoid(x),
    "silu": lambda x, _: x * _sigmoid(x),
    "softplus": lambda x, _: _softplus(x),
    "squared_relu": lambda x, _: jnp.maximum(x, 0.0) * jnp.maximum(x, 0.0),
    "gelu_tanh": lambda x, _: (
        0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    ),
}


def activation_within(function: Scalar, *, short: bool = False) -> Callable[[Array], Array]:
    """Returns an activation by operations that every Pallas back end has, for float32.

    Where `short`, erf is right to five digits: for results that bfloat16 rounds to three.
    """
    within = _WITHIN.get(function.name)
    return function if within is None else lambda x: within(x, short)


# ---------------------------------------------------------------- the kernel, on matrices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """The static description of the layer."""

    op: str = "dense"  # the function the user called
    function: Scalar | None = None  # the activation
    contract: int = 0  # the kernel's summed axis
    has_bias: bool = False
    keep: bool = False  # return z too
    precision: str | None = None  # the product's precision


def define(spec: Dense, x: Array, w: Array, *bias: Array) -> list[Array]:
    """`(x (m, k), w (k, n)[, bias (n,)]) -> y[, z]`: z = x · w + bias, y = activation(z).

    x and w have one dtype, which y and z are rounded to; the rest is float32 (or float64).
    """
    compute = compute_dtype(x.dtype)
    z = lax.dot(x, w, precision=spec.precision, preferred_element_type=compute)
    for b in bias:
        z = z + b.astype(compute)
    y = z if spec.function is None else spec.function(z)
    return [y.astype(x.dtype), *[z.astype(x.dtype)] * spec.keep]


def run(target: Target, spec: Dense, x: Array, w: Array, *bias: Array) -> list[Array]:
    """`define` by the platform's kernel.

    Raises:
      Unsupported: for GPUs and dtypes that no kernel takes.
    """
    lowering.require_dtypes(target, x.dtype)
    hopper = target.capability == 90 and x.dtype.itemsize == 2
    if target.gpu and not hopper:
        raise Unsupported(
            "on GPUs the Pallas matrix product needs compute capability 9.0 and operands of "
            "bfloat16 or float16"
        )
    function = spec.function
    if function is not None and not target.interpret:
        function = activation_within(function, short=hopper and x.dtype == jnp.bfloat16)

    def epilogue(sums: Array, *bias: Array) -> list[Array]:
        z = sums + bias[0] if bias else sums
        y = z if function is None else function(z)
        return [y, z] if spec.keep else [y]

    wide = [b.astype(compute_dtype(x.dtype)) for b in bias]
    # On Hopper 16-bit operands are multiplied exactly, and summed in float32.
    by = _on_hopper if hopper else functools.partial(_on_blocks, precision=spec.precision)
    return by(target, x, w, wide, epilogue, 1 + spec.keep)


kernel = Kernel("dense", define, {"pallas": run})

_M, _N, _K = 512, 512, 512  # float32: 1 MiB each of x, w, the sums and y, most of them twice


def _on_blocks(
    target: Target,
    x: Array,
    w: Array,
    bias: Sequence[Array],
    epilogue: Callable[..., list[Array]],
    results: int,
    *,
    precision: str | None,
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (m, k), n, compute = x.shape, w.shape[1], compute_dtype(x.dtype)
    tm, tn, tk = (min(size, tile) for size, tile in zip((m, n, k), (_M, _N, _K)))
    steps = cdiv(k, tk)

    def kernel(x_ref, w_ref, *refs):
        sums = refs[-1]
        step = pl.program_id(2)
        pl.when(step == 0)(lambda: clear(sums))
        x, w = x_ref[...], w_ref[...]
        if k % tk:  # beyond the end lies anything, even infinities: set both sides to zero
            x, w = before(x, k - step * tk, 1), before(w, k - step * tk, 0)
        sums[...] += lax.dot(x, w, precision=precision, preferred_element_type=compute)

        @pl.when(step == steps - 1)
        def _():
            values = epilogue(sums[...], *[ref[...] for ref in refs[: len(bias)]])
            for ref, value in zip(refs[len(bias) : -1], values):
                ref[...] = value.astype(ref.dtype)

    out = pl.BlockSpec((tm, tn), lambda i, j, s: (i, j))
    return pl.pallas_call(
        kernel,
        grid=(cdiv(m, tm), cdiv(n, tn), steps),
        in_specs=[
            pl.BlockSpec((tm, tk), lambda i, j, s: (i, s)),
            pl.BlockSpec((tk, tn), lambda i, j, s: (s, j)),
            *[pl.BlockSpec((1, tn), lambda i, j, s: (0, j))] * len(bias),
        ],
        out_specs=[out] * results,
        out_shape=[result_type((m, n), x.dtype)] * results,
        scratch_shapes=[pltpu.VMEM((tm, tn), compute)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=target.interpret,
        name="pallas_dense",
    )(x, w, *[b[None] for b in bias])


# ---------------------------------------------------------------- on Hopper GPUs
# One block a multiprocessor takes tiles of the result in turn. Of its three warpgroups one fetches
# the next pieces of x and w while two multiply, each its half of the tile; when a tile's sums are
# complete those two apply bias and activation to them, piece by piece, and store through shared
# memory, while the third fetches for the next tile. Pallas's Mosaic GPU backend schedules the
# copies. Copies from beyond an operand's end read zeros, those to beyond it write nothing: tiles
# need not fit. But operands must be whole pieces of shared memory, 8 x 64: others are padded.

_SIDE = 64  # a tile is stored in pieces of this side; shared memory holds two in flight
_WARPGROUPS = 2


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


def _on_hopper(
    target: Target,
    x: Array,
    w: Array,
    bias: Sequence[Array],
    epilogue: Callable[..., list[Array]],
    results: int,
) -> list[Array]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

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
    from jax.experimental.pallas import mosaic_gpu as plgpu

    swizzle = plgpu.find_swizzle(columns * dtype.itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def _kernel(
    x: Ref, w: Ref, *refs: Ref, shape: Shape, steps: Any, epilogue: Callable, biases: int
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

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
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

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
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # JAX 0.10 asks for an index, which later versions deprecate
    index = inspect.signature(plgpu.load).parameters.get("idx")
    every = [()] * (index is not None and index.default is inspect.Parameter.empty)
    return plgpu.load(ref, *every, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


# ---------------------------------------------------------------- the operation
# x (*rows, k), kernel of any rank[, bias] -> y[, z], both (*rows, *outs)


def define_on_arrays(spec: Dense, x: Array, w: Array, *bias: Array) -> list[Array]:
    """The layer as XLA's product and what follows it, which are split over a mesh."""
    z = matmul(x, w, dtype=x.dtype, contract=spec.contract)
    z = finish(z, bias[0] if bias else None, None, x.dtype)
    function = spec.function and spec.function.function
    return [finish(z, None, function, x.dtype), *[z] * spec.keep]


def _body(spec: Dense, split: Split, x: Array, w: Array, *bias: Array, order: Order) -> list[Array]:
    """One device's arrays as matrices."""
    del split
    w = jnp.moveaxis(w.astype(x.dtype), spec.contract, 0)
    rows, outs = x.shape[:-1], w.shape[1:]
    flat = [x.reshape(math.prod(rows), x.shape[-1]), w.reshape(w.shape[0], math.prod(outs))]
    flat += [b.reshape(-1) for b in bias]
    empty = 0 in x.shape or 0 in w.shape
    results = define(spec, *flat) if empty else kernel(spec, *flat, order=order)
    return [r.reshape(*rows, *outs) for r in results]


def _batch(
    op: Op, args: Any, dims: Any, *, spec: Dense, order: Order
) -> tuple[list[Array], list[int]]:
    """A batch of x is one more dimension of rows, the first: x's last is the summed one."""
    x_dim, *others = dims
    if all(dim is None for dim in others):
        results = op(spec, jnp.moveaxis(args[0], x_dim, 0), *args[1:], order=order)
    else:
        reason = "vmap over kernels is a batched product, which XLA computes"
        report(spec.op, reason, strict=order.strict, names=order.names)
        results = jax.vmap(functools.partial(op.plain, spec), tuple(dims))(*args)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, *, spec: Dense, order: Order) -> Any:
    kept = replace(spec, keep=spec.keep or spec.function is not None)
    results = layer(kept, *primals, order=order)
    moved = tangents_of(
        layer, _gradients, kept, primals, tangents, results, results[1:], order=order
    )
    return results[: 1 + spec.keep], moved[: 1 + spec.keep]


def _gradients(
    spec: Dense, cts: Any, operands: Any, z: Any, wanted: Sequence[bool], *, order: Order
) -> list[Any]:
    """Returns those of x, the kernel and the bias: two products, and one pass before them."""
    del order
    (x, kernel, *bias), (dy, *dz) = operands, cts
    if dy is None or any(d is not None for d in dz):  # in a second derivative
        results, pull = jax.vjp(functools.partial(layer.plain, spec), *operands)
        return list(pull([jnp.zeros_like(r) if ct is None else ct for r, ct in zip(results, cts)]))
    found: list[Any] = [dy]
    if spec.function is not None:
        ndim = x.ndim + kernel.ndim - 2
        axes = tuple(range(x.ndim - 1, ndim)) if bias else ()
        after = Epilogue(
            op=spec.op,
            function=spec.function,
            axes=axes,
            has_bias=bool(bias),
            out_dtype=x.dtype.name,
        )
        shift = [match(jnp.zeros_like(b), z[0], axes) for b in bias]  # z has the bias already
        here = [True, *wanted[2:]]
        found = epilogue.gradients(after, [dy], [*z, *shift], (), here, order=BEST)
    elif bias:
        add = lambda y, shift: finish(y, shift, None, x.dtype)
        found = [*jax.vjp(add, dy, jnp.zeros_like(bias[0]))[1](dy)]
    product = functools.partial(matmul, dtype=x.dtype, contract=spec.contract)
    of_x = jax.vjp(lambda x: product(x, kernel), x)[1] if wanted[0] else None
    of_kernel = jax.vjp(lambda kernel: product(x, kernel), kernel)[1] if wanted[1] else None
    pulled = [pull(found[0])[0] if pull else None for pull in (of_x, of_kernel)]
    return [*pulled, *found[1:]]


layer = Op("dense_layer", define_on_arrays, body=_body, batch=_batch, jvp=_jvp)


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    contract: int = 0,
    order: Order,
) -> Array:
    """Returns `activation(x · kernel + bias)` for x `(*rows, n)`, rounded once to `dtype`.

    The kernel has any rank; its axis `contract` has n elements, and the others, which are the
    bias's, follow x's rows in the result. `order` says which kernels to try.

    Raises:
      NotImplementedError: if no kernel of a strict `order` can serve, or for an activation that is
        not one of `SCALARS`.
    """
    function = scalar_of(activation)
    if activation is not None and function not in SCALARS.values():
        raise NotImplementedError(
            "dense: implementation='pallas' has kernels for the activations with names alone, got "
            f"{activation!r}; use 'xla'"
        )
    precision = jax.config.jax_default_matmul_precision
    has_bias = bias is not None
    spec = Dense(function=function, contract=contract, has_bias=has_bias, precision=precision)
    biases = [] if bias is None else [bias.astype(compute_dtype(dtype))]
    return layer(spec, *equally_varying(x.astype(dtype), kernel, *biases), order=order)[0]
