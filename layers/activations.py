"""The activation functions that dense layers know by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..native.scalar import SCALARS, Scalar
from . import epilogue_op
from .implementation import order_of
from .op import match, vary
from .rounding import rounded, wide

Activation = str | Callable[[jax.Array], jax.Array] | None


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    name: scalar.function for name, scalar in sorted(SCALARS.items())
}
"""By name. "gelu" is the exact one, of the error function; "gelu_tanh" its usual approximation."""


def resolve(activation: Activation, op: str = "") -> Callable[[jax.Array], jax.Array] | None:
    """The function that `activation` names or is; None for none.

    Args:
      activation: as the user gave it.
      op: what it was given to, for errors.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything but None, a name or a callable.
    """
    if activation is None or callable(activation):
        return activation
    prefix = op and f"{op}: "
    if not isinstance(activation, str):
        raise TypeError(
            f"{prefix}activation must be None, a name or a function, got "
            f"{type(activation).__name__}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{prefix}activation must be one of {', '.join(map(repr, ACTIVATIONS))}, or a "
            f"function, got {activation!r}"
        )
    return ACTIVATIONS[activation]


def scalar_of(activation: Activation) -> Scalar | None:
    """What kernels know of `activation`; None for a function that is plain JAX alone.

    A function that has its C++ with it says so by an attribute `scalar`.
    """
    if isinstance(activation, str):
        return SCALARS[activation]
    return activation if isinstance(activation, Scalar) else getattr(activation, "scalar", None)


def finish_natively(
    op: str,
    z: jax.Array,
    up: jax.Array | None,
    bias: jax.Array | None,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    *,
    strict: bool,
) -> jax.Array:
    """`activation(z + bias) · up` on kernels, in one pass in each direction.

    Raises:
      NotImplementedError: if there is nothing to do or no kernel knows the activation.
    """
    function = scalar_of(activation)
    if function is None:
        what = "no activation" if activation is None else "an activation that is plain JAX"
        raise NotImplementedError(f"{op}: implementation='native' has no kernel for {what}")
    params = {"function": function, "has_up": up is not None, "has_bias": bias is not None}
    operands = [z, *[up] * (up is not None)]
    if bias is not None:
        operands[0] = z = vary(z, jax.typeof(bias).manual_axis_type.varying)
        dims = range(z.ndim - bias.ndim, z.ndim)
        operands.append(rounded(match(bias, z, dims), z.dtype))
        params["axes"] = tuple(dims)
    else:
        params["axes"] = ()
    out_dtype = jnp.dtype(dtype).name
    return epilogue_op.forward(*operands, out_dtype=out_dtype, strict=order_of(strict), **params)[0]


def finish_tangent(
    function: Scalar,
    z: jax.Array,
    dz: jax.Array,
    *dbias: jax.Array,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The tangent of `function(z + bias)` where z has the bias already.

    Its transpose is one pass for both gradients, on kernels where they serve. Where the bias moves
    `dbias` is its tangent, of z's last dimensions.
    """
    params = {"function": function, "has_up": False, "has_bias": bool(dbias), "axes": ()}
    moving = [dz]
    for d in dbias:
        params["axes"] = tuple(range(z.ndim - d.ndim, z.ndim))
        moving.append(match(d.astype(wide(z.dtype)), z, params["axes"]))
    flags = {"moves": (True, False, bool(dbias)), "strict": order_of(False)}
    shift = [jnp.zeros_like(d) for d in moving[1:]]
    out_dtype = jnp.dtype(dtype).name
    return epilogue_op.tangent(z, *shift, *moving, out_dtype=out_dtype, **flags, **params)[0]


def finish(
    y: jax.Array,
    bias: jax.Array | None,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    up: jax.Array | None = None,
) -> jax.Array:
    """`activation(y + bias) · up`: one pass in float32 (or wider), rounded once, to `dtype`.

    The activation's derivative is recomputed from y: nothing of y's size is kept in float32.
    """
    function = resolve(activation)
    if up is not None:
        gate = lambda y, up: finish(y, bias, activation, wide(dtype)) * up.astype(wide(dtype))
        gated = lambda y, up: gate(y, up).astype(dtype)
        return jax.checkpoint(gated, prevent_cse=False)(y, up)
    if bias is None and function is None:
        return y.astype(dtype)
    compute = dtype if jnp.issubdtype(dtype, jnp.complexfloating) else wide(dtype)

    def epilogue(y, *bias):
        z = y.astype(compute)
        for b in bias:
            z = z + b.astype(compute)
        if function is None:
            return z.astype(dtype)
        result = function(z)
        if jnp.shape(result) != z.shape:
            raise ValueError(
                f"activation must keep the shape of its input, {z.shape}; {activation!r} returned "
                f"{jnp.shape(result)}"
            )
        return result.astype(dtype)

    if function is not None:
        epilogue = jax.checkpoint(epilogue, prevent_cse=False)
    if bias is None:
        return epilogue(y)
    rows = y.ndim - bias.ndim
    bias = rounded(match(bias, y, range(rows, y.ndim)), y.dtype)
    return epilogue(y, jnp.expand_dims(bias, range(rows)))
