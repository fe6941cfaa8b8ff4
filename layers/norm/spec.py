"""The static parameters of a normalisation, and its definitions in plain JAX."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import promoted, rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """All that is known of a normalisation, or of a derivative of it, when it is traced.

    Attributes:
      op: the function the user called.
      axes: the normalised dimensions of x; kernels see arrays as (rows, n).
      heads: the dimensions of x before `axes` that scale and bias have too. Kernels see arrays as
        (examples, tokens, n): one scale for all tokens of an example.
      eps, scale_offset: as in the formula.
      out_dtype: of y.
      compute: the dtype of the arithmetic: float64 where an operand or a result is, else float32.
      cast_before: whether x̂ is rounded to the dtype of what is normalised before it is multiplied.
      has_residual: whether x + residual is normalised; in a backward, whether the residual has a
        gradient of its own, to be added.
      has_scale, has_bias: whether there is a scale, a bias.
      centred: whether the mean is subtracted first, and rows have two statistics: mean and rstd.
      with_mean, with_rstd, with_dscale, with_dbias: whether these are results.
      count: features of a whole row, where devices have parts of it.
    """

    op: str = "rms_norm"
    axes: tuple[int, ...] = (1,)
    heads: tuple[int, ...] = ()
    eps: float = 0.0
    scale_offset: float = 0.0
    out_dtype: str = ""
    compute: str = "float32"
    cast_before: bool = False
    has_residual: bool = False
    has_scale: bool = False
    has_bias: bool = False
    centred: bool = False
    with_mean: bool = False
    with_rstd: bool = False
    with_dscale: bool = False
    with_dbias: bool = False
    count: float = 0.0

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (a few norms, and small)
    def names(self, kernel: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the operands and the results of a kernel, in order, as sources call them."""
        scale, bias = ["SCALE"] * self.has_scale, ["BIAS"] * self.has_bias
        mean, sums = ["MEAN"] * self.centred, [*["SUMS"] * self.centred, "DOTS"]
        dots = ["DY", "X", *scale, *mean]
        gradient = [*dots, "RSTD", *["DH"] * self.has_residual]
        gradients = ["DX", *["DSCALE"] * self.with_dscale, *["DBIAS"] * self.with_dbias]
        known = [*["MEAN"] * self.with_mean, *["RSTD"] * self.with_rstd]
        operands, results = {
            "forward": (
                ["X", *["RESIDUAL"] * self.has_residual, *scale, *bias],
                ["Y", *["H"] * self.has_residual, *known],
            ),
            "row_statistics": (["X"], [*mean, "SQUARES"]),
            "apply": (["X", *scale, *bias, *mean, "RSTD"], ["Y"]),
            "backward": (gradient, gradients),
            "row_dots": (dots, sums),
            "backward_apply": ([*gradient, *sums], gradients),
        }[kernel]
        return tuple(operands), tuple(results)


STATISTICS = ("MEAN", "RSTD", "SQUARES", "SUMS", "DOTS")  # one of each row, in the compute type
PARAMETERS = ("SCALE", "BIAS", "DSCALE", "DBIAS")


# ---------------------------------------------------------------- definitions
# In plain JAX; every kernel is held to these. Operands and results are those of `Norm.names`:
# parameters have the shape of the normalised axes, in increasing order, after that of the heads;
# statistics that of all but the normalised axes of x.


def rows_of(norm: Norm, x: Any) -> tuple[int, ...]:
    """Returns the dimensions of x that parameters do not have."""
    return tuple([i for i in range(x.ndim) if i not in (*norm.heads, *norm.axes)])


