"""RMSNorm as operations on global arrays: sharding, kernels, vmap over parameters, derivative."""

import math

import jax
import jax.numpy as jnp

from ..native import rms_norm as native
from ..native import rms_norm_definition as definition
from . import derivative
from .op import Op
from .partition import Loose

# ---------------------------------------------------------------- sharding
# Operands and results by the dimensions of x they have: all of them, the rows, or the axes.


def _arrays(ndim, axes):
    return tuple(range(ndim)), tuple(i for i in range(ndim) if i not in axes), Loose(axes)


def _forward_dims(ndim, *, axes, has_residual, has_scale, with_rstd, **_):
    x, rows, scale = _arrays(ndim, axes)
    return (
        (x, *[x] * has_residual, *[scale] * has_scale),
        (x, *[x] * has_residual, *[rows] * with_rstd),
    )


def _backward_dims(ndim, *, axes, has_residual, has_scale, with_dscale, **_):
    x, rows, scale = _arrays(ndim, axes)
    return (
        (x, x, *[scale] * has_scale, rows, *[x] * has_residual),
        (x, *[scale] * with_dscale),
    )


def _pullback_dims(ndim, *, with_value, **params):
    inputs, outputs = _backward_dims(ndim, has_residual=False, **params)
    return inputs, (*outputs, *[inputs[0]] * with_value)


def _apply_dims(ndim, *, axes, has_scale, **_):
    x, rows, scale = _arrays(ndim, axes)
    return (x, *[scale] * has_scale, rows), (x,)


def _tangent_dims(ndim, *, axes, has_residual, has_scale, moves, **_):
    x, rows, scale = _arrays(ndim, axes)
    inputs = (x, *[scale] * has_scale, rows, *[x] * moves[0], *[scale] * moves[1])
    return inputs, (x, *[x] * (has_residual and moves[0]))


# ---------------------------------------------------------------- kernels


def _canonical(array, axes):
    """The array with its `axes` together, as kernels see it: (outer, n, inner).

    A reshape where the axes are neighbours, which costs nothing; otherwise a transpose before it.
    """
    first = axes[0]
    if axes != tuple(range(first, first + len(axes))):
        array = jnp.moveaxis(array, axes, range(first, first + len(axes)))
    shape = array.shape
    sizes = [math.prod(s) for s in (shape[:first], shape[first : first + len(axes)])]
    return array.reshape(*sizes, math.prod(shape[first + len(axes) :]))


def _restore(array, shape, axes):
    """The inverse of `_canonical`."""
    first = axes[0]
    block = tuple(range(first, first + len(axes)))
    others = [n for i, n in enumerate(shape) if i not in axes]
    array = array.reshape(*others[:first], *[shape[a] for a in axes], *others[first:])
    return array if axes == block else jnp.moveaxis(array, block, axes)


def _rows_of(array, axes):
    """A row statistic as kernels see it: (outer, inner)."""
    return array.reshape(math.prod(array.shape[: axes[0]]), -1)


def _forward_body(split, x, *rest, axes, eps, strict, **params):
    if x.size == 0:
        return definition.forward(x, *rest, axes=axes, eps=eps, **params)
    rows_shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    flat = [_canonical(a, axes) for a in (x, *rest[: params["has_residual"]])]
    scale = [a.reshape(-1) for a in rest[params["has_residual"] :]]
    if not split.over(axes):
        results = native.forward(*flat, *scale, eps=eps, strict=strict, **params)
    else:  # each device has a part of every row: one sum over the devices between two kernels
        results = _forward_over_devices(split, flat, scale, axes, eps, strict, **params)
    big = 1 + params["has_residual"]
    return [
        *[_restore(a, x.shape, axes) for a in results[:big]],
        *[a.reshape(rows_shape) for a in results[big:]],
    ]


def _forward_over_devices(
    split, flat, scale, axes, eps, strict, *, has_residual, with_rstd, **params
):
    dtype = definition.compute_dtype(*(a.dtype for a in (*flat, *scale)), params["out_dtype"])
    h = flat[0]
    if has_residual:
        h_dtype = jnp.promote_types(flat[0].dtype, flat[1].dtype)
        h = (flat[0].astype(dtype) + flat[1].astype(dtype)).astype(h_dtype)
    wide = h.astype(dtype) if dtype == jnp.float64 else h  # row_sums sees no scale, no dtype of y
    sums = split.psum(native.row_sums(wide, strict=strict)[0], axes)
    rstd = jax.lax.rsqrt(sums / split.count(axes) + jnp.asarray(eps, sums.dtype))
    y = native.apply(h, *scale, rstd, strict=strict, **params)
    return [*y, *[h] * has_residual, *[rstd] * with_rstd]


def _backward_body(split, dy, x, *rest, axes, strict, has_scale, has_residual, **params):
    if x.size == 0:
        flags = {"has_scale": has_scale, "has_residual": has_residual}
        dx, *dscale = definition.backward(dy, x, *rest, axes=axes, **flags, **params)
        return [dx, *[_sum_rows(split, d, axes) for d in dscale]]
    scale, (rstd, *dh) = [a.reshape(-1) for a in rest[:has_scale]], rest[has_scale:]
    flat = [_canonical(a, axes) for a in (dy, x)]
    dh = [_canonical(a, axes) for a in dh]
    params |= {"strict": strict, "has_scale": has_scale}
    operands = [*flat, *scale, _rows_of(rstd, axes), *dh]
    if not split.over(axes):
        results = native.backward(*operands, has_residual=has_residual, **params)
    else:
        dots_params = {k: v for k, v in params.items() if k != "with_dscale"}
        dots = split.psum(native.row_dots(*flat, *scale, **dots_params)[0], axes)
        count = split.count(axes)
        results = native.backward_apply(
            *operands, dots, count=count, has_residual=has_residual, **params
        )
    shape = tuple(x.shape[a] for a in axes)
    dscale = [_sum_rows(split, d, axes).reshape(shape) for d in results[1:]]
    return [_restore(results[0], x.shape, axes), *dscale]


