"""The static parameters of a normalisation, and its definitions in plain JAX."""

import dataclasses
import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import promoted, rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """All that is known of a normalisation, or of a derivative of it, when it is traced."""

    op: str = "rms_norm"  # the function the user called
    axes: tuple[int, ...] = (1,)  # the normalised dimensions of x; kernels see arrays as (rows, n)
    # The dimensions of x before `axes` that scale and bias have too. Kernels see arrays as
    # (examples, tokens, n): one scale for all tokens of an example.
    heads: tuple[int, ...] = ()
    eps: float = 0.0
    scale_offset: float = 0.0
    out_dtype: str = ""  # y's
    compute: str = "float32"  # the arithmetic's: float64 if an operand or a result is, else float32
    cast_before: bool = False  # x̂ is rounded to its input's dtype before it is multiplied
    centred: bool = False  # the mean is subtracted first; rows have two statistics, mean and rstd
    # Results that are asked for:
    with_mean: bool = False
    with_rstd: bool = False
    with_dscale: bool = False
    with_dbias: bool = False
    count: float = 0.0  # features of a whole row, if devices have parts of it


# The operands and the results of each kernel, in order, as sources call them. A call may lack
# RESIDUAL, SCALE, BIAS, MEAN (norms that are not centred have none, nor SUMS), and DH, the gradient
# of x + residual itself. It has those of MEAN, RSTD, DSCALE and DBIAS that are asked for.
_GRADIENT = ("DY", "X", "SCALE", "MEAN", "RSTD", "DH")
_GRADIENTS = ("DX", "DSCALE", "DBIAS")
OPERANDS = {
    "forward": ("X", "RESIDUAL", "SCALE", "BIAS"),
    "row_statistics": ("X",),
    "apply": ("X", "SCALE", "BIAS", "MEAN", "RSTD"),
    "backward": _GRADIENT,
    "row_dots": ("DY", "X", "SCALE", "MEAN"),
    "backward_apply": (*_GRADIENT, "SUMS", "DOTS"),
}
RESULTS = {
    "forward": ("Y", "H", "MEAN", "RSTD"),
    "row_statistics": ("MEAN", "SQUARES"),
    "apply": ("Y",),
    "backward": _GRADIENTS,
    "row_dots": ("SUMS", "DOTS"),
    "backward_apply": _GRADIENTS,
}
STATISTICS = ("MEAN", "RSTD", "SQUARES", "SUMS", "DOTS")  # one of each row, in the compute type
PARAMETERS = ("SCALE", "BIAS", "DSCALE", "DBIAS")


def operands_of(kernel: str, operands: Sequence[Any]) -> dict[str, Any]:
    pairs = zip(OPERANDS[kernel], operands)  # a call may leave out the last ones
    return {name: a for name, a in pairs if a is not None}


def results_of(kernel: str, norm: Norm, names: Container[str]) -> tuple[str, ...]:
    """Returns the names of the results that there are of operands with these names."""
    there = {"H": "RESIDUAL" in names, "SUMS": norm.centred, "RSTD": norm.with_rstd}
    there |= {"MEAN": norm.centred and (norm.with_mean or kernel == "row_statistics")}
    there |= {"DSCALE": norm.with_dscale, "DBIAS": norm.with_dbias}
    return tuple([name for name in RESULTS[kernel] if there.get(name, True)])


# ---------------------------------------------------------------- definitions
# In plain JAX; every kernel is held to these. None is no operand, and no result. Parameters have
# the shape of the normalised axes, in increasing order, after that of the heads; statistics that of
# all but the normalised axes of x.


def rows_of(norm: Norm, x: Any) -> tuple[int, ...]:
    return tuple([i for i in range(x.ndim) if i not in (*norm.heads, *norm.axes)])


def against(kernel: str, norm: Norm, operands: Sequence[Any]) -> dict[str, Array]:
    """Returns the operands by name, in the compute type and broadcast against x; and "W", scale +
    scale_offset, or 1 without a scale."""
    arrays = operands_of(kernel, operands)
    rows, compute = rows_of(norm, arrays["X"]), jnp.dtype(norm.compute)
    new: dict[str, Any] = dict.fromkeys(STATISTICS, norm.axes)
    new |= dict.fromkeys(PARAMETERS, rows)
    wide = {k: jnp.expand_dims(a.astype(compute), new.get(k, ())) for k, a in arrays.items()}
    offset = jnp.asarray(norm.scale_offset, compute)
    return wide | {"W": wide["SCALE"] + offset if "SCALE" in wide else jnp.ones((), compute)}


def statistics_of(norm: Norm, wide: Array) -> tuple[Array, Array | None, Array]:
    """Returns x − mean, mean and Σ (x − mean)² of each row; if not centred x, None and Σ x²."""
    if not norm.centred:
        return wide, None, jnp.sum(wide * wide, norm.axes)
    # Rounding moves a mean that is large: what is left of it is the mean of the differences. No
    # derivative is lost, for the mean of differences to any constant has that of the mean.
    rough = jax.lax.stop_gradient(jnp.mean(wide, norm.axes))
    apart = wide - jnp.expand_dims(rough, norm.axes)
    rest = jnp.mean(apart, norm.axes)
    centred = apart - jnp.expand_dims(rest, norm.axes)
    return centred, rough + rest, jnp.sum(centred * centred, norm.axes)


