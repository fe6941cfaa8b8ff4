"""RMSNorm and LayerNorm: functions, definition, kernels, sharding and derivative.

With w = scale + scale_offset, all sums in float32 (float64 where an operand is float64):

    y = x̂ · w + bias            x̂ = (x − mean) · rstd
    rstd = 1 / sqrt(mean((x − mean)²) + eps)
    dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))      g = dy · w
    dscale = Σ_rows dy · x̂      dbias = Σ_rows dy

RMSNorm is the same with 0 for mean(x) and mean(g): a norm that is not `centred`.

`cast="before"` rounds x̂ to the dtype of x in y; the derivative is as if it did not round.

The variance is the mean of squared differences, never a difference of means, which loses all where
the mean is large. The mean that the backward is given is rounded to the type of the sums; the
forward also takes what that rounding has lost.

References: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467; Ba, Kiros
and Hinton, "Layer Normalization", arXiv:1607.06450.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.interpreters import ad

from ...native import registry
from ...native.dtypes import compute_dtype, promoted, rounded
from ...native.implementation import Implementation, Order, order_of
from ...native.kernel import Kernel, result_types
from ...native.launch import call_host
from ..core.arguments import dimensions, finite, floating, floating_dtype
from ..core.op import Dims, Loose, Op, Split, match, vary, varying_axes
from . import cuda
from .spec import Norm

Cast = Literal["after", "before"]
"""When x̂ is rounded: after it is multiplied by scale, or before as well."""


def rms_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    cast: Cast = "after",
    dtype: jax.typing.DTypeLike | None = None,
    residual_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Any:
    """Divides x by its root mean square over `axis`, multiplies by `scale` and adds `bias`.

        y = x / sqrt(mean(x²) + eps) · (scale + scale_offset) + bias

    With a residual it normalises x + residual, the step between two blocks of a transformer, and
    also returns the sum: one pass over the activations in each direction.

    Computed in float32 (float64 if an operand or `dtype` is float64); the gradients of scale and
    bias are summed in that type and returned in their own. Rows may be split over any mesh axes
    without communication; where a normalised axis is split, one value a row is summed over the
    devices. The gradients of parameters cross the devices that have rows of the same parameters.

    Args:
      x: any shape; float64, float32, bfloat16 or float16.
      scale: the shape of x's normalised axes, in increasing order of axis; any of those dtypes.
        Where these are x's last axes, scale may have more dimensions before them, which broadcast
        against x as in NumPy: (heads, features) is a scale for each head of x (..., heads,
        features), and (batch, 1, features), `scale[:, None]`, one for each example of x (batch,
        tokens, features), as in AdaLN. Pallas kernels take one scale for all rows.
      bias: as scale; the two broadcast against each other.
      residual: added to x; x's shape and any of those dtypes.
      eps: added to the mean square; finite, at least 0.
      axis: the normalised axis, or several.
      scale_offset: added to scale; 1 where checkpoints store scale − 1, and in DiT's `modulate`.
      cast: "after" rounds once, the result, to `dtype`. "before" rounds x / sqrt(mean(x²) + eps)
        to x's dtype (the sum's, with a residual) before it is multiplied, as Hugging Face's Llama
        does: the same bits, but where another order of the mean's sum moves a value past a tie.
        This rounding has no derivative.
      dtype: of y; x's where None.
      residual_dtype: of the sum, which is rounded to it before it is normalised; the promoted dtype
        of x and residual where None.
      implementation: None, "native", "pallas" or "xla", or several to try in order; see
        `normfuse info` for what serves here.

    Returns:
      y, an array of x's shape and sharding; with a residual `(y, x + residual)`.

    Raises:
      TypeError: for integer or complex operands, or an eps that is not a number.
      ValueError: for a scale, bias or residual that does not fit, a residual_dtype without a
        residual, an axis out of range, an eps that is negative or not finite, or an unknown cast or
        implementation.
      NotImplementedError: if `implementation` asks for what cannot serve; an ExceptionGroup of
        them where it names several.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    >>> import jax.numpy as jnp
    >>> from normfuse import rms_norm
    >>> x = jnp.array([3.0, 4.0])
    >>> [round(value, 3) for value in rms_norm(x, jnp.array([1.0, 2.0])).tolist()]
    [0.849, 2.263]
    >>> y, new_residual = rms_norm(x, residual=x)
    >>> [round(value, 3) for value in y.tolist()], new_residual.tolist()
    ([0.849, 1.131], [6.0, 8.0])
    """
    options = eps, axis, scale_offset, dtype, cast
    norm, operands = check("rms_norm", x, scale, bias, *options, residual, residual_dtype)
    return results_of(norm, call(forward, norm, operands, implementation))


def rms_norm_with_rstd(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    cast: Cast = "after",
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """`rms_norm`, and the reciprocal root mean square it multiplied by.

        rstd = 1 / sqrt(mean(x²) + eps)        y = x · rstd · (scale + scale_offset) + bias

    Takes and raises what `rms_norm` does without a residual.

    Returns:
      `(y, rstd)`: rstd has the shape of x without the normalised axes, float32 (or float64).

    >>> import jax.numpy as jnp
    >>> from normfuse import rms_norm_with_rstd
    >>> y, rstd = rms_norm_with_rstd(jnp.array([[3.0, 4.0], [6.0, 8.0]]), eps=0.0)
    >>> [round(value, 3) for value in rstd.tolist()]
    [0.283, 0.141]
    """
    options = eps, axis, scale_offset, dtype, cast
    norm, operands = check("rms_norm_with_rstd", x, scale, bias, *options)
    y, rstd = call(forward, norm, operands, implementation)
    return y, rstd


def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    residual_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Any:
    """Subtracts the mean of x over `axis`, divides by the standard deviation, scales and shifts.

        y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · (scale + scale_offset) + bias

    Takes, returns and raises what `rms_norm` does, in as many passes; two values a row are
    exchanged where a normalised axis is split. The mean is computed first, so that a mean much
    larger than the deviation costs no digits of it. Kernels take a scale of each head only after a
    transposition of x.

    References:
      Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450; Peebles and Xie, "Scalable
      Diffusion Models with Transformers", arXiv:2212.09748 (AdaLN).

    >>> import jax.numpy as jnp
    >>> from normfuse import layer_norm
    >>> y = layer_norm(jnp.array([3.0, 5.0]), jnp.array([1.0, 2.0]), jnp.array([0.0, 1.0]))
    >>> [round(value, 3) for value in y.tolist()]
    [-1.0, 3.0]
    >>> x, scale = jnp.array([[[3.0, 5.0]], [[5.0, 1.0]]]), jnp.array([[0.0, 0.0], [1.0, 1.0]])
    >>> y = layer_norm(x, scale[:, None], scale_offset=1.0)       # a scale of each example
    >>> [round(value, 3) for value in y.ravel().tolist()]
    [-1.0, 1.0, 2.0, -2.0]
    """
    options = eps, axis, scale_offset, dtype, "after"
    norm, operands = check("layer_norm", x, scale, bias, *options, residual, residual_dtype, True)
    return results_of(norm, call(forward, norm, operands, implementation))


# ---------------------------------------------------------------- checks and the call


def check(
    op: str,
    x: Any,
    scale: Any,
    bias: Any,
    eps: Any,
    axis: Any,
    scale_offset: Any,
    dtype: Any,
    cast: Any = "after",
    residual: Any = None,
    residual_dtype: Any = None,
    centred: bool = False,
) -> tuple[Norm, list[Array]]:
    """Returns what is known of the norm, and its operands as arrays; or raises one clear error."""
    x = floating(op, "x", x)
    if not isinstance(cast, str) or cast not in get_args(Cast):
        raise ValueError(f"{op}: cast must be 'after' or 'before', got {cast!r}")
    axes = dimensions(op, x, axis)
    given = {"scale": scale, "bias": bias}
    given = {name: floating(op, name, a) for name, a in given.items() if a is not None}
    heads, parameters = aligned(op, x, axes, axis, given)
    offset = finite(op, "scale_offset", scale_offset)
    if heads and scale is None:  # kernels find the owner of a row by its scale
        parameters, offset = [jnp.zeros_like(parameters[0]), *parameters], 1.0
    more = [] if residual is None else [floating(op, "residual", residual)]
    if more and more[0].shape != x.shape:
        raise ValueError(
            f"{op}: residual must have x's shape {x.shape}, got {more[0].shape}; "
            "broadcast it first with jnp.broadcast_to"
        )
    if residual_dtype is not None:
        residual_dtype = floating_dtype(op, residual_dtype, None, "residual_dtype")
        if residual is None:
            raise ValueError(
                f"{op}: residual_dtype is the dtype of x + residual, got {residual_dtype} without "
                "a residual; give residual, or dtype for the dtype of y"
            )
    norm = Norm(
        op=op,
        axes=axes,
        heads=heads,
        eps=finite(op, "eps", eps, least=0),
        scale_offset=offset,
        out_dtype=floating_dtype(op, dtype, x.dtype),
        residual_dtype=residual_dtype or "",
        has_residual=bool(more),
        has_scale=scale is not None or bool(heads),
        has_bias=bias is not None,
        cast_before=cast == "before",
        centred=centred,
        with_mean=centred,
        with_rstd=True,
    )
    return norm, [x, *more, *parameters]


def aligned(
    op: str, x: Array, axes: tuple[int, ...], axis: Any, given: dict[str, Array]
) -> tuple[tuple[int, ...], list[Array]]:
    """Returns the dimensions of x before `axes` along which parameters differ, and the parameters
    with these dimensions and `axes` alone.

    Raises:
      ValueError: for a parameter that does not broadcast against x.
    """
    size, first, heads = tuple(x.shape[a] for a in axes), axes[0], set()
    most = first if axes == tuple(range(first, x.ndim)) else 0  # dimensions before the axes
    for name, value in given.items():
        count = value.ndim - len(axes)
        own, of_x = value.shape[: max(0, count)], x.shape[first - count : first]
        fits = 0 <= count <= most and value.shape[count:] == size
        if not (fits and all(n in (1, m) for n, m in zip(own, of_x))):
            before = ", and any dimensions before it must broadcast against x's" if most else ""
            raise ValueError(
                f"{op}: {name} must have the shape of x's normalised axes, {size}{before}; got "
                f"{value.shape} for x of shape {x.shape} and axis={axis}"
                + _remedy(name, value, x, size)
            )
        heads |= {first - count + i for i, n in enumerate(own) if n != 1}
    dims, parameters = tuple(sorted(heads)), []
    shape = *[x.shape[d] for d in dims], *size
    for value in given.values():
        if value.shape != shape:
            start = x.ndim - value.ndim
            value = jnp.squeeze(value, [d - start for d in range(start, first) if d not in heads])
            value = jnp.broadcast_to(value, shape)
        parameters.append(value)
    return dims, parameters


def _remedy(name: str, value: Array, x: Array, size: tuple[int, ...]) -> str:
    """Returns the cure for a parameter that broadcasts, but not as ours do; or ""."""
    count = value.ndim - len(size)
    if 0 < count < x.ndim - len(size) and value.shape == (*x.shape[:count], *size):
        index = ", ".join([":"] * count + ["None"] * (x.ndim - value.ndim))
        return f"; write {name}[{index}] for one of each example"
    if count <= 0 and all(n in (1, m) for n, m in zip(value.shape[::-1], size[::-1])):
        return f"; write jnp.broadcast_to({name}, {size})"
    return ""


def call(op: Op, norm: Norm, operands: list[Array], implementation: Implementation) -> list[Array]:
    """Applies `op` to operands placed like x, the first."""
    x, *others = operands
    assert op.dims is not None
    (own, *dims), _ = op.dims(norm, x.ndim)
    lead = vary(x, varying_axes(*operands))
    if norm.has_residual and not any(jax.typeof(x).sharding.spec):
        lead = match(lead, others[0], own)
    operands = [lead, *[match(a, lead, d) for a, d in zip(others, dims, strict=True)]]
    order = order_of(implementation)
    return op.plain(norm, *operands) if order is None else op(norm, *operands, order=order)


def results_of(norm: Norm, results: list[Array]) -> Any:
    """y, or y and the sum with a residual."""
    return tuple(results[:2]) if norm.has_residual else results[0]


# ---------------------------------------------------------------- definitions, in plain JAX
# Every kernel is held to these. `scale` and `bias` have the shape of the normalised axes, in
# increasing order, after that of the heads; `mean`, `rstd`, `squares`, `sums` and `dots` have that
# of all but the normalised axes of x. Operands and results called mean and sums exist where the
# norm is centred.


def rows_of(norm: Norm, x: Any) -> tuple[int, ...]:
    """Returns the dimensions of x that parameters do not have."""
    return tuple(i for i in range(x.ndim) if i not in (*norm.heads, *norm.axes))


def along_rows(norm: Norm, value: Array) -> Array:
    """Broadcasts one value a row against x."""
    return jnp.expand_dims(value, norm.axes)


def weight_of(norm: Norm, operands: list[Array], x: Array, dtype: jnp.dtype) -> Array:
    """Takes scale off `operands`; returns scale + scale_offset against x, or 1 if there is none."""
    if not norm.has_scale:
        return jnp.ones((), dtype)
    scale = operands.pop(0).astype(dtype) + jnp.asarray(norm.scale_offset, dtype)
    return jnp.expand_dims(scale, rows_of(norm, x))


def bias_of(norm: Norm, operands: list[Array], x: Array, dtype: jnp.dtype) -> Array | None:
    """Takes bias off `operands`; returns it against x, or None if there is none."""
    if not norm.has_bias:
        return None
    return jnp.expand_dims(operands.pop(0).astype(dtype), rows_of(norm, x))


def plus(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias


def statistics_of(norm: Norm, wide: Array) -> tuple[Array, list[Array], Array]:
    """Returns x − mean, [mean] and Σ (x − mean)² of each row; if not centred x, [] and Σ x²."""
    if not norm.centred:
        return wide, [], jnp.sum(wide * wide, norm.axes)
    # Rounding moves a mean that is large: what is left of it is the mean of the differences. No
    # derivative is lost, for the mean of differences to any constant has that of the mean.
    rough = jax.lax.stop_gradient(jnp.mean(wide, norm.axes))
    apart = wide - along_rows(norm, rough)
    rest = jnp.mean(apart, norm.axes)
    centred = apart - along_rows(norm, rest)
    return centred, [rough + rest], jnp.sum(centred * centred, norm.axes)


def rstd_of(norm: Norm, squares: Array, count: int) -> Array:
    """Returns 1 / the root of the mean of `count` squares a row."""
    size = jnp.asarray(count, squares.dtype)
    return jax.lax.rsqrt(squares / size + jnp.asarray(norm.eps, squares.dtype))


def centred_of(norm: Norm, x: Array, others: list[Array], dtype: jnp.dtype) -> Array:
    """Takes mean off `others` if the norm is centred; returns x − mean, or x."""
    wide = x.astype(dtype)
    return wide - along_rows(norm, others.pop(0).astype(dtype)) if norm.centred else wide


def normal_of(norm: Norm, x: Array, others: list[Array], dtype: jnp.dtype) -> tuple[Array, Array]:
    """Takes the statistics off `others`; returns x̂, and rstd against x."""
    centred = centred_of(norm, x, others, dtype)
    rstd = along_rows(norm, others.pop(0).astype(dtype))
    return centred * rstd, rstd


def scaled(norm: Norm, normal: Array, x: Array, parameters: list[Array], dtype: jnp.dtype) -> Array:
    """Returns x̂ · w + bias, with x̂ rounded as x is if `cast_before`."""
    normal = rounded(normal, x.dtype) if norm.cast_before else normal
    w, bias = weight_of(norm, parameters, x, dtype), bias_of(norm, parameters, x, dtype)
    return plus(normal * w, bias).astype(norm.out_dtype)


def dtype_of(*operands: Array, out: Any = None) -> jnp.dtype:
    return compute_dtype(*(a.dtype for a in operands), out)


def forward_dtype(norm: Norm, *operands: Array) -> jnp.dtype:
    return compute_dtype(dtype_of(*operands, out=norm.out_dtype), norm.residual_dtype or None)


def define_forward(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """`(x[, residual][, scale][, bias]) -> (y[, h][, mean][, rstd])`, h = x + residual being
    normalised."""
    dtype, others = forward_dtype(norm, x, *rest), list(rest)
    h = []
    if norm.has_residual:
        x = add(x, others.pop(0), dtype, norm.residual_dtype)
        h.append(x)
    centred, mean, squares = statistics_of(norm, x.astype(dtype))
    rstd = rstd_of(norm, squares, math.prod(x.shape[a] for a in norm.axes))
    y = scaled(norm, centred * along_rows(norm, rstd), x, others, dtype)
    return [y, *h, *mean * norm.with_mean, *[rstd] * norm.with_rstd]


def add(x: Array, residual: Array, dtype: jnp.dtype, out: Any = "") -> Array:
    """Returns x + residual in `out`, or the dtype they promote to, added in `dtype`.

    XLA does not normalise the unrounded sum in its place, as it would on GPUs.
    """
    out = out or promoted(x.dtype, residual.dtype)
    return rounded(x.astype(dtype) + residual.astype(dtype), out).astype(out)


def define_row_statistics(norm: Norm, x: Array) -> list[Array]:
    """`x -> ([mean,] Σ (x − mean)²)`, one value a row each."""
    _, mean, squares = statistics_of(norm, x.astype(compute_dtype(x.dtype)))
    return [*mean, squares]


def define_apply(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """`(x[, scale][, bias][, mean], rstd) -> y`, for statistics that are already known."""
    dtype, others = dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    known = [others.pop() for _ in range(1 + norm.centred)][::-1]
    normal, _ = normal_of(norm, x, known, dtype)
    return [scaled(norm, normal, x, others, dtype)]


def define_row_dots(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale][, mean]) -> ([Σ dy · w,] Σ dy · w · (x − mean))`, one value a row each."""
    dtype, others = dtype_of(dy, x, *rest), list(rest)
    g = dy.astype(dtype) * weight_of(norm, others, x, dtype)
    dots = jnp.sum(g * centred_of(norm, x, others, dtype), norm.axes)
    return [*[jnp.sum(g, norm.axes) for _ in range(norm.centred)], dots]


