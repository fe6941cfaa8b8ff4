"""Activations: functions of one number and their derivatives, in JAX and as text for kernels."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import Array

from ...native.compiler import Source, kernel_source


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A function of one number, and its derivative, in plain JAX and as source text for kernels."""

    # The C++ function's name, other than those of CUDA's functions (`tanh`), which `source` could
    # not call then.
    name: str
    # The definition, `template <typename T> __device__ T name(T x, T parameter, ...)`, for T float
    # and double. It may call CUDA's math functions and those of `kernels/scalar.cuh`.
    source: str
    derivative: str  # likewise, with _derivative after its name
    # The definition in JAX, which forward mode and higher orders differentiate.
    function: Callable[..., Array] = dataclasses.field(repr=False)
    parameters: tuple[tuple[str, float], ...] = ()  # (name, value) of the constants that follow x

    def __call__(self, x: Array) -> Array:
        return self.function(x)

    def code(self, alias: str = "activation") -> str:
        """Returns C++ text of `alias(x)` and of `alias_derivative(x)`."""
        values = ", ".join(["x", *(f"T({value!r})" for _, value in self.parameters)])
        parts = []
        for end, text in {"": self.source, "_derivative": self.derivative}.items():
            call = f"return {self.name}{end}({values});"
            head = f"template <typename T>\n__device__ inline T {alias}{end}(T x)"
            parts += [text.strip(), f"{head} {{ {call} }}"]
        return "\n".join(parts) + "\n"


def _text(name: str, body: str, takes: Iterable[str]) -> str:
    """Returns C++ of a function, given its body or the expression that it returns."""
    body = body if "return" in body else f"return {body};"
    parameters = ", ".join(f"T {parameter}" for parameter in takes)
    return f"template <typename T>\n__device__ inline T {name}({parameters}) {{\n  {body}\n}}"


def _scalar(name: str, function, value: str, derivative: str, **parameters: float) -> Scalar:
    """Returns a Scalar from two function bodies, or the expressions that they return."""
    takes = ["x", *parameters]
    sources = _text(name, value, takes), _text(f"{name}_derivative", derivative, takes)
    return Scalar(name, *sources, function, tuple(parameters.items()))


def squared_relu(x: Array) -> Array:
    """`max(x, 0)²` (So et al., arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def quick_gelu(x: Array) -> Array:
    """`x · sigmoid(1.702 x)`, the approximation of GELU that CLIP was trained with."""
    return x * jax.nn.sigmoid(1.702 * x)


def gelu(x: Array) -> Array:
    """`x · Φ(x)` with the normal distribution's Φ (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: Array) -> Array:
    """The usual approximation of `gelu`, `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`."""
    return jax.nn.gelu(x, approximate=True)


_SWISH = "sigmoid_of(k * x) + k * x * sigmoid_slope(k * x)"  # derivative of x · sigmoid(k x)
# gelu_tanh(x) = x · sigmoid(2u), u = √(2/π) (x + 0.044715 x³): fewer operations than tanh takes.
_TWO_U = "const T u = T(1.5957691216057308) * (x + T(0.044715) * x * x * x);"

SCALARS: dict[str, Scalar] = {
    scalar.name: scalar
    for scalar in (
        _scalar("elu", jax.nn.elu, "x > T(0) ? x : T(expm1(x))", "x > T(0) ? T(1) : T(exp(x))"),
        _scalar("gelu", gelu, "x * normal_below(x)", "normal_below(x) + x * normal_density(x)"),
        _scalar(
            "gelu_tanh",
            gelu_tanh,
            f"{_TWO_U}\n  return x * sigmoid_of(u);",
            f"{_TWO_U}\n  const T du = T(1.5957691216057308) * (T(1) + T(0.134145) * x * x);\n"
            "  return sigmoid_of(u) + x * du * sigmoid_slope(u);",
        ),
        _scalar(
            "leaky_relu",
            jax.nn.leaky_relu,
            "x >= T(0) ? x : slope * x",
            "x >= T(0) ? T(1) : slope",
            slope=0.01,
        ),
        _scalar(
            "mish",
            jax.nn.mish,
            "x * T(tanh(softplus_of(x)))",
            "const T t = T(tanh(softplus_of(x)));\n"
            "  return t + x * (T(1) - t * t) * sigmoid_of(x);",
        ),
        _scalar("quick_gelu", quick_gelu, "x * sigmoid_of(k * x)", _SWISH, k=1.702),
        _scalar("relu", jax.nn.relu, "x > T(0) ? x : T(0)", "x > T(0) ? T(1) : T(0)"),
        _scalar("sigmoid", jax.nn.sigmoid, "sigmoid_of(x)", "sigmoid_slope(x)"),
        _scalar("silu", jax.nn.silu, "x * sigmoid_of(k * x)", _SWISH, k=1.0),
        _scalar("softplus", jax.nn.softplus, "softplus_of(x)", "sigmoid_of(x)"),
        _scalar(
            "squared_relu", squared_relu, "x > T(0) ? x * x : T(0)", "x > T(0) ? T(2) * x : T(0)"
        ),
        _scalar(
            "hyperbolic_tangent",
            jnp.tanh,
            "T(tanh(x))",
            "const T t = T(tanh(x)); return T(1) - t * t;",
        ),
    )
}
"""The activations that kernels know, by name. "gelu" is the exact one."""
SCALARS["swish"] = SCALARS["silu"]
SCALARS["tanh"] = SCALARS.pop("hyperbolic_tangent")


Activation = str | Callable[..., Array] | None

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    name: scalar.function for name, scalar in sorted(SCALARS.items())
}
"""By name. "gelu" is the exact one, of the error function; "gelu_tanh" its usual approximation."""


def resolve(activation: Activation, op: str = "") -> Callable[[Array], Array] | None:
    """Returns the function that `activation` names or is; None for none. Errors name `op`.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything but None, a name or a callable.
    """
    prefix = op and f"{op}: "
    if activation is not None and not callable(activation) and not isinstance(activation, str):
        raise TypeError(
            f"{prefix}activation must be None, a name or a function, got "
            f"{type(activation).__name__}"
        )
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(
            f"{prefix}activation must be one of {names}, or a function, got {activation!r}"
        )
    return ACTIVATIONS[activation] if isinstance(activation, str) else activation


def scalar_of(activation: Activation) -> Scalar | None:
    """Returns the `Scalar` of `activation`; None for a function of the user's."""
    if isinstance(activation, str):
        return SCALARS[activation]
    return activation if isinstance(activation, Scalar) else None


@functools.cache
def with_activation(file: str, function: Scalar) -> Source:
    """Returns a kernel's source behind the text of an activation, which it calls `activation`."""
    source = kernel_source(file)
    text = f'#include "scalar.cuh"\n{function.code()}#line 1 "{source.name}"\n{source.text}'
    return dataclasses.replace(source, text=text)
