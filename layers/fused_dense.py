"""A dense layer in one kernel: product, bias and activation; the gradients' products are XLA's.

The forward is a primitive of its own, partitioned as `jnp.matmul` would be. Its derivative is made
of ordinary operations: `layers.matmul`'s, whose kernel gradient is the output of one GEMM, and the
activation's, recomputed from z = x · kernel + bias, which the forward kernel also writes when there
is something to differentiate. For an activation that kernels know that is `layers.epilogue_op`'s:
one pass in the place of z, which makes the bias's gradient too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..native import fallback
from ..native.fallback import Order, Unsupported
from ..native.pallas import activation as portable
from . import dense_op, matmul
from .activations import (
    Activation,
    finish,
    finish_tangent,
    resolve,
    scalar_of,
)
from .op import vary
from .rounding import wide


@dataclasses.dataclass(frozen=True)
class Options:
    """What a fused dense layer is, beside its operands.

    Attributes:
      activation: of those that a kernel can compute.
      dtype: of the product and of y.
      contract: the kernel's summed axis.
      keep: whether z is a result.
      precision: of the product.
      order: which kernels are to serve.
    """

    activation: Activation
    dtype: jnp.dtype
    contract: int
    keep: bool
    precision: str | None
    order: Order


def fused_dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    contract: int = 0,
    order: Order,
) -> jax.Array:
    """`activation(x · kernel + bias)`, rounded once to `dtype`.

    Args:
      x: `(*rows, n)`.
      kernel: any rank; its axis `contract` has n elements, the others follow x's rows in y.
      bias: of the kernel's other axes.
      activation: element-wise, given float32 (float64 for float64).
      dtype: of the operands of the product, and of y.
      contract: see kernel.
      order: which kernels are to serve.

    Raises:
      NotImplementedError: for what no kernel of `order` can serve, if it is strict; and for an
        activation that is no function of numbers alone.
    """
    if (function := resolve(activation)) is not None:
        try:
            portable.check(function, wide(dtype))
        except Unsupported as error:
            fallback.report("dense", str(error), strict=True, names=["pallas"])
    precision = jax.config.jax_default_matmul_precision
    options = Options(activation, jnp.dtype(dtype), contract, False, precision, order)
    arrays = [x.astype(dtype), kernel, *[bias] * (bias is not None)]
    varying = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    return _fused(options, *[vary(a, varying) for a in arrays])[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(options: Options, x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> list[jax.Array]:
    """y, and z if kept."""
    kernel = jnp.moveaxis(kernel.astype(options.dtype), options.contract, 0)
    operands = dense_op.fitting(x, kernel, *[b.astype(wide(options.dtype)) for b in bias])
    flags = {"precision": options.precision, "keep": options.keep, "order": options.order}
    return dense_op.dense_p.bind(*operands, function=resolve(options.activation), **flags)


@functools.partial(_fused.defjvp, symbolic_zeros=True)
def _(options, primals, tangents):
    (x, kernel, *bias), (dx, dkernel, *dbias) = primals, tangents
    kept = dataclasses.replace(options, keep=options.keep or options.activation is not None)
    y, *z = _fused(kept, x, kernel, *bias)
    product = functools.partial(matmul.matmul, dtype=options.dtype, contract=options.contract)
    terms = [jnp.zeros_like(y)]
    if not isinstance(dx, SymbolicZero):
        terms.append(jax.jvp(lambda x: product(x, kernel), (x,), (dx,))[1])
    if not isinstance(dkernel, SymbolicZero):
        terms.append(jax.jvp(lambda kernel: product(x, kernel), (kernel,), (dkernel,))[1])
    dproduct = functools.reduce(jnp.add, terms[1:] or terms)
    rest = functools.partial(_rest, z[0] if z else y, dproduct, bias, dbias, dtype=options.dtype)
    dy = rest(options.activation)
    return ([y, z[0]], [dy, rest(None)]) if options.keep else ([y], [dy])


def _rest(z, dproduct, bias, dbias, activation, *, dtype):
    """The tangent of what follows the product: bias and activation in one pass each way."""
    moving = [d for d in dbias if not isinstance(d, SymbolicZero)]
    if (function := scalar_of(activation)) is not None:
        return finish_tangent(function, z, dproduct, *moving, dtype=dtype)
    if not moving:
        return jax.jvp(lambda z: finish(z, None, activation, dtype), (z,), (dproduct,))[1]
    (shift,) = (jnp.zeros_like(b) for b in bias)  # z has the bias already
    after = lambda z, shift: finish(z, shift, activation, dtype)
    return jax.jvp(after, (z, shift), (dproduct, *moving))[1]
