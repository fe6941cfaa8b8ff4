"""The norms in Pallas, on (rows, n) arrays.

Rows too long for a kernel to hold are read twice, a sum over each and then the rest, or if centred
three times. Elements beyond a row are zeros, which differences to a mean are not: those are masked.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import promoted
from ...native.implementation import Unsupported
from ...native.pallas import blocks, lowering
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import Arrays, Call, Out, before
from .spec import PARAMETERS, STATISTICS, Norm

Values = dict[str, Any]  # a tile's, by the names of `Norm.names`; and "W", the weight, or 1


@dataclass(frozen=True)
class _Rows:
    """A kernel of a platform, for rows of n elements."""

    target: Target
    norm: Norm
    kernel: str
    n: int

    def __call__(self, operands: Arrays, body: Callable[[Values], Values], whole: bool) -> Any:
        """Runs `body` on each tile, or on whole rows."""
        norm, (names, results) = self.norm, self.norm.names(self.kernel)
        arrays = dict(zip(names, operands, strict=True))
        columns = [name for name in names if name in PARAMETERS]
        rows = [name for name in names if name in STATISTICS]
        tiles = [name for name in names if name not in (*columns, *rows)]

        def named(*groups: Arrays) -> list[Any]:
            every = [v for group in groups for v in group]
            values: dict[str, Any] = dict(zip((*tiles, *columns, *rows), every))
            values["W"] = values["SCALE"] + norm.scale_offset if "SCALE" in values else 1
            found = body(values)
            return [found[name] for name in results]

        kinds = {"MEAN": "row", "RSTD": "row"} | dict.fromkeys(
            ("SQUARES", "SUMS", "DOTS"), "row sum"
        )
        kinds |= dict.fromkeys(PARAMETERS, "column sum")
        dtypes = {"Y": norm.out_dtype, "H": stored(norm, arrays), "DX": arrays["X"].dtype}
        outs = [Out(kinds.get(k, "tile"), jnp.dtype(dtypes.get(k, norm.compute))) for k in results]
        of = lambda group: [arrays[name] for name in group]
        return self.run(named, of(tiles), of(columns), of(rows), outs, whole)

    def run(self, body: Any, tiles: Any, columns: Any, rows: Any, outs: Any, whole: bool) -> Any:
        family = "layer_norm" if self.norm.centred else "rms_norm"
        name = f"pallas_{family}_{self.kernel}"
        compute = jnp.dtype(self.norm.compute)
        return blocks.run(self.target, Call(name, body, tiles, columns, rows, outs, compute, whole))


def stored(norm: Norm, arrays: Values) -> Any:
    """Returns the dtype of x + residual."""
    x, residual = arrays["X"], arrays.get("RESIDUAL", arrays["X"])
    return jnp.dtype(norm.residual_dtype or promoted(x.dtype, residual.dtype))


def _sum(values: Any, along: int = 1) -> Any:
    return jnp.sum(values, along, keepdims=True)


def _scaled(norm: Norm, values: Values, normal: Any, dtype: jnp.dtype) -> Any:
    """Returns y of a tile, what is normalised being of `dtype`."""
    normal = normal.astype(dtype).astype(normal.dtype) if norm.cast_before else normal
    y = normal * values["W"]
    return y + values["BIAS"] if norm.has_bias else y


def _centred(values: Values) -> Any:
    """Returns x − mean, or x."""
    return values["X"] - values["MEAN"] if "MEAN" in values else values["X"]


def _sums(values: Values) -> Values:
    """Returns what a tile adds to the sums over rows; g is zero beyond them."""
    g = values["DY"] * values["W"]
    return {"SUMS": _sum(g), "DOTS": _sum(g * _centred(values))}


def _gradients(norm: Norm, values: Values, sums: Values, count: float) -> Values:
    """Returns dx of a tile, and what it adds to dscale and dbias; in the definition's order."""
    dy, rstd, normal = values["DY"], values["RSTD"], _centred(values) * values["RSTD"]
    g = dy * values["W"] - sums["SUMS"] / count if norm.centred else dy * values["W"]
    dx = rstd * (g - normal * (rstd * (sums["DOTS"] / count)))
    dx = dx + values["DH"] if norm.has_residual else dx
    return {"DX": dx, "DSCALE": _sum(dy * normal, 0), "DBIAS": _sum(dy, 0)}


# ---------------------------------------------------------------- kernels


