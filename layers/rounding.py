"""Which floating dtype holds which, and parameters rounded without rounding their gradients."""

import functools

import jax
import jax.numpy as jnp


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype that sums over `dtype` run in: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def holds(dtype: jax.typing.DTypeLike, other: jax.typing.DTypeLike) -> bool:
    """Whether every value of `other` is a value of `dtype`."""
    a, b = jnp.finfo(dtype), jnp.finfo(other)
    return a.nmant >= b.nmant and a.nexp >= b.nexp


def narrowed(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x rounded to `dtype`; x itself where `dtype` holds its values: a wider copy gains nothing."""
    return x if holds(dtype, x.dtype) else x.astype(dtype)


def rounded(parameter: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The values that `parameter.astype(dtype)` has, in float32 or wider.

    A cast's derivative rounds the gradient as the cast rounds the value. Here the gradient passes
    as it is, so that a sum in float32 reaches a float32 parameter whole.
    """
    return parameter if holds(dtype, parameter.dtype) else _rounded(parameter, jnp.dtype(dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(parameter, dtype):
    return parameter.astype(dtype).astype(wide(parameter.dtype))


@_rounded.defjvp
def _(dtype, primals, tangents):
    value = _rounded(primals[0], dtype)
    return value, tangents[0].astype(value.dtype)
