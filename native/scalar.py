"""Scalar functions that kernels apply to every element: the same in plain JAX and in CUDA C++."""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A function of one number, and its derivative, as source text for kernels.

    Attributes:
      name: the C++ function's; its derivative's is `name_derivative`. Not that of a function of
        CUDA's own (`tanh`), which the text could then not call.
      source: the definition, `template <typename T> __device__ T name(T x, T parameter, ...)`, for
        T float and double. It may call CUDA's math functions and those of `kernels/scalar.cuh`.
      derivative: the same of `name_derivative`; "" for a function without one, which cannot be
        part of a backward kernel.
      function: the function in plain JAX: what it means, and what is differentiated in forward
        mode and to higher orders.
      parameters: (name, value) of what follows x; constants of the compiled kernel.
    """

    name: str
    source: str
    derivative: str
    function: Callable[[jax.Array], jax.Array] = dataclasses.field(repr=False)
    parameters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"Scalar: name must be a C++ identifier, got {self.name!r}")

    def __call__(self, x: jax.Array) -> jax.Array:
        """The function in plain JAX."""
        return self.function(x)

    def code(self, alias: str = "activation") -> str:
        """C++ text that defines `alias(x)` and, with a derivative, `alias_derivative(x)`."""
        values = "".join(f", T({value!r})" for _, value in self.parameters)
        parts = [self.source, _forward(alias, self.name, values)]
        if self.derivative:
            name = f"{self.name}_derivative"
            parts += [self.derivative, _forward(f"{alias}_derivative", name, values)]
        return "\n".join(part.strip() for part in parts) + "\n"


def _forward(alias: str, name: str, values: str) -> str:
    return (
        f"template <typename T>\n__device__ inline T {alias}(T x) {{ return {name}(x{values}); }}"
    )


def _scalar(name: str, function, value: str, derivative: str, **parameters: float) -> Scalar:
    """A Scalar of two function bodies."""
    takes = "".join(f", T {parameter}" for parameter in parameters)
    text = lambda name, body: (
        f"template <typename T>\n__device__ inline T {name}(T x{takes}) {{\n  {body}\n}}"
    )
    return Scalar(
        name,
        text(name, value),
        text(f"{name}_derivative", derivative),
        function,
        tuple(parameters.items()),
    )


def squared_relu(x: jax.Array) -> jax.Array:
    """`max(x, 0)²` (So et al., arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def quick_gelu(x: jax.Array) -> jax.Array:
    """`x · sigmoid(1.702 x)`, the approximation of GELU that CLIP was trained with."""
    return x * jax.nn.sigmoid(1.702 * x)


def gelu(x: jax.Array) -> jax.Array:
    """`x · Φ(x)` with the normal distribution's Φ (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """The usual approximation of `gelu`, `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`."""
    return jax.nn.gelu(x, approximate=True)


# x · sigmoid(k x) has the derivative s + k x s (1 − s), and 1 − s is sigmoid(−k x).
_SWISH = "const T s = sigmoid_of(k * x); return s + k * x * s * sigmoid_of(-k * x);"
# gelu_tanh(x) = x · sigmoid(2u), u = √(2/π) (x + 0.044715 x³): fewer operations than tanh takes.
_TWO_U = "const T u = T(1.5957691216057308) * (x + T(0.044715) * x * x * x);"

SCALARS: dict[str, Scalar] = {
    scalar.name: scalar
    for scalar in (
        _scalar(
            "elu",
            jax.nn.elu,
            "return x > T(0) ? x : T(expm1(x));",
            "return x > T(0) ? T(1) : T(exp(x));",
        ),
        _scalar(
            "gelu",
            gelu,
            "return T(0.5) * x * T(erfc(T(-0.70710678118654752) * x));",
            "const T density = T(0.39894228040143268) * T(exp(T(-0.5) * x * x));\n"
            "  return T(0.5) * T(erfc(T(-0.70710678118654752) * x)) + x * density;",
        ),
        _scalar(
            "gelu_tanh",
            gelu_tanh,
            f"{_TWO_U}\n  return x * sigmoid_of(u);",
            f"{_TWO_U}\n  const T s = sigmoid_of(u);\n"
            "  const T slope = T(1.5957691216057308) * (T(1) + T(0.134145) * x * x);\n"
            "  return s + x * slope * s * sigmoid_of(-u);",
        ),
        _scalar(
            "leaky_relu",
            jax.nn.leaky_relu,
            "return x >= T(0) ? x : slope * x;",
            "return x >= T(0) ? T(1) : slope;",
            slope=0.01,
        ),
        _scalar(
            "mish",
            jax.nn.mish,
            "return x * T(tanh(softplus_of(x)));",
            "const T t = T(tanh(softplus_of(x)));\n"
            "  return t + x * (T(1) - t * t) * sigmoid_of(x);",
        ),
        _scalar("quick_gelu", quick_gelu, "return x * sigmoid_of(k * x);", _SWISH, k=1.702),
        _scalar(
            "relu", jax.nn.relu, "return x > T(0) ? x : T(0);", "return x > T(0) ? T(1) : T(0);"
        ),
        _scalar(
            "sigmoid",
            jax.nn.sigmoid,
            "return sigmoid_of(x);",
            "return sigmoid_of(x) * sigmoid_of(-x);",
        ),
        _scalar("silu", jax.nn.silu, "return x * sigmoid_of(k * x);", _SWISH, k=1.0),
        _scalar("softplus", jax.nn.softplus, "return softplus_of(x);", "return sigmoid_of(x);"),
        _scalar(
            "squared_relu",
            squared_relu,
            "return x > T(0) ? x * x : T(0);",
            "return x > T(0) ? T(2) * x : T(0);",
        ),
        _scalar(
            "hyperbolic_tangent",
            jnp.tanh,
            "return T(tanh(x));",
            "const T t = T(tanh(x)); return T(1) - t * t;",
        ),
    )
}
"""The activations that kernels know, by name. "gelu" is the exact one."""
SCALARS["swish"] = SCALARS["silu"]
SCALARS["tanh"] = SCALARS.pop("hyperbolic_tangent")
