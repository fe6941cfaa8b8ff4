"""RMSNorms written as other projects write theirs."""

import jax
import jax.numpy as jnp
from flax import nnx

f32 = jnp.float32


# ---------------------------------------------------------------- nnx


class DivideByRms(nnx.Module):
    """The weight before the division, the statistics in float32."""

    def __init__(self, dim, *, norm_eps=1e-6, rngs):
        self.w = nnx.Param(nnx.initializers.ones_init()(rngs.params(), (dim,)))
        self.norm_eps = norm_eps

    @jax.named_scope("rms_norm")
    def __call__(self, x):
        rms = jnp.sqrt(jnp.mean(jnp.astype(x, f32) ** 2, axis=-1, keepdims=True) + self.norm_eps)
        return jnp.astype(self.w[...] * x / rms, x.dtype)


class OnePlusScale(nnx.Module):
    """An eps in the code, 1 + scale, and all in the dtype of x."""

    def __init__(self, dim, *, rngs):
        self.scale = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (dim,)))

    def __call__(self, x):
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normal = x * jax.lax.rsqrt(variance + 1e-6)
        return normal * (1 + jnp.expand_dims(self.scale[...], range(x.ndim - 1)))
