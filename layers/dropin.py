"""What the drop-in modules share: checks of options, and the way back to the framework's code."""

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ..native import fallback
from .activations import Activation, finish, resolve
from .arguments import DTYPES, dimensions
from .implementation import Implementation, choose, requested


def check_eps(layer: str, argument: str, eps: Any) -> None:
    """Refuses what makes every output NaN.

    Raises:
      ValueError: if `eps` is a number and not finite or negative.
    """
    if isinstance(eps, numbers.Real) and not 0 <= float(eps) < math.inf:
        raise ValueError(f"{layer}: {argument} must be finite and at least 0, got {eps}")


def check_options(implementation: Implementation, activation: Activation = None) -> Implementation:
    """`implementation`, hashable as a static attribute must be.

    Raises:
      ValueError: for a name that is not known.
      TypeError: for an activation with parameters of its own.
    """
    requested(implementation)
    function: Any = resolve(activation)
    if isinstance(function, functools.partial):
        function = function.func, function.args, function.keywords
    if any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(function)):
        raise TypeError(
            f"activation must hold no arrays, got {type(activation).__name__}; call it on the "
            "layer's output instead"
        )
    return implementation if isinstance(implementation, str | None) else tuple(implementation)


def unserved_dtype(*dtypes: jax.typing.DTypeLike | None) -> str:
    """Why the ops cannot take these dtypes, or ""."""
    others = {jnp.dtype(d).name for d in dtypes if d is not None} - set(DTYPES)
    return f"the dtype {', '.join(sorted(others))}" if others else ""


def another(layer: Any, expected: type) -> str:
    """How a part of a fused module is not as the module made it, or ""."""
    if type(layer) is not expected:
        return f"a {type(layer).__name__} in the place of its {expected.__name__}"
    if getattr(layer, "activation", None) is not None:
        return f"an activation of its {expected.__name__}'s own"
    return ""


def in_a_row(layer: Any, x: jax.Array, reason: str) -> jax.Array:
    """A NormDense as its norm, its linear layer and its activation one after the other.

    Raises: what `by_framework` does.
    """

    def call():
        y = layer.linear(layer.norm(x))
        return finish(y, None, layer.activation, y.dtype)

    return by_framework("NormDense", reason, layer.implementation, call)


def by_framework(
    layer: str, reason: str, implementation: Implementation, call: Callable[[], Any]
) -> Any:
    """The framework's own layer, where an option asks for what our ops do not do.

    Raises:
      NotImplementedError: if `implementation` allows native kernels only.
    """

    def plain(strict):
        fallback.report(layer, reason, strict=strict)
        return call()

    return choose(
        f"{layer} with {reason}", implementation, {"native": plain, "xla": lambda _: call()}
    )


def dimensions_of(layer: str, x: jax.Array, axes: int | Iterable[int]) -> tuple[int, ...]:
    """Flax's axes of x: increasing, each once; ValueError where x has no such axis."""
    given = (axes,) if isinstance(axes, int) else axes
    return tuple(sorted({dimensions(layer, x, axis)[0] for axis in given}))
