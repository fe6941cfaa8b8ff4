"""FP8: codes of a matrix with a power-of-two scale, and products of them.

The recipe, as formulas: docs/quantization.md.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...native.implementation import BEST, Order
from . import gated, kernels
from .definition import E4M3, E5M2, FORMATS, Format, exponent_of, scale_of
from .op import kernel_codes_saveable

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "Format",
    "Quantized",
    "amax",
    "exponent_of",
    "fits",
    "gated",
    "kernel_codes_saveable",
    "product",
    "quantize",
    "rms_norm_bound",
    "scale_of",
]

MULTIPLE = 16  # cuBLASLt's FP8 products need multiples of it in every dimension


class Quantized(NamedTuple):
    """`x ≈ scale · q`, elementwise."""

    # (rows, columns), float8_e4m3fn or float8_e5m2; None unless asked for.
    q: jax.Array | None
    # (columns, rows), its transpose, contiguous; None unless asked for.
    qt: jax.Array | None
    scale: jax.Array  # (), float32, a power of two; NaN if the bound was not finite


def amax(x: jax.Array, *, order: Order = BEST) -> jax.Array:
    """The largest magnitude among the finite elements of `x`, as a () float32; 0 without any.

    Args:
      x: any shape; float32, bfloat16 or float16.
      order: kernels to try.

    Raises:
      TypeError: for another dtype.
    """
    kernels.check_input(x)
    (maximum,) = kernels.amax(kernels.Codes(), x, order=order)
    return maximum.reshape(())


def quantize(
    x: jax.Array,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    bound: jax.Array | None = None,
    plain: bool = True,
    transpose: bool = True,
    order: Order = BEST,
) -> Quantized:
    """FP8 codes of a matrix, as it lies and transposed, in one pass over memory.

        q[i, j] = qt[j, i] = round(x[i, j] / scale)

    `scale` is the smallest power of two, at least 2^-100, with bound / scale ≤ 448 (e4m3) or
    57344 (e5m2). An element that is not finite, or that is beyond the format because the bound is
    too small, has the code NaN: nothing saturates.

    Args:
      x: (rows, columns); float32, bfloat16 or float16.
      dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
      bound: float32 numbers of any shape; their maximum must be at least every finite |x|. None:
        `amax(x)`, which reads x once more.
      plain, transpose: compute q, compute qt.
      order: kernels to try.

    Raises:
      TypeError: for a dtype that cannot be quantized, or that is not an FP8 format.
      ValueError: if x is not a matrix, or if neither q nor qt is wanted.
    """
    kernels.check_matrix(x)
    if not (plain or transpose):
        raise ValueError("plain=False and transpose=False leave nothing to compute: set one")
    name = jnp.dtype(dtype).name
    if name not in FORMATS:
        raise TypeError(f"dtype must be {' or '.join(FORMATS)}, got {name}")
    spec = kernels.Codes(name, plain, transpose)
    if bound is None:
        *codes, scale = kernels.quantize(spec, x, order=order)
    else:
        maxima = jnp.ravel(bound).astype(jnp.float32)
        *codes, scale = kernels.cast(spec, x, maxima, order=order)
    q = codes[0] if plain else None
    qt = codes[-1] if transpose else None
    return Quantized(q, qt, scale.reshape(()))


def product(
    a: jax.Array,
    a_scale: jax.Array | None,
    b: jax.Array,
    b_scale: jax.Array | None,
    dtype: DTypeLike,
    *,
    add_to: jax.Array | None = None,
) -> jax.Array:
    """`a_scale · b_scale · a · bᵀ`, added to `add_to`: one call of cuBLASLt on GPUs with FP8.

    Args:
      a: (m, k), FP8; at least one of a and b is e4m3.
      b: (n, k), FP8: both contract over their last axis, as the hardware requires.
      a_scale, b_scale: () float32, powers of two; both None for the raw product, whose reader
        applies the scale (`gated`): a number of bfloat16 has float32's range.
      dtype: the result's: the compute dtype, or float32 for a kernel's gradient.
      add_to: (m, n), of that dtype: the sum is made in the product (beta = 1), in place if
        `add_to` is no longer needed.
    """
    dims = (((1,), (1,)), ((), ()))
    raw = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.dtype(dtype))
    if a_scale is None or b_scale is None:
        result = raw
    else:
        result = raw * (a_scale * b_scale).astype(dtype)
    return result if add_to is None else add_to + result


def fits(*dimensions: int) -> bool:
    """Whether the product of matrices with these dimensions can run in FP8: multiples of 16."""
    return all(size > 0 and size % MULTIPLE == 0 for size in dimensions)


def rms_norm_bound(features: int, weight: jax.Array | None = None) -> jax.Array:
    """Bounds |y| of `y = x / sqrt(mean(x²) + eps) · weight` by sqrt(features) · max|weight|.

    Args:
      features: the length of the normalised axis.
      weight: (features,): scale + scale_offset; None: 1.
    """
    root = jnp.sqrt(jnp.float32(features))
    if weight is None:
        return root
    return root * jnp.max(jnp.abs(weight.astype(jnp.float32)))
