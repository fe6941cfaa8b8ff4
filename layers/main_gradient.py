"""The place where a kernel's main gradient comes from.

A kernel in bfloat16 has, to JAX, a gradient in bfloat16: the output of its GEMM rounded, then
widened again by whoever sums gradients in float32. So a dense layer's product takes, beside such a
kernel, a float32 array of zeros of its shape. The product does not depend on it, but has a
derivative in its direction: the one that it has in the kernel's. The gradient of these zeros is
therefore the kernel's, as the GEMM puts it out. `normfuse.accumulate_gradients` asks for that one;
for everyone else they are zeros that nothing uses.

The primitive here marks, in a traced program, which zeros belong to which kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NARROW = ("bfloat16", "float16")

mark_p = Primitive("normfuse_kernel")
"""`(kernel, zeros) -> (kernel, zeros)`."""
mark_p.multiple_results = True
mark_p.def_impl(lambda *operands: list(operands))
mark_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(mark_p, lambda ctx, *values: list(values))


def marked(kernel: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The kernel, and the zeros whose gradient is its main gradient.

    None for a kernel that is in float32 or wider: its own gradient is not rounded.
    """
    if kernel.dtype.name not in NARROW:
        return kernel, None
    kernel, zeros = mark_p.bind(kernel, lax.full_like(kernel, 0, dtype=jnp.float32))
    return kernel, zeros


def _jvp(primals, tangents):
    return mark_p.bind(*primals), list(tangents)


def _batch(args, dims):
    return mark_p.bind(*args), list(dims)


ad.primitive_jvps[mark_p] = _jvp
batching.primitive_batchers[mark_p] = _batch
