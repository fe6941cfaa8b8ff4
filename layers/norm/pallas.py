"""The norms in Pallas, forward and backward, on (rows, n) arrays of rows that a kernel can hold.

Kernels take blocks of whole rows, pipelined by Mosaic on TPUs and, interpreted, on CPUs.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...native.dtypes import FLOATING, promoted
from ...native.implementation import Unsupported
from .spec import PARAMETERS, RESULTS, STATISTICS, Norm, operands_of, results_of

Values = dict[str, Any]  # a block's, by their names; and "W", the weight, or 1

# Elements of a block. A TPU core has 16 MiB for every operand's block twice (one is fetched while
# the other is used) and the values in between; a backward has five operands, 0.5 MiB each in
# float32.
_ELEMENTS = 1 << 17
_ROWS, _LANES = 16, 128  # bfloat16 is laid out in tiles of (16, 128)
LONGEST = _ELEMENTS // _ROWS  # elements of a row


def _sum(values: Any, along: int = 1) -> Any:
    return jnp.sum(values, along, keepdims=True)


def _forward(norm: Norm, n: int, stored: jnp.dtype, values: Values) -> Values:
    """Returns the results of a block; what is normalised is of dtype `stored`."""
    h, mean = values["X"], []
    if "RESIDUAL" in values:  # the norm is of the rounded sum
        h = (h + values["RESIDUAL"]).astype(stored).astype(norm.compute)
    centred = h
    for _ in range(2 * norm.centred):  # the second is what rounding has left
        mean.append(_sum(centred) / n)
        centred = centred - mean[-1]
    rstd = lax.rsqrt(_sum(centred * centred) / n + norm.eps)
    normal = centred * rstd
    y = (normal.astype(stored).astype(normal.dtype) if norm.cast_before else normal) * values["W"]
    y = y + values["BIAS"] if "BIAS" in values else y
    return {"Y": y, "H": h, "MEAN": sum(mean), "RSTD": rstd}


def _backward(norm: Norm, n: int, stored: jnp.dtype, values: Values) -> Values:
    """Returns dx of a block, and what it adds to dscale and dbias; in the definition's order."""
    centred = values["X"] - values["MEAN"] if norm.centred else values["X"]
    dy, rstd, g = values["DY"], values["RSTD"], values["DY"] * values["W"]
    normal, dots = centred * rstd, _sum(g * centred)
    g = g - _sum(g) / n if norm.centred else g
    dx = rstd * (g - normal * (rstd * (dots / n)))
    dx = dx + values["DH"] if "DH" in values else dx
    return {"DX": dx, "DSCALE": _sum(dy * normal, 0), "DBIAS": _sum(dy, 0)}


def _require(platform: str, norm: Norm, n: int, dtypes: set[str]) -> None:
    """Raises `Unsupported` for rows of n that the platform's kernels do not take."""
    if norm.heads:
        raise Unsupported("Pallas kernels take one scale for all rows")
    taken = {*(FLOATING if platform == "cpu" else ("float32", "bfloat16"))}
    if others := {*dtypes, norm.compute, norm.out_dtype} - taken - {""}:
        raise Unsupported(
            f"Pallas kernels take {', '.join(sorted(taken))} on {platform}, not "
            f"{', '.join(sorted(others))}"
        )
    if n > LONGEST:
        raise Unsupported(f"Pallas kernels take rows of at most {LONGEST}, not {n}")


def run(kernel: str, platform: str, norm: Norm, *operands: Array | None) -> list[Any]:
    """Runs a kernel; raises `Unsupported` for what the platform's kernels do not take."""
    arrays = operands_of(kernel, operands)
    results = results_of(kernel, norm, arrays)
    x, compute = arrays["X"], jnp.dtype(norm.compute)
    (m, n), stored = x.shape[-2:], promoted(x.dtype, arrays.get("RESIDUAL", x).dtype)
    types = {"Y": norm.out_dtype, "H": stored, "DX": x.dtype}
    _require(platform, norm, n, {a.dtype.name for a in arrays.values()})
    size = min(m, max(_ROWS, _ELEMENTS // (-(-n // _LANES) * _LANES) // _ROWS * _ROWS))

    def placed(name: str) -> tuple[tuple[int, int], pl.BlockSpec]:
        if name in PARAMETERS:  # in a backward the sums of all blocks
            return (1, n), pl.BlockSpec((1, n), lambda i: (0, 0))
        width = 1 if name in STATISTICS else n
        return (m, width), pl.BlockSpec((size, width), lambda i: (i, 0))

    def on_block(*refs: Any) -> None:
        values: Values = {}
        for name, ref in zip(arrays, refs):
            value = ref[...].astype(compute)
            if m % size and name not in PARAMETERS:
                # zero beyond the matrix: what is there is anything, and would be summed
                index = lax.broadcasted_iota(jnp.int32, value.shape, 0)
                value = jnp.where(
                    index < m - pl.program_id(0) * size, value, jnp.zeros((), compute)
                )
            values[name] = value
        values["W"] = values["SCALE"] + norm.scale_offset if "SCALE" in values else 1
        values = of_kernel(norm, n, stored, values)
        for name, ref in zip(results, refs[len(arrays) :]):
            if name in PARAMETERS:
                zeros = jnp.zeros(ref.shape, ref.dtype)
                pl.when(pl.program_id(0) == 0)(functools.partial(ref.__setitem__, ..., zeros))
                ref[...] += values[name]
            else:
                ref[...] = values[name].astype(ref.dtype)

    of_kernel = {"forward": _forward, "backward": _backward}[kernel]
    order: Any = ("arbitrary" if {*PARAMETERS} & {*results} else "parallel",)
    # A `ShapeDtypeStruct` would have to say over which mesh axes a result varies, in words that
    # differ among JAX's versions.
    outs = [ShapedArray(placed(r)[0], jnp.dtype(types.get(r, compute))) for r in results]
    values = pl.pallas_call(
        on_block,
        grid=(-(-m // size),),
        in_specs=[placed(name)[1] for name in arrays],
        out_specs=[placed(name)[1] for name in results],
        out_shape=outs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        interpret=platform == "cpu",
        name=f"pallas_{'layer_norm' if norm.centred else 'rms_norm'}_{kernel}",
    )(*[array.reshape(placed(name)[0]) for name, array in arrays.items()])
    small = {*STATISTICS, *PARAMETERS}
    named = {k: v.reshape(-1) if k in small else v for k, v in zip(results, values, strict=True)}
    return [named.get(name) for name in RESULTS[kernel]]
