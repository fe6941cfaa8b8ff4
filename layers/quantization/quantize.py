"""Quantizing an array on any mesh: the codes of a sharded array have one scale.

An array is a matrix whose rows are its dimensions before `split`, and its columns the others. Its
maximum is that of all devices, so that a mesh gives the result of one device. C++ on CPUs and CUDA
on NVIDIA GPUs compute what the definition says, bit for bit.

Codes are passed on as bytes: `jax.checkpoint` rounds floating arrays that it keeps, and it takes
float8_e4m3fn, which has numbers to 448, for a format that ends at 240 (jax-ml/jax#22244).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...native.compiler import Source
from ...native.dtypes import CUDA_TYPES
from ...native.implementation import BEST, Order
from ...native.kernel import Kernel
from ...native.launch import Target, call_host, launch
from ..core.op import Batching, Derivative, Dims, Op, Placement, Split, in_places

# ---------------------------------------------------------------- definition, in plain JAX
# Integer operations, since the platforms' own conversions to FP8 differ for numbers beyond the
# format, and in whether subnormal numbers are zero.

_LARGEST_SHIFT = 100  # scales are 2^-100 or more: subnormal numbers become zero
_NAN = 0x7F
_FLOAT32_NAN = 0x7FC00000


@dataclasses.dataclass(frozen=True)
class Format:
    dtype: str  # its name in JAX
    # mantissa_bits, exponent_bias: of a code.
    mantissa_bits: int
    exponent_bias: int
    largest: float  # its largest number
    beyond: float  # the smallest float32 that rounds beyond the largest number


E4M3 = Format("float8_e4m3fn", 3, 7, 448.0, 464.00003)
E5M2 = Format("float8_e5m2", 2, 15, 57344.0, 61440.0)
FORMATS = {format.dtype: format for format in (E4M3, E5M2)}


@dataclasses.dataclass(frozen=True)
class Codes:
    """The static description of a quantized matrix."""

    dtype: str = "float8_e4m3fn"  # the format's name
    # has_q, has_qt: whether the codes as they lie and their transpose are results.
    has_q: bool = True
    has_qt: bool = True
    op: str = "quantize"  # the function the user called
    # Of an array: how many leading dimensions are the matrix's rows, and whether vmap's dimension
    # joins them, under one scale; otherwise each of the stacked arrays has a scale of its own.
    split: int = 1
    rows: bool = True

    @property
    def results(self) -> tuple[bool, bool, bool]:
        return self.has_q, self.has_qt, True


def define_amax(x: jax.Array) -> list[jax.Array]:
    """`(x,) -> (maximum (1,),)`: the largest magnitude among finite elements, float32."""
    bits = _magnitude_bits(x.astype(jnp.float32))
    finite = jnp.where(bits < 0x7F800000, bits, 0)
    largest = jnp.max(finite, initial=0)
    return [_as_float(largest).reshape(1)]


def define_cast(codes: Codes, x: jax.Array, maxima: jax.Array) -> list[jax.Array]:
    """`(x, maxima) -> ([q,] [qt,] scale (1,))`."""
    format = FORMATS[codes.dtype]
    bound = _as_float(jnp.max(_magnitude_bits(maxima), initial=0))
    shift = exponent_of(bound, format)
    finite = _magnitude_bits(bound) < 0x7F800000
    nan = _as_float(jnp.int32(_FLOAT32_NAN))
    multiplier = jnp.where(finite, _as_float((127 + shift) << 23), nan)
    q = encode(x.astype(jnp.float32) * multiplier, format)
    results = [q] * codes.has_q + [q.T] * codes.has_qt
    return [*results, scale_of(bound, format).reshape(1)]


def define_quantize(codes: Codes, x: jax.Array) -> list[jax.Array]:
    """`(x,) -> ([q,] [qt,] scale (1,))` with the maximum of x as its bound."""
    return define_cast(codes, x, *define_amax(x))


def exponent_of(bound: jax.Array, format: Format) -> jax.Array:
    """The largest k ≤ 100 with bound · 2^k ≤ format.largest, for a finite bound."""
    bits = _magnitude_bits(bound)
    largest = format.exponent_bias + (format.dtype == "float8_e4m3fn")  # the largest number's
    shift = largest + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    return jnp.minimum(shift, _LARGEST_SHIFT)


def scale_of(bound: jax.Array, format: Format) -> jax.Array:
    """2^-k of `exponent_of`; NaN for a bound that is not finite."""
    finite = _magnitude_bits(bound) < 0x7F800000
    scale = _as_float((127 - exponent_of(bound, format)) << 23)
    return jnp.where(finite, scale, _as_float(jnp.int32(_FLOAT32_NAN)))


def encode(values: jax.Array, format: Format) -> jax.Array:
    """The codes of float32 numbers: nearest, ties to even; NaN beyond the format."""
    shift = 23 - format.mantissa_bits
    magic = (127 + 24 - format.exponent_bias - format.mantissa_bits) << 23
    smallest_normal = (128 - format.exponent_bias) << 23
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    top = bits & 0x7FFFFFFF
    rebased = top - smallest_normal + (1 << 23)
    normal = (rebased + ((1 << (shift - 1)) - 1) + (rebased >> shift & 1)) >> shift
    # A number below the smallest normal is added to one whose last bit is the smallest subnormal.
    below = jnp.minimum(_as_float(top), _as_float(jnp.int32(smallest_normal)))
    subnormal = jax.lax.bitcast_convert_type(below + _as_float(jnp.int32(magic)), jnp.int32) - magic
    code = jnp.where(top < smallest_normal, subnormal, normal) | (bits >> 24 & 0x80)
    fits = top < jax.lax.bitcast_convert_type(jnp.float32(format.beyond), jnp.int32)
    code = jnp.where(fits, code, _NAN).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(code, jnp.dtype(format.dtype))


def _magnitude_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def _as_float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


# ---------------------------------------------------------------- kernels, on matrices

_ROWS, COLUMNS = 16, 8  # a thread's part of a tile
AMAX_THREADS = 512
AMAX_BLOCKS = 4  # for each multiprocessor
AMAX_UNROLL = 4  # vectors of 16 bytes that a thread loads together
_LARGE = 7 << 25  # bytes: more tiles than the multiprocessors take in a few rounds


@dataclasses.dataclass(frozen=True)
class CastLayout:
    """How the threads of quantize_cast.cu share a matrix."""

    # width, height: threads of a block along columns (8 each) and rows (16 each).
    width: int = 16
    height: int = 8
    batch: int = 8  # rows of a thread that are loaded together
    min_blocks: int = 6  # registers must suffice for so many blocks of a multiprocessor
    group: int = 8  # rows of tiles that are taken together

    def blocks(self, rows: int, columns: int) -> int:
        return -(-rows // (_ROWS * self.height)) * -(-columns // (COLUMNS * self.width))

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a tile takes to be transposed."""
        return self.held(1)

    def held(self, itemsize: int) -> int:
        """Bytes of shared memory that a tile takes as it is stored, at least those of its codes."""
        return self.width * self.height * _ROWS * COLUMNS * itemsize


