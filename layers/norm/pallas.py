"""The norms in Pallas, forward and backward, on (rows, n) arrays of rows that a kernel can hold."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import promoted
from ...native.implementation import Unsupported
from ...native.pallas import blocks, lowering
from ...native.pallas.blocks import Call, Out
from ...native.pallas.lowering import Target
from .spec import PARAMETERS, STATISTICS, Norm

Values = dict[str, Any]  # a block's, by the names of `Norm.names`; and "W", the weight, or 1


def _sum(values: Any, along: int = 1) -> Any:
    return jnp.sum(values, along, keepdims=True)


def _forward(norm: Norm, n: int, stored: jnp.dtype, values: Values) -> Values:
    """Returns the results of a block; what is normalised is of dtype `stored`."""
    h, mean = values["X"], []
    if norm.has_residual:  # the norm is of the rounded sum
        h = (h + values["RESIDUAL"]).astype(stored).astype(norm.compute)
    centred = h
    for _ in range(2 * norm.centred):  # the second is what rounding has left
        mean.append(_sum(centred) / n)
        centred = centred - mean[-1]
    rstd = jax.lax.rsqrt(_sum(centred * centred) / n + norm.eps)
    normal = centred * rstd
    y = (normal.astype(stored).astype(normal.dtype) if norm.cast_before else normal) * values["W"]
    y = y + values["BIAS"] if norm.has_bias else y
    return {"Y": y, "H": h, "MEAN": sum(mean), "RSTD": rstd}


def _backward(norm: Norm, n: int, stored: jnp.dtype, values: Values) -> Values:
    """Returns dx of a block, and what it adds to dscale and dbias; in the definition's order."""
    centred = values["X"] - values["MEAN"] if norm.centred else values["X"]
    dy, rstd, g = values["DY"], values["RSTD"], values["DY"] * values["W"]
    normal, dots = centred * rstd, _sum(g * centred)
    g = g - _sum(g) / n if norm.centred else g
    dx = rstd * (g - normal * (rstd * (dots / n)))
    dx = dx + values["DH"] if norm.has_residual else dx
    return {"DX": dx, "DSCALE": _sum(dy * normal, 0), "DBIAS": _sum(dy, 0)}


def _run(kernel: str, target: Target, norm: Norm, *operands: Array) -> list[Array]:
    """Runs a kernel; raises `Unsupported` for what the platform's kernels do not take."""
    if norm.heads:
        raise Unsupported("Pallas kernels take one scale for all rows")
    dtypes = {*(a.dtype.name for a in operands), norm.compute, norm.out_dtype, norm.residual_dtype}
    lowering.require_dtypes(target, *map(jnp.dtype, dtypes - {""}))
    names, results = norm.names(kernel)
    arrays = dict(zip(names, operands, strict=True))
    x, compute = arrays["X"], jnp.dtype(norm.compute)
    n = x.shape[1]
    if n > blocks.LONGEST:
        raise Unsupported(f"Pallas kernels take rows of at most {blocks.LONGEST}, not {n}")
    sum_dtype = promoted(x.dtype, arrays.get("RESIDUAL", x).dtype)
    stored = jnp.dtype(norm.residual_dtype or sum_dtype)
    groups = PARAMETERS, STATISTICS
    tiles = [name for name in names if name not in (*PARAMETERS, *STATISTICS)]
    columns, rows = ([name for name in names if name in group] for group in groups)

    def body(*values: Any) -> list[Any]:
        given: Values = dict(zip((*tiles, *columns, *rows), [v for group in values for v in group]))
        given["W"] = given["SCALE"] + norm.scale_offset if "SCALE" in given else 1
        found = of_kernel(norm, n, stored, given)
        return [found[name] for name in results]

    of_kernel = {"forward": _forward, "backward": _backward}[kernel]
    kinds: dict[str, Any] = dict.fromkeys(STATISTICS, "row")
    kinds |= dict.fromkeys(PARAMETERS, "column sum")
    types = {"Y": norm.out_dtype, "H": stored, "DX": x.dtype}
    outs = [Out(kinds.get(k, "tile"), jnp.dtype(types.get(k, compute))) for k in results]
    of = lambda group: [arrays[name] for name in group]
    name = f"pallas_{'layer_norm' if norm.centred else 'rms_norm'}_{kernel}"
    return blocks.run(target, Call(name, body, of(tiles), of(columns), of(rows), outs, compute))


KERNELS = {kernel: functools.partial(_run, kernel) for kernel in ("forward", "backward")}
