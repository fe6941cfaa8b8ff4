"""Layers made of FP8 products alone, with plain JAX around them, forward and backward.

What a `Linear` in FP8 is: x, its kernel and the gradient of its result are each quantized once, in
the two layouts that the three products want.
"""

from collections.abc import Callable, Sequence

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
Product = Callable[..., jax.Array]


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


def product(a, a_scale, b, b_scale, dtype, *, add_to=None):
    """`a_scale · b_scale · a · bᵀ`, added to `add_to`: one call of cuBLASLt on GPUs with FP8.

    Without scales it is the raw product, whose reader applies them.
    """
    dims = (((1,), (1,)), ((), ()))
    result = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.dtype(dtype))
    if a_scale is not None:
        result = result * (a_scale * b_scale).astype(dtype)
    return result if add_to is None else add_to + result


def rms_norm_bound(weight: jax.Array) -> jax.Array:
    """Bounds |y| of `y = x / sqrt(mean(x²) + eps) · weight` by sqrt(features) · max|weight|."""
    return jnp.sqrt(f32(weight.size)) * jnp.max(jnp.abs(weight.astype(f32)))


def wide_product(a, a_scale, b, b_scale, dtype, *, add_to=None):
    """As `product`, written as a product of dequantized operands."""
    dims = (((1,), (1,)), ((), ()))
    wide = lambda q, scale: q.astype(dtype) * scale.astype(dtype)
    result = jax.lax.dot_general(
        wide(a, a_scale), wide(b, b_scale), dims, preferred_element_type=jnp.dtype(dtype)
    )
    return result if add_to is None else add_to + result


def linears(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    *,
    bound: jax.Array | None = None,
    gradients: jnp.dtype = jnp.float8_e4m3fn,
    product: Product = product,
    quantize: Callable = quantize,
) -> list[jax.Array]:
    """`[x @ kernel for kernel in kernels]`, x (tokens, k) and kernels (k, n), in FP8.

    Gradients of kernels are float32. `bound` is what no |x| exceeds; no gradient passes through it.
    """

    @jax.custom_vjp
    def run(x, kernels, bound):
        return forward(x, kernels, bound)[0]

    def forward(x, kernels, bound):
        xq = quantize(x, bound=bound)
        # K-major forward: (n, k). For the gradient of x: (k, n), as it lies.
        kept = [quantize(kernel) for kernel in kernels]
        results = [product(xq.q, xq.scale, w.qt, w.scale, x.dtype) for w in kept]
        like = [jnp.zeros((), kernel.dtype) for kernel in kernels]
        return results, (xq.qt, xq.scale, [(w.q, w.scale) for w in kept], like)

    def backward(kept, dys):
        xt, x_scale, kernels, like = kept
        dx, dws = None, []
        for dy, (w, w_scale), zero in zip(dys, kernels, like, strict=True):
            g = quantize(dy, gradients)
            dx = product(g.q, g.scale, w, w_scale, dy.dtype, add_to=dx)
            dws.append(product(xt, x_scale, g.qt, g.scale, f32).astype(zero.dtype))
        return dx, dws, None

    run.defvjp(forward, backward)
    return run(x, list(kernels), bound)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in plain JAX."""
    wide = x.astype(f32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def gated(a: jax.Array, b: jax.Array) -> jax.Array:
    """silu(a) · b."""
    return (jax.nn.silu(a.astype(f32)) * b.astype(f32)).astype(a.dtype)


def mlp(
    x: jax.Array,
    scale: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    together: bool = True,
    norm: Callable = rms_norm,
    **options,
) -> jax.Array:
    """Norm and SwiGLU MLP with FP8 products.

    Args:
      together: gate and up share what is made of the normalised x, whose scale comes from a bound;
        else three Linears that know nothing of each other.
    """
    y = norm(x, scale)
    if together:
        bound = rms_norm_bound(jax.lax.stop_gradient(scale))
        a, b = linears(y, [gate, up], bound=bound, **options)
    else:
        (a,), (b,) = linears(y, [gate], **options), linears(y, [up], **options)
    (z,) = linears(gated(a, b), [down], **options)
    return z


def plain_mlp(x, scale, gate, up, down, *, norm: Callable = rms_norm):
    """The same in the dtype of x."""
    y = norm(x, scale)
    narrow = lambda kernel: kernel.astype(x.dtype)
    return gated(y @ narrow(gate), y @ narrow(up)) @ narrow(down)


def both_ways(layer: Callable, **options) -> Callable:
    """(operands, dy) -> the layer's result and the gradients of all operands."""

    def run(operands, dy):
        y, pull = jax.vjp(lambda *given: layer(*given, **options), *operands)
        return y, pull(dy)

    return run
