"""The dtypes that operations take, which of them holds which, and rounding."""

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

Floating = Literal["float64", "float32", "bfloat16", "float16"]
FLOATING: tuple[str, ...] = get_args(Floating)
"""The dtypes of norms and dense layers, widest first."""
NARROW = ("bfloat16", "float16")
"""Dtypes of values that are computed in float32 and rounded."""

# C++ types of values, by dtype. Half precision is stored in types of its own, which differ between
# CUDA and the host, and computed in float.
VALUE_TYPES = {
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "double",
}
CUDA_TYPES = VALUE_TYPES | {"float16": "__half", "bfloat16": "__nv_bfloat16"}
HOST_TYPES = VALUE_TYPES | {"float16": "Half", "bfloat16": "BFloat16"}


def compute_dtype(*dtypes: jax.typing.DTypeLike | None) -> jnp.dtype:
    """Returns the dtype that sums over `dtypes` run in: float64 if one is float64, else float32."""
    float64 = any(dtype is not None and jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if float64 else jnp.float32)


def promoted(a: jax.typing.DTypeLike, b: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns the dtype that holds the values of both, also where JAX's promotion is strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def holds(dtype: jax.typing.DTypeLike, other: jax.typing.DTypeLike) -> bool:
    """Returns whether every value of `other` is a value of `dtype`."""
    a, b = jnp.finfo(dtype), jnp.finfo(other)
    return a.nmant >= b.nmant and a.nexp >= b.nexp


def narrowed(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns x rounded to `dtype`; x itself where `dtype` holds its values."""
    return x if holds(dtype, x.dtype) else x.astype(dtype)


def rounded(parameter: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the values that `parameter.astype(dtype)` has, in float32 or wider.

    A cast's derivative rounds the gradient as the cast rounds the value. Here the gradient passes
    as it is, so that a sum in float32 reaches a float32 parameter whole.
    """
    return parameter if holds(dtype, parameter.dtype) else _rounded(parameter, jnp.dtype(dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(parameter: jax.Array, dtype: jnp.dtype) -> jax.Array:
    # On GPUs XLA drops a cast there and back. It keeps this, which has no subnormals of its own.
    info, wide = jnp.finfo(dtype), parameter.astype(compute_dtype(parameter.dtype))
    value = jax.lax.reduce_precision(wide, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(wide.dtype).nexp:
        return value
    small = jnp.abs(wide) < float(info.smallest_normal)
    return jnp.where(small, wide.astype(dtype).astype(wide.dtype), value)


@_rounded.defjvp
def _(dtype: jnp.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    value = _rounded(primals[0], dtype)
    return value, tangents[0].astype(value.dtype)
