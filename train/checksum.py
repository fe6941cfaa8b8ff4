"""A checksum of an array that does not depend on how it is split over devices."""

import jax
import jax.numpy as jnp
from jax import Array


@jax.jit
def checksum(x: Array) -> Array:
    """Gives the sum, modulo 2^32, of a hash of every element's bits and its position.

    Integer addition knows no order: any mesh and any number of hosts give the same number, and it
    is computed where the array lies. The hash is one to one in the element, so one changed element
    always shows, and several escape with a chance of 2^-32.

    Args:
      x: a boolean or real array.
    Returns: `()` uint32.
    """
    if x.dtype == jnp.bool_:
        words = x.astype(jnp.uint32)
    elif x.dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)  # (..., 2)
    else:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position += index * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(_mix(words ^ _mix(position)), dtype=jnp.uint32)


def checksums(tree) -> dict[str, Array]:
    """Gives the checksum of every leaf under its path, without waiting for them on accelerators.

    On the CPU's emulated devices it waits for each: programs that communicate, several in flight,
    can take every thread of XLA's pool and wait for each other until XLA aborts the process.
    """
    settle = jax.block_until_ready if jax.default_backend() == "cpu" else lambda x: x
    settle(tree)
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): settle(checksum(x)) for path, x in leaves}


def _mix(x: Array) -> Array:
    """Mixes 32 bits one to one: MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
