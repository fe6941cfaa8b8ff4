"""Parts that the modules of all three frameworks share."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import jax

from ..native.implementation import Implementation, choose, report, requested
from .core.arguments import Quantization, check_quantization, options_of
from .dense.dense import apply as apply_dense
from .dense.epilogue import Activation, finish, resolve


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
    *,
    gated: bool = False,
) -> Implementation:
    """Returns `implementation`, hashable as a static attribute must be.

    With `gated` the activation may be a function of gate and up.

    Raises:
      ValueError: for a name or a quantization that is not known.
      TypeError: for an activation with parameters of its own.
    """
    requested(implementation)
    check_quantization(layer, quantization)
    function: Any = resolve(activation, gated=gated)
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
    *,
    gated: bool = False,
) -> None:
    """Checks and sets the options that our layers have in addition to their framework's."""
    layer.implementation = check_options(
        implementation, activation, quantization, name, gated=gated
    )
    layer.activation, layer.quantization = activation, quantization


@dataclasses.dataclass(frozen=True)
class MatrixProduct:
    """A product of x and a kernel that is one matrix product after reshapes that cost nothing."""

    count: int  # x's last axes, which are summed over
    contract: int = 0  # 0: they are the kernel's first axes, 1: its last
    ndims: tuple[int | None, int | None] = (None, None)  # x's and the kernel's; None for any

    def misfit(self, x: jax.Array, kernel: jax.Array) -> str:
        """Returns why x and the kernel are for the framework, or ""."""
        count = self.count
        if reason := merged(count, x, kernel):
            return reason
        first = kernel.shape[:count] if self.contract == 0 else kernel.shape[kernel.ndim - count :]
        fits = x.ndim >= count and x.shape[x.ndim - count :] == first
        fits &= all(n in (None, a.ndim) for n, a in zip(self.ndims, (x, kernel)))
        return "" if fits else f"shapes {x.shape} and {kernel.shape} that do not fit"

    def apply(
        self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None, **options: Any
    ) -> jax.Array:
        """Returns `normfuse.dense` of the product; the bias has the kernel's other axes."""
        count, ndim = self.count, kernel.ndim
        outer = kernel.shape[count:] if self.contract == 0 else kernel.shape[: ndim - count]
        if count > 1:
            x = x.reshape(*x.shape[: x.ndim - count], -1)
        # The kernel is a matrix, unless the result's axes are placed on a mesh one by one.
        placed = options.get("out_sharding") is not None or bool(merged(2, kernel))
        shape = outer if placed and self.contract == 0 else (math.prod(outer),)
        kernel = kernel.reshape(-1, *shape) if self.contract == 0 else kernel.reshape(*shape, -1)
        bias = None if bias is None else bias.reshape(shape)
        y = apply_dense(x, kernel, bias, contract=self.contract, **options)
        return y.reshape(*x.shape[:-1], *outer)


def product_of_einsum(equation: str) -> MatrixProduct | str:
    """Returns the matrix product that an einsum of x and a kernel is, or why it is none."""
    operands, _, result = equation.replace(" ", "").partition("->")
    x, _, kernel = operands.partition(",")
    ndims = None if "." in x else len(x), len(kernel)
    if x.startswith("...") and result.startswith("..."):
        x, result = x[3:], result[3:]
    labels = x, kernel, result
    count = sum(label in x and label not in result for label in kernel)
    if any("." in part or len(set(part)) < len(part) for part in labels) or not count:
        return f"the equation {equation}"
    rows, summed = x[: len(x) - count], x[len(x) - count :]
    if kernel[:count] == summed and result == rows + kernel[count:]:
        return MatrixProduct(count, 0, ndims)
    outer = len(kernel) - count
    if kernel[outer:] == summed and result == rows + kernel[:outer]:
        return MatrixProduct(count, 1, ndims)
    return f"the equation {equation}, which is not one matrix product without a transposition"


def product_over(axes: Iterable[int], ndim: int, batched: bool) -> MatrixProduct | str:
    """Returns the matrix product that sums over `axes` of x, the kernel's first, or why not."""
    axes = tuple(axes)
    given = [axis % ndim for axis in axes if -ndim <= axis < ndim]
    if batched:
        return "batch axes"
    if not given or given != list(range(ndim - len(given), ndim)):
        return f"the axes {axes}"
    return MatrixProduct(len(given))


def merged(count: int, *arrays: jax.Array) -> str:
    """Returns why axes of the arrays are not merged: they are split on an Explicit mesh; or ""."""
    explicit = lambda a: not jax.typeof(a).sharding.mesh.empty and any(jax.typeof(a).sharding.spec)
    return "merged axes on an Explicit mesh" if count > 1 and any(map(explicit, arrays)) else ""


def multiply(
    name: str,
    layer: Any,
    found: MatrixProduct | str,
    operands: tuple[jax.Array, jax.Array, jax.Array | None],
    dtype: Callable[..., Any],
    call: Callable[[], jax.Array],
    unserved: str = "",
    **placed: Any,
) -> jax.Array:
    """Computes a layer by `normfuse.dense`, or by its framework where that must serve.

    `found` is the product that the layer is, or why it is none; `operands` are x, the kernel and
    the bias; `dtype` of them is the compute dtype; `unserved` says why the framework must serve.
    """
    if isinstance(found, str):
        return dense_by_framework(name, found, layer, call)
    if reason := unserved or found.misfit(*operands[:2]):
        return dense_by_framework(name, reason, layer, call)
    return found.apply(*operands, **placed, **options_of(name, layer, dtype(*operands)))


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
