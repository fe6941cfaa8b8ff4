"""RMSNorm into FP8 products: the norm writes codes, and the backward keeps codes.

    n = rms_norm(x [+ residual]) · (scale + offset)        y_i = n · W_i

n is never in memory: one pass writes its codes in both layouts, with the scale that follows from
the norm's bound (`quantization.norm`), and all products read them. Each is as in `fp8`; so the
query, key and value projections of attention are one call. The gradient of n goes through
the norm's own backward, which reads x (or x + residual) and one float32 a row.
"""

from collections.abc import Sequence
from typing import Any

from jax import Array

from ..quantization import norm as quantized_norm
from ..rms_norm.spec import Norm
from .fp8 import Fp8, Input, fits, operands_of, products
from .matmul import Product


def serves(kernels: Sequence[Array], contract: int, *arrays: Array | None) -> bool:
    """Returns whether the norm of `arrays` can write the codes that products with kernels read."""
    return quantized_norm.serves(*arrays) and all(fits(kernel, contract) for kernel in kernels)


def norm_of(
    op: str, x: Array, scale: Array | None, dtype: str, *, residual: bool = False, **options: Any
) -> Norm:
    """Returns the norm over the last axis, whose gradient has `dtype`; options: eps and offset."""
    options |= {"has_scale": scale is not None, "has_residual": residual, "with_rstd": True}
    return Norm(op=op, axes=(x.ndim - 1,), out_dtype=dtype, **options)


def multiply_normalised(
    norm: Norm,
    x: Array,
    scale: Array | None,
    kernels: Sequence[Array],
    *,
    residual: Array | None = None,
    contract: int = 0,
    out_sharding: Any = None,
    order: Any,
    plain: bool = False,
) -> tuple[Array, ...]:
    """Returns the products of the normalised x with kernels that `serves` allows.

    Kernels may have several widths, but one number of dimensions. With a residual x + residual is
    normalised, and is the last result.
    """
    ndim = kernels[0].ndim
    product = Product.of(x.ndim, ndim, contract, None, out_sharding)
    spec = Input(Fp8(norm.op, product, norm.out_dtype, order), norm, plain)
    return products(spec, *operands_of(x, residual, scale, kernels))
