"""RMSNorm in Pallas, on (outer, n, inner) arrays.

Rows are made contiguous first: where `inner` is not one that is a transpose before the kernel and
one after it. Rows too long for a kernel to hold are read twice: a sum over each, then the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import compute_dtype
from ...native.implementation import Unsupported
from ...native.pallas import lowering
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import Arrays, Call, Out
from .spec import Norm

Body = Callable[..., list[Array]]


def kernel_of(
    run: Callable[..., list[Array]], lead: int, with_columns: bool = False, op: str = "rms_norm"
) -> Body:
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
        dtypes = [a.dtype for a in operands]
        dtypes += [norm.out_dtype, norm.residual_dtype] if lead == 0 else []
        dtypes = [dtype for dtype in dtypes if dtype]
        lowering.require_dtypes(target, *dtypes)
        name = f"pallas_{op}_{run.__name__.lstrip('_')}"  # of "forward" and the like
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
    name: str  # of the kernel
    n: int
    compute: jnp.dtype

    def fit(self) -> bool:
        """Returns whether a kernel can hold whole rows."""
        return self._backend.fits(self.n)

    @property
    def _backend(self) -> Any:
        if self.target.gpu:
            from ...native.pallas import triton as backend
        else:
            from ...native.pallas import blocks as backend
        return backend

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
        return self._backend.run(self.target, call)


def weight_of(columns: Arrays, norm: Norm) -> Any:
    """Returns scale + scale_offset, or 1; scale is the first of the columns."""
    return columns[0] + norm.scale_offset if norm.has_scale else 1


def plus_bias(columns: Arrays, norm: Norm, y: Any) -> Any:
    """Returns y + bias, or y; bias is the last of the columns."""
    return y + columns[-1] if norm.has_bias else y


def _normal_of(norm: Norm, h: Any, rstd: Any, dtype: jnp.dtype) -> Any:
    """Returns x̂ as it is multiplied by the weight, h being of `dtype`."""
    normal = h * rstd
    return normal.astype(dtype).astype(normal.dtype) if norm.cast_before else normal


def forward(rows: Rows, norm: Norm, x: Array, *rest: Array) -> list[Array]:
    residual, parameters = rest[: norm.has_residual], rest[norm.has_residual :]
    h_dtype = jnp.promote_types(x.dtype, residual[0].dtype) if residual else x.dtype
    h_dtype = jnp.dtype(norm.residual_dtype or h_dtype)
    if not rows.fit():
        h = x
        if residual:
            h = (x.astype(rows.compute) + residual[0].astype(rows.compute)).astype(h_dtype)
        (sums,) = _row_sums(rows, norm, h)
        rstd = jax.lax.rsqrt(sums / rows.n + norm.eps)
        y = _apply(rows, norm, h, *parameters, rstd)
        return [*y, *[h] * norm.has_residual, *[rstd] * norm.with_rstd]

    def body(tiles, columns, _):
        h = tiles[0]
        if residual:  # what is normalised is the sum after rounding
            h = (h + tiles[1]).astype(h_dtype).astype(rows.compute)
        rstd = jax.lax.rsqrt(jnp.sum(h * h, 1, keepdims=True) / rows.n + norm.eps)
        y = _normal_of(norm, h, rstd, h_dtype) * weight_of(columns, norm)
        y = plus_bias(columns, norm, y)
        return [y, *[h] * norm.has_residual, *[rstd] * norm.with_rstd]

    outs = [Out("tile", jnp.dtype(norm.out_dtype)), *[Out("tile", h_dtype)] * norm.has_residual]
    outs += [Out("row", rows.compute)] * norm.with_rstd
    return rows(body, [x, *residual], parameters, [], outs, whole=True)


def _row_sums(rows: Rows, norm: Norm, x: Array) -> list[Array]:
    del norm
    body = lambda tiles, *_: [jnp.sum(tiles[0] * tiles[0], 1, keepdims=True)]
    return rows(body, [x], [], [], [Out("row sum", rows.compute)])


def _apply(rows: Rows, norm: Norm, x: Array, *rest: Array) -> list[Array]:
    *parameters, rstd = rest

    def body(tiles, columns, stats):
        y = _normal_of(norm, tiles[0], stats[0], x.dtype) * weight_of(columns, norm)
        return [plus_bias(columns, norm, y)]

    return rows(body, [x], parameters, [rstd], [Out("tile", jnp.dtype(norm.out_dtype))])


def _row_dots(rows: Rows, norm: Norm, dy: Array, x: Array, *scale: Array) -> list[Array]:
    def body(tiles, columns, _):
        dots = tiles[0] * weight_of(columns, norm) * tiles[1]
        return [jnp.sum(dots, 1, keepdims=True)]

    return rows(body, [dy, x], scale, [], [Out("row sum", rows.compute)])


def backward(rows: Rows, norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    scale, (rstd, *dh) = rest[: norm.has_scale], rest[norm.has_scale :]
    if not rows.fit():
        (dots,) = _row_dots(rows, norm, dy, x, *scale)
        known = replace(norm, count=float(rows.n))
        results = _backward_apply(rows, known, dy, x, *scale, rstd, *dh, dots)
    else:

        def body(tiles, columns, stats):
            dy, x, *dh = tiles
            dots = jnp.sum(dy * weight_of(columns, norm) * x, 1, keepdims=True)
            return gradients(norm, dy, x, dh, columns, stats[0], dots / rows.n)

        outs = gradient_outs(rows, norm, x)
        results = rows(body, [dy, x, *dh], scale, [rstd], outs, whole=True)
    if norm.with_value:
        results += _apply(rows, replace(norm, out_dtype=dy.dtype.name), x, *scale, rstd)
    return results


def _backward_apply(rows: Rows, norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    scale, (rstd, *dh, dots) = rest[: norm.has_scale], rest[norm.has_scale :]

    def body(tiles, columns, stats):
        dy, x, *dh = tiles
        return gradients(norm, dy, x, dh, columns, stats[0], stats[1] / norm.count)

    return rows(body, [dy, x, *dh], scale, [rstd, dots], gradient_outs(rows, norm, x))


def gradients(
    norm: Norm, dy: Any, x: Any, dh: Sequence[Any], columns: Any, rstd: Any, mean: Any
) -> list[Any]:
    """Returns dx of a tile, and what it adds to dscale and dbias; in the definition's order."""
    normal = x * rstd
    dx = rstd * (dy * weight_of(columns, norm) - normal * (rstd * mean))
    dx = dx + dh[0] if dh else dx
    add = lambda value: jnp.sum(value, 0, keepdims=True)
    return [dx, *[add(dy * normal)] * norm.with_dscale, *[add(dy)] * norm.with_dbias]


def gradient_outs(rows: Rows, norm: Norm, x: Array) -> list[Out]:
    """dx, and what was asked for of dscale and dbias."""
    sums = norm.with_dscale + norm.with_dbias
    return [Out("tile", x.dtype), *[Out("column sum", rows.compute)] * sums]


KERNELS = {
    "forward": kernel_of(forward, 0),
    "row_sums": kernel_of(_row_sums, 0),
    "apply": kernel_of(_apply, 0),
    "backward": kernel_of(backward, 1, with_columns=True),
    "row_dots": kernel_of(_row_dots, 1),
    "backward_apply": kernel_of(_backward_apply, 1, with_columns=True),
}
