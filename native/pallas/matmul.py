"""y = activation(x · w + bias) in one kernel, for any activation: which kernel serves where."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..fallback import Unsupported
from . import activation, lowering
from .lowering import Target


def serve(
    target: Target,
    x: jax.Array,
    w: jax.Array,
    *bias: jax.Array,
    function: Callable[[jax.Array], jax.Array] | None,
    precision: str | None,
    keep: bool,
) -> list[jax.Array]:
    """`(x (m, k), w (k, n)[, bias (n,)]) -> y`, and z = x · w + bias too where `keep`.

    Sums, bias and activation are in float32 (float64 for float64); y and z are rounded to x's
    dtype.

    Raises:
      Unsupported: for dtypes or activations that the platform's kernels do not take.
    """
    lowering.require_dtypes(target, x.dtype)
    if x.dtype == jnp.float64 and target.gpu:
        raise Unsupported("no Pallas matrix product takes float64 on a GPU")
    compute = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    hopper = target.capability == 90 and x.dtype.itemsize == 2
    if function is not None:
        function = activation.portable(function, short=hopper and x.dtype == jnp.bfloat16)

    def epilogue(sums, *bias):
        z = sums + bias[0] if bias else sums
        y = z if function is None else function(z)
        return [y, z] if keep else [y]

    options = {"epilogue": epilogue, "precision": precision, "compute": compute, "keep": keep}
    wide = [b.astype(compute) for b in bias]
    if not target.gpu:
        from . import matmul_blocks as backend
    elif hopper:
        from . import matmul_hopper as backend
    else:
        from . import matmul_triton as backend
    return backend.run(target, x, w, wide, **options)
