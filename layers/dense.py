"""Dense (placeholder)."""

import jax.numpy as jnp


def dense(x, kernel, bias=None, *, activation=None, dtype=None, implementation=None):
    dtype = dtype or x.dtype
    y = jnp.matmul(x.astype(dtype), kernel.astype(dtype))
    return y if bias is None else y + bias.astype(dtype)
