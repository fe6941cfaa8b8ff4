"""The gradient of an activation whose result a product multiplied, on one device.

    dh = dy · wᵀ        y = function(z) · up        (dz[, dup][, value]) from dh, z and up

`native.epilogue`'s backward with the product before it. On Hopper one kernel can do both, and dh is
never in memory; elsewhere they are a GEMM and a pass.
"""

import jax

from normfuse.native import cuda_epilogue, epilogue
from normfuse.native.kernel import Kernel
from normfuse.native.scalar import Scalar


def _product(dy, w, precision):
    return jax.lax.dot_general(dy, w, (((1,), (1,)), ((), ())), precision=precision)


def definition(dy, w, z, *up, function: Scalar, with_value, precision):
    """`(dy (m, k), w (n, k), z (m, n)[, up (m, n)]) -> (dz[, dup][, value])`, of one dtype."""
    dh = _product(dy, w, precision)
    flags = {"has_up": bool(up), "has_bias": False, "with_dbias": False, "with_value": with_value}
    return epilogue.define_backward(dh, z, *up, function=function, **flags)


def _native(target, dy, w, *operands, function, with_value, precision):
    dh = _product(dy, w, precision)
    flags = {"has_up": len(operands) > 1, "has_bias": False, "with_dbias": False}
    flags |= {"function": function, "with_value": with_value}
    return cuda_epilogue.backward(target, dh, *operands, **flags)


def _pallas(target, *operands, **params):
    from normfuse.native.pallas import product_gradient  # imported when it is first used

    return product_gradient.serve(target, *operands, **params)


backward = Kernel("product_gradient", definition, cuda=_native, pallas=_pallas)