def define_backward_apply(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale][, mean], rstd[, dh][, sums], dots) -> (dx[, dscale][, dbias])`.

    `sums` and `dots` are what `define_row_dots` gives of the whole row.
    """
    dtype, others = dtype_of(dy, x, *rest), list(rest)
    w = weight_of(norm, others, x, dtype)
    normal, rstd = normal_of(norm, x, others, dtype)
    dh = others.pop(0).astype(dtype) if norm.has_residual else jnp.zeros((), dtype)
    count = jnp.asarray(norm.count, dtype)
    *mean_g, mean_dot = (along_rows(norm, a.astype(dtype)) / count for a in others)
    dy = dy.astype(dtype)
    g = dy * w - mean_g[0] if norm.centred else dy * w
    # x̂ · rstd · mean in an order that rstd³ cannot overflow or vanish in
    dx = (rstd * (g - normal * (rstd * mean_dot)) + dh).astype(x.dtype)
    dscale = [jnp.sum(dy * normal, rows_of(norm, x)) for _ in range(norm.with_dscale)]
    return [dx, *dscale, *[jnp.sum(dy, rows_of(norm, x)) for _ in range(norm.with_dbias)]]


def define_backward(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale][, mean], rstd[, dh]) -> (dx[, dscale][, dbias])`; dh is of x + residual."""
    sums = define_row_dots(norm, dy, x, *rest[: norm.has_scale + norm.centred])
    known = replace(norm, count=math.prod(x.shape[a] for a in norm.axes))
    return define_backward_apply(known, dy, x, *rest, *sums)


def define_tangent(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """The tangents of y and h:
    `(h[, scale][, mean], rstd[, dh][, dscale][, dbias]) -> (dy[, dh])`.

    h is a result only with a residual, and only moves if dh does.
    """
    dtype, others = dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    w = weight_of(norm, others, x, dtype)
    normal, rstd = normal_of(norm, x, others, dtype)
    dy, dh = jnp.zeros((), dtype), []
    mean = lambda value: jnp.mean(value, norm.axes, keepdims=True)
    if norm.moves[0]:
        dx = others.pop(0)
        dh, wide = [dx] * norm.has_residual, dx.astype(dtype)
        along = normal * mean(normal * wide)
        dy = w * rstd * ((wide - mean(wide) if norm.centred else wide) - along)
    if norm.moves[1]:
        dy = dy + normal * jnp.expand_dims(others.pop(0).astype(dtype), rows_of(norm, x))
    if norm.moves[2]:
        dbias = jnp.expand_dims(others.pop(0).astype(dtype), rows_of(norm, x))
        dy = dy + jnp.broadcast_to(dbias, x.shape)
    return [dy.astype(norm.out_dtype), *dh]


# ---------------------------------------------------------------- kernels, on (outer, n, inner)
# `forward` and `backward` do the whole work where a device holds whole rows. Where rows are split
# over devices, `row_statistics` then `apply`, and `row_dots` then `backward_apply`, do it around
# one exchange.

# Elements of x up to which XLA's forward is left alone on a GPU, where no derivative asks for rstd
# and there is more than a row: as fast as ours, it is free to join the product that follows.
# Chains of 24 × (norm + product) on 64 rows of 1024 took 1.11 and 1.16 times as long with our
# launches (benchmarks/results/tried_and_lost.md).
PLAIN_ELEMENTS = 1 << 16


def _plain_forward_on_cuda(norm: Norm, x: Any, *_: Any) -> bool:
    return not (norm.centred or norm.with_rstd) and x.shape[0] > 1 and x.size <= PLAIN_ELEMENTS


def _cpu_body(name: str, definition: Callable[..., Any], *attributes: str) -> Callable[..., Any]:
    """Returns the body that calls a C++ handler with these attributes of the norm."""

    def call(norm: Norm, *operands: Array) -> list[Array]:
        if norm.per_example and norm.has_scale and name != "row_statistics":
            return _per_example_on_cpu(name, call, norm, *operands)
        types = result_types(definition, norm, tuple((a.shape, a.dtype) for a in operands))
        flat = types
        if norm.heads:
            operands = cuda.flat(norm, operands)
            sums = range(1, 1 + norm.with_dscale + norm.with_dbias)
            flat = [cuda.flat_struct(t, i in sums) for i, t in enumerate(types)]
        values: dict[str, Any] = {name: getattr(norm, name) for name in attributes}
        values = {k: np.float64(v) if isinstance(v, float) else v for k, v in values.items()}
        results = call_host(f"normfuse_norm_{name}", operands, flat, **values)
        return [a.reshape(t.shape) for a, t in zip(results, types)] if norm.heads else results

    return call


def _per_example_on_cpu(
    name: str, call: Callable[..., list[Array]], norm: Norm, *operands: Array
) -> list[Array]:
    """Rows alone in C++, with scale and bias of each example, and their sums, in XLA's loops."""
    own = {"has_scale": False, "has_bias": False, "scale_offset": 0.0}
    alone = replace(norm, **own, with_dscale=False, with_dbias=False)
    if name in ("forward", "apply"):
        at = 2 if norm.has_residual and name == "forward" else 1
        parameters = list(operands[at : at + 1 + norm.has_bias])
        dtype = forward_dtype(norm, *operands)
        known = *operands[:at], *operands[at + len(parameters) :]
        y, *others = call(replace(alone, out_dtype=dtype.name), *known)
        w = weight_of(norm, parameters, y, dtype)
        y = plus(y * w, bias_of(norm, parameters, y, dtype))
        return [y.astype(norm.out_dtype), *others]
    dy, x, scale, *known = operands
    dtype, rows = dtype_of(*operands), rows_of(norm, x)
    wide = dy.astype(dtype)
    results = call(alone, wide * weight_of(norm, [scale], x, dtype), x, *known)
    if name == "row_dots":
        return results
    normal, _ = normal_of(norm, x, known, dtype)
    dscale = [jnp.sum(wide * normal, rows) for _ in range(norm.with_dscale)]
    return [*results, *dscale, *[jnp.sum(wide, rows) for _ in range(norm.with_dbias)]]


