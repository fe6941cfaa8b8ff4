"""The activation functions that dense layers know by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from normfuse.layers.op import match
from normfuse.layers.rounding import rounded, wide
from normfuse.native.scalar import SCALARS

Activation = str | Callable[[jax.Array], jax.Array] | None


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    name: scalar.function for name, scalar in sorted(SCALARS.items())
}
"""By name. "gelu" is the exact one, of the error function; "gelu_tanh" its usual approximation."""


def resolve(activation: Activation) -> Callable[[jax.Array], jax.Array] | None:
    """The function that `activation` names or is; None for none.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything but None, a name or a callable.
    """
    if activation is None or callable(activation):
        return activation
    if not isinstance(activation, str):
        raise TypeError(
            f"activation must be None, a name or a function, got {type(activation).__name__}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, or a function, got "
            f"{activation!r}"
        )
    return ACTIVATIONS[activation]


def finish(
    y: jax.Array, bias: jax.Array | None, activation: Activation, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """`activation(y + bias)`: one pass over y in float32 (or wider), rounded once, to `dtype`.

    The activation's derivative is recomputed from y: nothing of y's size is kept in float32.
    """
    function = resolve(activation)
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
