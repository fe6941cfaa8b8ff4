"""LayerNorm's kernels on CUDA, on RMSNorm's layouts of threads on rows.

Arrays are viewed as (outer, n, inner). Rows that no block, or cluster of blocks, can hold take two
launches: one for the statistics of each slice of a row, one for the rest.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...native.launch import Target
from ..rms_norm import cuda as rms_norm
from ..rms_norm.cuda import (
    Call,
    Step,
    by_rows,
    compute_of,
    eased_backward,
    eased_forward,
    found,
    launch_backward,
    launch_forward,
    named,
)
from ..rms_norm.spec import Norm

Arrays = list[jax.Array]

# Where there are rows for every block that fits. Found with benchmarks/layouts.py on an H200
# (benchmarks/results): each is the best, or within 1 % of it, of some 150 to 350 that were timed at
# 1024, 4096, 8192 and 32768 features of bfloat16, the backward at 2048 and 16384 too, with scale,
# bias and both gradients, and spills no register, with statistics as results or without.
_FORWARD = (
    Step(32, chunks=2, rows=2, fill=512, blocks=2),
    Step(128, chunks=2, rows=2, fill=128, blocks=8),
    Step(512, chunks=6, rows=2, blocks=6),
    Step(1024, chunks=6, rows=2, blocks=3),
    Step(4096, chunks=4, slices=2, hold=True, persistent=True, ahead=True),
)
_BACKWARD = (
    Step(32, chunks=2, fill=128, blocks=3, hold=True),
    Step(96, chunks=4, fill=128, blocks=2, hold=True),
    Step(128, chunks=2, fill=128, blocks=4, hold=True),
    Step(512, chunks=4, fill=256, hold=True),
    Step(1024, chunks=2, hold=True),
    Step(2048, chunks=2, slices=2, hold=True, stages=3),
    Step(4096, chunks=4, slices=2, hold=True, share=True),
)


def combined(means: Any, squares: Any, counts: Any) -> tuple[jax.Array, jax.Array]:
    """Mean and squared differences of rows, from those of their parts along the first dimension.

    `counts` are the elements of each part, against `means`. References: Chan, Golub and LeVeque,
    "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    counts = jnp.broadcast_to(counts, means.shape)
    mean = jnp.sum(counts * means, 0) / jnp.sum(counts, 0)
    return mean, jnp.sum(squares + counts * (means - mean) ** 2, 0)


def row_counts(n: int, target: Target, x: str, scale: str, out: str) -> list[int]:
    """Returns numbers of rows of n, one for each combination of layouts; as RMSNorm's."""
    counts = rms_norm.row_counts(n, target, x, scale, out)
    widest = max(jnp.dtype(dtype).itemsize for dtype in (x, out))
    counts.append(target.multiprocessors + 1)  # from here on one of _BACKWARD
    layout = rms_norm.timed_layout(n, widest, target, _FORWARD)
    if layout is not None:
        counts.append(layout.least_rows(target))
    return counts


# ---------------------------------------------------------------- the kernels


@by_rows
def forward(target: Target, norm: Norm, x: Any, *rest: Any) -> Arrays:
    """`(x[, residual][, scale][, bias]) -> (y[, h][, mean][, rstd])`, h = x + residual."""
    given = {"RESIDUAL": norm.has_residual, "SCALE": norm.has_scale, "BIAS": norm.has_bias}
    call = _call(target, "forward", named(rest, X=x, **given), norm.out_dtype)
    call.result("Y", x.shape, norm.out_dtype)
    if norm.has_residual:
        call.result("H", x.shape, jnp.promote_types(x.dtype, rest[0].dtype))
    for name in ["MEAN"] * norm.with_mean + ["RSTD"] * norm.with_rstd:
        call.result(name, call.row_shape, call.compute)
    done = _forward(call, norm, norm.eps)
    if done is not None:
        return done

    h = x
    if norm.has_residual:
        h = (x.astype(call.compute) + rest[0].astype(call.compute)).astype(call.results["H"].dtype)
    mean, squares = row_statistics(target, norm, h, compute=call.compute)
    rstd = jax.lax.rsqrt(squares / x.shape[1] + norm.eps)
    (y,) = apply(target, norm, h, *rest[norm.has_residual :], mean, rstd)
    return [y, *[h] * norm.has_residual, *[mean] * norm.with_mean, *[rstd] * norm.with_rstd]


