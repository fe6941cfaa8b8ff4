"""The backward of a product whose left operand is an activation: one kernel where that serves.

    dvalue = dy · kernelᵀ        y = function(z) · up        (dz[, dup][, value]) from dvalue, z, up

On Hopper one kernel can do both, and dvalue is never in memory; elsewhere they are a GEMM and a
pass. Where the arrays are one device's (a single device, or shard_map over every axis) it is one
operation; on a mesh it is the product and the activation's gradient, each split as it is anywhere.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from ...native.implementation import Order, report
from ...native.kernel import Kernel
from ...native.launch import Target
from ..core.op import Op, Split, is_for_one_device, placed
from . import epilogue
from .epilogue import Epilogue, GatedScalar
from .matmul import Product, input_gradient


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The static description of the gradient."""

    epilogue: Epilogue  # the activation's, without a bias
    product: Product  # its left operand is the activation
    sharding: jax.P | None = None  # the activation's and its gradient's, on a mesh of Auto axes

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.epilogue.op

    @property
    def contract(self) -> int:
        """The axis of the kernel, seen as a matrix, that dy's last axis is summed with."""
        return 1 if self.product.kernel.startswith(self.product.x[-1]) else 0


def unfit(spec: Gradient, dy: Any, kernel: Any) -> str:
    """Returns why no fused kernel could serve; empty if one could."""
    product = spec.product
    if spec.epilogue.stack is not None:
        return "gate and up are one array"
    if product.kernel.index(product.x[-1]) not in (0, len(product.kernel) - 1):
        return "the kernel's summed axis is between others"
    if dy.dtype.itemsize != 2 or kernel.dtype != dy.dtype:
        return "the fused kernel takes operands of 16 bits"
    return ""


def report_unfused(spec: Gradient, reason: str, order: Order) -> None:
    """Reports that a product and a pass serve instead of the fused kernel that was asked for."""
    if order.names == ("pallas",):
        report(spec.op, reason, strict=order.strict, names=order.names)


# ---------------------------------------------------------------- definition, in plain JAX


def define(spec: Gradient, dy: Array, kernel: Array, *args: Array) -> list[Array]:
    """`(dy, kernel, z[, up]) -> (dz[, dup][, value])`: a product, then a gradient."""
    like = jax.typeof(args[0]).update(dtype=jnp.dtype(spec.epilogue.out_dtype), weak_type=False)
    dvalue = placed(input_gradient(spec.product, dy, like, kernel), spec.sharding)
    return epilogue.backward(spec.epilogue, dvalue, *args)


# ---------------------------------------------------------------- kernels, on matrices


def _in_two(
    gradient: Callable[..., Any], spec: Gradient, dy: Any, w: Any, *operands: Any
) -> list[Array]:
    """A GEMM, and then `gradient`: one of the epilogue's backwards."""
    summed = ((1,), (spec.contract,))
    dh = jax.lax.dot_general(dy, w, (summed, ((), ())), precision=spec.product.precision)
    return gradient(spec.epilogue, dh, *operands)


def define_on_matrices(spec: Gradient, dy: Any, w: Any, *operands: Any) -> list[Array]:
    """`(dy (m, k), w, z (m, n)[, up (m, n)]) -> (dz[, dup][, value])`, of one dtype.

    w is (n, k) or (k, n): its axis `contract` is the one of k.
    """
    return _in_two(epilogue.define_backward, spec, dy, w, *operands)


def _on_cuda(target: Target, spec: Gradient, *operands: Any) -> list[Array]:
    return _in_two(functools.partial(epilogue.backward_on_cuda, target), spec, *operands)


def _on_pallas(target: Any, spec: Gradient, *operands: Any) -> list[Array]:
    from . import pallas_gradient  # imported when it is first used

    return pallas_gradient.run(target, spec, *operands)


# Measured on an H200 (benchmarks/results): the fused kernel takes 3.5 % more for the products than
# cuBLAS, and for an element of the result 1.4 µs less in a million than the pass would.
_FLOPS, _SLOWER, _SAVED = 820e6, 0.035, 1.4e-6  # in a microsecond; of the product; microseconds


def fused_is_faster(target: Target, spec: Gradient, dy: Any, w: Any, z: Any, *up: Any) -> bool:
    """Returns whether one kernel takes less time than cuBLAS and a pass.

    Measurements say so on Hopper, for bfloat16 and activations of one number, with kernels stored
    (in, out) as in Flax and (out, in) as in Equinox. It serves others on request. Its tiles have
    one size: multiprocessors that are idle in the last round lose time, where cuBLAS would use
    smaller tiles.
    """
    del w, up
    (m, k), n = dy.shape, z.shape[1]
    hopper = target.capability == 90 and not target.portable
    gated = isinstance(spec.epilogue.function, GatedScalar)
    if gated or not (hopper and dy.dtype == jnp.bfloat16):
        return False
    from .pallas_gradient import TILE, fits  # Pallas is imported when it is first used

    if not spec.epilogue.function.derivative or not fits(m, n, k):
        return False
    rounds = -(-m // TILE[0]) * -(-n // TILE[1]) / target.multiprocessors
    idle = math.ceil(rounds) / rounds - 1
    return _SAVED * m * n > 2 * m * n * k / _FLOPS * (_SLOWER + idle)


kernel = Kernel(
    "product_gradient",
    define_on_matrices,
    {"cuda": _on_cuda, "pallas": _on_pallas},
    pallas_on_cuda=fused_is_faster,
)


def _body(
    spec: Gradient, split: Split, dy: Array, w: Array, *args: Array, order: Order
) -> list[Array]:
    """One device's share."""
    del split
    reason = ""
    if len({a.dtype for a in (dy, w, *args)}) > 1:
        reason = "its operands are of several dtypes"
    elif not all(a.size for a in (dy, w, *args)):
        reason = "an operand is empty"
    if reason:
        report_unfused(spec, reason, order)
        return define(spec, dy, w, *args)
    rows, n = math.prod(args[0].shape[:-1]), args[0].shape[-1]
    w = w.reshape(n, -1) if spec.contract else w.reshape(-1, n)
    flat = [dy.reshape(rows, -1), w, *[a.reshape(rows, n) for a in args]]
    return [r.reshape(args[0].shape) for r in kernel(spec, *flat, order=order)]


def _native_beside_collectives(ctx: Any, spec: Gradient, order: Order) -> Order:
    """By default the fused kernel serves only programs for one device: elsewhere collectives run
    with products, and would wait for the kernel, which has a block on every multiprocessor."""
    del spec
    return order if order.names or is_for_one_device(ctx) else Order(("native",), strict=False)


# ---------------------------------------------------------------- derivative


def _transpose(cts: Any, dy: Any, *rest: Any, spec: Gradient, order: Order) -> list[Any]:
    """The gradients are linear in dy; the value does not depend on it."""
    del order
    out: list[Any] = [None] * (1 + len(rest))
    cts = [ad.instantiate_zeros(ct) for ct in cts[: len(rest) - 1]]
    if ad.is_undefined_primal(dy):
        alone = dataclasses.replace(spec.epilogue, with_value=False)
        spec = dataclasses.replace(spec, epilogue=alone)
        out[0] = jax.linear_transpose(lambda dy: define(spec, dy, *rest), dy.aval)(cts)[0]
    return out


gradient = Op(
    "activated_product_gradient",
    define,
    body=_body,
    leads=(2,),
    before=_native_beside_collectives,
    transpose=_transpose,
)
"""`(dy, kernel, z[, up]) -> (dz[, dup][, value])`."""
