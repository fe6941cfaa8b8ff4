"""The dense layer on one device as one kernel: a product with its epilogue."""

import jax

from .kernel import Kernel
from .rms_norm_definition import compute_dtype


def definition(x, w, *bias, function, precision, keep):
    """`(x (m, k), w (k, n)[, bias (n,)]) -> y[, z]`: z = x · w + bias, y = function(z).

    x and w have one dtype, which y and z are rounded to; the rest is float32 (or float64). z is a
    result where `keep`; a function of None is the identity.
    """
    compute = compute_dtype(x.dtype)
    z = jax.lax.dot(x, w, precision=precision, preferred_element_type=compute)
    for b in bias:
        z = z + b.astype(compute)
    y = z if function is None else function(z)
    return [y.astype(x.dtype), *[z.astype(x.dtype)] * keep]


def _pallas(target, *operands, **params):
    from .pallas import matmul  # imported when it is first used

    return matmul.serve(target, *operands, **params)


forward = Kernel("dense", definition, pallas=_pallas)
