"""RMSNorm, forward to backward: the functions, their definition, kernels, sharding and derivative.

With w = scale + scale_offset, all sums in float32 (float64 where an operand is float64):

    y = x̂ · w + bias            x̂ = x · rstd        rstd = 1 / sqrt(mean(x²) + eps)
    dx = rstd · g − x · rstd³ · mean(g · x)      g = dy · w
    dscale = Σ_rows dy · x̂      dbias = Σ_rows dy

`cast="before"` rounds x̂ to the dtype of x in y; the derivative is as if it did not round.

References: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

import functools
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
from ...native.dtypes import compute_dtype, rounded
from ...native.implementation import Implementation, Order, order_of
from ...native.kernel import Kernel, result_types
from ...native.launch import call_host
from ..core.arguments import dimensions, finite, floating, floating_dtype
from ..core.op import Dims, Loose, Op, Split, match, vary, varying_axes
from . import cuda
from .spec import Norm

# ---------------------------------------------------------------- the functions

Cast = Literal["after", "before"]
"""When x̂ is rounded: after it is multiplied by scale, or before as well."""


def rms_norm(
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
) -> Array:
    """Divides x by its root mean square over `axis`, multiplies by `scale` and adds `bias`.

        y = x / sqrt(mean(x²) + eps) · (scale + scale_offset) + bias

    Computed in float32 (float64 if an operand or `dtype` is float64); the gradients of scale and
    bias are summed in that type and returned in their own. Rows may be split over any mesh axes
    without communication; where a normalised axis is split, one value a row is summed over the
    devices.

    Args:
      x: any shape; float64, float32, bfloat16 or float16.
      scale: the shape of x's normalised axes, in increasing order of axis; any of those dtypes.
        Where these are x's last axes, scale may have more of them, with a weight for each head:
        (heads, features) for x (..., heads, features) and axis=-1. Heads may be split over mesh
        axes without communication. Pallas kernels take no heads.
      bias: the shape of scale where there is one, else that of x's normalised axes.
      eps: added to the mean square; finite, at least 0.
      axis: the normalised axis, or several.
      scale_offset: added to scale; 1 for checkpoints that store scale − 1.
      cast: "after" rounds once, the result, to `dtype`. "before" rounds x / sqrt(mean(x²) + eps)
        to x's dtype before it is multiplied, as Hugging Face's Llama does: the same bits, but where
        another order of the mean's sum moves a value past a tie. This rounding has no derivative.
      dtype: of the result; x's where None.
      implementation: None, "native", "pallas" or "xla", or several to try in order; see
        `normfuse info` for what serves here.

    Returns:
      An array of x's shape and sharding.

    Raises:
      TypeError: for integer or complex operands, or an eps that is not a number.
      ValueError: for a scale or bias that does not fit, an axis out of range, an eps that is
        negative or not finite, or an unknown cast or implementation.
      NotImplementedError: if `implementation` asks for what cannot serve; an ExceptionGroup of
        them where it names several.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    >>> import jax.numpy as jnp
    >>> from normfuse import rms_norm
    >>> y = rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0]))
    >>> [round(value, 3) for value in y.tolist()]
    [0.849, 2.263]
    """
    options = eps, axis, scale_offset, dtype, cast
    norm, x, *parameters = check("rms_norm", x, scale, bias, *options, per_head=True)
    return call(forward, norm, x, [], parameters, implementation)[0]


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

    Takes and raises what `rms_norm` does.

    Returns:
      `(y, rstd)`: rstd has the shape of x without the normalised axes, float32 (or float64).

    >>> import jax.numpy as jnp
    >>> from normfuse import rms_norm_with_rstd
    >>> y, rstd = rms_norm_with_rstd(jnp.array([[3.0, 4.0], [6.0, 8.0]]), eps=0.0)
    >>> [round(value, 3) for value in rstd.tolist()]
    [0.283, 0.141]
    """
    options = eps, axis, scale_offset, dtype, cast
    norm, x, *parameters = check("rms_norm_with_rstd", x, scale, bias, *options, per_head=True)
    y, rstd = call(forward, norm, x, [], parameters, implementation)
    return y, rstd