def rstd_of(norm: Norm, squares: Array, count: int) -> Array:
    """Returns 1 / the root of the mean of `count` squares a row."""
    size = jnp.asarray(count, squares.dtype)
    return jax.lax.rsqrt(squares / size + jnp.asarray(norm.eps, squares.dtype))


def centred_of(wide: dict[str, Array]) -> Array:
    """Returns x − mean, or x, of operands that `against` returns."""
    return wide["X"] - wide["MEAN"] if "MEAN" in wide else wide["X"]


def add(norm: Norm, x: Array, residual: Array) -> Array:
    """Returns x + residual, rounded as it is stored.

    XLA does not normalise the unrounded sum in its place, as it would on GPUs.
    """
    stored = promoted(x.dtype, residual.dtype)
    return rounded(x.astype(norm.compute) + residual.astype(norm.compute), stored).astype(stored)


def scaled(norm: Norm, wide: dict[str, Array], normal: Array, dtype: Any) -> Array:
    """Returns x̂ · w + bias, with x̂ rounded to `dtype` if `cast_before`."""
    y = (rounded(normal, dtype) if norm.cast_before else normal) * wide["W"]
    return (y + wide["BIAS"] if "BIAS" in wide else y).astype(norm.out_dtype)


def define_forward(
    norm: Norm,
    x: Array,
    residual: Array | None = None,
    scale: Array | None = None,
    bias: Array | None = None,
) -> list[Any]:
    wide = against("forward", norm, (x, residual, scale, bias))
    h = x if residual is None else add(norm, x, residual)
    centred, mean, squares = statistics_of(norm, h.astype(norm.compute))
    rstd = rstd_of(norm, squares, math.prod(x.shape[a] for a in norm.axes))
    y = scaled(norm, wide, centred * jnp.expand_dims(rstd, norm.axes), h.dtype)
    return [y, *forward_results(norm, residual, h, mean, rstd)]


def forward_results(norm: Norm, residual: Any, h: Any, mean: Any, rstd: Any) -> list[Any]:
    """Returns the forward's results beside y, as far as they are asked for."""
    known = mean if norm.with_mean else None, rstd if norm.with_rstd else None
    return [None if residual is None else h, *known]


def define_row_statistics(norm: Norm, x: Array) -> list[Any]:
    return [*statistics_of(norm, x.astype(norm.compute))[1:]]


def define_apply(norm: Norm, *operands: Any) -> list[Array]:
    """Returns y of rows whose statistics are known."""
    wide, (x, *_) = against("apply", norm, operands), operands
    return [scaled(norm, wide, centred_of(wide) * wide["RSTD"], x.dtype)]


def define_row_dots(norm: Norm, *operands: Any) -> list[Any]:
    """Returns Σ g, of a centred norm, and Σ g · (x − mean) of each row."""
    wide = against("row_dots", norm, operands)
    g = wide["DY"] * wide["W"]
    sums = jnp.sum(g, norm.axes) if norm.centred else None
    return [sums, jnp.sum(g * centred_of(wide), norm.axes)]


def define_backward_apply(norm: Norm, *operands: Any) -> list[Any]:
    """Returns dx, dscale and dbias; SUMS and DOTS are `define_row_dots`' of the whole row."""
    wide, (_, x, *_) = against("backward_apply", norm, operands), operands
    rstd, count = wide["RSTD"], jnp.asarray(norm.count, norm.compute)
    normal, g = centred_of(wide) * rstd, wide["DY"] * wide["W"]
    g = g - wide["SUMS"] / count if norm.centred else g
    # x̂ · rstd · mean in an order that rstd³ cannot overflow or vanish in
    dx = rstd * (g - normal * (rstd * (wide["DOTS"] / count)))
    dx = (dx + wide["DH"] if "DH" in wide else dx).astype(x.dtype)
    return [dx, *gradients_of_parameters(norm, wide, normal)]


def gradients_of_parameters(norm: Norm, wide: dict[str, Array], normal: Array) -> list[Any]:
    """Returns dscale and dbias, as far as they are asked for."""
    rows = rows_of(norm, normal)
    dscale = jnp.sum(wide["DY"] * normal, rows) if norm.with_dscale else None
    return [dscale, jnp.sum(wide["DY"], rows) if norm.with_dbias else None]


def define_backward(
    norm: Norm, dy: Array, x: Array, scale: Any, mean: Any, rstd: Array, dh: Any = None
) -> list[Any]:
    """Returns dx, dscale and dbias; `dh` is added to dx."""
    sums = define_row_dots(norm, dy, x, scale, mean)
    known = replace(norm, count=math.prod(x.shape[a] for a in norm.axes))
    return define_backward_apply(known, dy, x, scale, mean, rstd, dh, *sums)