def _kernel(
    name: str,
    definition: Callable[..., Any],
    on_cuda: Callable[..., Any],
    *attributes: str,
    **options: Any,
) -> Kernel:
    """Returns a kernel whose C++ handler has the norm's `attributes`; Pallas's has its name."""

    def pallas(target: Any, norm: Norm, *operands: Array) -> list[Array]:
        from . import pallas  # imported when it is first used

        return pallas.KERNELS[name](target, norm, *operands)

    cpu = _cpu_body(name, definition, *attributes)
    return Kernel(
        f"norm_{name}", definition, {"cpu": cpu, "cuda": on_cuda, "pallas": pallas}, **options
    )


registry.register()
_WEIGHT = ("centred", "scale_offset", "has_scale")
_GRADIENT = (*_WEIGHT, "has_residual", "with_dscale", "with_dbias")
forward_kernel = _kernel(
    "forward",
    define_forward,
    cuda.forward,
    *("eps", *_WEIGHT, "cast_before", "has_bias", "has_residual", "with_mean", "with_rstd"),
    plain_on_cuda=_plain_forward_on_cuda,
)
row_statistics_kernel = _kernel(
    "row_statistics", define_row_statistics, cuda.row_statistics, "centred"
)
apply_kernel = _kernel("apply", define_apply, cuda.apply, *_WEIGHT, "cast_before", "has_bias")
backward_kernel = _kernel("backward", define_backward, cuda.backward, *_GRADIENT)
row_dots_kernel = _kernel("row_dots", define_row_dots, cuda.row_dots, *_WEIGHT)
backward_apply_kernel = _kernel(
    "backward_apply", define_backward_apply, cuda.backward_apply, "count", *_GRADIENT
)


