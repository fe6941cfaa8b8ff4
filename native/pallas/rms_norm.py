"""RMSNorm in Pallas: the kernels of `native.rms_norm` on (outer, n, inner) arrays.

Rows are made contiguous first: where `inner` is not one that is a transpose before the kernel and
one after it. Rows too long for a kernel to hold are read twice: a sum over each, then the rest.
"""

import functools

import jax
import jax.numpy as jnp

from ..rms_norm_definition import compute_dtype
from . import lowering
from .lowering import Target
from .tiles import Call, Out


def serve(name: str, target: Target, *operands: jax.Array, **params) -> list[jax.Array]:
    """Kernel `name` with the operands and params of its definition.

    Raises:
      Unsupported: for dtypes or sizes that the platform's kernels do not take.
    """
    out = params.get("out_dtype")
    dtypes = [a.dtype for a in operands] + ([] if out is None else [out])
    lowering.require_dtypes(target, *dtypes)
    lead = operands[name in _GRADIENTS]
    rows = _Rows(target, f"pallas_rms_norm_{name}", lead.shape, compute_dtype(*dtypes))
    return _KERNELS[name](rows, *[rows.flat(a) for a in operands], **params)


class _Rows:
    """The matrix of rows behind an (outer, n, inner) array, and the kernels of a platform."""

    def __init__(self, target, name, shape, compute):
        self.target, self.name, self.shape, self.compute = target, name, shape, compute

    @functools.cached_property
    def _backend(self):
        if self.target.gpu:
            from . import triton as backend
        else:
            from . import blocks as backend
        return backend

    @property
    def fit(self) -> bool:
        """Whether a kernel can hold whole rows."""
        return self._backend.fits(self.target, self.shape[1])

    def flat(self, array):
        """(outer, n, inner) as (rows, n), (outer, inner) as (rows,), (n,) as it is."""
        if array.ndim == 3:
            return jnp.swapaxes(array, 1, 2).reshape(-1, array.shape[1])
        return array.reshape(-1) if array.ndim == 2 else array

    def _restore(self, array, kind):
        outer, n, inner = self.shape
        if kind == "tile":
            return jnp.swapaxes(array.reshape(outer, inner, n), 1, 2)
        return array if kind == "column sum" else array.reshape(outer, inner)

    def __call__(self, body, tiles, columns, rows, outs, whole=False, restore=True):
        call = Call(self.name, body, tiles, columns, rows, outs, self.compute, whole)
        results = self._backend.run(self.target, call)
        if not restore:
            return results
        return [self._restore(r, out.kind) for r, out in zip(results, outs)]


def _weight(columns, scale_offset):
    """scale + scale_offset, or 1."""
    return columns[0] + scale_offset if columns else 1


def _forward(rows, x, *rest, eps, scale_offset, out_dtype, has_residual, has_scale, with_rstd):
    residual, scale = rest[:has_residual], rest[has_residual:]
    h_dtype = jnp.promote_types(x.dtype, residual[0].dtype) if has_residual else x.dtype
    n = x.shape[1]
    if not rows.fit:
        h = x
        if has_residual:
            h = (x.astype(rows.compute) + residual[0].astype(rows.compute)).astype(h_dtype)
        (sums,) = _row_sums(rows, h, restore=False)
        rstd = jax.lax.rsqrt(sums / n + eps)
        flags = {"scale_offset": scale_offset, "out_dtype": out_dtype, "has_scale": has_scale}
        y = _apply(rows, h, *scale, rstd, **flags)
        big = [rows._restore(h, "tile")] * has_residual
        return [*y, *big, *[rows._restore(rstd, "row")] * with_rstd]

    def body(tiles, columns, _):
        h = tiles[0]
        if has_residual:  # what is normalised is the sum after rounding
            h = (h + tiles[1]).astype(h_dtype).astype(rows.compute)
        rstd = jax.lax.rsqrt(jnp.sum(h * h, 1, keepdims=True) / n + eps)
        y = h * rstd * _weight(columns, scale_offset)
        return [y, *[h] * has_residual, *[rstd] * with_rstd]

    outs = [Out("tile", out_dtype), *[Out("tile", h_dtype)] * has_residual]
    outs += [Out("row", rows.compute)] * with_rstd
    return rows(body, [x, *residual], scale, [], outs, whole=True)


