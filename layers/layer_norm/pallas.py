"""LayerNorm in Pallas, on (outer, n, inner) arrays; rows are laid out as RMSNorm's are.

Rows too long for a kernel to hold are read three times: for the mean, the squared differences, and
the rest. Elements beyond a row are zeros, which the differences are not: those are masked.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ...native.pallas.tiles import Out, before
from ..rms_norm.pallas import Rows, gradient_outs, kernel_of, plus_bias, weight_of
from ..rms_norm.spec import Norm

Array = jax.Array


def _normalised(norm: Norm, centred: Any, rstd: Any, columns: Sequence[Any]) -> Any:
    """Returns y of a tile, the columns being scale and bias as far as there are such."""
    return plus_bias(columns, norm, centred * rstd * weight_of(columns, norm))


def _forward(rows: Rows, norm: Norm, x: Array, *rest: Array) -> list[Array]:
    residual, parameters = rest[: norm.has_residual], rest[norm.has_residual :]
    h_dtype = jnp.promote_types(x.dtype, residual[0].dtype) if residual else x.dtype
    known = lambda mean, rstd: [*[mean] * norm.with_mean, *[rstd] * norm.with_rstd]
    if not rows.fit():
        h = x
        if residual:
            h = (x.astype(rows.compute) + residual[0].astype(rows.compute)).astype(h_dtype)
        mean, squares = _row_statistics(rows, norm, h)
        rstd = jax.lax.rsqrt(squares / rows.n + norm.eps)
        y = _apply(rows, norm, h, *parameters, mean, rstd)
        return [*y, *[h] * norm.has_residual, *known(mean, rstd)]

    def body(tiles, columns, _):
        h = tiles[0]
        if residual:  # what is normalised is the sum after rounding
            h = (h + tiles[1]).astype(h_dtype).astype(rows.compute)
        mean = jnp.sum(h, 1, keepdims=True) / rows.n
        centred = before(h - mean, rows.n, 1)
        rstd = jax.lax.rsqrt(jnp.sum(centred * centred, 1, keepdims=True) / rows.n + norm.eps)
        y = _normalised(norm, centred, rstd, columns)
        return [y, *[h] * norm.has_residual, *known(mean, rstd)]

    outs = [Out("tile", jnp.dtype(norm.out_dtype)), *[Out("tile", h_dtype)] * norm.has_residual]
    outs += [Out("row", rows.compute)] * (norm.with_mean + norm.with_rstd)
    return rows(body, [x, *residual], parameters, [], outs, whole=True)


def _row_statistics(rows: Rows, norm: Norm, x: Array) -> list[Array]:
    del norm
    outs = [Out("row sum", rows.compute)]
    total = lambda tiles, *_: [jnp.sum(tiles[0], 1, keepdims=True)]
    (sums,) = rows(total, [x], [], [], outs)
    mean = sums / rows.n

    def body(tiles, columns, stats):
        centred = (tiles[0] - stats[0]) * columns[0]  # 1 within the row, 0 beyond it
        return [jnp.sum(centred * centred, 1, keepdims=True)]

    inside = jnp.ones(rows.n, rows.compute)
    return [mean, *rows(body, [x], [inside], [mean], outs)]


def _apply(rows: Rows, norm: Norm, x: Array, *rest: Array) -> list[Array]:
    *parameters, mean, rstd = rest
    body = lambda tiles, columns, stats: [_normalised(norm, tiles[0] - stats[0], stats[1], columns)]
    out = Out("tile", jnp.dtype(norm.out_dtype))
    return rows(body, [x], parameters, [mean, rstd], [out])


def _row_dots(rows: Rows, norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    *scale, mean = rest

    def body(tiles, columns, stats):
        return _dots(norm, tiles[0] * weight_of(columns, norm), tiles[1] - stats[0])

    return rows(body, [dy, x], scale, [mean], [Out("row sum", rows.compute)] * 2)


def _dots(norm: Norm, g: Any, centred: Any) -> list[Any]:
    """Sums over rows; g is zero beyond them."""
    del norm
    return [jnp.sum(g, 1, keepdims=True), jnp.sum(g * centred, 1, keepdims=True)]


def _backward(rows: Rows, norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    scale, (mean, rstd, *dh) = rest[: norm.has_scale], rest[norm.has_scale :]
    if not rows.fit():
        sums = _row_dots(rows, norm, dy, x, *scale, mean)
        known = replace(norm, count=float(rows.n))
        return _backward_apply(rows, known, dy, x, *rest, *sums)

    def body(tiles, columns, stats):
        dy, x, *dh = tiles
        centred, w = x - stats[0], weight_of(columns, norm)
        means = [total / rows.n for total in _dots(norm, dy * w, centred)]
        return _gradients(norm, dy, centred, dh, w, stats[1], means)

    outs = gradient_outs(rows, norm, x)
    return rows(body, [dy, x, *dh], scale, [mean, rstd], outs, whole=True)


def _backward_apply(rows: Rows, norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    scale, (mean, rstd, *dh, sums, dots) = rest[: norm.has_scale], rest[norm.has_scale :]

    def body(tiles, columns, stats):
        dy, x, *dh = tiles
        means = [total / norm.count for total in stats[2:]]
        w = weight_of(columns, norm)
        return _gradients(norm, dy, x - stats[0], dh, w, stats[1], means)

    outs = gradient_outs(rows, norm, x)
    return rows(body, [dy, x, *dh], scale, [mean, rstd, sums, dots], outs)


def _gradients(
    norm: Norm, dy: Any, centred: Any, dh: Sequence[Any], w: Any, rstd: Any, means: Sequence[Any]
) -> list[Any]:
    """Returns dx of a tile, and what it adds to dscale and dbias; in the definition's order."""
    normal = centred * rstd
    dx = rstd * (dy * w - means[0] - normal * (rstd * means[1]))
    dx = dx + dh[0] if dh else dx
    add = lambda value: jnp.sum(value, 0, keepdims=True)
    return [dx, *[add(dy * normal)] * norm.with_dscale, *[add(dy)] * norm.with_dbias]


_kernel = functools.partial(kernel_of, op="layer_norm")
KERNELS = {
    "forward": _kernel(_forward, 0),
    "row_statistics": _kernel(_row_statistics, 0),
    "apply": _kernel(_apply, 0),
    "backward": _kernel(_backward, 1, with_columns=True),
    "row_dots": _kernel(_row_dots, 1),
    "backward_apply": _kernel(_backward_apply, 1, with_columns=True),
}