def cast_layout(rows: int, columns: int, itemsize: int, target: Target) -> CastLayout:
    """The layout that was measured to be best on an H200 (benchmarks/results)."""
    if target.capability == 90 and rows * columns * itemsize >= _LARGE:
        return CastLayout(width=32, batch=8, min_blocks=2, group=2)
    batch = 8 if itemsize == 2 else 4
    # Without an instruction that rounds to FP8 a thread needs more registers.
    blocks = 6 if target.capability >= 90 and itemsize == 2 else 4
    return CastLayout(batch=batch, min_blocks=blocks)


def tile_macros(layout: CastLayout, codes: Codes, rows: int, columns: int) -> dict[str, int]:
    """The macros of fp8_tile.cuh."""
    return {
        "E5M2": int(codes.dtype == "float8_e5m2"),
        "HAS_Q": int(codes.has_q),
        "HAS_QT": int(codes.has_qt),
        "BLOCK_X": layout.width,
        "BLOCK_Y": layout.height,
        "BATCH": layout.batch,
        "MIN_BLOCKS": layout.min_blocks,
        "VECTORS": int(rows % 16 == 0 and columns % 16 == 0),
    }


def launch_amax(
    target: Target,
    source: str | Source,
    kernel: str,
    arrays: Sequence[jax.Array],
    macros: dict[str, Any],
    *,
    count: tuple[int, ...] = (),
    unroll: int,
) -> jax.Array:
    """Launches a kernel whose blocks, at least one, each find the largest of `count` magnitudes.

    Returns: `(*count, blocks)`; a block of an empty array finds 0.
    """
    x = arrays[0]
    wanted = -(-x.size * x.dtype.itemsize // (16 * AMAX_THREADS * unroll))
    blocks = max(1, min(wanted, AMAX_BLOCKS * target.multiprocessors))
    (maxima,) = launch(
        source,
        kernel,
        arrays,
        [jax.ShapeDtypeStruct((*count, blocks), jnp.float32)],
        target=target,
        macros=macros | {"THREADS": AMAX_THREADS, "UNROLL": unroll},
        grid=blocks,
        block=AMAX_THREADS,
        ints=(x.size,),
    )
    return maxima


def cuda_maxima(target: Target, x: jax.Array) -> jax.Array:
    """The largest magnitude that each block finds; the largest of them is that of x."""
    kernel, macros = ("quantize_amax.cu", "quantize_amax"), {"X_TYPE": CUDA_TYPES[x.dtype.name]}
    return launch_amax(target, *kernel, [x], macros, unroll=AMAX_UNROLL)


def _cuda_amax(target: Target, codes: Codes, x: jax.Array) -> list[jax.Array]:
    maxima = cuda_maxima(target, x)
    return [maxima if maxima.size == 1 else jnp.max(maxima, keepdims=True)]


def cuda_cast(target: Target, codes: Codes, x: jax.Array, maxima: jax.Array) -> list[jax.Array]:
    rows, columns = x.shape
    layout = cast_layout(rows, columns, x.dtype.itemsize, target)
    macros = {"X_TYPE": CUDA_TYPES[x.dtype.name]} | tile_macros(layout, codes, rows, columns)
    return launch(
        "quantize_cast.cu",
        "quantize_cast",
        [x, maxima],
        code_types(codes, rows, columns),
        target=target,
        macros=macros,
        grid=layout.blocks(rows, columns),
        block=layout.width * layout.height,
        shared=layout.shared if codes.has_qt else 0,
        ints=(rows, columns, maxima.size, layout.group),
    )


def cuda_quantize(target: Target, codes: Codes, x: jax.Array) -> list[jax.Array]:
    """Two launches: every block of the second takes the maximum of the first one's maxima."""
    return cuda_cast(target, codes, x, cuda_maxima(target, x))


def cpu_amax(codes: Codes, x: jax.Array) -> list[jax.Array]:
    return call_host("normfuse_quantize_amax", [x], [jax.ShapeDtypeStruct((1,), jnp.float32)])


def cpu_cast(codes: Codes, x: jax.Array, maxima: jax.Array) -> list[jax.Array]:
    flags: Any = {"has_q": codes.has_q, "has_qt": codes.has_qt}
    types = code_types(codes, *x.shape)
    return call_host("normfuse_quantize_cast", [x, maxima], types, **flags)


def _cpu_quantize(codes: Codes, x: jax.Array) -> list[jax.Array]:
    return cpu_cast(codes, x, *cpu_amax(codes, x))


def code_types(codes: Codes, rows: int, columns: int) -> list[jax.ShapeDtypeStruct]:
    """The results of a cast: [q,] [qt,] scale."""
    shapes = [(rows, columns)] * codes.has_q + [(columns, rows)] * codes.has_qt
    types = [jax.ShapeDtypeStruct(shape, jnp.dtype(codes.dtype)) for shape in shapes]
    return [*types, jax.ShapeDtypeStruct((1,), jnp.float32)]


INPUTS = ("float32", "bfloat16", "float16")

MULTIPLE = 16  # cuBLASLt's FP8 products need multiples of it in every dimension


def fits(*dimensions: int) -> bool:
    """Returns whether the product of matrices with these dimensions can run in FP8."""
    return all(isinstance(n, int) and n > 0 and n % MULTIPLE == 0 for n in dimensions)


def no_second_derivative(primals: Any, tangents: Any, *, spec: Any, order: Any) -> Any:
    """The tangent rule of operations that have none: a TypeError that says what to do."""
    del primals, tangents, order
    raise TypeError(  # `choose` reads NotImplementedError as "try another implementation"
        f"{spec.op}: quantization='fp8' has first derivatives only; take second ones of the layer "
        "with quantization=None"
    )


def _types(codes: Codes, x: Any, *_: Any) -> list[jax.ShapeDtypeStruct]:
    return code_types(codes, *x.shape)


amax_kernel = Kernel(
    "quantize_amax", lambda codes, x: define_amax(x), {"cpu": cpu_amax, "cuda": _cuda_amax}
)
cast_kernel = Kernel(
    "quantize_cast", define_cast, {"cpu": cpu_cast, "cuda": cuda_cast}, types=_types
)
quantize_kernel = Kernel("quantize", define_quantize, {"cpu": _cpu_quantize, "cuda": cuda_quantize})
"""`(x,) -> ([q,] [qt,] scale (1,))` with the maximum of x as its bound."""


# ---------------------------------------------------------------- the operation


class Quantized(NamedTuple):
    """`x ≈ scale · decoded(q)`."""

    q: Any  # uint8, of x's shape; None where it was not asked for
    qt: Any  # its transpose, the columns' dimensions before the rows'; None where not asked for
    scale: Array  # (), float32, a power of two


def _matrix(spec: Codes, x: Array) -> Array:
    return x.reshape(math.prod(x.shape[: spec.split]), math.prod(x.shape[spec.split :]))


def _restored(spec: Codes, x: Array, results: list[Array]) -> list[Array]:
    *codes, scale = results
    shapes = [t.shape for t in _array_types(spec, x)[:-1]]
    shaped = [as_bytes(c.reshape(s)) for c, s in zip(codes, shapes, strict=True)]
    return [*shaped, scale.reshape(())]


def _array_types(spec: Codes, x: Any) -> list[jax.ShapeDtypeStruct]:
    shapes = [x.shape] * spec.has_q
    shapes += [(*x.shape[spec.split :], *x.shape[: spec.split])] * spec.has_qt
    types = [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes]
    return [*types, jax.ShapeDtypeStruct((), jnp.float32)]


def as_bytes(codes: Array) -> Array:
    return jax.lax.bitcast_convert_type(codes, jnp.uint8)


def decoded(codes: Array, dtype: str = "float8_e4m3fn") -> Array:
    """Returns bytes as the FP8 codes that they are; codes of another dtype as they are."""
    return jax.lax.bitcast_convert_type(codes, dtype) if codes.dtype == jnp.uint8 else codes


def _body(spec: Codes, split: Split, x: Array, *, order: Order) -> list[Array]:
    """`(x,) -> ([q,] [qt,] scale ())`."""
    matrix, every = _matrix(spec, x), range(x.ndim)
    if not any(split.axes):
        return _restored(spec, x, quantize_kernel(spec, matrix, order=order))
    (maximum,) = amax_kernel(spec, matrix, order=order)
    # Bits order non-negative numbers as their values do. XLA joins reductions of one dtype, so it
    # joins those of all kernels, which wait for nothing, with none that waits for an activation.
    reduced = jnp.float32 if spec.rows else jnp.int32
    maximum = split.pmax(jax.lax.bitcast_convert_type(maximum, reduced), every)
    maximum = jax.lax.bitcast_convert_type(maximum, jnp.float32)
    return _restored(spec, x, cast_kernel(spec, matrix, maximum, order=order))


def _dims(spec: Codes, ndim: int) -> Dims:
    every = tuple(range(ndim))
    qt = (*every[spec.split :], *every[: spec.split])
    return (every,), (*[every] * spec.has_q, *[qt] * spec.has_qt, ())


def _batch(op: Op, args: Any, dims: Any, *, spec: Codes, order: Order) -> Any:
    (x,), (dim,) = args, dims
    if not spec.rows:
        results = jax.vmap(functools.partial(op.plain, spec), dim)(x)
        return results, [0] * len(results)
    columns = x.ndim - 1 - spec.split
    results = op(replace(spec, split=spec.split + 1), jnp.moveaxis(x, dim, 0), order=order)
    return results, [*[0] * spec.has_q, *[columns] * spec.has_qt, None]


op = Op(
    "quantize_array",
    None,
    Placement(_dims, _body),
    Batching(rule=_batch),
    Derivative(jvp=no_second_derivative),
    types=_array_types,
)


def kernel_codes_saveable(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: keeps the FP8 codes of kernels, two bytes an element.

    Without it a rematerialised layer quantizes its kernel twice a step.
    """
    return primitive is op.primitive and not params["spec"].rows


def quantize(
    x: Array, codes: Codes, *, split: int, rows: bool = True, order: Order = BEST
) -> Quantized:
    """Returns the codes of `x`, of a kernel where not `rows`; see `Codes`."""
    *layouts, scale = op(replace(codes, split=split, rows=rows), x, order=order)
    q, qt, _ = in_places(layouts, (codes.has_q, codes.has_qt, False))
    return Quantized(q, qt, scale)
