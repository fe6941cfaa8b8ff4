"""Parts that the modules of all three frameworks share."""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax

from ..native.implementation import Implementation, choose, report, requested
from .core.activations import Activation, resolve
from .core.arguments import Quantization, check_quantization
from .dense.epilogue import finish


def check_eps(layer: str, argument: str, eps: Any) -> None:
    """Refuses all but numbers, and numbers that make every output NaN; checks arrays when used.

    Raises:
      TypeError: if `eps` is neither a number nor an array.
      ValueError: if it is a number, and negative or not finite.
    """
    known = isinstance(eps, numbers.Real) and not isinstance(eps, bool)
    if not known and not hasattr(eps, "dtype"):
        raise TypeError(f"{layer}: {argument} must be a number, got {eps!r}")
    value: Any = eps if known else 0  # an integer may be larger than any float
    if not 0 <= value < math.inf:
        raise ValueError(f"{layer}: {argument} must be finite and at least 0, got {eps}")


def check_options(
    implementation: Implementation,
    activation: Activation = None,
    quantization: Quantization = None,
    layer: str = "swap",
) -> Implementation:
    """Returns `implementation`, hashable as a static attribute must be.

    Raises:
      ValueError: for a name or a quantization that is not known.
      TypeError: for an activation with parameters of its own.
    """
    requested(implementation)
    check_quantization(layer, quantization)
    function: Any = resolve(activation)
    if isinstance(function, functools.partial):
        function = function.func, function.args, function.keywords
    if any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(function)):
        raise TypeError(
            f"activation must hold no arrays, got {type(activation).__name__}; call it on the "
            "layer's output instead"
        )
    return implementation if isinstance(implementation, str | None) else tuple(implementation)


def set_options(
    layer: Any,
    name: str,
    activation: Activation,
    implementation: Implementation,
    quantization: Quantization,
) -> None:
    """Checks and sets the options that our layers have in addition to their framework's."""
    layer.implementation = check_options(implementation, activation, quantization, name)
    layer.activation, layer.quantization = activation, quantization


def layers_of(mlp: Any) -> dict[str, Any]:
    """Returns the layers of a gated MLP by name; the transformer's may have no gate."""
    layers = {"gate": mlp.gate, "up": mlp.up, "down": mlp.down}
    return {name: layer for name, layer in layers.items() if layer is not None}


def replaced(layer: Any, expected: type) -> str:
    """Returns how a part of a fused module differs from what the module made, or ""."""
    if type(layer) is not expected:
        return f"a {type(layer).__name__} in place of its {expected.__name__}"
    if getattr(layer, "activation", None) is not None:
        return f"an activation of its {expected.__name__}'s own"
    return ""


def _refuse_quantization(name: str, reason: str, layer: Any, part: Any = None) -> None:
    """Raises ValueError if a layer asks for FP8 and its substitute does not multiply in it.

    `part` is the part of the layer that is called instead.
    """
    wanted = getattr(layer, "quantization", None)
    if wanted is not None and getattr(part, "quantization", None) != wanted:
        raise ValueError(
            f"{name}: quantization={wanted!r} does not go with {reason}; leave one out"
        )


def by_framework(
    name: str, reason: str, layer: Any, call: Callable[[], Any], part: Any = None
) -> Any:
    """Calls the framework's own layer, for options that our ops lack.

    `part` is the linear layer in `layer` that is called, if there is one.

    Raises:
      NotImplementedError: if `layer.implementation` allows native kernels only.
      ValueError: if `layer.quantization` is set, which the framework lacks.
    """
    _refuse_quantization(name, reason, layer, part)

    def native(strict):
        report(name, reason, strict=strict)
        return call()

    serve = {"native": native, "xla": lambda strict: call()}
    return choose(f"{name} with {reason}", layer.implementation, serve)


def dense_by_framework(
    name: str, reason: str, layer: Any, call: Callable[[], jax.Array]
) -> jax.Array:
    """Calls the framework's own product, then the layer's activation.

    Raises:
      NotImplementedError: unless `layer.implementation` allows plain HLO.
      ValueError: if `layer.quantization` is set, which the framework lacks.
    """
    _refuse_quantization(name, reason, layer)
    serve = {"xla": lambda strict: call()}
    y = choose(f"{name} with {reason}", layer.implementation, serve)
    return finish(y, None, layer.activation, y.dtype)