def add_rms_norm(
    x: Array,
    residual: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    cast: Cast = "after",
    dtype: jax.typing.DTypeLike | None = None,
    residual_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Adds a residual to x and normalises the sum: the step between two blocks of a transformer.

        new_residual = x + residual        y = rms_norm(new_residual, scale, bias)

    One pass over the activations in each direction: the backward adds the residual's own gradient
    in the kernel. Takes and raises what `rms_norm` does, and ValueError where residual's shape is
    not x's.

    Args:
      residual: x's shape; float64, float32, bfloat16 or float16.
      residual_dtype: of new_residual.

    Returns:
      `(y, new_residual)`: y has `dtype` (x's where None); new_residual has `residual_dtype` (the
      promoted dtype of x and residual where None), and is what is normalised, after rounding to
      that dtype. `cast="before"` rounds to that dtype too.

    >>> import jax.numpy as jnp
    >>> from normfuse import add_rms_norm
    >>> y, h = add_rms_norm(jnp.array([1.0, 1.0]), jnp.array([2.0, 3.0]))
    >>> [round(value, 3) for value in y.tolist()], h.tolist()
    ([0.849, 1.131], [3.0, 4.0])
    """
    options = eps, axis, scale_offset, dtype, cast
    norm, x, *parameters = check("add_rms_norm", x, scale, bias, *options, per_head=True)
    residual = check_residual("add_rms_norm", x, residual)
    if residual_dtype is not None:
        residual_dtype = floating_dtype("add_rms_norm", residual_dtype, None, "residual_dtype")
    norm = replace(norm, has_residual=True, residual_dtype=residual_dtype or "")
    y, new_residual, _ = call(forward, norm, x, [residual], parameters, implementation)
    return y, new_residual


def adaptive_rms_norm(
    x: Array,
    scale: Array,
    shift: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 1.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    """RMSNorm over the last axis with a scale and a shift of each example, as AdaLN has them.

        y[b, t] = x[b, t] / sqrt(mean(x[b, t]²) + eps) · (scale[b] + scale_offset) + shift[b]

    On GPUs one pass over the activations in each direction, which also sums the gradients of each
    example's scale and shift over its tokens. Computed in float32 (float64 if an operand or `dtype`
    is float64); any dimensions of x but the last may be split over mesh axes, and those sums cross
    the devices that have tokens of one example. Pallas does not serve it.

    Args:
      x: `(*examples, *tokens, features)`; float64, float32, bfloat16 or float16.
      scale: `(*examples, features)`, of one or more leading dimensions of x; any of those dtypes.
      shift: the shape of scale, or None.
      scale_offset: added to scale: 1 as DiT's `modulate` does.
      eps, dtype, implementation: as for `rms_norm`.

    Returns:
      An array of x's shape and sharding.

    Raises:
      TypeError, ValueError, NotImplementedError: as `rms_norm`.

    References:
      Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748.

    >>> import jax.numpy as jnp
    >>> from normfuse import adaptive_rms_norm
    >>> x, scale = jnp.array([[[3.0, 4.0]], [[4.0, 3.0]]]), jnp.array([[0.0, 0.0], [1.0, 1.0]])
    >>> y = adaptive_rms_norm(x, scale)
    >>> [round(value, 3) for value in y.ravel().tolist()]
    [0.849, 1.131, 2.263, 1.697]
    """
    options = eps, scale_offset, dtype
    norm, x, own = check_examples("adaptive_rms_norm", x, scale, shift, *options)
    return call(forward, norm, x, [], own, implementation)[0]


# `check` to `call`, and below all that is public and no definition, serve `layer_norm` too.


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
    per_head: bool = False,  # whether scale may have heads
) -> tuple[Norm, Array, Array | None, Array | None]:
    """Returns what is known of the norm, and the operands as arrays; or raises one clear error."""
    x = floating(op, "x", x)
    check_cast(op, cast)
    axes, heads = dimensions(op, x, axis), ()
    if per_head and scale is not None and axes == tuple(range(axes[0], x.ndim)):
        heads = tuple(range(max(0, x.ndim - np.ndim(scale)), axes[0]))
    norm = Norm(
        op=op,
        axes=axes,
        heads=heads,
        eps=finite(op, "eps", eps, least=0),
        scale_offset=finite(op, "scale_offset", scale_offset),
        out_dtype=floating_dtype(op, dtype, x.dtype),
        has_scale=scale is not None,
        has_bias=bias is not None,
        cast_before=cast == "before",
        with_rstd=True,
    )
    scale = check_parameter(norm, "scale", scale, x, axis)
    return norm, x, scale, check_parameter(norm, "bias", bias, x, axis)


def check_cast(op: str, cast: Any) -> None:
    """Raises ValueError for an unknown `cast`."""
    if not isinstance(cast, str) or cast not in get_args(Cast):
        raise ValueError(f"{op}: cast must be 'after' or 'before', got {cast!r}")


def check_parameter(norm: Norm, name: str, value: Any, x: Array, axis: Any) -> Array | None:
    """Returns a parameter as an array of the shape it must have, or None as it is."""
    if value is None:
        return None
    value = floating(norm.op, name, value)
    if value.shape != tuple(x.shape[a] for a in (*norm.heads, *norm.axes)):
        if name == "bias" and norm.heads:
            raise ValueError(
                f"{norm.op}: bias must have the shape of scale, {x.shape[norm.heads[0] :]}, "
                f"one for each head; got {value.shape}; broadcast it with jnp.broadcast_to"
            )
        wanted = tuple(x.shape[a] for a in norm.axes)
        heads = f", or heads before it, {x.shape[norm.heads[0] :]}" if norm.heads else ""
        raise ValueError(
            f"{norm.op}: {name} must have the shape of x's normalised axes, {wanted}{heads}, for x "
            f"of shape {x.shape} and axis={axis}; got {value.shape}"
        )
    return value


def check_examples(
    op: str, x: Any, scale: Any, shift: Any, eps: Any, scale_offset: Any, dtype: Any
) -> tuple[Norm, Array, list[Array]]:
    """As `check`, of a norm with scale and shift of each example, which it returns last."""
    norm, x, *_ = check(op, x, None, None, eps, -1, scale_offset, dtype)
    own = [floating(op, "scale", scale)]
    own += [] if shift is None else [floating(op, "shift", shift)]
    count = own[0].ndim - 1
    if not 0 < count < x.ndim or own[0].shape != (*x.shape[:count], x.shape[-1]):
        raise ValueError(
            f"{op}: scale must have the shape (*examples, features), of leading dimensions of x "
            f"and its last, for x of shape {x.shape}; got {own[0].shape}"
        )
    if own[-1].shape != own[0].shape:
        raise ValueError(f"{op}: shift must have scale's shape {own[0].shape}, got {own[1].shape}")
    norm = replace(norm, heads=tuple(range(count)), has_scale=True, has_bias=len(own) == 2)
    return norm, x, own


def check_residual(op: str, x: Array, residual: Any) -> Array:
    """Returns the residual as an array of x's shape."""
    residual = floating(op, "residual", residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual must have x's shape {x.shape}, got {residual.shape}; "
            "broadcast it first with jnp.broadcast_to"
        )
    return residual


