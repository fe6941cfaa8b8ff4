"""RMSNorm and its derivatives in plain JAX: the definition every kernel is held to.

Everything is computed in `compute_dtype`: float32, or float64 when an operand or the result is
float64. `axes` are the normalised dimensions of x; `scale` has their shape, in increasing order;
`rstd`, `sums` and `dots` have the shape of the others. With w = scale + scale_offset:

    y = x · rstd · w            rstd = 1 / sqrt(mean(x²) + eps)
    dx = rstd · g − x · rstd³ · mean(g · x)      g = dy · w
    dscale = Σ_rows dy · x · rstd

References: Zhang and Sennrich, arXiv:1910.07467.
"""

import math

import jax
import jax.numpy as jnp

_CANONICAL = (1,)  # kernels see (outer, n, inner)


def compute_dtype(*dtypes) -> jnp.dtype:
    """float64 if one of `dtypes` is float64, else float32."""
    float64 = any(dtype is not None and jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if float64 else jnp.float32)


def _rows(x, axes):
    return tuple(i for i in range(x.ndim) if i not in axes)


def _along_rows(value, axes):
    """Broadcasts one value a row against x."""
    return jnp.expand_dims(value, axes)


def _weight(operands, x, axes, scale_offset, has_scale, dtype):
    """Takes scale off `operands`, and broadcasts scale + scale_offset against x; 1 if none."""
    if not has_scale:
        return jnp.ones((), dtype)
    scale = operands.pop(0).astype(dtype) + jnp.asarray(scale_offset, dtype)
    return jnp.expand_dims(scale, _rows(x, axes))


def _dtype_of(*operands, out=None):
    return compute_dtype(*(a.dtype for a in operands), out)


def forward(
    x, *rest, eps, scale_offset, out_dtype, has_residual, has_scale, with_rstd, axes=_CANONICAL
):
    """`(x[, residual][, scale]) -> (y[, h][, rstd])`, h = x + residual being what is normalised."""
    dtype, rest = _dtype_of(x, *rest, out=out_dtype), list(rest)
    results = []
    if has_residual:
        residual = rest.pop(0)
        h_dtype = jnp.promote_types(x.dtype, residual.dtype)
        x = (x.astype(dtype) + residual.astype(dtype)).astype(h_dtype)
        results.append(x)
    wide = x.astype(dtype)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axes) + jnp.asarray(eps, dtype))
    w = _weight(rest, x, axes, scale_offset, has_scale, dtype)
    y = (wide * _along_rows(rstd, axes) * w).astype(out_dtype)
    return [y, *results, rstd] if with_rstd else [y, *results]


def row_sums(x, *, axes=_CANONICAL):
    """`x -> Σ x²`, one value a row."""
    wide = x.astype(compute_dtype(x.dtype))
    return [jnp.sum(wide * wide, axes)]


def apply(x, *rest, scale_offset, out_dtype, has_scale, axes=_CANONICAL):
    """`(x[, scale], rstd) -> y`, for an rstd that is already known."""
    dtype, rest = _dtype_of(x, *rest, out=out_dtype), list(rest)
    w = _weight(rest, x, axes, scale_offset, has_scale, dtype)
    rstd = _along_rows(rest.pop(0).astype(dtype), axes)
    return [(x.astype(dtype) * rstd * w).astype(out_dtype)]


def row_dots(dy, x, *rest, scale_offset, has_scale, axes=_CANONICAL):
    """`(dy, x[, scale]) -> Σ dy · w · x`, one value a row."""
    dtype, rest = _dtype_of(dy, x, *rest), list(rest)
    w = _weight(rest, x, axes, scale_offset, has_scale, dtype)
    return [jnp.sum(dy.astype(dtype) * w * x.astype(dtype), axes)]


def backward_apply(
    dy, x, *rest, count, scale_offset, has_residual, has_scale, with_dscale, axes=_CANONICAL
):
    """`(dy, x[, scale], rstd[, dh], dots) -> (dx[, dscale])`, for known sums over each row."""
    dtype, rest = _dtype_of(dy, x, *rest), list(rest)
    w = _weight(rest, x, axes, scale_offset, has_scale, dtype)
    rstd = _along_rows(rest.pop(0).astype(dtype), axes)
    dh = rest.pop(0).astype(dtype) if has_residual else jnp.zeros((), dtype)
    mean = _along_rows(rest.pop(0).astype(dtype), axes) / jnp.asarray(count, dtype)
    dy, normal = dy.astype(dtype), x.astype(dtype) * rstd
    # x · rstd³ · mean in an order that rstd³ cannot overflow or vanish in
    dx = (rstd * (dy * w - normal * (rstd * mean)) + dh).astype(x.dtype)
    if not with_dscale:
        return [dx]
    return [dx, jnp.sum(dy * normal, _rows(x, axes))]


def backward(dy, x, *rest, scale_offset, has_residual, has_scale, with_dscale, axes=_CANONICAL):
    """`(dy, x[, scale], rstd[, dh]) -> (dx[, dscale])`; dh is the residual's own gradient."""
    flags = {"scale_offset": scale_offset, "has_scale": has_scale, "axes": axes}
    (dots,) = row_dots(dy, x, *rest[:has_scale], **flags)
    count = math.prod(x.shape[a] for a in axes)
    return backward_apply(
        dy, x, *rest, dots, count=count, has_residual=has_residual, with_dscale=with_dscale, **flags
    )


def pullback(dy, x, *rest, scale_offset, has_scale, with_dscale, with_value, axes=_CANONICAL):
    """`(dy, x[, scale], rstd) -> (dx[, dscale][, value])`: `backward`, and `apply` as dy is."""
    flags = {"scale_offset": scale_offset, "has_scale": has_scale, "axes": axes}
    results = backward(dy, x, *rest, has_residual=False, with_dscale=with_dscale, **flags)
    return [*results, *(apply(x, *rest, out_dtype=dy.dtype, **flags) if with_value else [])]


def tangent(x, *rest, scale_offset, has_residual, has_scale, out_dtype, moves, axes=_CANONICAL):
    """The tangents of y and h: `(h[, scale], rstd[, dh][, dscale]) -> (dy[, dh])`.

    `moves` is a pair of flags saying which of the two tangents are given. h is a result only with
    a residual, and only moves if dh does.
    """
    dtype, rest = _dtype_of(x, *rest, out=out_dtype), list(rest)
    w = _weight(rest, x, axes, scale_offset, has_scale, dtype)
    rstd = _along_rows(rest.pop(0).astype(dtype), axes)
    normal, dy, dh = x.astype(dtype) * rstd, jnp.zeros((), dtype), []
    if moves[0]:
        dx = rest.pop(0)
        dh = [dx] * has_residual
        mean = jnp.mean(normal * dx.astype(dtype), axes, keepdims=True)
        dy = w * rstd * (dx.astype(dtype) - normal * mean)
    if moves[1]:
        dy = dy + normal * jnp.expand_dims(rest.pop(0).astype(dtype), _rows(x, axes))
    return [dy.astype(out_dtype), *dh]
