"""Gated dense layers: two projections of one input, one gating the other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from ...native.implementation import Implementation, Order
from ..core.activations import Activation, resolve, scalar_of
from ..core.arguments import Quantization, check_quantization, choose, floating, floating_dtype
from ..core.op import match, placed
from .dense import Options, check_shapes
from .epilogue import Epilogue, finish, finish_gated, finish_natively
from .fp8 import multiply
from .fp8_mlp import multiply_mlp, serves
from .matmul import Activated, product


def gated_dense(
    x: Array,
    kernel_gate: Array,
    kernel_up: Array,
    *,
    activation: Activation = "silu",
    dtype: jax.typing.DTypeLike | None = None,
    quantization: Quantization = None,
    implementation: Implementation = None,
    out_sharding: NamedSharding | jax.P | None = None,
) -> Array:
    """A gated linear unit: SwiGLU with "silu", GeGLU with "gelu".

        y = activation(x · kernel_gate) · (x · kernel_up)

    The activation and the product with it are one pass in float32, rounded once; so are both
    gradients. Otherwise as `dense`.

    Args:
      x: `(*rows, in)`.
      kernel_gate, kernel_up: `(in, *out)`, of one shape.
      activation: a name or a function, as for `dense`.
      dtype, quantization, out_sharding: as for `dense`.
      implementation: None, "native" or "xla", for the operations after XLA's products.

    Returns:
      `(*rows, *out)` in `dtype`.

    Raises:
      TypeError: for integer or complex operands, and for float64 in FP8.
      ValueError: for shapes that do not fit, an activation that is unknown or None, or an unknown
        quantization or implementation. JAX raises its own error for a sharding that does not fit.
      NotImplementedError: if the `implementation` asked for cannot serve; an ExceptionGroup of
        them if it names several.

    References:
      Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.

    >>> import jax.numpy as jnp
    >>> from normfuse import gated_dense
    >>> x = jnp.array([[1.0, -2.0]])
    >>> gated_dense(x, jnp.eye(2), 3 * jnp.eye(2), activation="relu")
    Array([[ 3., -0.]], dtype=float32)
    """
    op = "gated_dense"
    x = floating(op, "x", x)
    gate, up = floating(op, "kernel_gate", kernel_gate), floating(op, "kernel_up", kernel_up)
    check_shapes(op, x, gate, None, "kernel_gate")
    if up.shape != gate.shape:
        raise ValueError(
            f"{op}: kernel_up must have kernel_gate's shape {gate.shape}, got {up.shape}"
        )
    check_activated(op, activation)
    dtype = floating_dtype(op, dtype, x.dtype)
    check_quantization(op, quantization, dtype)
    options = {"dtype": dtype, "out_sharding": out_sharding, "quantization": quantization}
    z, up = (multiply(op, x, kernel, **options) for kernel in (gate, up))
    return finish_gated(z, up, op, activation, dtype, implementation)


def gated_product(
    gate: Array,
    up: Array | None,
    kernel: Array,
    bias: Array | None = None,
    *,
    activation: Activation = "silu",
    dtype: jax.typing.DTypeLike | None = None,
    quantization: Quantization = None,
    implementation: Implementation = None,
    hidden_sharding: jax.P | None = None,
    out_sharding: NamedSharding | jax.P | None = None,
) -> Array:
    """The second half of an MLP: `dense` of a gated activation, which is not kept.

        y = (activation(gate) · up) · kernel + bias

    The gated activation, as large as `gate`, is computed again by the pass of the backward that
    computes the gradients of `gate` and `up`. Alone, without the product, it is an op of
    `normfuse.elementwise`; the guide's gallery has it.

    Args:
      gate: `(*rows, in)`, before its activation.
      up: `(*rows, in)`; None for an MLP without a gate.
      kernel: `(in, *out)`.
      bias: `(*out,)`.
      hidden_sharding: on a mesh of Auto axes, the sharding of `gate` and `up`,
        of their gated activation and of their gradients, as for
        `jax.lax.with_sharding_constraint`; None: XLA's choice.
      quantization: as for `dense`; with "fp8" the codes of the gated activation are kept.
      The others are those of `gated_dense`. To keep the gated activation, use `dense` of one.

    Returns:
      `(*rows, *out)` in `dtype`.

    Raises: what `gated_dense` does.

    >>> import jax.numpy as jnp
    >>> from normfuse import gated_product
    >>> gated_product(jnp.ones((2, 3)), 2 * jnp.ones((2, 3)), jnp.ones((3, 1)), activation="relu")
    Array([[6.],
           [6.]], dtype=float32)
    """
    op = "gated_product"
    gate, kernel = floating(op, "gate", gate), floating(op, "kernel", kernel)
    up = None if up is None else floating(op, "up", up)
    dtype = floating_dtype(op, dtype, gate.dtype)
    bias = None if bias is None else floating(op, "bias", bias)
    check_shapes(op, gate, kernel, bias, x_name="gate")
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"{op}: up must have gate's shape {gate.shape}, got {up.shape}")
    check_activated(op, activation)
    check_quantization(op, quantization, dtype)
    options = activation, dtype, implementation, quantization, out_sharding, hidden_sharding
    return apply_product(gate, up, kernel, bias, **Options(*options)._asdict())


def apply_product(
    gate: Array, up: Array | None, kernel: Array, bias: Array | None, **options: Any
) -> Array:
    """`gated_product` for operands known to fit; `options` are `Options`."""
    op, chosen = "gated_product", Options(**options)
    activation, dtype = chosen.activation, jnp.dtype(chosen.dtype).name
    function = scalar_of(activation)
    place = functools.partial(placed, sharding=chosen.hidden_sharding)
    gate = place(gate)
    up = None if up is None else place(match(up, gate, range(gate.ndim)))

    def native(order: Order) -> Array:
        assert function is not None
        if chosen.quantization is None:
            after = Epilogue(op=op, function=function, axes=(), out_dtype=dtype)
            value = Activated(after, order, chosen.hidden_sharding)
            shared = {"contract": chosen.contract, "out_sharding": chosen.out_sharding}
            y = product((gate, up), kernel, value=value, **shared)
        else:
            hidden = finish_natively(op, gate, up, None, activation, dtype, order)
            y = multiply(op, place(hidden), kernel, order=order, **chosen.product)
        return finish(y, bias, None, dtype)

    def xla(order: Order) -> Array:
        hidden = place(finish(gate, None, activation, dtype, up))
        return finish(multiply(op, hidden, kernel, **chosen.product), bias, None, dtype)

    serve = {"xla": xla}
    if function is not None:
        serve["native"] = native
    return choose(op, chosen.implementation, serve)


def mlp(x: Array, kernels: dict[str, Array], biases: dict[str, Array], **options: Any) -> Array:
    """An MLP of operands known to fit, its (gated) activation not kept; `options` are `Options`.

    kernels: "gate", "up" and "down", or without "gate". biases: of the same names, or none.
    """
    op, chosen = "GatedMLP", Options(**options)
    *first, down = (kernels[name] for name in _names(kernels))
    dtype, function = chosen.dtype, scalar_of(chosen.activation)

    def in_parts(implementation: Implementation) -> Array:
        z, *up = (
            finish(multiply(op, x, kernels[name], **chosen.product), biases.get(name), None, dtype)
            for name in _names(kernels)[:-1]
        )
        asked = options | {"implementation": implementation}
        return apply_product(z, up[0] if up else None, down, biases.get("down"), **asked)

    def in_fp8(order: Order) -> Array:
        assert function is not None
        shared: Any = {"contract": chosen.contract, "hidden_sharding": chosen.hidden_sharding}
        shared |= {"dtype": dtype, "biases": [biases[name] for name in biased]}
        y = multiply_mlp(op, x, first, down, function, order=order, **shared)
        return finish(y, biases.get("down"), None, dtype)

    biased = [name for name in _names(kernels)[:-1] if name in biases]  # all of them or none
    alike = len(biased) in (0, len(first))
    serves_fp8 = alike and serves([*first, down], chosen.contract, function)
    if chosen.quantization is None or not serves_fp8:
        return in_parts(chosen.implementation)
    serve = {"native": in_fp8, "xla": lambda order: in_parts("xla")}
    return choose(op, chosen.implementation, serve)


def _names(kernels: dict[str, Array]) -> list[str]:
    return [name for name in ("gate", "up", "down") if name in kernels]


def check_activated(op: str, activation: Activation) -> None:
    if resolve(activation, op) is None:
        raise ValueError(
            f"{op}: activation must be a name or a function, got None; for a bilinear layer pass "
            "lambda z: z"
        )
