"""FP8 codes and products of matrices, as tests of the kernels call them."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from normfuse.layers.quantization.quantize import (
    Codes,
    Quantized,
    amax_kernel,
    cast_kernel,
    quantize_kernel,
)
from normfuse.native.implementation import BEST, Order

f32 = jnp.float32


def amax(x: jax.Array, *, order: Order = BEST) -> jax.Array:
    """The largest magnitude among the finite elements of `x`, as a () float32; 0 without any."""
    return amax_kernel(Codes(), x, order=order)[0].reshape(())


def quantize(
    x: jax.Array,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    bound: jax.Array | None = None,
    plain: bool = True,
    transpose: bool = True,
    order: Order = BEST,
) -> Quantized:
    """FP8 codes of a matrix: as it lies where `plain`, and transposed where `transpose`.

    `bound` is float32 numbers of any shape, whose maximum is at least every finite |x|; None:
    `amax(x)`.
    """
    spec = Codes(jnp.dtype(dtype).name, plain, transpose)
    if bound is None:
        *codes, scale = quantize_kernel(spec, x, order=order)
    else:
        maxima = jnp.ravel(bound).astype(f32)
        *codes, scale = cast_kernel(spec, x, maxima, order=order)
    q, qt = codes[0] if plain else None, codes[-1] if transpose else None
    return Quantized(q, qt, scale.reshape(()))
