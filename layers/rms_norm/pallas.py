"""RMSNorm in Pallas, on (outer, n, inner) arrays.

Rows are made contiguous first: where `inner` is not one that is a transpose before the kernel and
one after it. Rows too long for a kernel to hold are read twice: a sum over each, then the rest.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ...native.dtypes import compute_dtype
from ...native.pallas import lowering
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import Call, Out
from .spec import Norm


def _kernel(run: Callable[..., Any], lead: int) -> Callable[..., list[jax.Array]]:
    """Returns the kernel `run` as a body; its operand `lead` is x.

    It raises `Unsupported` for dtypes or sizes that the platform's kernels do not take.
    """

    def call(target: Target, norm: Norm, *operands: jax.Array) -> list[jax.Array]:
        dtypes = [a.dtype for a in operands] + ([norm.out_dtype] if lead == 0 else [])
        dtypes = [dtype for dtype in dtypes if dtype]
        lowering.require_dtypes(target, *dtypes)
        name = f"pallas_rms_norm{run.__name__}"  # of "_forward" and the like
        rows = _Rows(target, name, operands[lead].shape, compute_dtype(*dtypes))
        return run(rows, norm, *[rows.flat(a) for a in operands])

    return call


class _Rows:
    """The matrix of rows behind an (outer, n, inner) array, and the kernels of a platform."""

    def __init__(self, target: Target, name: str, shape: tuple[int, int, int], compute: jnp.dtype):
        self.target, self.name, self.shape, self.compute = target, name, shape, compute

    @functools.cached_property
    def _backend(self) -> Any:
        if self.target.gpu:
            from ...native.pallas import triton as backend
        else:
            from ...native.pallas import blocks as backend
        return backend

    @property
    def fit(self) -> bool:
        """Whether a kernel can hold whole rows."""
        return self._backend.fits(self.target, self.shape[1])

    def flat(self, array: jax.Array) -> jax.Array:
        """(outer, n, inner) as (rows, n), (outer, inner) as (rows,), (n,) as it is."""
        if array.ndim == 3:
            return jnp.swapaxes(array, 1, 2).reshape(-1, array.shape[1])
        return array.reshape(-1) if array.ndim == 2 else array

    def _restore(self, array: jax.Array, kind: str) -> jax.Array:
        outer, n, inner = self.shape
        if kind == "tile":
            return jnp.swapaxes(array.reshape(outer, inner, n), 1, 2)
        return array if kind == "column sum" else array.reshape(outer, inner)

    def __call__(
        self,
        body: Callable[..., Any],
        tiles: Sequence[jax.Array],
        columns: Sequence[jax.Array],
        rows: Sequence[jax.Array],
        outs: Sequence[Out],
        whole: bool = False,
        restore: bool = True,
    ) -> list[jax.Array]:
        call = Call(self.name, body, tiles, columns, rows, outs, self.compute, whole)
        results = self._backend.run(self.target, call)
        if not restore:
            return results
        return [self._restore(r, out.kind) for r, out in zip(results, outs)]


def _weight(columns: Sequence[jax.Array], norm: Norm) -> Any:
    """scale + scale_offset, or 1."""
    return columns[0] + norm.scale_offset if columns else 1


def _forward(rows: _Rows, norm: Norm, x: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    residual, scale = rest[: norm.has_residual], rest[norm.has_residual :]
    h_dtype = jnp.promote_types(x.dtype, residual[0].dtype) if residual else x.dtype
    n = x.shape[1]
    if not rows.fit:
        h = x
        if residual:
            h = (x.astype(rows.compute) + residual[0].astype(rows.compute)).astype(h_dtype)
        (sums,) = _row_sums(rows, norm, h, restore=False)
        rstd = jax.lax.rsqrt(sums / n + norm.eps)
        y = _apply(rows, norm, h, *scale, rstd)
        big = [rows._restore(h, "tile")] * norm.has_residual
        return [*y, *big, *[rows._restore(rstd, "row")] * norm.with_rstd]

    def body(tiles, columns, _):
        h = tiles[0]
        if residual:  # what is normalised is the sum after rounding
            h = (h + tiles[1]).astype(h_dtype).astype(rows.compute)
        rstd = jax.lax.rsqrt(jnp.sum(h * h, 1, keepdims=True) / n + norm.eps)
        y = h * rstd * _weight(columns, norm)
        return [y, *[h] * norm.has_residual, *[rstd] * norm.with_rstd]

    outs = [Out("tile", jnp.dtype(norm.out_dtype)), *[Out("tile", h_dtype)] * norm.has_residual]
    outs += [Out("row", rows.compute)] * norm.with_rstd
    return rows(body, [x, *residual], scale, [], outs, whole=True)


def _row_sums(rows: _Rows, norm: Norm, x: jax.Array, *, restore: bool = True) -> list[jax.Array]:
    del norm
    body = lambda tiles, *_: [jnp.sum(tiles[0] * tiles[0], 1, keepdims=True)]
    return rows(body, [x], [], [], [Out("row sum", rows.compute)], restore=restore)


def _apply(rows: _Rows, norm: Norm, x: jax.Array, *rest: jax.Array) -> list[jax.Array]:
    *scale, rstd = rest
    body = lambda tiles, columns, stats: [tiles[0] * stats[0] * _weight(columns, norm)]
    return rows(body, [x], scale, [rstd], [Out("tile", jnp.dtype(norm.out_dtype))])


def _row_dots(
    rows: _Rows, norm: Norm, dy: jax.Array, x: jax.Array, *scale: jax.Array, restore: bool = True
) -> list[jax.Array]:
    def body(tiles, columns, _):
        dots = tiles[0] * _weight(columns, norm) * tiles[1]
        return [jnp.sum(dots, 1, keepdims=True)]

    return rows(body, [dy, x], scale, [], [Out("row sum", rows.compute)], restore=restore)


def _backward(
    rows: _Rows, norm: Norm, dy: jax.Array, x: jax.Array, *rest: jax.Array
) -> list[jax.Array]:
    scale, (rstd, *dh) = rest[: norm.has_scale], rest[norm.has_scale :]
    n = x.shape[1]
    if not rows.fit:
        (dots,) = _row_dots(rows, norm, dy, x, *scale, restore=False)
        known = replace(norm, count=float(n))
        results = _backward_apply(rows, known, dy, x, *scale, rstd, *dh, dots)
    else:

        def body(tiles, columns, stats):
            dy, x, *dh = tiles
            dots = jnp.sum(dy * _weight(columns, norm) * x, 1, keepdims=True)
            return _gradients(norm, dy, x, dh, columns, stats[0], dots / n)

        outs = _gradient_outs(rows, norm, x)
        results = rows(body, [dy, x, *dh], scale, [rstd], outs, whole=True)
    if norm.with_value:
        results += _apply(rows, replace(norm, out_dtype=dy.dtype.name), x, *scale, rstd)
    return results


def _backward_apply(
    rows: _Rows, norm: Norm, dy: jax.Array, x: jax.Array, *rest: jax.Array
) -> list[jax.Array]:
    scale, (rstd, *dh, dots) = rest[: norm.has_scale], rest[norm.has_scale :]

    def body(tiles, columns, stats):
        dy, x, *dh = tiles
        return _gradients(norm, dy, x, dh, columns, stats[0], stats[1] / norm.count)

    return rows(body, [dy, x, *dh], scale, [rstd, dots], _gradient_outs(rows, norm, x))


def _gradients(
    norm: Norm, dy: Any, x: Any, dh: Sequence[Any], columns: Any, rstd: Any, mean: Any
) -> list[Any]:
    """dx of a tile, and what it adds to dscale; in the definition's order of products."""
    normal = x * rstd
    dx = rstd * (dy * _weight(columns, norm) - normal * (rstd * mean))
    dx = dx + dh[0] if dh else dx
    return [dx, *[jnp.sum(dy * normal, 0, keepdims=True)] * norm.with_dscale]


def _gradient_outs(rows: _Rows, norm: Norm, x: jax.Array) -> list[Out]:
    return [Out("tile", x.dtype), *[Out("column sum", rows.compute)] * norm.with_dscale]


KERNELS = {
    "forward": _kernel(_forward, 0),
    "row_sums": _kernel(_row_sums, 0),
    "apply": _kernel(_apply, 0),
    "backward": _kernel(_backward, 1),
    "row_dots": _kernel(_row_dots, 1),
    "backward_apply": _kernel(_backward_apply, 1),
}