def against(kernel: str, norm: Norm, operands: Sequence[Array]) -> dict[str, Array]:
    """Returns the operands by name, in the compute type and broadcast against x; and "W", scale +
    scale_offset, or 1 without a scale."""
    arrays = dict(zip(norm.names(kernel)[0], operands, strict=True))
    rows, compute = rows_of(norm, arrays["X"]), jnp.dtype(norm.compute)
    new: dict[str, Any] = dict.fromkeys(STATISTICS, norm.axes)
    new |= dict.fromkeys(PARAMETERS, rows)
    wide = {k: jnp.expand_dims(a.astype(compute), new.get(k, ())) for k, a in arrays.items()}
    offset = jnp.asarray(norm.scale_offset, compute)
    return wide | {"W": wide["SCALE"] + offset if "SCALE" in wide else jnp.ones((), compute)}


def statistics_of(norm: Norm, wide: Array) -> tuple[Array, list[Array], Array]:
    """Returns x − mean, [mean] and Σ (x − mean)² of each row; if not centred x, [] and Σ x²."""
    if not norm.centred:
        return wide, [], jnp.sum(wide * wide, norm.axes)
    # Rounding moves a mean that is large: what is left of it is the mean of the differences. No
    # derivative is lost, for the mean of differences to any constant has that of the mean.
    rough = jax.lax.stop_gradient(jnp.mean(wide, norm.axes))
    apart = wide - jnp.expand_dims(rough, norm.axes)
    rest = jnp.mean(apart, norm.axes)
    centred = apart - jnp.expand_dims(rest, norm.axes)
    return centred, [rough + rest], jnp.sum(centred * centred, norm.axes)


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
    return (y + wide["BIAS"] if norm.has_bias else y).astype(norm.out_dtype)


def define_forward(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    wide = against("forward", norm, (x, *rest))
    h = add(norm, x, rest[0]) if norm.has_residual else x
    centred, mean, squares = statistics_of(norm, h.astype(norm.compute))
    rstd = rstd_of(norm, squares, math.prod(x.shape[a] for a in norm.axes))
    y = scaled(norm, wide, centred * jnp.expand_dims(rstd, norm.axes), h.dtype)
    return [y, *[h] * norm.has_residual, *mean * norm.with_mean, *[rstd] * norm.with_rstd]


def define_row_statistics(norm: Norm, x: Array) -> list[Array]:
    _, mean, squares = statistics_of(norm, x.astype(norm.compute))
    return [*mean, squares]


def define_apply(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    wide = against("apply", norm, (x, *rest))
    return [scaled(norm, wide, centred_of(wide) * wide["RSTD"], x.dtype)]


def define_row_dots(norm: Norm, *operands: Array) -> list[Array]:
    wide = against("row_dots", norm, operands)
    g = wide["DY"] * wide["W"]
    sums = [jnp.sum(g, norm.axes) for _ in range(norm.centred)]
    return [*sums, jnp.sum(g * centred_of(wide), norm.axes)]


def define_backward_apply(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """Sums and dots are what `define_row_dots` gives of the whole row."""
    wide, rows = against("backward_apply", norm, (dy, x, *rest)), rows_of(norm, x)
    rstd, count = wide["RSTD"], jnp.asarray(norm.count, norm.compute)
    normal, g = centred_of(wide) * rstd, wide["DY"] * wide["W"]
    g = g - wide["SUMS"] / count if norm.centred else g
    # x̂ · rstd · mean in an order that rstd³ cannot overflow or vanish in
    dx = rstd * (g - normal * (rstd * (wide["DOTS"] / count)))
    dx = (dx + wide["DH"] if norm.has_residual else dx).astype(x.dtype)
    dscale = [jnp.sum(wide["DY"] * normal, rows) for _ in range(norm.with_dscale)]
    return [dx, *dscale, *[jnp.sum(wide["DY"], rows) for _ in range(norm.with_dbias)]]


def define_backward(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    sums = define_row_dots(norm, dy, x, *rest[: norm.has_scale + norm.centred])
    known = replace(norm, count=math.prod(x.shape[a] for a in norm.axes))
    return define_backward_apply(known, dy, x, *rest, *sums)
