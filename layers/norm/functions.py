"""RMSNorm and LayerNorm: the public functions, and what they check."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax import Array

from ...native.implementation import Implementation, order_of
from ..core.arguments import dimensions, finite, floating, floating_dtype
from ..core.op import Op, match, vary, varying_axes
from .op import forward
from .spec import Norm

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


def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    """Subtracts the mean of x over `axis`, divides by the standard deviation, scales and shifts.

        y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · (scale + scale_offset) + bias

    Computed in float32 (float64 if an operand or `dtype` is float64), the mean first, so that a
    mean much larger than the deviation costs no digits of it; the gradients of scale and bias are
    summed in that type and returned in their own. Rows may be split over any mesh axes without
    communication; where a normalised axis is split, two values a row are exchanged.

    Args:
      x: any shape; float64, float32, bfloat16 or float16.
      scale, bias: the shape of x's normalised axes, in increasing order of axis; any of those
        dtypes.
      eps: added to the variance; finite, at least 0.
      axis: the normalised axis, or several.
      scale_offset: added to scale; 1 for checkpoints that store scale − 1.
      dtype: of the result; x's where None.
      implementation: None, "native", "pallas" or "xla", or several to try in order; see
        `normfuse info` for what serves here.

    Returns:
      An array of x's shape and sharding.

    Raises:
      TypeError: for integer or complex operands, or an eps that is not a number.
      ValueError: for a scale or bias that does not fit, an axis out of range, an eps that is
        negative or not finite, or an unknown implementation.
      NotImplementedError: if `implementation` asks for what cannot serve; an ExceptionGroup of
        them where it names several.

    References:
      Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.

    >>> import jax.numpy as jnp
    >>> from normfuse import layer_norm
    >>> y = layer_norm(jnp.array([3.0, 5.0]), jnp.array([1.0, 2.0]), jnp.array([0.0, 1.0]))
    >>> [round(value, 3) for value in y.tolist()]
    [-1.0, 3.0]
    """
    options = eps, axis, scale_offset, dtype
    norm, x, *parameters = check("layer_norm", x, scale, bias, *options, centred=True)
    return call(forward, norm, x, [], parameters, implementation)[0]


def add_layer_norm(
    x: Array,
    residual: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Adds a residual to x and normalises the sum, in one pass over the activations.

        new_residual = x + residual        y = layer_norm(new_residual, scale, bias)

    The backward adds the residual's own gradient in the kernel. Takes and raises what `layer_norm`
    does, and ValueError where residual's shape is not x's.

    Args:
      residual: x's shape; float64, float32, bfloat16 or float16.

    Returns:
      `(y, new_residual)`: y has `dtype` (x's where None); new_residual has the promoted dtype of x
      and residual, and is what is normalised, after rounding to that dtype.

    >>> import jax.numpy as jnp
    >>> from normfuse import add_layer_norm
    >>> y, h = add_layer_norm(jnp.array([1.0, 1.0]), jnp.array([2.0, 4.0]))
    >>> [round(value, 3) for value in y.tolist()], h.tolist()
    ([-1.0, 1.0], [3.0, 5.0])
    """
    options = eps, axis, scale_offset, dtype
    norm, x, *parameters = check("add_layer_norm", x, scale, bias, *options, centred=True)
    residual = check_residual("add_layer_norm", x, residual)
    norm = replace(norm, has_residual=True)
    y, h, *_ = call(forward, norm, x, [residual], parameters, implementation)
    return y, h


def adaptive_layer_norm(
    x: Array,
    scale: Array,
    shift: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 1.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    """LayerNorm over the last axis with a scale and a shift of each example: AdaLN.

        x̂[b, t] = (x[b, t] − mean(x[b, t])) / sqrt(mean((x[b, t] − mean(x[b, t]))²) + eps)
        y[b, t] = x̂[b, t] · (scale[b] + scale_offset) + shift[b]

    In DiT, PixArt, Stable Diffusion 3 and Flux, a LayerNorm without parameters and `modulate`.
    Takes and raises what `adaptive_rms_norm` does, and computes it in as many passes.

    Returns:
      An array of x's shape and sharding.

    >>> import jax.numpy as jnp
    >>> from normfuse import adaptive_layer_norm
    >>> x, scale = jnp.array([[[3.0, 5.0]], [[5.0, 1.0]]]), jnp.array([[0.0, 0.0], [1.0, 1.0]])
    >>> y = adaptive_layer_norm(x, scale, jnp.array([[0.0, 1.0], [0.0, 0.0]]))
    >>> [round(value, 3) for value in y.ravel().tolist()]
    [-1.0, 2.0, 2.0, -2.0]
    """
    options = eps, scale_offset, dtype
    norm, x, own = check_examples("adaptive_layer_norm", x, scale, shift, *options, centred=True)
    return call(forward, norm, x, [], own, implementation)[0]


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
    per_head: bool = False,  # whether scale may have heads
    centred: bool = False,
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
        centred=centred,
        with_mean=centred,
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
    op: str,
    x: Any,
    scale: Any,
    shift: Any,
    eps: Any,
    scale_offset: Any,
    dtype: Any,
    centred: bool = False,
) -> tuple[Norm, Array, list[Array]]:
    """As `check`, of a norm with scale and shift of each example, which it returns last."""
    norm, x, *_ = check(op, x, None, None, eps, -1, scale_offset, dtype, centred=centred)
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
