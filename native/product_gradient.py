"""The gradient of an activation whose result a product multiplied, on one device.

    dh = dy · w        y = function(z) · up        (dz[, dup][, value]) from dh, z and up

`native.epilogue`'s backward with the product before it. On Hopper one kernel can do both, and dh is
never in memory; elsewhere they are a GEMM and a pass.
"""

import functools
import math

import jax
import jax.numpy as jnp

from . import cuda_epilogue, epilogue
from .kernel import Kernel
from .scalar import Scalar


def _in_two(pull_back, dy, w, *operands, function, with_value, contract, precision):
    """A GEMM, and then `pull_back`: one of the backwards of `native.epilogue`."""
    dh = jax.lax.dot_general(dy, w, (((1,), (contract,)), ((), ())), precision=precision)
    flags = {"has_up": len(operands) > 1, "has_bias": False, "with_dbias": False}
    return pull_back(dh, *operands, function=function, with_value=with_value, **flags)


def definition(dy, w, z, *up, function: Scalar, **params):
    """`(dy (m, k), w, z (m, n)[, up (m, n)]) -> (dz[, dup][, value])`, of one dtype.

    w is (n, k) or (k, n): its axis `contract` is the one of k.
    """
    return _in_two(epilogue.define_backward, dy, w, z, *up, function=function, **params)


def _native(target, *operands, **params):
    return _in_two(functools.partial(cuda_epilogue.backward, target), *operands, **params)


# What was measured on an H200 (docs/pallas.md): the fused kernel takes 3.5 % more for the products
# than cuBLAS, and for an element of the result 1.4 µs less in a million than the pass would.
_FLOPS, _SLOWER, _SAVED = 820e6, 0.035, 1.4e-6  # in a microsecond; of the product; microseconds


def fused_is_faster(target, dy, w, z, *up, function, with_value, contract, precision) -> bool:
    """Whether one kernel takes less time than cuBLAS and a pass: on Hopper, for bfloat16 and w as
    (n, k), which is what was measured. Others it serves where it is asked for.

    Its tiles are of one size: where multiprocessors have nothing to do in the last round, that is
    time lost, in which cuBLAS would have smaller ones.
    """
    from .pallas.product_gradient import TILE, fits  # as below

    del w, up, with_value, precision
    (m, k), n = dy.shape, z.shape[1]
    hopper = target.capability == 90 and not target.portable
    if not (hopper and dy.dtype == jnp.bfloat16 and contract and function.derivative):
        return False
    if not fits(m, n, k):
        return False
    rounds = -(-m // TILE[0]) * -(-n // TILE[1]) / target.multiprocessors
    idle = math.ceil(rounds) / rounds - 1
    return _SAVED * m * n > 2 * m * n * k / _FLOPS * (_SLOWER + idle)


def _pallas(target, *operands, **params):
    from .pallas import product_gradient  # imported when it is first used

    return product_gradient.serve(target, *operands, **params)


backward = Kernel(
    "product_gradient",
    definition,
    cuda=_native,
    pallas=_pallas,
    pallas_on_cuda=fused_is_faster,
)
