"""What follows the product of a dense layer, on one device.

    y = function(z + bias) · up

`up` is the second product of a gated layer. Arrays are (rows, columns), or of any shape where there
is no bias. On CUDA forward and backward are one pass each; on CPUs and elsewhere they are plain
JAX, which XLA fuses into one loop itself.
"""

import jax
import jax.numpy as jnp

from . import cuda_epilogue as cuda
from . import registry
from .kernel import Kernel
from .rms_norm_definition import compute_dtype
from .scalar import Scalar

_COLUMNS = (1,)


def _split(operands, has_up: bool, has_bias: bool, axes, ndim: int, dtype):
    """(up or 1, bias or 0) in `dtype`, against the whole array."""
    up = operands[0].astype(dtype) if has_up else jnp.ones((), dtype)
    bias = jnp.zeros((), dtype)
    if has_bias:
        rows = [d for d in range(ndim) if d not in axes]
        bias = jnp.expand_dims(operands[-1].astype(dtype), rows)
    return up, bias


def define_forward(z, *rest, function: Scalar, has_up, has_bias, out_dtype, axes=_COLUMNS):
    """`(z[, up][, bias]) -> (y,)` in plain JAX; bias has the dimensions `axes` of z."""
    dtype = compute_dtype(z.dtype, *(a.dtype for a in rest), out_dtype)
    up, bias = _split(rest, has_up, has_bias, axes, z.ndim, dtype)
    y = function(z.astype(dtype) + bias)
    return [(y * up if has_up else y).astype(out_dtype)]


def define_backward(
    dy, z, *rest, function: Scalar, has_up, has_bias, with_dbias, with_value, axes=_COLUMNS
):
    """`(dy, z[, up][, bias]) -> (dz[, dup][, dbias][, value])` in plain JAX."""
    dtype = compute_dtype(dy.dtype, z.dtype, *(a.dtype for a in rest))
    up, bias = _split(rest, has_up, has_bias, axes, z.ndim, dtype)
    wide = dy.astype(dtype)
    y, pull = jax.vjp(function, z.astype(dtype) + bias)
    (dz,) = pull(wide * up if has_up else wide)
    results = [dz.astype(z.dtype)]
    if has_up:
        results.append((wide * y).astype(rest[0].dtype))
    if with_dbias:
        results.append(jnp.sum(dz, [d for d in range(z.ndim) if d not in axes]))
    if with_value:
        results.append((y * up if has_up else y).astype(dy.dtype))
    return results


def define_tangent(z, *rest, function: Scalar, has_up, has_bias, out_dtype, moves, axes=_COLUMNS):
    """`(z[, up][, bias][, dz][, dup][, dbias]) -> (dy,)`; `moves` says which tangents are given."""
    dtype = compute_dtype(z.dtype, *(a.dtype for a in rest), out_dtype)
    count = has_up + has_bias
    up, bias = _split(rest[:count], has_up, has_bias, axes, z.ndim, dtype)
    given, tangents = list(rest[count:]), []
    for moved in moves:
        tangents.append(given.pop(0).astype(dtype) if moved else None)
    dz, dup, dbias = tangents
    shift = jnp.zeros(z.shape, dtype) if dz is None else dz
    if dbias is not None:
        shift = shift + jnp.expand_dims(dbias, [d for d in range(z.ndim) if d not in axes])
    y, dy = jax.jvp(function, (z.astype(dtype) + bias,), (shift,))
    if has_up:
        dy = dy * up
    if dup is not None:
        dy = dy + y * dup
    return [dy.astype(out_dtype)]


registry.register()
forward = Kernel("epilogue_forward", define_forward, cuda=cuda.forward)
backward = Kernel("epilogue_backward", define_backward, cuda=cuda.backward)
