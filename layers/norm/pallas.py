"""The norms in Pallas, on (outer, n, inner) arrays.

Rows are made contiguous first: where `inner` is not one that is a transpose before the kernel and
one after it. Rows too long for a kernel to hold are read twice, a sum over each and then the rest,
or if centred three times. Elements beyond a row are zeros, which differences to a mean are not:
those are masked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import compute_dtype, promoted
from ...native.implementation import Unsupported
from ...native.pallas import blocks, lowering
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import Arrays, Call, Out, before
from .spec import Norm

Body = Callable[..., list[Array]]


def _kernel_of(run: Callable[..., list[Array]], lead: int, with_columns: bool = False) -> Body:
    """Returns the kernel `run` as a body; its operand `lead` is x.

    `run` takes and returns flat arrays; a vector is one value a row, or one a column
    `with_columns`. The body raises `Unsupported` for dtypes or sizes that the platform's kernels do
    not take.
    """

    def restored(array: Array, outer: int, n: int, inner: int) -> Array:
        if array.ndim == 2:
            return jnp.swapaxes(array.reshape(outer, inner, n), 1, 2)
        return array if with_columns else array.reshape(outer, inner)

    def call(target: Target, norm: Norm, *operands: Array) -> list[Array]:
        if norm.heads:
            raise Unsupported("Pallas kernels take one scale for all heads")
        if target.gpu:
            raise Unsupported("the Pallas kernels of norms are for TPUs")
        dtypes = [a.dtype for a in operands]
        dtypes += [norm.out_dtype, norm.residual_dtype] if lead == 0 else []
        dtypes = [dtype for dtype in dtypes if dtype]
        lowering.require_dtypes(target, *dtypes)
        family = "layer_norm" if norm.centred else "rms_norm"
        name = f"pallas_{family}_{run.__name__.lstrip('_')}"  # ends in "forward" and the like
        rows = Rows(target, name, operands[lead].shape[1], compute_dtype(*dtypes))
        results = run(rows, norm, *[_flat(a) for a in operands])
        return [restored(r, *operands[lead].shape) for r in results]

    return call


def _flat(array: Array) -> Array:
    """Returns (outer, n, inner) as (rows, n), (outer, inner) as (rows,), (n,) as it is."""
    if array.ndim == 3:
        return jnp.swapaxes(array, 1, 2).reshape(-1, array.shape[1])
    return array.reshape(-1)


@dataclass(frozen=True)
class Rows:
    """The kernels of a platform for rows of n elements."""

    target: Target
    name: str  # the kernel's
    n: int
    compute: jnp.dtype

    def fit(self) -> bool:
        """Returns whether a kernel can hold whole rows."""
        return blocks.fits(self.n)

    def __call__(
        self,
        body: Any,
        tiles: Arrays,
        columns: Arrays,
        rows: Arrays,
        outs: Any,
        whole: bool = False,
    ) -> list[Array]:
        call = Call(self.name, body, tiles, columns, rows, outs, self.compute, whole)
        return blocks.run(self.target, call)


def _weight_of(columns: Arrays, norm: Norm) -> Any:
    """Returns scale + scale_offset, or 1; scale is the first of the columns."""
    return columns[0] + norm.scale_offset if norm.has_scale else 1


def _scaled(norm: Norm, columns: Arrays, normal: Any, dtype: jnp.dtype) -> Any:
    """Returns y of a tile, x being of `dtype`; bias is the last of the columns."""
    normal = normal.astype(dtype).astype(normal.dtype) if norm.cast_before else normal
    y = normal * _weight_of(columns, norm)
    return y + columns[-1] if norm.has_bias else y


def _centred(norm: Norm, x: Any, stats: Sequence[Any]) -> Any:
    """Returns x − mean, the first of the statistics; or x."""
    return x - stats[0] if norm.centred else x


def _sum(values: Any, along: int = 1) -> Any:
    return jnp.sum(values, along, keepdims=True)


def _forward(rows: Rows, norm: Norm, x: Array, *rest: Array) -> list[Array]:
    residual, parameters = rest[: norm.has_residual], rest[norm.has_residual :]
    h_dtype = promoted(x.dtype, residual[0].dtype) if residual else x.dtype
    h_dtype = jnp.dtype(norm.residual_dtype or h_dtype)
    known = lambda mean, rstd: [*mean * norm.with_mean, *[rstd] * norm.with_rstd]
    if not rows.fit():
        h = x
        if residual:
            h = (x.astype(rows.compute) + residual[0].astype(rows.compute)).astype(h_dtype)
        *mean, squares = _row_statistics(rows, norm, h)
        rstd = jax.lax.rsqrt(squares / rows.n + norm.eps)
        y = _apply(rows, norm, h, *parameters, *mean, rstd)
        return [*y, *[h] * norm.has_residual, *known(mean, rstd)]

    def body(tiles, columns, _):
        h, mean = tiles[0], []
        if residual:  # the norm is of the rounded sum
            h = (h + tiles[1]).astype(h_dtype).astype(rows.compute)
        centred = h
        for _ in range(2 * norm.centred):  # the second is what rounding has left
            mean.append(_sum(centred) / rows.n)
            centred = before(centred - mean[-1], rows.n, 1)
        rstd = jax.lax.rsqrt(_sum(centred * centred) / rows.n + norm.eps)
        y = _scaled(norm, columns, centred * rstd, h_dtype)
        return [y, *[h] * norm.has_residual, *known(mean and [sum(mean)], rstd)]

    outs = [Out("tile", jnp.dtype(norm.out_dtype)), *[Out("tile", h_dtype)] * norm.has_residual]
    outs += [Out("row", rows.compute)] * (norm.with_mean + norm.with_rstd)
    return rows(body, [x, *residual], parameters, [], outs, whole=True)


def _row_statistics(rows: Rows, norm: Norm, x: Array) -> list[Array]:
    out = Out("row sum", rows.compute)
    if not norm.centred:
        return rows(lambda tiles, *_: [_sum(tiles[0] * tiles[0])], [x], [], [], [out])
    inside = jnp.ones(rows.n, rows.compute)  # 1 within the row, 0 beyond it

    def sums(tiles, columns, stats):
        centred = (tiles[0] - stats[0]) * columns[0]
        return [_sum(centred), _sum(centred * centred)]

    (total,) = rows(lambda tiles, *_: [_sum(tiles[0])], [x], [], [], [out])
    rough = total / rows.n
    rest, squares = rows(sums, [x], [inside], [rough], [out, out])
    return [rough + rest / rows.n, squares - rest * (rest / rows.n)]


def _apply(rows: Rows, norm: Norm, x: Array, *rest: Array) -> list[Array]:
    count = norm.has_scale + norm.has_bias

    def body(tiles, columns, stats):
        return [_scaled(norm, columns, _centred(norm, tiles[0], stats) * stats[-1], x.dtype)]

    out = Out("tile", jnp.dtype(norm.out_dtype))
    return rows(body, [x], rest[:count], rest[count:], [out])


def _row_dots(rows: Rows, norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    def body(tiles, columns, stats):
        return _dots(norm, tiles[0] * _weight_of(columns, norm), _centred(norm, tiles[1], stats))

    outs = [Out("row sum", rows.compute)] * (1 + norm.centred)
    return rows(body, [dy, x], rest[: norm.has_scale], rest[norm.has_scale :], outs)


def _dots(norm: Norm, g: Any, centred: Any) -> list[Any]:
    """Sums over rows; g is zero beyond them."""
    return [*[_sum(g)] * norm.centred, _sum(g * centred)]


def _backward(rows: Rows, norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    scale, others = rest[: norm.has_scale], rest[norm.has_scale :]
    statistics, dh = others[: 1 + norm.centred], others[1 + norm.centred :]
    if not rows.fit():
        sums = _row_dots(rows, norm, dy, x, *scale, *statistics[: norm.centred])
        known = replace(norm, count=float(rows.n))
        results = _backward_apply(rows, known, dy, x, *rest, *sums)
    else:

        def body(tiles, columns, stats):
            dy, x, *dh = tiles
            centred, w = _centred(norm, x, stats), _weight_of(columns, norm)
            means = [total / rows.n for total in _dots(norm, dy * w, centred)]
            return _gradients(norm, dy, centred, dh, w, stats[-1], means)

        outs = _gradient_outs(rows, norm, x)
        results = rows(body, [dy, x, *dh], scale, statistics, outs, whole=True)
    return results


def _backward_apply(rows: Rows, norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    scale, others = rest[: norm.has_scale], rest[norm.has_scale :]
    count = 1 + norm.centred
    dh, statistics = others[count:-count], [*others[:count], *others[-count:]]

    def body(tiles, columns, stats):
        dy, x, *dh = tiles
        means = [total / norm.count for total in stats[count:]]
        centred, w = _centred(norm, x, stats), _weight_of(columns, norm)
        return _gradients(norm, dy, centred, dh, w, stats[count - 1], means)

    return rows(body, [dy, x, *dh], scale, statistics, _gradient_outs(rows, norm, x))


def _gradients(
    norm: Norm, dy: Any, centred: Any, dh: Sequence[Any], w: Any, rstd: Any, means: Sequence[Any]
) -> list[Any]:
    """Returns dx of a tile, and what it adds to dscale and dbias; in the definition's order."""
    normal = centred * rstd
    g = dy * w - means[0] if norm.centred else dy * w
    dx = rstd * (g - normal * (rstd * means[-1]))
    dx = dx + dh[0] if dh else dx
    return [dx, *[_sum(dy * normal, 0)] * norm.with_dscale, *[_sum(dy, 0)] * norm.with_dbias]


def _gradient_outs(rows: Rows, norm: Norm, x: Array) -> list[Out]:
    """dx, and what was asked for of dscale and dbias."""
    sums = norm.with_dscale + norm.with_dbias
    return [Out("tile", x.dtype), *[Out("column sum", rows.compute)] * sums]


KERNELS = {
    "forward": _kernel_of(_forward, 0),
    "row_statistics": _kernel_of(_row_statistics, 0),
    "apply": _kernel_of(_apply, 0),
    "backward": _kernel_of(_backward, 1, with_columns=True),
    "row_dots": _kernel_of(_row_dots, 1),
    "backward_apply": _kernel_of(_backward_apply, 1, with_columns=True),
}