def _row_sums(rows, x, *, restore=True):
    body = lambda tiles, *_: [jnp.sum(tiles[0] * tiles[0], 1, keepdims=True)]
    return rows(body, [x], [], [], [Out("row sum", rows.compute)], restore=restore)


def _apply(rows, x, *rest, scale_offset, out_dtype, has_scale):
    *scale, rstd = rest
    del has_scale

    def body(tiles, columns, stats):
        return [tiles[0] * stats[0] * _weight(columns, scale_offset)]

    return rows(body, [x], scale, [rstd], [Out("tile", out_dtype)])


def _row_dots(rows, dy, x, *scale, scale_offset, has_scale, restore=True):
    del has_scale

    def body(tiles, columns, _):
        dots = tiles[0] * _weight(columns, scale_offset) * tiles[1]
        return [jnp.sum(dots, 1, keepdims=True)]

    return rows(body, [dy, x], scale, [], [Out("row sum", rows.compute)], restore=restore)


def _backward(rows, dy, x, *rest, scale_offset, has_residual, has_scale, with_dscale):
    scale, (rstd, *dh) = rest[:has_scale], rest[has_scale:]
    n, flags = x.shape[1], {"scale_offset": scale_offset, "has_scale": has_scale}
    if not rows.fit:
        (dots,) = _row_dots(rows, dy, x, *scale, restore=False, **flags)
        flags |= {"has_residual": has_residual, "with_dscale": with_dscale, "count": n}
        return _backward_apply(rows, dy, x, *scale, rstd, *dh, dots, **flags)

    def body(tiles, columns, stats):
        dy, x, *dh = tiles
        dots = jnp.sum(dy * _weight(columns, scale_offset) * x, 1, keepdims=True)
        return _gradients(dy, x, dh, columns, stats[0], dots / n, scale_offset, with_dscale)

    return rows(body, [dy, x, *dh], scale, [rstd], _gradient_outs(rows, x, with_dscale), whole=True)


def _backward_apply(rows, dy, x, *rest, count, scale_offset, has_residual, has_scale, with_dscale):
    scale, (rstd, *dh, dots) = rest[:has_scale], rest[has_scale:]

    def body(tiles, columns, stats):
        dy, x, *dh = tiles
        mean = stats[1] / count
        return _gradients(dy, x, dh, columns, stats[0], mean, scale_offset, with_dscale)

    outs = _gradient_outs(rows, x, with_dscale)
    return rows(body, [dy, x, *dh], scale, [rstd, dots], outs)


def _pullback(rows, dy, x, *rest, with_dscale, with_value, **flags):
    results = _backward(rows, dy, x, *rest, has_residual=False, with_dscale=with_dscale, **flags)
    again = _apply(rows, x, *rest, out_dtype=dy.dtype, **flags) if with_value else []
    return [*results, *again]


def _gradients(dy, x, dh, columns, rstd, mean, scale_offset, with_dscale):
    """dx of a tile, and what it adds to dscale; in the definition's order of products."""
    normal = x * rstd
    dx = rstd * (dy * _weight(columns, scale_offset) - normal * (rstd * mean))
    dx = dx + dh[0] if dh else dx
    return [dx, *[jnp.sum(dy * normal, 0, keepdims=True)] * with_dscale]


def _gradient_outs(rows, x, with_dscale):
    return [Out("tile", x.dtype), *[Out("column sum", rows.compute)] * with_dscale]


_GRADIENTS = (
    "backward",
    "row_dots",
    "backward_apply",
    "pullback",
)  # their operands begin with dy, then x
_KERNELS = {
    "forward": _forward,
    "row_sums": _row_sums,
    "apply": _apply,
    "backward": _backward,
    "row_dots": _row_dots,
    "backward_apply": _backward_apply,
    "pullback": _pullback,
}
