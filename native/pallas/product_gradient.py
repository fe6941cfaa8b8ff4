"""A product and an activation's gradient in one kernel: where there is one, and its epilogue."""

import jax
import jax.numpy as jnp

from ..fallback import Unsupported
from ..scalar import Scalar
from . import activation
from .lowering import Target

TILE = 128, 256  # of the result, one a block at a time
PIECE = 64  # of what a tile sums over, and the side of what its epilogue takes


def fits(m: int, n: int, k: int) -> bool:
    """Whether the kernel takes a result of (m, n) that is a sum over k: a tile or more, in pieces
    that bulk copies move."""
    return m >= TILE[0] and n >= TILE[1] and not (m % 8 or n % PIECE or k % PIECE)


def serve(
    target: Target,
    dy: jax.Array,
    w: jax.Array,
    *operands: jax.Array,
    function: Scalar,
    with_value: bool,
    precision: str | None,
    contract: int,
) -> list[jax.Array]:
    """`(dy (m, k), w, z (m, n)[, up (m, n)]) -> (dz[, dup][, value])`.

    w is (n, k) or (k, n), its axis `contract` being the one of k. Sums and what is made of them are
    in float32, and rounded once.

    Raises:
      Unsupported: but on Hopper, for 16-bit operands of one dtype and sizes that the kernel takes.
    """
    del precision  # 16-bit operands are multiplied exactly, and summed in float32
    if target.capability != 90:
        raise Unsupported("the fused kernel is for GPUs of compute capability 9.0")
    if dy.dtype not in (jnp.bfloat16, jnp.float16) or {a.dtype for a in (w, *operands)} != {
        dy.dtype
    }:
        raise Unsupported("the fused kernel takes operands of bfloat16 alone, or of float16")
    from . import gradient_hopper

    smooth = activation.differentiable(function)

    def epilogue(dh, z, *up):
        y, dz = jax.jvp(smooth, (z,), (dh * up[0] if up else dh,))
        return [dz, *[dh * y for _ in up], *[y * up[0] if up else y] * with_value]

    short = dy.dtype == jnp.bfloat16
    epilogue = activation.portable_several(epilogue, short=short, exact=not short)
    options = {"epilogue": epilogue, "with_value": with_value, "contract": contract}
    return gradient_hopper.run(target, dy, w, operands, **options)
