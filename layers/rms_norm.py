"""Root mean square normalisation (placeholder in plain JAX while the native op is written)."""

import jax
import jax.numpy as jnp


def rms_norm(x, scale=None, *, eps=1e-6, axis=-1, scale_offset=0.0, dtype=None, implementation=None):
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(a % x.ndim for a in axes))
    compute = jnp.promote_types(x.dtype, jnp.float32)
    x32 = x.astype(compute)
    rstd = jax.lax.rsqrt(jnp.mean(x32 * x32, axes, keepdims=True) + eps)
    y = x32 * rstd
    if scale is not None:
        shape = [x.shape[i] if i in axes else 1 for i in range(x.ndim)]
        y = y * (scale.astype(compute) + scale_offset).reshape(shape)
    return y.astype(dtype or x.dtype)
