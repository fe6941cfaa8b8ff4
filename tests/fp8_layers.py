"""Layers made of FP8 products alone, with plain JAX around them, forward and backward.

What a `Linear` in FP8 is: x, its kernel and the gradient of its result are each quantized once, in
the two layouts that the three products want.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from normfuse.layers import quantization
from normfuse.layers.dense.epilogue import SCALARS, Scalar
from normfuse.layers.quantization import gated as activations
from normfuse.layers.quantization import product, quantize
from normfuse.layers.quantization.kernels import Codes
from normfuse.native.implementation import BEST, Order

f32 = jnp.float32
Product = Callable[..., jax.Array]


def wide_product(a, a_scale, b, b_scale, dtype, *, add_to=None):
    """As `quantization.product`, written as a product of dequantized operands."""
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
        bound = quantization.rms_norm_bound(x.shape[-1], jax.lax.stop_gradient(scale))
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


def activation_maxima(
    activation: Scalar, *given: jax.Array, order: Order = BEST
) -> list[jax.Array]:
    """The largest |h|, |activation(a)| and |up| (1 without up) of h = activation(a) · up.

    Given are a and up as a product left them, each with its scale.
    """
    spec, scales = activations.Gated(activation), jnp.stack(given[1::2])
    found = activations.amax_kernel(spec, *given[::2], scales, order=order)
    h, *rest = (maximum.reshape(()) for maximum in found)
    return [h, *rest] if rest else [h, h, jnp.float32(1)]


def quantized_activation(activation: Scalar, *given: jax.Array, bound, order: Order = BEST):
    """`(q, qt, scale)` of the same h, whose |h| `bound` bounds."""
    spec, scales = activations.Gated(activation), jnp.stack(given[1::2])
    bounds = jnp.reshape(bound, (1, 1))
    q, qt, scale = activations.forward_kernel(spec, *given[::2], scales, bounds, order=order)
    return q, qt, scale.reshape(())


def quantized_gradients(
    activation: Scalar,
    *given: jax.Array,
    bounds: Sequence[jax.Array],
    dtype: jnp.dtype = jnp.float8_e4m3fn,
    order: Order = BEST,
) -> list[tuple[jax.Array, ...]]:
    """`(q, qt, scale)` of da and, with `up`, of dup; given are dh, a and up with their scales."""
    spec = activations.Gated(activation, Codes(jnp.dtype(dtype).name))
    operands = *given[::2], jnp.stack(given[1::2]), jnp.stack(bounds).reshape(-1, 1)
    results = activations.gradient_kernel(spec, *operands, order=order)
    triples = [results[i : i + 3] for i in range(0, len(results), 3)]
    return [(q, qt, scale.reshape(())) for q, qt, scale in triples]


def fused_mlp(
    x: jax.Array,
    scale: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    norm: Callable = rms_norm,
    gradients: jnp.dtype = jnp.float8_e4m3fn,
    activation: Scalar = SCALARS["silu"],
) -> jax.Array:
    """As `mlp`, with the activation and its gradients quantized as they are made.

    The hidden array and its gradients are in memory as FP8 only, and products leave their scales to
    the kernel that reads them. The gradients' bounds are made of maxima.
    """

    @jax.custom_vjp
    def run(y, kernels, bound):
        return forward(y, kernels, bound)[0]

    def forward(y, kernels, bound):
        yq = quantize(y, bound=bound)
        g, u, d = (quantize(kernel) for kernel in kernels)
        a, b = (product(yq.q, None, w.qt, None, y.dtype) for w in (g, u))
        scales = yq.scale * g.scale, yq.scale * u.scale
        given = a, scales[0], b, scales[1]
        bound, *maxima = activation_maxima(activation, *given)
        h, ht, h_scale = quantized_activation(activation, *given, bound=bound)
        z = product(h, h_scale, d.qt, d.scale, y.dtype)
        ours = [(w.q, w.scale) for w in (g, u, d)]
        return z, (yq.qt, yq.scale, given, maxima, ht, h_scale, ours)

    def backward(kept, dz):
        yt, y_scale, given, maxima, ht, h_scale, ((g, g_scale), (u, u_scale), (d, d_scale)) = kept
        dzq = quantize(dz, gradients)
        raw = product(dzq.q, None, d, None, dz.dtype)
        dh_scale = dzq.scale * d_scale
        slope = activations.SLOPES[activation.name]
        largest = quantization.amax(raw) * dh_scale
        bounds = activations.gradient_bounds(largest, *maxima, slope)
        of_raw = {"bounds": bounds, "dtype": gradients}
        da, db = quantized_gradients(activation, raw, dh_scale, *given, **of_raw)
        dy = product(da[0], da[2], g, g_scale, dz.dtype)
        dy = product(db[0], db[2], u, u_scale, dz.dtype, add_to=dy)
        dg, du = (product(yt, y_scale, t, s, f32) for _, t, s in (da, db))
        return dy, [dg, du, product(ht, h_scale, dzq.qt, dzq.scale, f32)], None

    run.defvjp(forward, backward)
    bound = quantization.rms_norm_bound(x.shape[-1], jax.lax.stop_gradient(scale))
    return run(norm(x, scale), [gate, up, down], bound)
