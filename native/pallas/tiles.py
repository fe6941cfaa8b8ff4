"""Small parts of Pallas kernels."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

Ref = Any  # a reference to memory within a kernel


def result_type(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> ShapedArray:
    """Returns the type of a kernel's result. A `ShapeDtypeStruct` would have to say over which mesh
    axes it varies wherever shard_map checks that, in words that differ among JAX's versions."""
    return ShapedArray(tuple(shape), jnp.dtype(dtype))


def clear(ref: Ref) -> None:
    """Writes zeros."""
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def before(value: jax.Array, end: Any, axis: int) -> jax.Array:
    """Returns `value` with zeros from index `end` of an axis on."""
    inside = jax.lax.broadcasted_iota(jnp.int32, value.shape, axis) < end
    return jnp.where(inside, value, jnp.zeros((), value.dtype))


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)
