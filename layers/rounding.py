"""Parameters rounded to a compute dtype without rounding their gradients."""

import functools

import jax
import jax.numpy as jnp


def rounded(parameter: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The values that `parameter.astype(dtype)` has, in float32 or wider.

    A cast's derivative rounds the gradient as the cast rounds the value. Here the gradient passes
    as it is, so that a sum in float32 reaches a float32 parameter whole.
    """
    if jnp.promote_types(parameter.dtype, dtype) == dtype:
        return parameter  # every value is representable already
    return _rounded(parameter, jnp.dtype(dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(parameter, dtype):
    return parameter.astype(dtype).astype(jnp.promote_types(parameter.dtype, jnp.float32))


@_rounded.defjvp
def _(dtype, primals, tangents):
    value = _rounded(primals[0], dtype)
    return value, tangents[0].astype(value.dtype)