@by_rows
def row_statistics(target: Target, norm: Norm, x: Any, *, compute: Any = None) -> Arrays:
    """`x -> (mean, Σ (x − mean)²)`, one value a row each."""
    del norm
    call = _call(target, "row_statistics", {"X": x}, compute)
    for name in ("MEAN", "SQUARES"):
        call.result(name, call.row_shape, call.compute)
    means, squares = found(_forward(call, Norm()))  # without parameters
    if means.shape == call.row_shape:
        return [means, squares]
    slices = means.shape[1]  # as long as each other, but for the last
    layout = call.layout
    assert layout is not None and layout.slices == slices
    counts = np.full((slices, 1), layout.tile)
    counts[-1] = call.features - (slices - 1) * layout.tile
    parts = combined(means.T, squares.T, counts.astype(call.compute))
    return [part[:, None] for part in parts]


@by_rows
def apply(target: Target, norm: Norm, x: Any, *rest: Any) -> Arrays:
    """`(x[, scale][, bias], mean, rstd) -> y`, for statistics that are already known."""
    given = {"SCALE": norm.has_scale, "BIAS": norm.has_bias, "MEAN": True, "RSTD": True}
    call = _call(target, "apply", named(rest, X=x, **given), norm.out_dtype)
    call.result("Y", x.shape, norm.out_dtype)
    return found(_forward(call, norm))


@by_rows
def backward(target: Target, norm: Norm, dy: Any, x: Any, *rest: Any) -> Arrays:
    """`(dy, x[, scale], mean, rstd[, dh]) -> (dx[, dscale][, dbias])`."""
    given = {"SCALE": norm.has_scale, "MEAN": True, "RSTD": True, "DH": norm.has_residual}
    call = _call(target, "backward", named(rest, DY=dy, X=x, **given))
    call.result("DX", x.shape, x.dtype)
    done = _backward(call, norm)
    if done is not None:
        return done

    known = rest[: norm.has_scale + 1]
    sums = row_dots(target, norm, dy, x, *known, compute=call.compute)
    count = dataclasses.replace(norm, count=float(x.shape[1]))
    return backward_apply(target, count, dy, x, *rest, *sums)


@by_rows
def row_dots(
    target: Target, norm: Norm, dy: Any, x: Any, *rest: Any, compute: Any = None
) -> Arrays:
    """`(dy, x[, scale], mean) -> (Σ dy · w, Σ dy · w · (x − mean))`, one value a row each."""
    operands = named(rest, DY=dy, X=x, SCALE=norm.has_scale, MEAN=True)
    call = _call(target, "row_dots", operands, compute)
    for name in ("SUMS", "DOTS"):
        call.result(name, call.row_shape, call.compute)
    return call.over_slices(found(_backward(call, norm)))


@by_rows
def backward_apply(target: Target, norm: Norm, dy: Any, x: Any, *rest: Any) -> Arrays:
    """`(dy, x[, scale], mean, rstd[, dh], sums, dots) -> (dx[, dscale][, dbias])`."""
    given = {"SCALE": norm.has_scale, "MEAN": True, "RSTD": True, "DH": norm.has_residual}
    operands = named(rest, DY=dy, X=x, **given, SUMS=True, DOTS=True)
    call = _call(target, "backward_apply", operands)
    call.result("DX", x.shape, x.dtype)
    return found(_backward(call, norm, norm.count))


def _call(target: Target, kernel: str, operands: dict[str, Any], *more: Any) -> Call:
    """A launch; `more` are dtypes that are computed with too, or None."""
    compute = compute_of(operands, *[dtype for dtype in more if dtype])
    return Call(target, kernel, operands, compute, "layer_norm")


def _forward(call: Call, norm: Norm, eps: float = 0.0) -> Arrays | None:
    macros = call.per_example(norm)
    macros |= {"WITH_MEAN": "MEAN" in call.results, "HAS_BIAS": "BIAS" in call.operands}
    ease = functools.partial(eased_forward, call)
    tokens = call.outer // call.examples if call.examples else 0
    options: dict[str, Any] = {"steps": _FORWARD, "ease": ease, "tokens": tokens}
    return launch_forward(call, norm, eps, macros, sums_of_row=2, **options)


def _backward(call: Call, norm: Norm, count: float | None = None) -> Arrays | None:
    macros, gradients = call.per_example(norm), call.columns(norm)
    steps = _BACKWARD if gradients == 2 else ()
    ease = functools.partial(eased_backward, call, gradients + norm.has_scale)
    return launch_backward(call, norm, count, macros, sums_of_row=2, steps=steps, ease=ease)