def call(
    op: Op,
    norm: Norm,
    x: Array,
    residual: list[Array],
    parameters: Sequence[Array | None],
    implementation: Implementation,
) -> list[Array]:
    """Applies `op` to operands placed like x."""
    given = [a for a in parameters if a is not None]
    lead = vary(x, varying_axes(x, *residual, *given))
    if residual and not any(jax.typeof(x).sharding.spec):
        lead = match(lead, residual[0], range(x.ndim))
    operands = [lead, *[match(a, lead, range(x.ndim)) for a in residual]]
    operands += [match(a, lead, (*norm.heads, *norm.axes)) for a in given]
    order = order_of(implementation)
    return op.plain(norm, *operands) if order is None else op(norm, *operands, order=order)


# ---------------------------------------------------------------- definitions, in plain JAX
# Every kernel is held to these. `scale` and `bias` have the shape of the normalised axes, in
# increasing order, after that of the heads; `rstd`, `sums` and `dots` have that of all but the
# normalised axes of x.


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


def normal_of(norm: Norm, wide: Array, rstd: Array, dtype: jnp.dtype) -> Array:
    """Returns x̂ as it is multiplied by the weight, for an x of `dtype`."""
    normal = wide * along_rows(norm, rstd)
    return rounded(normal, dtype) if norm.cast_before else normal


def dtype_of(*operands: Array, out: Any = None) -> jnp.dtype:
    return compute_dtype(*(a.dtype for a in operands), out)


def forward_dtype(norm: Norm, *operands: Array) -> jnp.dtype:
    return compute_dtype(dtype_of(*operands, out=norm.out_dtype), norm.residual_dtype or None)


def define_forward(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """`(x[, residual][, scale][, bias]) -> (y[, h][, rstd])`, h = x + residual being normalised."""
    dtype, others = forward_dtype(norm, x, *rest), list(rest)
    h = []
    if norm.has_residual:
        x = add(x, others.pop(0), dtype, norm.residual_dtype)
        h.append(x)
    wide = x.astype(dtype)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, norm.axes) + jnp.asarray(norm.eps, dtype))
    w, bias = weight_of(norm, others, x, dtype), bias_of(norm, others, x, dtype)
    y = plus(normal_of(norm, wide, rstd, x.dtype) * w, bias).astype(norm.out_dtype)
    return [y, *h, *[rstd] * norm.with_rstd]