def _pullback_body(split, dy, x, *rest, axes, with_value, with_dscale, **params):
    if x.size and not split.over(axes):
        scale, (rstd,) = [a.reshape(-1) for a in rest[:-1]], rest[-1:]
        operands = [_canonical(dy, axes), _canonical(x, axes), *scale, _rows_of(rstd, axes)]
        flags = {"with_dscale": with_dscale, "with_value": with_value}
        dx, *more = native.pullback(*operands, **params, **flags)
        value = [_restore(more.pop(), x.shape, axes)] if with_value else []
        shape = tuple(x.shape[a] for a in axes)
        dscale = [_sum_rows(split, d, axes).reshape(shape) for d in more]
        return [_restore(dx, x.shape, axes), *dscale, *value]
    flags = {"has_residual": False, "with_dscale": with_dscale}
    results = _backward_body(split, dy, x, *rest, axes=axes, **params, **flags)
    if with_value:
        results += _apply_body(split, x, *rest, axes=axes, out_dtype=dy.dtype.name, **params)
    return results


def _apply_body(split, x, *rest, axes, **params):
    """Needs nothing of other devices: rstd is of the whole row."""
    del split
    if x.size == 0:
        params.pop("strict")
        return definition.apply(x, *rest, axes=axes, **params)
    *scale, rstd = rest
    scale = [a.reshape(-1) for a in scale]
    (y,) = native.apply(_canonical(x, axes), *scale, _rows_of(rstd, axes), **params)
    return [_restore(y, x.shape, axes)]


def _sum_rows(split, dscale, axes):
    """Sums over exactly the mesh axes that the rows use."""
    return split.psum(dscale, [i for i in range(len(split.shape)) if i not in axes])


# ---------------------------------------------------------------- vmap over a parameter


def _forward_unfused(x, *rest, axes, has_scale, out_dtype, scale_offset, **params):
    """Normalises on kernels, and multiplies by a scale of each example's own in plain JAX."""
    dtype = definition.compute_dtype(*(a.dtype for a in (x, *rest)), out_dtype)
    *operands, scale = rest if has_scale else (*rest, None)
    flags = {"has_scale": False, "scale_offset": 0.0, "out_dtype": dtype.name}
    y, *others = forward(x, *operands, axes=axes, **flags, **params)
    if scale is not None:
        rows = [i for i in range(x.ndim) if i not in axes]
        y = y * jnp.expand_dims(scale.astype(dtype) + jnp.asarray(scale_offset, dtype), rows)
    return [y.astype(out_dtype), *others]


def _backward_unfused(dy, x, *rest, axes, has_scale, scale_offset, with_dscale, **params):
    """dx on kernels, with dy scaled by each example's own scale; dscale as a sum in plain JAX."""
    dtype = definition.compute_dtype(*(a.dtype for a in (dy, x, *rest)))
    rows = [i for i in range(x.ndim) if i not in axes]
    scale, (rstd, *dh) = rest[:has_scale], rest[has_scale:]
    dy, g = dy.astype(dtype), dy.astype(dtype)
    if has_scale:
        g = g * jnp.expand_dims(scale[0].astype(dtype) + jnp.asarray(scale_offset, dtype), rows)
    flags = {"has_scale": False, "scale_offset": 0.0, "with_dscale": False}
    (dx,) = backward(g, x, rstd, *dh, axes=axes, **flags, **params)
    if not with_dscale:
        return [dx]
    return [dx, jnp.sum(dy * x.astype(dtype) * jnp.expand_dims(rstd, axes), rows)]


def _pullback_unfused(dy, x, *rest, with_dscale, with_value, **params):
    flags = {"has_residual": False, "with_dscale": with_dscale}
    results = _backward_unfused(dy, x, *rest, **params, **flags)
    if with_value:
        results += apply.plain(x, *rest, out_dtype=dy.dtype.name, **params)
    return results


# ---------------------------------------------------------------- operations

forward = Op("rms_norm", definition.forward, _forward_dims, _forward_body, _forward_unfused)
backward = Op(
    "rms_norm_gradient",
    definition.backward,
    _backward_dims,
    _backward_body,
    _backward_unfused,
    lead=1,
)
tangent = Op("rms_norm_tangent", definition.tangent, _tangent_dims, None)
derivative.link(forward, tangent, backward)

apply = Op("rms_norm_apply", definition.apply, _apply_dims, _apply_body)
"""`(x[, scale], rstd) -> (y,)`: the forward once more, where rstd is known."""
derivative.differentiate_plainly(apply)

pullback = Op(
    "rms_norm_pullback",
    definition.pullback,
    _pullback_dims,
    _pullback_body,
    _pullback_unfused,
    lead=1,
)
"""`(dy, x[, scale], rstd) -> (dx[, dscale][, value])`: `backward` for a layer that takes y.

Where with_value the pass also writes y, x normalised again, in dy's dtype. One of the results takes
the place of dy in memory, which costs a copy if dy is needed afterwards: it is made for a dy that
the layer itself has made.
"""
derivative.differentiate_plainly(pullback)
