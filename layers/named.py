"""haliax's modules, whose arrays have named axes, on normfuse's operations; for `eqx.swap`."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import modules
from .core.arguments import Quantization, check_quantization, unserved
from .recognize import Different


def haliax() -> Any:
    """Returns the module haliax, if the program has imported it."""
    return sys.modules.get("haliax")


def is_named(value: Any) -> bool:
    """Whether a value is an array with named axes."""
    return haliax() is not None and isinstance(value, haliax().NamedArray)


def is_linear(cls: type) -> bool:
    """Whether a class is haliax's Linear."""
    return haliax() is not None and cls is haliax().nn.Linear


def array_of(value: Any) -> Any:
    """Returns the array in a named array; any other value as it is."""
    return value.array if is_named(value) else value


def axis_of(layer: Any) -> Any:
    """Returns the axis that a haliax norm is over: its weight's last, or its only static one."""
    if haliax() is None:
        return None
    values = vars(layer).values()
    axes = [value.axes[-1] for value in values if is_named(value) and value.axes]
    axes = axes or [value for value in values if isinstance(value, haliax().Axis)]
    return axes[0] if len(axes) == 1 else None


def unwrapped(layer: Any, x: Any) -> tuple[Any, int, Callable[[Any], Any]]:
    """Returns the array in x, its dimension that a norm is over, and what makes y of an array."""
    if not is_named(x):
        return x, -1, lambda y: y
    axis = axis_of(layer)
    if axis is None or axis not in x.axes:
        return x, -1, lambda y: y
    wrap = lambda y: haliax().NamedArray(y, x.axes)
    return x.array, x.axes.index(axis) - len(x.axes), wrap


def call_of_norm(axis: Any, call: Callable[[Any], Any], x: jax.Array) -> jax.Array:
    """Calls a haliax norm with rows of its axis.

    Raises:
      Different: if the result is not named as x is, also where the axis is not x's last.
    """
    axes = [haliax().Axis(f"_rows{i}", size) for i, size in enumerate(x.shape[:-1])] + [axis]
    for order in (axes[::-1], axes):
        named = haliax().NamedArray(jnp.transpose(x, [axes.index(a) for a in order]), tuple(order))
        y = call(named)
        if not is_named(y):
            raise Different(f"it returns a {type(y).__name__}")
        if y.axes != named.axes:
            raise Different(f"it turns axes {named.axes} into {y.axes}")
    return y.array


@dataclasses.dataclass(frozen=True)
class Linear:
    """What computes a `haliax.nn.Linear`: `normfuse.dense`, where the axes fit as they are stored.

    The input's last axes must be `In`, in the weight's order; else haliax's own code serves.
    """

    quantization: Quantization = None

    served = "normfuse dense"
    implementation = None

    def __call__(self, layer: Any, inputs: Any, *, key: Any = None) -> Any:
        """Multiplies the named inputs by the weight; `key` is ignored."""
        own = lambda: haliax().nn.Linear.__call__(layer, inputs, key=key)
        found = self._product(layer, inputs)
        if isinstance(found, str):
            return modules.by_framework("haliax.nn.Linear", found, self, own)
        product, axes = found
        x, weight, bias = inputs.array, layer.weight.array, layer.bias
        dtype = jnp.result_type(x, weight)
        check_quantization("haliax.nn.Linear", self.quantization, dtype)
        options = {"activation": None, "implementation": None, "quantization": self.quantization}
        bias = None if bias is None else bias.array
        y = product.apply(x, weight, bias, dtype=dtype, **options)
        return haliax().auto_sharded(haliax().NamedArray(y, axes))

    def _product(self, layer: Any, inputs: Any) -> tuple[modules.MatrixProduct, Any] | str:
        """Returns the matrix product that a call is and the result's axes, or why it is none."""
        tuple_of = lambda axes: tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        summed, out = tuple_of(layer.In), tuple_of(layer.Out)
        if not is_named(inputs) or not is_named(layer.weight):
            return f"inputs of type {type(inputs).__name__}"
        if type(layer.dot_general).__name__ != "DefaultDotGeneralOp":
            return "a dot_general of its own"
        orders = {(*summed, *out): 0, (*out, *summed): 1}
        contract = orders.get(tuple(layer.weight.axes))
        rows = inputs.axes[: len(inputs.axes) - len(summed)]
        if contract is None or not summed or inputs.axes[len(rows) :] != summed:
            return f"axes {inputs.axes} and {layer.weight.axes}"
        if {axis.name for axis in rows} & {axis.name for axis in out}:
            return f"inputs with the axes {out}"
        x, weight, bias = inputs.array, layer.weight.array, layer.bias
        if reason := unserved({}, x.dtype, weight.dtype):
            return reason
        dtype = jnp.result_type(x, weight)
        if bias is not None and (bias.axes != out or jnp.result_type(dtype, bias.dtype) != dtype):
            return f"a bias in {bias.dtype} of axes {bias.axes}"
        reason = modules.merged(max(len(summed), len(out)), x, weight)
        return reason or (modules.MatrixProduct(len(summed), contract), (*rows, *out))