def add(x: Array, residual: Array, dtype: jnp.dtype, out: Any = "") -> Array:
    """Returns x + residual in `out`, or the dtype they promote to, added in `dtype`.

    XLA does not normalise the unrounded sum in its place, as it would on GPUs.
    """
    out = out or jnp.promote_types(x.dtype, residual.dtype)
    return rounded(x.astype(dtype) + residual.astype(dtype), out).astype(out)


def define_row_sums(norm: Norm, x: Array) -> list[Array]:
    """`x -> Σ x²`, one value a row."""
    wide = x.astype(compute_dtype(x.dtype))
    return [jnp.sum(wide * wide, norm.axes)]


def define_apply(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """`(x[, scale][, bias], rstd) -> y`, for an rstd that is already known."""
    dtype, others = dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    w, bias = weight_of(norm, others, x, dtype), bias_of(norm, others, x, dtype)
    rstd = others.pop(0).astype(dtype)
    y = plus(normal_of(norm, x.astype(dtype), rstd, x.dtype) * w, bias)
    return [y.astype(norm.out_dtype)]


def define_row_dots(norm: Norm, dy: Array, x: Array, *scale: Array) -> list[Array]:
    """`(dy, x[, scale]) -> Σ dy · w · x`, one value a row."""
    dtype = dtype_of(dy, x, *scale)
    w = weight_of(norm, list(scale), x, dtype)
    return [jnp.sum(dy.astype(dtype) * w * x.astype(dtype), norm.axes)]


def define_backward_apply(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale], rstd[, dh], dots) -> (dx[, dscale][, dbias])`, for known sums over rows."""
    dtype, others = dtype_of(dy, x, *rest), list(rest)
    w = weight_of(norm, others, x, dtype)
    rstd = along_rows(norm, others.pop(0).astype(dtype))
    dh = others.pop(0).astype(dtype) if norm.has_residual else jnp.zeros((), dtype)
    mean = along_rows(norm, others.pop(0).astype(dtype)) / jnp.asarray(norm.count, dtype)
    dy, normal = dy.astype(dtype), x.astype(dtype) * rstd
    # x · rstd³ · mean in an order that rstd³ cannot overflow or vanish in
    dx = (rstd * (dy * w - normal * (rstd * mean)) + dh).astype(x.dtype)
    dscale = [jnp.sum(dy * normal, rows_of(norm, x)) for _ in range(norm.with_dscale)]
    return [dx, *dscale, *[jnp.sum(dy, rows_of(norm, x)) for _ in range(norm.with_dbias)]]


def define_backward(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """`(dy, x[, scale], rstd[, dh]) -> (dx[, dscale][, dbias][, value])`.

    dh is the residual's own gradient; the value is y again, in dy's dtype.
    """
    (dots,) = define_row_dots(norm, dy, x, *rest[: norm.has_scale])
    known = replace(norm, count=math.prod(x.shape[a] for a in norm.axes))
    results = define_backward_apply(known, dy, x, *rest, dots)
    if norm.with_value:
        results += define_apply(replace(norm, out_dtype=dy.dtype.name), x, *rest)
    return results


def define_tangent(norm: Norm, x: Array, *rest: Array) -> list[Array]:
    """The tangents of y and h: `(h[, scale], rstd[, dh][, dscale][, dbias]) -> (dy[, dh])`.

    h is a result only with a residual, and only moves if dh does.
    """
    dtype, others = dtype_of(x, *rest, out=norm.out_dtype), list(rest)
    w = weight_of(norm, others, x, dtype)
    rstd = along_rows(norm, others.pop(0).astype(dtype))
    normal, dy, dh = x.astype(dtype) * rstd, jnp.zeros((), dtype), []
    if norm.moves[0]:
        dx = others.pop(0)
        dh = [dx] * norm.has_residual
        mean = jnp.mean(normal * dx.astype(dtype), norm.axes, keepdims=True)
        dy = w * rstd * (dx.astype(dtype) - normal * mean)
    if norm.moves[1]:
        dy = dy + normal * jnp.expand_dims(others.pop(0).astype(dtype), rows_of(norm, x))
    if norm.moves[2]:
        dbias = jnp.expand_dims(others.pop(0).astype(dtype), rows_of(norm, x))
        dy = dy + jnp.broadcast_to(dbias, x.shape)
    return [dy.astype(norm.out_dtype), *dh]


# ---------------------------------------------------------------- kernels, on (outer, n, inner)
# `forward` and `backward` do the whole work where a device holds whole rows. Where rows are split
# over devices, `row_sums` then `apply`, and `row_dots` then `backward_apply`, do it around one sum
# over the devices.

# Elements of x up to which XLA's forward is left alone on a GPU, where no derivative asks for rstd
# and there is more than a row: as fast as ours, it is free to join the product that follows.
# Chains of 24 × (norm + product) on 64 rows of 1024 took 1.11 and 1.16 times as long with our
# launches (benchmarks/results/2026-11-21_h200_rms_norm_tried.md).
PLAIN_ELEMENTS = 1 << 16


def _plain_forward_on_cuda(norm: Norm, x: Any, *_: Any) -> bool:
    return not norm.with_rstd and x.shape[0] > 1 and x.size <= PLAIN_ELEMENTS


def cpu_body(name: str, definition: Callable[..., Any], *attributes: str) -> Callable[..., Any]:
    """Returns the body that calls a C++ handler with these attributes of the norm."""

    def call(norm: Norm, *operands: Array, aliases: Any = None) -> list[Array]:
        rows_alone = name.endswith(("_row_sums", "_row_statistics"))
        if norm.per_example and norm.has_scale and not rows_alone:
            return _per_example_on_cpu(name, call, norm, *operands)
        types = result_types(definition, norm, tuple((a.shape, a.dtype) for a in operands))
        flat = types
        if norm.heads:
            operands = cuda.flat(norm, operands)
            sums = range(1, 1 + norm.with_dscale + norm.with_dbias)
            flat = [cuda.flat_struct(t, i in sums) for i, t in enumerate(types)]
        values = {name: getattr(norm, name) for name in attributes}
        values = {k: np.float64(v) if isinstance(v, float) else v for k, v in values.items()}
        results = call_host(f"normfuse_{name}", operands, flat, aliases=aliases, **values)
        return [a.reshape(t.shape) for a, t in zip(results, types)] if norm.heads else results

    return call


def _per_example_on_cpu(
    name: str, call: Callable[..., list[Array]], norm: Norm, *operands: Array
) -> list[Array]:
    """Rows alone in C++, with scale and bias of each example, and their sums, in XLA's loops."""
    own = {"has_scale": False, "has_bias": False, "scale_offset": 0.0}
    alone = replace(norm, **own, with_dscale=False, with_dbias=False)
    if name.endswith(("_forward", "_norm_apply")):
        at = 2 if norm.has_residual and name.endswith("_forward") else 1
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
    if name.endswith("_row_dots"):
        return results
    *mean, rstd = (along_rows(norm, a) for a in known[: 1 + norm.centred])
    normal = (x.astype(dtype) - mean[0] if mean else x.astype(dtype)) * rstd
    dscale = [jnp.sum(wide * normal, rows) for _ in range(norm.with_dscale)]
    return [*results, *dscale, *[jnp.sum(wide, rows) for _ in range(norm.with_dbias)]]


def _pullback_on_cpu(norm: Norm, dy: Array, x: Array, *rest: Array) -> list[Array]:
    """x is normalised again by a call of its own, and dx takes dy's place."""
    again, alone = replace(norm, out_dtype=dy.dtype.name), replace(norm, with_value=False)
    value = apply_kernel.bodies["cpu"](again, x, *rest) if norm.with_value else []
    aliases = {0: 0} if dy.dtype == x.dtype else None
    return [*backward_kernel.bodies["cpu"](alone, dy, x, *rest, aliases=aliases), *value]


def _kernel(
    name: str,
    definition: Callable[..., Any],
    on_cuda: Callable[..., Any],
    *attributes: str,
    on_cpu: Callable[..., Any] | None = None,
    on_pallas: str = "",
    **options: Any,
) -> Kernel:
    """Returns a kernel whose C++ handler has the norm's `attributes`, unless `on_cpu` is given.

    The Pallas kernel is that of the same name, or `on_pallas`.
    """

    def pallas(target: Any, norm: Norm, *operands: Array) -> list[Array]:
        from . import pallas  # imported when it is first used

        return pallas.KERNELS[on_pallas or name](target, norm, *operands)

    full = f"rms_norm_{name}"
    cpu = on_cpu or cpu_body(full, definition, *attributes)
    return Kernel(full, definition, {"cpu": cpu, "cuda": on_cuda, "pallas": pallas}, **options)


registry.register()
_WEIGHT = ("scale_offset", "has_scale")
_GRADIENT = (*_WEIGHT, "has_residual", "with_dscale", "with_dbias")
forward_kernel = _kernel(
    "forward",
    define_forward,
    cuda.forward,
    *("eps", *_WEIGHT, "cast_before", "has_bias", "has_residual", "with_rstd"),
    plain_on_cuda=_plain_forward_on_cuda,
)
row_sums_kernel = _kernel("row_sums", define_row_sums, cuda.row_sums)
apply_kernel = _kernel("apply", define_apply, cuda.apply, *_WEIGHT, "cast_before", "has_bias")
backward_kernel = _kernel("backward", define_backward, cuda.backward, *_GRADIENT)
row_dots_kernel = _kernel("row_dots", define_row_dots, cuda.row_dots, *_WEIGHT)
backward_apply_kernel = _kernel(
    "backward_apply", define_backward_apply, cuda.backward_apply, "count", *_GRADIENT
)
pullback_kernel = _kernel(
    "pullback", define_backward, cuda.pullback, on_cpu=_pullback_on_cpu, on_pallas="backward"
)
KERNELS = (
    forward_kernel,
    row_sums_kernel,
    apply_kernel,
    backward_kernel,
    row_dots_kernel,
    backward_apply_kernel,
    pullback_kernel,
)


def examples(
    n: int, x: str, scale: str, out: str, *, rows: int, scale_offset: float = 0.0
) -> Iterator[tuple[Kernel, Norm, list[jax.ShapeDtypeStruct]]]:
    """Yields every kernel on rows of `n` as the functions call it: (kernel, norm, operand types).

    Args:
      n: the length of a row.
      x, scale, out: dtypes of x, scale and y (and dy).
      rows: how many.
      scale_offset: as for `rms_norm`.
    """
    compute = compute_dtype(x, scale, out)
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    large, dy = struct((rows, n, 1), x), struct((rows, n, 1), out)
    row, w = struct((rows, 1), compute), struct((n,), scale)
    base = Norm(eps=1e-6, scale_offset=scale_offset, out_dtype=out)
    for weight in ([w], []):
        norm = replace(base, has_scale=bool(weight))
        if not weight:
            norm = replace(norm, scale_offset=0.0)
        yield apply_kernel, norm, [large, *weight, row]
        yield row_dots_kernel, norm, [dy, large, *weight]
        for residual, flag in (([], False), ([large], True), ([], True)):
            given = replace(norm, has_residual=bool(residual))
            yield (
                forward_kernel,
                replace(given, with_rstd=flag or bool(residual)),
                [large, *residual, *weight],
            )
            gradient = replace(given, with_dscale=flag and bool(weight))
            yield backward_kernel, gradient, [dy, large, *weight, row, *residual]
            known = replace(gradient, count=float(n))
            yield backward_apply_kernel, known, [dy, large, *weight, row, *residual, row]
        yield forward_kernel, replace(norm, has_residual=True), [large, large, *weight]
        for value in (False, True):
            for dscale in {False, bool(weight)}:
                spec = replace(norm, with_dscale=dscale, with_value=value)
                yield pullback_kernel, spec, [dy, large, *weight, row]
    yield row_sums_kernel, base, [large]


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
    """Whether scale has the first dimensions of x, and others of x are between them and `axes`.

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


def forward_on(
    kernel: Kernel,
    over_devices: Callable[..., list[Array]],
    norm: Norm,
    split: Split,
    x: Array,
    *rest: Array,
    order: Order,
) -> list[Array]:
    """The forward by `kernel`, or by `over_devices` where devices have parts of each row."""
    if x.size == 0:
        return list(kernel.definition(norm, x, *rest))
    large = [canonical(norm, a) for a in (x, *rest[: norm.has_residual])]
    parameters = [parameter_values(norm, a) for a in rest[norm.has_residual :]]
    if split.over(norm.axes):
        results = over_devices(norm, split, large, parameters, order)
    else:
        results = kernel(local(norm), *large, *parameters, order=order)
    return [
        (restore if i <= norm.has_residual else restore_row_values)(norm, a, x.shape)
        for i, a in enumerate(results)
    ]


def _forward_over_devices(
    norm: Norm, split: Split, large: list[Array], parameters: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: one sum over the devices between two kernels."""
    here, dtype = local(norm), forward_dtype(norm, *large, *parameters)
    h = add(large[0], large[1], dtype, norm.residual_dtype) if norm.has_residual else large[0]
    wide = h.astype(dtype) if dtype == jnp.float64 else h  # it sees no parameter, no dtype of y
    sums = split.psum(row_sums_kernel(here, wide, order=order)[0], norm.axes)
    rstd = jax.lax.rsqrt(sums / split.count(norm.axes) + jnp.asarray(norm.eps, sums.dtype))
    y = apply_kernel(here, h, *parameters, rstd, order=order)
    return [*y, *[h] * norm.has_residual, *[rstd] * norm.with_rstd]


forward_body = functools.partial(forward_on, forward_kernel, _forward_over_devices)


def _apply_body(norm: Norm, split: Split, x: Array, *rest: Array, order: Order) -> list[Array]:
    """Needs nothing of other devices: rstd is of the whole row."""
    del split
    if x.size == 0:
        return define_apply(norm, x, *rest)
    *parameters, rstd = rest
    parameters = [parameter_values(norm, a) for a in parameters]
    operands = [canonical(norm, x), *parameters, row_values(norm, rstd)]
    (y,) = apply_kernel(local(norm), *operands, order=order)
    return [restore(norm, y, x.shape)]


def gradients_on(
    kernel: Kernel,
    over_devices: Callable[..., list[Array]],
    norm: Norm,
    split: Split,
    dy: Array,
    x: Array,
    *rest: Array,
    order: Order,
) -> list[Array]:
    """dx, then what was asked for of dscale, dbias and the value; by `kernel`, or `over_devices`
    where devices have parts of each row."""
    rows = rows_of(norm, x)
    if x.size == 0:
        dx, *more = kernel.definition(norm, dy, x, *rest)
        return [dx, *[split.psum(d, rows) for d in more]]
    scale, statistics = rest[: norm.has_scale], rest[norm.has_scale :]
    statistics, dh = statistics[: 1 + norm.centred], statistics[1 + norm.centred :]
    large = [canonical(norm, a) for a in (dy, x)]
    operands = [*large, *[parameter_values(norm, a) for a in scale]]
    operands += [row_values(norm, a) for a in statistics]
    operands += [canonical(norm, a) for a in dh]
    if split.over(norm.axes):
        dx, *more = over_devices(norm, split, operands, order)
    else:
        dx, *more = kernel(local(norm), *operands, order=order)
    value = [restore(norm, more.pop(), x.shape)] if norm.with_value else []
    shape = tuple(x.shape[a] for a in (*norm.heads, *norm.axes))
    # dscale and dbias are summed over exactly the mesh axes that the rows use
    sums = [split.psum(d, rows).reshape(shape) for d in more]
    return [restore(norm, dx, x.shape), *sums, *value]


def _backward_over_devices(
    norm: Norm, split: Split, operands: list[Array], order: Order
) -> list[Array]:
    """Each device has a part of every row: one sum over the devices between two kernels."""
    here = local(norm, count=float(split.count(norm.axes)))
    (dots,) = row_dots_kernel(here, *operands[: 2 + norm.has_scale], order=order)
    return backward_apply_kernel(here, *operands, split.psum(dots, norm.axes), order=order)


backward_body = functools.partial(gradients_on, backward_kernel, _backward_over_devices)


def _pullback_body(
    norm: Norm, split: Split, dy: Array, x: Array, *rest: Array, order: Order
) -> list[Array]:
    if x.size and not split.over(norm.axes):
        apart = _backward_over_devices
        return gradients_on(pullback_kernel, apart, norm, split, dy, x, *rest, order=order)
    alone = replace(norm, with_value=False)
    results = backward_body(alone, split, dy, x, *rest, order=order)
    if norm.with_value:
        again = replace(norm, out_dtype=dy.dtype.name)
        results += _apply_body(again, split, x, *rest, order=order)
    return results


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
    """`(dy, x[, scale][, mean], rstd[, dh]) -> (dx[, dscale][, dbias][, value])`"""
    x, rows, scale = dims_of(norm, ndim)
    known = [*[scale] * norm.has_scale, *[rows] * (1 + norm.centred)]
    sums = [scale] * (norm.with_dscale + norm.with_dbias)
    return (x, x, *known, *[x] * norm.has_residual), (x, *sums, *[x] * norm.with_value)


def _apply_dims(norm: Norm, ndim: int) -> Dims:
    x, rows, scale = dims_of(norm, ndim)
    return (x, *[scale] * (norm.has_scale + norm.has_bias), rows), (x,)


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
    rstd, *dh = others
    alone = replace(norm, has_scale=False, heads=(), scale_offset=0.0)
    alone = replace(alone, with_dscale=False, with_dbias=False, with_value=False)
    results = backward(alone, g, x, rstd, *dh, order=order)
    if norm.with_dscale:
        normal = x.astype(dtype) * along_rows(norm, rstd)
        results.append(jnp.sum(wide * normal, rows))
    results += [jnp.sum(wide, rows)] * norm.with_dbias
    if norm.with_value:
        results += define_apply(replace(norm, out_dtype=dy.dtype.name), x, *rest)
    return results


# ---------------------------------------------------------------- derivative
# The tangent is an operation of its own, linear in the tangents, in plain HLO; its transpose is the
# native backward. So reverse mode runs kernels wherever JAX transposes (grad, linearize, scan,
# remat, vmap), while forward mode and higher orders are JAX's own derivatives of the definitions.


def _forward_jvp(primals: Any, tangents: Any, *, spec: Norm, order: Order) -> Any:
    return push(forward, tangent, _rstd_tangent, primals, tangents, spec, order)


def push(
    forward: Op,
    tangent: Op,
    of_statistics: Callable[..., list[Any]],
    primals: Any,
    tangents: Any,
    spec: Norm,
    order: Order,
) -> Any:
    """Returns the results of `forward` and their tangents, those of statistics where wanted.

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
        dstatistics = of_statistics(spec, here, *statistics, dx)
        results += [value for value, want in zip(statistics, wanted) if want]
        dresults += [value for value, want in zip(dstatistics, wanted) if want]
    return results, dresults


def _moves(given: list[bool], scale: bool, bias: bool) -> tuple[bool, bool, bool]:
    """`given` says what moves of x, scale and bias, as far as there is a scale and a bias."""
    return given[0], scale and given[1], bias and given[-1]


def _rstd_tangent(norm: Norm, x: Array, rstd: Array, dx: Any) -> list[Any]:
    if type(dx) is ad.Zero:
        return [ad.Zero(jax.typeof(rstd).to_tangent_aval())]
    normal = x.astype(rstd.dtype) * along_rows(norm, rstd)
    return [-rstd * (rstd * jnp.mean(normal * dx.astype(rstd.dtype), norm.axes))]


def _cast(tangent: Any, dtype: Any) -> Any:
    """Returns the tangent in `dtype`; a symbolic zero stays one."""
    if type(tangent) is ad.Zero:
        return ad.Zero(tangent.aval.update(dtype=dtype))
    return tangent.astype(dtype)


def _transpose_tangent(cts: Any, *operands: Any, spec: Norm, order: Order) -> list[Any]:
    return pull(backward, cts, *operands, spec=spec, order=order)


def pull(backward: Op, cts: Any, x: Any, *rest: Any, spec: Norm, order: Order) -> list[Any]:
    """The transpose of a tangent, by `backward`."""
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


def _transpose_backward(cts: Any, *operands: Any, spec: Norm, order: Order) -> list[Any]:
    return pull_again(tangent, cts, *operands, spec=spec, order=order)


def pull_again(
    tangent: Op, cts: Any, dy: Any, x: Any, *rest: Any, spec: Norm, order: Order
) -> list[Any]:
    """The transpose of a backward, by `tangent`."""
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
    "rms_norm_tangent",
    define_tangent,
    dims=tangent_dims,
    batched=batched,
    transpose=_transpose_tangent,
)
backward = Op(
    "rms_norm_gradient",
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
    "rms_norm",
    define_forward,
    dims=forward_dims,
    body=forward_body,
    unfused=_forward_unfused,
    batched=batched,
    jvp=_forward_jvp,
    backward=backward,
    without_last=lambda norm: without(norm, "with_rstd"),
)
apply = Op("rms_norm_apply", define_apply, dims=_apply_dims, body=_apply_body, batched=batched)
"""`(x[, scale][, bias], rstd) -> (y,)`: the forward once more, where rstd is known."""

pullback = Op(
    "rms_norm_pullback",
    define_backward,
    dims=backward_dims,
    body=_pullback_body,
    leads=(1,),
    unfused=_backward_unfused,
    batched=batched,
)
"""`(dy, x[, scale], rstd) -> (dx[, dscale][, value])`: `backward` for a layer that takes y.

Where with_value the pass also writes y, x normalised again, in dy's dtype. One of the results takes
dy's place in memory, which costs a copy if dy is needed afterwards: it is made for a dy that the
layer itself has made.
"""
