"""The quantizer in plain JAX, bit for bit the same as the kernels, on any platform.

It consists of integer operations: the platforms' own conversions to FP8 differ for numbers beyond
the format, and in whether subnormal numbers are zero.
"""

import dataclasses

import jax
import jax.numpy as jnp

_LARGEST_SHIFT = 100  # scales are 2^-100 or more: subnormal numbers become zero
_NAN = 0x7F
_FLOAT32_NAN = 0x7FC00000


@dataclasses.dataclass(frozen=True)
class Format:
    """An FP8 format."""

    dtype: str  # its name in JAX
    # mantissa_bits, exponent_bias: of a code.
    mantissa_bits: int
    exponent_bias: int
    largest: float  # its largest number
    beyond: float  # the smallest float32 that rounds beyond the largest number


E4M3 = Format("float8_e4m3fn", 3, 7, 448.0, 464.00003)
E5M2 = Format("float8_e5m2", 2, 15, 57344.0, 61440.0)
FORMATS = {format.dtype: format for format in (E4M3, E5M2)}


def define_amax(x: jax.Array) -> list[jax.Array]:
    """`(x,) -> (maximum (1,),)`: the largest magnitude among finite elements, float32."""
    bits = _magnitude_bits(x.astype(jnp.float32))
    finite = jnp.where(bits < 0x7F800000, bits, 0)
    largest = jnp.max(finite, initial=0)
    return [_as_float(largest).reshape(1)]


def define_cast(
    x: jax.Array, maxima: jax.Array, *, dtype: str, has_q: bool, has_qt: bool
) -> list[jax.Array]:
    """`(x, maxima) -> ([q,] [qt,] scale (1,))`."""
    format = FORMATS[dtype]
    bound = _as_float(jnp.max(_magnitude_bits(maxima), initial=0))
    shift = exponent_of(bound, format)
    finite = _magnitude_bits(bound) < 0x7F800000
    nan = _as_float(jnp.int32(_FLOAT32_NAN))
    multiplier = jnp.where(finite, _as_float((127 + shift) << 23), nan)
    codes = encode(x.astype(jnp.float32) * multiplier, format)
    results = [codes] * has_q + [codes.T] * has_qt
    return [*results, scale_of(bound, format).reshape(1)]


def define_quantize(x: jax.Array, *, dtype: str, has_q: bool, has_qt: bool) -> list[jax.Array]:
    """`(x,) -> ([q,] [qt,] scale (1,))` with the maximum of x as its bound."""
    return define_cast(x, *define_amax(x), dtype=dtype, has_q=has_q, has_qt=has_qt)


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
