"""What follows a dense layer's product, as operations on global arrays.

    y = activation(z + bias) · up

Reverse mode runs one kernel for every gradient of it, where kernels serve; forward mode and higher
orders are plain HLO. The bias has trailing dimensions of z, `axes`; up has all of them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ..native import epilogue as native
from .derivative import differentiate_plainly
from .op import Op
from .partition import Loose

# ---------------------------------------------------------------- sharding


def _operands(ndim, has_up, has_bias, axes):
    z = tuple(range(ndim))
    return (z, *[z] * has_up, *[Loose(axes)] * has_bias)


def _forward_dims(ndim, *, axes, has_up, has_bias, **_):
    return _operands(ndim, has_up, has_bias, axes), (tuple(range(ndim)),)


def _backward_dims(ndim, *, axes, has_up, has_bias, with_dbias, with_value, **_):
    z = tuple(range(ndim))
    results = (z, *[z] * has_up, *[Loose(axes)] * with_dbias, *[z] * with_value)
    return (z, *_operands(ndim, has_up, has_bias, axes)), results


def _tangent_dims(ndim, *, axes, has_up, has_bias, moves, **_):
    z = tuple(range(ndim))
    tangents = [dims for dims, moved in zip((z, z, Loose(axes)), moves) if moved]
    return (*_operands(ndim, has_up, has_bias, axes), *tangents), (z,)


# ---------------------------------------------------------------- kernels


def _flat(array, axes):
    """(rows, columns), the columns being the dimensions `axes`; the array itself without any."""
    if not axes:
        return array
    ndim, count = array.ndim, len(axes)
    last = tuple(range(ndim - count, ndim))
    if axes != last:
        array = jnp.moveaxis(array, axes, last)
    return array.reshape(math.prod(array.shape[: ndim - count]), -1)


def _restored(array, shape, axes):
    """The inverse of `_flat`."""
    if not axes:
        return array
    ndim, count = len(shape), len(axes)
    last = tuple(range(ndim - count, ndim))
    others = [n for d, n in enumerate(shape) if d not in axes]
    array = array.reshape(*others, *[shape[d] for d in axes])
    return array if axes == last else jnp.moveaxis(array, last, axes)


def _forward_body(split, z, *rest, axes, strict, **params):
    del split
    if z.size == 0:
        return native.define_forward(z, *rest, axes=axes, **params)
    large = [_flat(a, axes) for a in (z, *rest[: params["has_up"]])]
    bias = [a.reshape(-1) for a in rest[params["has_up"] :]]
    (y,) = native.forward(*large, *bias, strict=strict, **params)
    return [_restored(y, z.shape, axes)]


def _backward_body(split, dy, z, *rest, axes, strict, has_up, has_bias, with_dbias, **params):
    flags = {"has_up": has_up, "has_bias": has_bias, "with_dbias": with_dbias}
    if z.size == 0:
        results = native.define_backward(dy, z, *rest, axes=axes, **flags, **params)
    else:
        large = [_flat(a, axes) for a in (dy, z, *rest[:has_up])]
        bias = [a.reshape(-1) for a in rest[has_up:]]
        results = native.backward(*large, *bias, strict=strict, **flags, **params)
        shape = [z.shape[d] for d in axes]
        results = [
            r.reshape(shape) if r.ndim == 1 else _restored(r, z.shape, axes) for r in results
        ]
    if with_dbias:  # over exactly the mesh axes that the rows use
        at = 1 + has_up
        rows = [d for d in range(len(split.shape)) if d not in axes]
        results[at] = split.psum(results[at], rows)
    return results


forward = Op("epilogue", native.define_forward, _forward_dims, _forward_body)
backward = Op("epilogue_gradient", native.define_backward, _backward_dims, _backward_body, lead=1)
tangent = Op("epilogue_tangent", native.define_tangent, _tangent_dims, None)


# ---------------------------------------------------------------- differentiation


def _forward_jvp(primals, tangents, **params):
    (y,) = forward(*primals, **params)
    moving = [t for t in tangents if type(t) is not ad.Zero]
    if not moving:
        return [y], [ad.Zero(jax.typeof(y).to_tangent_aval())]
    moves = _moves(tangents, params)
    return [y], tangent(*primals, *moving, moves=moves, **params)


def _moves(tangents, params) -> tuple[bool, bool, bool]:
    """Which of z, up and bias have a tangent."""
    moved = [type(t) is not ad.Zero for t in tangents]
    up = moved.pop(1) if params["has_up"] else False
    return moved[0], up, moved[1] if params["has_bias"] else False


def _transpose_tangent(cts, z, *rest, moves, out_dtype, **params):
    del out_dtype
    count = params["has_up"] + params["has_bias"]
    constants, linear = rest[:count], rest[count:]
    nothing = [None] * (1 + count)
    (dy,) = cts
    if type(dy) is ad.Zero:
        return nothing + [None] * len(linear)
    flags = {"with_dbias": moves[2], "with_value": False}
    results = backward(dy, z, *constants, **flags, **params)
    named = {"z": results[0]}
    if params["has_up"]:
        named["up"] = results[1]
    if moves[2]:
        named["bias"] = results[-1]
    wanted = [name for name, moved in zip(("z", "up", "bias"), moves) if moved]
    return nothing + [
        named[name].astype(operand.aval.dtype) if ad.is_undefined_primal(operand) else None
        for name, operand in zip(wanted, linear, strict=True)
    ]


def _transpose_backward(cts, dy, z, *constants, with_dbias, with_value, **params):
    """The gradients are linear in dy; the value does not depend on it."""
    out: list[Any] = [None] * (2 + len(constants))
    cts = list(cts[: len(cts) - with_value])
    if ad.is_undefined_primal(dy) and any(type(ct) is not ad.Zero for ct in cts):
        dz = cts.pop(0)
        dup = cts.pop(0) if params["has_up"] else None
        dbias = cts.pop(0) if with_dbias else None
        given = [None if type(ct) is ad.Zero else ct for ct in (dz, dup, dbias)]
        moves = tuple(ct is not None for ct in given)
        moving = [ct for ct in given if ct is not None]
        dtype = dy.aval.dtype.name
        out[0] = tangent(z, *constants, *moving, moves=moves, out_dtype=dtype, **params)[0]
    return out


ad.primitive_jvps[forward.primitive] = _forward_jvp
ad.primitive_transposes[tangent.primitive] = _transpose_tangent
ad.primitive_transposes[backward.primitive] = _transpose_backward
differentiate_plainly(tangent)
differentiate_plainly(backward)
