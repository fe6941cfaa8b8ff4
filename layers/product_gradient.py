"""The backward of a product whose left operand is an activation: as one kernel where that serves.

    dvalue = dy · kernelᵀ        (dz[, dup][, value]) from dvalue, z and up

Where the arrays are one device's (a single device, or shard_map over every axis) it is one
operation of `native.product_gradient`; elsewhere it is the product and the activation's gradient,
each of which is split over a mesh as it is anywhere.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..native import fallback
from ..native import product_gradient as native
from ..native.fallback import Order
from ..native.jax_private import needs_devices_during_lowering
from ..native.kernel import lower
from .matmul import Product, input_gradient
from .op import compile_when_eager, where_lowered
from .producers import Activated, Producer


def gradients(
    producer: Producer,
    products: Sequence[tuple[Product, jax.Array, jax.Array]],
    args: Sequence[jax.Array],
    kept: Sequence[jax.Array],
    wanted: tuple[bool, ...],
    with_value: bool,
    order: Order,
) -> tuple[list[Any], Any]:
    """`producer.backward` of the gradient that its value has from `products`.

    Args:
      producer, args, kept, wanted, with_value: see `Producer.backward`.
      products: for each the product, the gradient of its result, and the kernel as its GEMM reads
        it.
      order: which kernels are to serve.
    """
    (product, dy, kernel), *others = products
    if isinstance(producer, Activated) and not others:
        if reason := _unfit(producer, product, dy, kernel):
            _report(reason, order)
        else:
            flags = {"product": product, "with_value": with_value, "order": order}
            found = gradient_p.bind(dy, kernel, *args, producer=producer, **flags)
            value = found.pop() if with_value else None
            pairs = zip(found, args, wanted)
            return [g.astype(a.dtype) if w else None for g, a, w in pairs], value
    like = producer.value_type(args)
    terms = [input_gradient(product, dy, like, kernel) for product, dy, kernel in products]
    return producer.backward(functools.reduce(jnp.add, terms), args, kept, wanted, with_value)


def _unfit(producer, product, dy, kernel) -> str:
    """Why no kernel could serve; empty if one could."""
    if producer.has_bias:
        return "the activation's bias would need a sum over tiles"
    if product.kernel.index(product.x[-1]) not in (0, len(product.kernel) - 1):
        return "the kernel's summed axis is between others"
    if dy.dtype.itemsize != 2 or kernel.dtype != dy.dtype:
        return "the fused kernel takes operands of 16 bits"
    return ""


def _report(reason, order):
    if order.names == ("pallas",):
        fallback.report("product_gradient", reason, strict=order.strict, names=order.names)


def _plain(dy, kernel, *args, producer, product, with_value, order):
    """The product, and then the activation's gradient."""
    del order
    dvalue = input_gradient(product, dy, producer.value_type(args), kernel)
    every = (True,) * len(args)
    found, value = producer.backward(dvalue, args, (), every, with_value)
    return [*found, *[value] * with_value]


def _on_matrices(dy, kernel, *args, producer, product, with_value, order):
    """One device's share."""
    rows, n = math.prod(args[0].shape[:-1]), args[0].shape[-1]
    contract = 1 if product.kernel.startswith(product.x[-1]) else 0
    kernel = kernel.reshape(n, -1) if contract else kernel.reshape(-1, n)
    flat = [dy.reshape(rows, -1), kernel, *[a.reshape(rows, n) for a in args]]
    params = {"function": producer.function, "with_value": with_value, "contract": contract}
    params |= {"precision": product.precision, "strict": order}
    found = native.backward(*flat, **params)
    return [r.reshape(args[0].shape) for r in found]


gradient_p = Primitive("normfuse_product_gradient_layer")
gradient_p.multiple_results = True


def _lower(ctx, *values, **params):
    where = where_lowered(ctx, ctx.avals_in[2])
    if not where.single:
        reason = (
            "its operands are split over a mesh; call the layer under shard_map over every axis"
        )
    elif len({a.dtype for a in ctx.avals_in}) > 1:
        reason = "its operands are of several dtypes"
    elif not all(a.size for a in ctx.avals_in):
        reason = "an operand is empty"
    else:
        if not params["order"].names and not _alone(ctx):
            params["order"] = Order(("native",), strict=False)
        return lower(functools.partial(_on_matrices, **params), ctx, *values)
    _report(reason, params["order"])
    plain = functools.partial(_plain, **params)
    return mlir.lower_fun(plain, multiple_results=True)(ctx, *values)


def _alone(ctx):
    """Whether the program is for one device. Elsewhere collectives run beside products, and the
    kernel, which has a block on every multiprocessor to its end, would wait for theirs."""
    context = ctx.module_context.axis_context
    devices = context.mesh.size if hasattr(context, "mesh") else context.num_devices
    return devices == 1


def _jvp(primals, tangents, **params):
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(functools.partial(_plain, **params), tuple(primals), tangents)


def _transpose(cts, dy, *rest, **params):
    """The gradients are linear in dy; the value does not depend on it."""
    out: list[Any] = [None] * (1 + len(rest))
    cts = [ad.instantiate_zeros(ct) for ct in cts[: len(rest) - 1]]
    if ad.is_undefined_primal(dy):
        params |= {"with_value": False}
        out[0] = jax.linear_transpose(lambda dy: _plain(dy, *rest, **params), dy.aval)(cts)[0]
    return out


def _batch(args, dims, **params):
    fn = jax.vmap(functools.partial(_plain, **params), tuple(dims))
    results = fn(*args)
    return results, [0] * len(results)


compile_when_eager(gradient_p)
gradient_p.def_abstract_eval(
    lambda *avals, **params: jax.make_jaxpr(functools.partial(_plain, **params))(*avals).out_avals
)
needs_devices_during_lowering(gradient_p)
mlir.register_lowering(gradient_p, _lower)
ad.primitive_jvps[gradient_p] = _jvp
ad.primitive_transposes[gradient_p] = _transpose
batching.primitive_batchers[gradient_p] = _batch