def examples(
    n: int,
    x: str,
    scale: str,
    out: str,
    *,
    rows: int,
    scale_offset: float = 0.0,
    centred: bool = False,
) -> Iterator[tuple[Kernel, Norm, list[jax.ShapeDtypeStruct]]]:
    """Yields every kernel on rows of `n` as the functions call it: (kernel, norm, operand types).

    Args:
      n: the length of a row.
      x, scale, out: dtypes of x, scale (and bias) and y (and dy).
      rows: how many.
      scale_offset: as for `rms_norm`.
      centred: LayerNorm's, with a bias, rather than RMSNorm's.
    """
    compute = compute_dtype(x, scale, out)
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    large, dy = struct((rows, n, 1), x), struct((rows, n, 1), out)
    row, w = struct((rows, 1), compute), struct((n,), scale)
    op = "layer_norm" if centred else "rms_norm"
    base = Norm(op=op, centred=centred, eps=1e-6, out_dtype=out)
    known, sums = [row] * (1 + base.centred), [row] * (1 + base.centred)
    for parameters in ([w, w], [w], []) if centred else ([w], []):
        weight, bias = parameters[:1], parameters[1:]
        norm = replace(base, has_scale=bool(weight), has_bias=bool(bias))
        norm = replace(norm, scale_offset=scale_offset if weight else 0.0)
        yield apply_kernel, norm, [large, *parameters, *known]
        if not bias:
            yield row_dots_kernel, norm, [dy, large, *weight, *known[1:]]
        for residual, flag in (([], False), ([large], True), ([], True), ([large], False)):
            given = replace(norm, has_residual=bool(residual))
            asked = replace(given, with_mean=flag and centred, with_rstd=flag)
            yield forward_kernel, asked, [large, *residual, *parameters]
            if not flag and (bias or residual):  # the same as without a bias
                continue
            asked = {"with_dscale": flag and bool(weight), "with_dbias": flag and bool(bias)}
            gradient = replace(given, has_bias=False, **asked)
            operands = [dy, large, *weight, *known, *residual]
            yield backward_kernel, gradient, operands
            apart = replace(gradient, count=float(n))
            yield backward_apply_kernel, apart, [*operands, *sums]
    yield row_statistics_kernel, base, [large]