def _forward(rows: _Rows, *operands: Array) -> list[Array]:
    norm, n = rows.norm, rows.n
    arrays = dict(zip(norm.names("forward")[0], operands))
    dtype, compute = stored(norm, arrays), jnp.dtype(norm.compute)
    if not blocks.fits(n):
        h, *parameters = operands
        if norm.has_residual:
            h = (h.astype(compute) + parameters.pop(0).astype(compute)).astype(dtype)
        *mean, squares = _row_statistics(replace(rows, kernel="row_statistics"), h)
        rstd = jax.lax.rsqrt(squares / n + norm.eps)
        (y,) = _apply(replace(rows, kernel="apply"), h, *parameters, *mean, rstd)
        return [y, *[h] * norm.has_residual, *mean * norm.with_mean, *[rstd] * norm.with_rstd]

    def body(values: Values) -> Values:
        h, mean = values["X"], []
        if norm.has_residual:  # the norm is of the rounded sum
            h = (h + values["RESIDUAL"]).astype(dtype).astype(compute)
        centred = h
        for _ in range(2 * norm.centred):  # the second is what rounding has left
            mean.append(_sum(centred) / n)
            centred = before(centred - mean[-1], n, 1)
        rstd = jax.lax.rsqrt(_sum(centred * centred) / n + norm.eps)
        y = _scaled(norm, values, centred * rstd, dtype)
        return {"Y": y, "H": h, "MEAN": sum(mean), "RSTD": rstd}

    return rows(operands, body, whole=True)


def _row_statistics(rows: _Rows, x: Array) -> list[Array]:
    out = Out("row sum", jnp.dtype(rows.norm.compute))
    if not rows.norm.centred:
        return rows([x], lambda values: {"SQUARES": _sum(values["X"] ** 2)}, whole=False)
    inside = jnp.ones(rows.n, rows.norm.compute)  # 1 within the row, 0 beyond it

    def sums(tiles: Arrays, columns: Arrays, means: Arrays) -> Sequence[Any]:
        centred = (tiles[0] - means[0]) * columns[0]
        return [_sum(centred), _sum(centred * centred)]

    (total,) = rows.run(lambda tiles, *_: [_sum(tiles[0])], [x], [], [], [out], False)
    rough = total / rows.n
    rest, squares = rows.run(sums, [x], [inside], [rough], [out, out], False)
    return [rough + rest / rows.n, squares - rest * (rest / rows.n)]


def _apply(rows: _Rows, *operands: Array) -> list[Array]:
    def body(values: Values) -> Values:
        normal = _centred(values) * values["RSTD"]
        return {"Y": _scaled(rows.norm, values, normal, operands[0].dtype)}

    return rows(operands, body, whole=False)


def _backward(rows: _Rows, *operands: Array) -> list[Array]:
    norm, n = rows.norm, rows.n
    if blocks.fits(n):
        body = lambda values: _gradients(norm, values, _sums(values), n)
        return rows(operands, body, whole=True)
    known = operands[: 2 + norm.has_scale + norm.centred]
    sums = _row_dots(replace(rows, kernel="row_dots"), *known)
    apart = replace(rows, kernel="backward_apply", norm=replace(norm, count=float(n)))
    return _backward_apply(apart, *operands, *sums)


def _row_dots(rows: _Rows, *operands: Array) -> list[Array]:
    return rows(operands, _sums, whole=False)


def _backward_apply(rows: _Rows, *operands: Array) -> list[Array]:
    body = lambda values: _gradients(rows.norm, values, values, rows.norm.count)
    return rows(operands, body, whole=False)


def _body(
    kernel: str,
    run: Callable[..., list[Array]],
    target: Target,
    norm: Norm,
    *operands: Array,
) -> list[Array]:
    """Raises `Unsupported` for what the platform's kernels do not take."""
    if norm.heads:
        raise Unsupported("Pallas kernels take one scale for all rows")
    dtypes = {*(a.dtype.name for a in operands), norm.compute, norm.out_dtype, norm.residual_dtype}
    lowering.require_dtypes(target, *map(jnp.dtype, dtypes - {""}))
    x = operands[norm.names(kernel)[0].index("X")]
    return run(_Rows(target, norm, kernel, x.shape[1]), *operands)


_RUN = {
    "forward": _forward,
    "row_statistics": _row_statistics,
    "apply": _apply,
    "backward": _backward,
    "row_dots": _row_dots,
    "backward_apply": _backward_apply,
}
KERNELS = {kernel: functools.partial(_body, kernel, run) for kernel, run in _RUN.items()}
