"""RMSNorm and LayerNorm: the public functions, and their checks."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
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
    """What to write for a parameter that broadcasts, but not as ours do; or ""."""
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
    if (norm.has_residual or norm.gate) and not any(jax.typeof(x).sharding.spec):
        lead = match(lead, others[0], own)
    operands = [lead, *[match(a, lead, d) for a, d in zip(others, dims, strict=True)]]
    order = order_of(implementation)
    return op.plain(norm, *operands) if order is None else op(norm, *operands, order=order)


def results_of(norm: Norm, results: list[Array]) -> Any:
    """y, or y and the sum with a residual."""
    return tuple(results[:2]) if norm.has_residual else results[0]