# ---------------------------------------------------------------- one device's share


def canonical(norm: Norm, array: Array) -> Array:
    """Returns the array with its `axes` together, as kernels see it: (outer, n, inner).

    With heads: (outer, heads, n); with examples: (examples, tokens, n). A reshape where the
    dimensions of each are neighbours in this order, which costs nothing; otherwise a transpose
    before it.
    """
    if norm.heads:
        parts = _parts(norm, array.ndim)
        sizes = [math.prod(array.shape[d] for d in dims) for dims in parts]
        return array.transpose([d for dims in parts for d in dims]).reshape(sizes)
    axes, first = norm.axes, norm.axes[0]
    if axes != tuple(range(first, first + len(axes))):
        array = jnp.moveaxis(array, axes, range(first, first + len(axes)))
    shape = array.shape
    sizes = [math.prod(s) for s in (shape[:first], shape[first : first + len(axes)])]
    return array.reshape(*sizes, math.prod(shape[first + len(axes) :]))


def restore(norm: Norm, array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `canonical`."""
    if norm.heads:
        order = [d for dims in _parts(norm, len(shape)) for d in dims]
        return array.reshape([shape[d] for d in order]).transpose(np.argsort(order))
    axes, first = norm.axes, norm.axes[0]
    block = tuple(range(first, first + len(axes)))
    others = [n for i, n in enumerate(shape) if i not in axes]
    array = array.reshape(*others[:first], *[shape[a] for a in axes], *others[first:])
    return array if axes == block else jnp.moveaxis(array, block, axes)


def row_values(norm: Norm, array: Array) -> Array:
    """Returns a row statistic as kernels see it: (outer, inner), (outer, heads) or
    (examples, tokens)."""
    if norm.heads:
        return canonical(norm, along_rows(norm, array)).squeeze(2)
    return array.reshape(math.prod(array.shape[: norm.axes[0]]), -1)


def restore_row_values(norm: Norm, array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `row_values`, for x of this shape."""
    if norm.heads:
        shape = tuple(1 if i in norm.axes else n for i, n in enumerate(shape))
        return restore(norm, array, shape).squeeze(norm.axes)
    return array.reshape([n for i, n in enumerate(shape) if i not in norm.axes])


def _parts(norm: Norm, ndim: int) -> tuple[Sequence[int], ...]:
    """The dimensions that those which kernels see are made of, where there are heads."""
    rows = [d for d in range(ndim) if d not in (*norm.heads, *norm.axes)]
    both = (norm.heads, rows) if are_examples(norm) else (rows, norm.heads)
    return *both, norm.axes


def are_examples(norm: Norm) -> bool:
    """Returns True if scale has x's first dimensions, with others of x between them and `axes`.

    LayerNorm's kernels take examples alone: there vmap may have put rows before them, or none is
    between.
    """
    count = len(norm.heads)
    first = norm.heads == tuple(range(count)) and norm.axes[0] > count
    return count > 0 and (first or norm.centred)


def local(norm: Norm, **changes: Any) -> Norm:
    """The norm as kernels see it."""
    if are_examples(norm):
        return replace(norm, axes=(2,), heads=(0,), per_example=True, **changes)
    if norm.heads:
        return replace(norm, axes=(2,), heads=(1,), **changes)
    return replace(norm, axes=(1,), **changes)


def parameter_values(norm: Norm, array: Array) -> Array:
    """Returns a parameter as kernels see it: (n,), or (heads, n)."""
    if not norm.heads:
        return array.reshape(-1)
    return array.reshape(math.prod(array.shape[: len(norm.heads)]), -1)


def forward_body(norm: Norm, split: Split, x: Array, *rest: Array, order: Order) -> list[Array]:
    if x.size == 0:
        return define_forward(norm, x, *rest)
    large = [canonical(norm, a) for a in (x, *rest[: norm.has_residual])]
    parameters = [parameter_values(norm, a) for a in rest[norm.has_residual :]]
    if split.over(norm.axes):
        results = _forward_over_devices(norm, split, large, parameters, order)
    else:
        results = forward_kernel(local(norm), *large, *parameters, order=order)
    return [
        (restore if i <= norm.has_residual else restore_row_values)(norm, a, x.shape)
        for i, a in enumerate(results)
    ]


def _forward_over_devices(
    norm: Norm, split: Split, large: list[Array], parameters: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: one exchange between two kernels."""
    here, dtype = local(norm), forward_dtype(norm, *large, *parameters)
    h = add(large[0], large[1], dtype, norm.residual_dtype) if norm.has_residual else large[0]
    wide = h.astype(dtype) if dtype == jnp.float64 else h  # it sees no parameter, no dtype of y
    *mean, rstd = statistics_over_devices(norm, split, wide, order)
    y = apply_kernel(here, h, *parameters, *mean, rstd, order=order)
    return [*y, *[h] * norm.has_residual, *mean * norm.with_mean, *[rstd] * norm.with_rstd]


def statistics_over_devices(norm: Norm, split: Split, h: Array, order: Order) -> list[Array]:
    """Returns `[mean,] rstd` of rows of which each device has a part, as kernels see them."""
    here = local(norm)
    *mean, squares = row_statistics_kernel(here, h, order=order)
    if norm.centred:
        own = jnp.stack([*mean, squares])
        means, parts = jnp.moveaxis(jax.lax.all_gather(own, split.over(norm.axes)), 1, 0)
        size = jnp.asarray(h.shape[here.axes[0]], squares.dtype)
        of_all, squares = cuda.combined(means, parts, size)
        mean = [of_all]
    else:
        squares = split.psum(squares, norm.axes)
    return [*mean, rstd_of(norm, squares, split.count(norm.axes))]


def backward_body(
    norm: Norm,
    split: Split,
    dy: Array,
    x: Array,
    *rest: Array,
    order: Order,
) -> list[Array]:
    """dx, then what was asked for of dscale and dbias."""
    rows = rows_of(norm, x)
    if x.size == 0:
        dx, *more = define_backward(norm, dy, x, *rest)
        return [dx, *[split.psum(d, rows) for d in more]]
    scale, statistics = rest[: norm.has_scale], rest[norm.has_scale :]
    statistics, dh = statistics[: 1 + norm.centred], statistics[1 + norm.centred :]
    large = [canonical(norm, a) for a in (dy, x)]
    operands = [*large, *[parameter_values(norm, a) for a in scale]]
    operands += [row_values(norm, a) for a in statistics]
    operands += [canonical(norm, a) for a in dh]
    if split.over(norm.axes):
        dx, *more = _backward_over_devices(norm, split, operands, order)
    else:
        dx, *more = backward_kernel(local(norm), *operands, order=order)
    shape = tuple(x.shape[a] for a in (*norm.heads, *norm.axes))
    # dscale and dbias are summed over exactly the mesh axes that the rows use
    sums = [split.psum(d, rows).reshape(shape) for d in more]
    return [restore(norm, dx, x.shape), *sums]


def _backward_over_devices(
    norm: Norm, split: Split, operands: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: one sum over the devices between two kernels."""
    here = local(norm, count=float(split.count(norm.axes)))
    own = row_dots_kernel(here, *operands[: 2 + norm.has_scale + norm.centred], order=order)
    sums = split.psum(jnp.stack(own), norm.axes)
    return backward_apply_kernel(here, *operands, *sums, order=order)


# ---------------------------------------------------------------- sharding
# Operands and results by the dimensions of x they have: all of them, the rows, or the axes.


def dims_of(norm: Norm, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...], Loose]:
    """The dimensions of x, of a row's statistic and of a parameter."""
    rows = tuple(i for i in range(ndim) if i not in norm.axes)
    return tuple(range(ndim)), rows, Loose((*norm.heads, *norm.axes))


def forward_dims(norm: Norm, ndim: int) -> Dims:
    """`(x[, residual][, scale][, bias]) -> (y[, h][, mean][, rstd])`"""
    x, rows, scale = dims_of(norm, ndim)
    more = [x] * norm.has_residual
    parameters = [scale] * (norm.has_scale + norm.has_bias)
    return (x, *more, *parameters), (x, *more, *[rows] * (norm.with_mean + norm.with_rstd))


def backward_dims(norm: Norm, ndim: int) -> Dims:
    """`(dy, x[, scale][, mean], rstd[, dh]) -> (dx[, dscale][, dbias])`"""
    x, rows, scale = dims_of(norm, ndim)
    known = [*[scale] * norm.has_scale, *[rows] * (1 + norm.centred)]
    sums = [scale] * (norm.with_dscale + norm.with_dbias)
    return (x, x, *known, *[x] * norm.has_residual), (x, *sums)


def tangent_dims(norm: Norm, ndim: int) -> Dims:
    """`(h[, scale][, mean], rstd[, dh][, dscale][, dbias]) -> (dy[, dh])`"""
    x, rows, scale = dims_of(norm, ndim)
    known = [*[scale] * norm.has_scale, *[rows] * (1 + norm.centred)]
    moving = [*[x] * norm.moves[0], *[scale] * sum(norm.moves[1:])]
    results = (x, *[x] * (norm.has_residual and norm.moves[0]))
    return (x, *known, *moving), results


def batched(norm: Norm, at: int) -> Norm:
    """The norm of an x with one more dimension, at `at`."""
    moved = lambda dims: tuple(d + (d >= at) for d in dims)
    return replace(norm, axes=moved(norm.axes), heads=moved(norm.heads))


# ---------------------------------------------------------------- vmap over a parameter


def _forward_unfused(norm: Norm, x: Array, *rest: Array, order: Order) -> list[Array]:
    """Normalises on kernels; applies scale and bias of each example's own in plain JAX."""
    dtype = forward_dtype(norm, x, *rest)
    residual, parameters = rest[: norm.has_residual], list(rest[norm.has_residual :])
    alone = replace(norm, has_scale=False, has_bias=False, heads=(), scale_offset=0.0)
    y, *others = forward(replace(alone, out_dtype=dtype.name), x, *residual, order=order)
    w, bias = weight_of(norm, parameters, x, dtype), bias_of(norm, parameters, x, dtype)
    return [plus(y * w, bias).astype(norm.out_dtype), *others]


def _backward_unfused(norm: Norm, dy: Array, x: Array, *rest: Array, order: Order) -> list[Array]:
    """dx on kernels, with dy scaled by each example's own scale; the sums in plain JAX."""
    dtype, rows = dtype_of(dy, x, *rest), rows_of(norm, x)
    wide, others = dy.astype(dtype), list(rest)
    g = wide * weight_of(norm, others, x, dtype)
    alone = replace(norm, has_scale=False, heads=(), scale_offset=0.0)
    alone = replace(alone, with_dscale=False, with_dbias=False)
    results = backward(alone, g, x, *others, order=order)
    if norm.with_dscale:
        results.append(jnp.sum(wide * normal_of(norm, x, others, dtype)[0], rows))
    results += [jnp.sum(wide, rows)] * norm.with_dbias
    return results


# ---------------------------------------------------------------- derivative
# The tangent is an operation of its own, linear in the tangents, in plain HLO; its transpose is the
# native backward. So reverse mode runs kernels wherever JAX transposes (grad, linearize, scan,
# remat, vmap), while forward mode and higher orders are JAX's own derivatives of the definitions.


def _forward_jvp(primals: Any, tangents: Any, *, spec: Norm, order: Order) -> Any:
    """Returns the results and their tangents, those of statistics where wanted.

    The tangent takes the sum h = x + residual, so its transpose, the backward kernel, adds the
    residual's gradient itself.
    """
    x, *rest = primals
    dx, *drest = tangents
    known = replace(spec, with_mean=spec.centred, with_rstd=True)
    y, *more = forward(known, *primals, order=order)
    h, statistics = more[: spec.has_residual], more[spec.has_residual :]
    if spec.has_residual:
        dx = ad.add_tangents(_cast(dx, h[0].dtype), _cast(drest.pop(0), h[0].dtype))
        rest.pop(0)
    here = h[0] if h else x
    moving = [t for t in (dx, *drest) if type(t) is not ad.Zero]
    moves = _moves([type(t) is not ad.Zero for t in (dx, *drest)], spec.has_scale, spec.has_bias)
    norm = replace(spec, with_mean=False, with_rstd=False, moves=moves)
    dy, *dh = tangent(norm, here, *rest[: spec.has_scale], *statistics, *moving, order=order)
    results, dresults = [y, *h], [dy, *(dh or [dx] * len(h))]
    wanted = [*[spec.with_mean] * spec.centred, spec.with_rstd]
    if any(wanted):
        dstatistics = _statistics_tangents(spec, here, statistics, dx)
        results += [value for value, want in zip(statistics, wanted) if want]
        dresults += [value for value, want in zip(dstatistics, wanted) if want]
    return results, dresults


def _moves(given: list[bool], scale: bool, bias: bool) -> tuple[bool, bool, bool]:
    """`given` says what moves of x, scale and bias, as far as there is a scale and a bias."""
    return given[0], scale and given[1], bias and given[-1]


def _statistics_tangents(norm: Norm, x: Array, statistics: list[Array], dx: Any) -> list[Any]:
    """The tangents of [mean,] rstd."""
    if type(dx) is ad.Zero:
        return [ad.Zero(jax.typeof(a).to_tangent_aval()) for a in statistics]
    rstd = statistics[-1]
    wide, (normal, _) = dx.astype(rstd.dtype), normal_of(norm, x, list(statistics), rstd.dtype)
    along = jnp.mean(normal * wide, norm.axes)
    means = [jnp.mean(wide, norm.axes) for _ in range(norm.centred)]
    return [*means, -rstd * (rstd * along)]


def _cast(tangent: Any, dtype: Any) -> Any:
    """Returns the tangent in `dtype`; a symbolic zero stays one."""
    if type(tangent) is ad.Zero:
        return ad.Zero(tangent.aval.update(dtype=dtype))
    return tangent.astype(dtype)


def _transpose_tangent(cts: Any, x: Any, *rest: Any, spec: Norm, order: Order) -> list[Any]:
    count = spec.has_scale + 1 + spec.centred
    linear, nothing = rest[count:], [None] * (1 + count)
    dy, *dh = cts
    dh = [ct for ct in dh if type(ct) is not ad.Zero]
    if type(dy) is ad.Zero:
        return nothing + [*dh, *[None] * (len(linear) - len(dh))]
    asked = {"with_dscale": spec.moves[1], "with_dbias": spec.moves[2]}
    norm = replace(spec, has_residual=bool(dh), has_bias=False, moves=(False,) * 3, **asked)
    results = backward(norm, dy, x, *rest[:count], *dh, order=order)
    results = results if spec.moves[0] else results[1:]
    return nothing + [
        r.astype(t.aval.dtype) if ad.is_undefined_primal(t) else None
        for r, t in zip(results, linear, strict=True)
    ]


def without(norm: Norm, *flags: str) -> Norm | None:
    """The norm without the first of these results that it has."""
    found = next((flag for flag in flags if getattr(norm, flag)), None)
    return None if found is None else replace(norm, **{found: False})


def _transpose_backward(
    cts: Any, dy: Any, x: Any, *rest: Any, spec: Norm, order: Order
) -> list[Any]:
    count = spec.has_scale + 1 + spec.centred
    constants, dh = rest[:count], rest[count:]
    given = [type(ct) is not ad.Zero for ct in cts]
    out: list[Any] = [None] * (2 + len(rest))
    if dh and ad.is_undefined_primal(dh[0]) and given[0]:
        out[-1] = cts[0].astype(dh[0].aval.dtype)
    if ad.is_undefined_primal(dy) and any(given):
        moving = [ct for ct in cts if type(ct) is not ad.Zero]
        norm = replace(
            spec,
            has_residual=False,
            with_dscale=False,
            with_dbias=False,
            moves=_moves(given, spec.with_dscale, spec.with_dbias),
            out_dtype=dy.aval.dtype.name,
        )
        out[0] = tangent(norm, x, *constants, *moving, order=order)[0]
    return out


# ---------------------------------------------------------------- operations

tangent = Op(
    "norm_tangent",
    define_tangent,
    dims=tangent_dims,
    batched=batched,
    transpose=_transpose_tangent,
)
backward = Op(
    "norm_gradient",
    define_backward,
    dims=backward_dims,
    body=backward_body,
    leads=(1,),
    unfused=_backward_unfused,
    batched=batched,
    transpose=_transpose_backward,
    without_last=lambda norm: without(norm, "with_dbias", "with_dscale"),
)
forward = Op(
    "norm",
    define_forward,
    dims=forward_dims,
    body=forward_body,
    unfused=_forward_unfused,
    batched=batched,
    jvp=_forward_jvp,
    backward=backward,
    without_last=lambda norm: without(norm, "with_rstd", "with_mean"),
)
