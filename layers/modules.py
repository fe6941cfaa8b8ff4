"""Parts that the modules of all three frameworks share."""

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from ..native.implementation import Implementation, Order, report
from .core.activations import Activation, resolve
from .core.arguments import Quantization, check_quantization, choose, finite, options_of, requested
from .core.op import placed
from .dense.epilogue import finish
from .dense.gated import apply_product
from .dense.gated import mlp as apply_mlp


def check_eps(layer: str, argument: str, eps: Any) -> None:
    """Refuses all but numbers that a norm can add, as `finite` does; checks arrays when used."""
    if isinstance(eps, numbers.Real) or not hasattr(eps, "dtype"):
        finite(layer, argument, eps, least=0)


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
    requested(implementation, argument=f"{layer}: implementation")
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


def gated_mlp(
    mlp: Any,
    x: Array,
    linear: type,
    *,
    hidden_sharding: jax.P | None = None,
) -> Array:
    """Returns the MLP of three layers `gate` (or None), `up` and `down`.

    In FP8 it is one function, and else its hidden array is not kept, if each of the layers that it
    reads is a `linear` as the MLP has made it; another layer is called as it is. A `linear` has
    `operands` (its kernel and bias), `unserved` (what of it and an input only the framework serves,
    or "") and `compute_dtype` (of a product of arrays).

    Args:
      mlp: the module, with an activation, an implementation and a quantization.
      x: `(*rows, features)`.
      linear: the class of its layers.
      hidden_sharding: as for `normfuse.gated_product`.
    """
    layers = {"gate": mlp.gate, "up": mlp.up, "down": mlp.down}
    layers = {name: layer for name, layer in layers.items() if layer is not None}
    options = {"hidden_sharding": hidden_sharding, "contract": getattr(linear, "contract", 0)}
    if mlp.quantization and not any(_replaced(mlp, layer, linear, x) for layer in layers.values()):
        operands = {name: layer.operands() for name, layer in layers.items()}
        kernels = {name: kernel for name, (kernel, _) in operands.items()}
        biases = {name: bias for name, (_, bias) in operands.items() if bias is not None}
        dtype = mlp.up.compute_dtype(x, *kernels.values(), *biases.values())
        options |= options_of("GatedMLP", mlp, dtype)
        return apply_mlp(x, kernels, biases, **options)
    down = layers.pop("down")
    gate, *up = [layer(x) for layer in layers.values()]

    def call() -> Array:
        hidden = finish(gate, None, mlp.activation, gate.dtype, *up)
        return down(placed(hidden, hidden_sharding))

    if reason := _replaced(mlp, down, linear, gate):
        return by_framework("GatedMLP", reason, mlp, call, down)
    kernel, bias = down.operands()
    options |= options_of("GatedMLP", mlp, down.compute_dtype(gate, kernel, bias))
    return apply_product(gate, up[0] if up else None, kernel, bias, **options)


def _replaced(mlp: Any, layer: Any, linear: type, x: Array) -> str:
    """Returns how a layer of a gated MLP differs from what the MLP made, or ""."""
    if type(layer) is not linear:
        return f"a {type(layer).__name__} in place of its {linear.__name__}"
    for option, ours in ("activation", None), ("quantization", mlp.quantization):
        if getattr(layer, option) != ours:
            return f"another {option} of its {linear.__name__}"
    if getattr(layer, "dtype", None) != getattr(mlp.up, "dtype", None):
        return f"another dtype of its {linear.__name__}"
    return layer.unserved(x)


def by_framework(
    name: str, reason: str, layer: Any, call: Callable[[], Any], part: Any = None
) -> Any:
    """Calls the framework's own layer, for options that our ops lack.

    `part` is the linear layer in `layer` that is called, if there is one.

    Raises:
      NotImplementedError: if `layer.implementation` allows native kernels only.
      ValueError: if `layer.quantization` is set, which the framework lacks.
    """
    wanted = getattr(layer, "quantization", None)
    if wanted is not None and getattr(part, "quantization", None) != wanted:
        raise ValueError(
            f"{name}: quantization={wanted!r} does not go with {reason}; leave one out"
        )

    def native(order: Order) -> Any:
        report(name, reason, strict=order.strict)
        return call()

    serve = {"native": native, "xla": lambda order: call()}
    return choose(f"{name} with {reason}", layer.implementation, serve)


def linear_by_framework(name: str, reason: str, layer: Any, call: Callable[[], Array]) -> Array:
    """Calls the framework's own product as `by_framework` does, then the layer's activation."""
    y = by_framework(name, reason, layer, call)
    return finish(y, None, layer.activation, y.dtype)
