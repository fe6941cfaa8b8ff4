"""Root mean square normalisation, with or without a residual addition before it."""

from collections.abc import Sequence

import jax

from .arguments import dimensions, finite, floating, floating_dtype
from .implementation import Implementation, kernels
from .op import match, vary
from .rms_norm_op import forward


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Divides x by its root mean square over `axis` and multiplies by `scale`.

        y = x / sqrt(mean(x²) + eps) · (scale + scale_offset)

    Computed in float32 (float64 if an operand or `dtype` is float64); the gradient of scale is
    summed in that type and returned in scale's own. Rows may be split over any mesh axes without
    communication; where a normalised axis is split, one value a row is summed over the devices.

    Args:
      x: any shape; float64, float32, bfloat16 or float16.
      scale: the shape of x's normalised axes, in increasing order of axis; any of those dtypes.
      eps: added to the mean square; finite, at least 0.
      axis: the normalised axis, or several.
      scale_offset: added to scale; 1 for checkpoints that store scale − 1.
      dtype: of the result; x's where None.
      implementation: None, "native", "pallas" or "xla", or several to try in order; see
        `normfuse info` for what serves here.

    Returns:
      An array of x's shape and sharding.

    Raises:
      TypeError: for integer or complex operands, or an eps that is not a number.
      ValueError: for a scale that does not fit, an axis out of range, or an eps that is not finite
        or negative.
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
    x, scale, params = _check("rms_norm", x, scale, eps, axis, scale_offset, dtype)
    params |= {"has_residual": False, "with_rstd": True}
    return _call(x, [], scale, implementation, params)[0]


def rms_norm_with_rstd(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """`rms_norm`, and the reciprocal root mean square it multiplied by.

    Takes and raises what `rms_norm` does.

    Returns:
      `(y, rstd)`: rstd has the shape of x without the normalised axes, float32 (or float64).
    """
    x, scale, params = _check("rms_norm_with_rstd", x, scale, eps, axis, scale_offset, dtype)
    params |= {"has_residual": False, "with_rstd": True}
    y, rstd = _call(x, [], scale, implementation, params)
    return y, rstd


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    axis: int | Sequence[int] = -1,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds a residual to x and normalises the sum: the step between two blocks of a transformer.

        new_residual = x + residual        y = rms_norm(new_residual, scale)

    One pass over the activations in each direction: the backward adds the residual's own gradient
    in the kernel. Takes and raises what `rms_norm` does, and ValueError where residual's shape is
    not x's.

    Returns:
      `(y, new_residual)`: y has `dtype` (x's where None); new_residual has the promoted dtype of x
      and residual, and is what is normalised, after rounding to that dtype.

    >>> import jax.numpy as jnp
    >>> from normfuse import add_rms_norm
    >>> y, h = add_rms_norm(jnp.array([1.0, 1.0]), jnp.array([2.0, 3.0]))
    >>> [round(value, 3) for value in y.tolist()], h.tolist()
    ([0.849, 1.131], [3.0, 4.0])
    """
    x, scale, params = _check("add_rms_norm", x, scale, eps, axis, scale_offset, dtype)
    residual = floating("add_rms_norm", "residual", residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm: residual must have x's shape {x.shape}, got {residual.shape}; "
            "broadcast it first with jnp.broadcast_to"
        )
    params |= {"has_residual": True, "with_rstd": True}
    y, new_residual, _ = _call(x, [residual], scale, implementation, params)
    return y, new_residual


def _call(x, residual, scale, implementation, params):
    arrays = [x, *residual, *[scale] * (scale is not None)]
    lead = vary(x, frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays)))
    if residual and not any(jax.typeof(x).sharding.spec):
        lead = match(lead, residual[0], range(x.ndim))
    operands = [
        lead,
        *[match(a, lead, range(x.ndim)) for a in residual],
        *[match(a, lead, params["axes"]) for a in arrays[1 + len(residual) :]],
    ]
    order = kernels(implementation)
    return (
        forward.plain(*operands, **params)
        if order is None
        else forward(*operands, strict=order, **params)
    )


def _check(op, x, scale, eps, axis, scale_offset, dtype):
    """The operands as arrays and the op's parameters, or one clear error."""
    x = floating(op, "x", x)
    axes = dimensions(op, x, axis)
    if scale is not None:
        scale = floating(op, "scale", scale)
        wanted = tuple(x.shape[a] for a in axes)
        if scale.shape != wanted:
            raise ValueError(
                f"{op}: scale must have the shape of x's normalised axes, {wanted} for x of shape "
                f"{x.shape} and axis={axis}; got {scale.shape}"
            )
    return (
        x,
        scale,
        {
            "axes": axes,
            "eps": finite(op, "eps", eps, least=0),
            "scale_offset": finite(op, "scale_offset", scale_offset),
            "out_dtype": floating_dtype(op, dtype, x.dtype),
            "has_scale": scale is not None,
        },
    )
