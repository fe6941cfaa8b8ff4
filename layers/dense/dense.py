"""The dense layer: a product, a bias and an activation."""

from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import NamedSharding

from ...native.implementation import BEST, Implementation, Order
from ..core.activations import Activation, resolve
from ..core.arguments import Quantization, check_quantization, choose, floating, floating_dtype
from .epilogue import finish, finish_natively
from .fp8 import multiply


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    activation: Activation = None,
    dtype: jax.typing.DTypeLike | None = None,
    quantization: Quantization = None,
    implementation: Implementation = None,
    out_sharding: NamedSharding | jax.P | None = None,
) -> Array:
    """Multiplies the last axis of x by `kernel`, adds `bias` and applies `activation`.

        y = activation(x · kernel + bias)

    x, kernel and bias are cast to `dtype`; the product sums in float32 (float64 for float64), and
    the bias and the activation are one pass in float32, rounded once. Gradients of kernel and bias
    come in their own dtypes from float32 sums: a float32 kernel's is the output of the GEMM, which
    XLA can then add to an accumulator in place. The activation's derivative is recomputed from the
    product; nothing of its size is kept in float32.

    The product is XLA's, and is partitioned as `jnp.matmul` is. On Explicit meshes a kernel split
    (as FSDP stores it) over axes that split x's rows is gathered, in `dtype`.

    Args:
      x: `(*rows, in)`; float64, float32, bfloat16 or float16, as all operands.
      kernel: `(in, out)`, or `(in, *out)` for several output axes.
      bias: `(*out,)`.
      activation: None; a name: "gelu" (the exact one; `jax.nn.gelu`'s default is "gelu_tanh"),
        "relu", "silu", "squared_relu", "tanh" and the rest of
        `normfuse.layers.core.activations.ACTIVATIONS`; or a pure function, which is given float32.
      dtype: the dtype of the product and the result; None: x's.
      quantization: "fp8" for products of FP8 operands, forward and backward
        (docs/quantization.md); parameters, results and gradients keep their dtypes.
      implementation: None, "native" (bias and activation by our kernels, never by plain HLO),
        "xla", or several to try in order.
      out_sharding: the product's, as for `jax.lax.dot_general`; needed only if x and kernel are
        both split over `in` on an Explicit mesh.

    Returns:
      `(*rows, *out)` in `dtype`.

    Raises:
      TypeError: for integer or complex operands, and for float64 in FP8.
      ValueError: for shapes that do not fit, or an unknown activation, quantization or
        implementation. JAX raises its own error for an `out_sharding` that does not fit.
      NotImplementedError: if the `implementation` asked for cannot serve; an ExceptionGroup of
        them if it names several.

    >>> import jax, jax.numpy as jnp
    >>> from normfuse import dense
    >>> x, kernel = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.float32)
    >>> dense(x, kernel, activation="silu").dtype
    dtype(bfloat16)
    >>> jax.grad(lambda kernel: dense(x, kernel).sum())(kernel).dtype  # one GEMM's output
    dtype('float32')
    """
    x, kernel = floating("dense", "x", x), floating("dense", "kernel", kernel)
    bias = None if bias is None else floating("dense", "bias", bias)
    dtype = floating_dtype("dense", dtype, x.dtype)
    check_shapes("dense", x, kernel, bias)
    check_quantization("dense", quantization, dtype)
    resolve(activation, "dense")

    options = Options(activation, dtype, implementation, quantization, out_sharding)
    return apply(x, kernel, bias, **options._asdict())


class Options(NamedTuple):
    """The options of a linear layer or an MLP, checked."""

    activation: Activation
    dtype: jax.typing.DTypeLike  # the products' and the results'
    implementation: Implementation
    quantization: Quantization = None
    out_sharding: NamedSharding | jax.P | None = None
    hidden_sharding: jax.P | None = None  # an MLP's hidden arrays have it
    contract: int = 0  # 1 for kernels that are stored `(out, in)`

    @property
    def product(self) -> dict[str, Any]:
        """The options of a product alone."""
        names = "dtype", "quantization", "out_sharding", "contract"
        return {name: getattr(self, name) for name in names}


def apply(
    x: Array, kernel: Array, bias: Array | None, *, op: str = "dense", **options: Any
) -> Array:
    """`dense` for operands known to fit; `options` are `Options`."""
    chosen = Options(**options)
    activation, dtype = chosen.activation, chosen.dtype
    product = lambda order: multiply(op, x, kernel, order=order, **chosen.product)

    def native(order: Order) -> Array:
        if activation is None:  # nothing follows the product but a bias, which XLA adds in it
            return finish(product(order), bias, None, dtype)
        return finish_natively(op, product(order), None, bias, activation, dtype, order)

    xla = lambda order: finish(product(BEST), bias, activation, dtype)
    return choose(op, chosen.implementation, {"native": native, "xla": xla})


def check_shapes(
    op: str,
    x: Array,
    kernel: Array,
    bias: Array | None,
    kernel_name: str = "kernel",
    x_name: str = "x",
) -> None:
    """Raises ValueError unless x is (*rows, in), kernel (in, *out) and bias (*out,)."""
    if x.ndim < 1:
        raise ValueError(f"{op}: {x_name} must be (*rows, in), got a scalar; reshape it to (1,)")
    if kernel.ndim < 2:
        raise ValueError(f"{op}: {kernel_name} must be (in, *out), got shape {kernel.shape}")
    if x.shape[-1] != kernel.shape[0]:
        hint = ""
        if kernel.ndim == 2 and x.shape[-1] == kernel.shape[1]:
            hint = f"; pass {kernel_name}.T if it is stored (out, in)"
        raise ValueError(
            f"{op}: {kernel_name}'s first axis must be as long as {x_name}'s last, {x.shape[-1]}; "
            f"got {kernel_name} of shape {kernel.shape} and {x_name} of shape {x.shape}{hint}"
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(
            f"{op}: bias must have the shape of {kernel_name}'s output axes, {kernel.shape[1:]}; "
            f"got {bias.shape}"
        )
