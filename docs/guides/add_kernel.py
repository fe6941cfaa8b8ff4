"""Add a CUDA kernel.

Your own CUDA code becomes a JAX operation, with a definition in plain JAX that runs everywhere.

Run it: `python docs/guides/add_kernel.py`. It needs the extra `cuda13`, but no GPU: the CUDA code
is compiled, and the definition computes the results. CI checks every statement below.

The operation is a soft cap, y = cap · tanh(x / cap), which some models put on their logits.
"""

import dataclasses
import os
import tempfile

os.environ.setdefault("NORMFUSE_CACHE_DIR", tempfile.mkdtemp())  # this guide's kernels only

import jax
import jax.numpy as jnp
import numpy as np

from normfuse.layers.core.op import Op, Placement
from normfuse.native.compiler import Source
from normfuse.native.implementation import Unsupported
from normfuse.native.kernel import Kernel
from normfuse.native.launch import launch

# 1. The CUDA code. Constants that are known with the shape (types, sizes) are macros with names
#    longer than one letter. Operands come first, then results, then scalars as `long long`, `float`
#    and `double`. In normfuse itself it would be a file in native/kernels, and `launch` would take
#    its name.
SOFT_CAP = Source(
    "soft_cap.cu",
    """
extern "C" __global__ void soft_cap(const TYPE* x, TYPE* y, long long count, float cap) {
  const long long stride = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += stride)
    y[i] = static_cast<TYPE>(cap * tanhf(static_cast<float>(x[i]) / cap));
}
""",
)


# 2. The static parameters: everything about a call that is known when it is traced. `op` names the
#    function the user called, for errors.
@dataclasses.dataclass(frozen=True)
class SoftCap:
    cap: float
    op: str = "soft_cap"


# 3. One device's share, on an NVIDIA GPU: `target` says which, and how large it is.
def on_cuda(target, spec, x):
    blocks = min(-(-x.size // 256), 8 * target.multiprocessors)
    types = {"float32": "float"}
    if x.dtype.name not in types:
        raise Unsupported(f"soft_cap has no kernel for {x.dtype.name}")  # the definition serves
    return launch(
        SOFT_CAP,
        "soft_cap",
        [x],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        target=target,
        grid=blocks,
        block=256,
        macros={"TYPE": types[x.dtype.name]},
        ints=[x.size],
        floats=[spec.cap],
    )


# 4. The definition in plain JAX: the reference for types and tests, and the fallback where no
#    kernel serves.
def definition(spec, x):
    return [spec.cap * jnp.tanh(x / spec.cap)]


kernel = Kernel("soft_cap", definition, {"cuda": on_cuda})

# 5. The operation on global arrays, which owns batching, partitioning and the derivative: `dims`
#    says which dimensions of x each operand and result has.
op = Op(
    "soft_cap_op",
    definition,
    Placement(
        dims=lambda spec, ndim: ([tuple(range(ndim))], [tuple(range(ndim))]),
        body=lambda spec, split, x, order: kernel(spec, x, order=order),
    ),
)


def soft_cap(x):
    return op(SoftCap(cap=30.0), x)[0]


# 6. It behaves like JAX's own operations.
x = 50 * jax.random.normal(jax.random.key(0), (4, 8, 16))
np.testing.assert_allclose(soft_cap(x), 30 * np.tanh(x / 30), rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(jax.vmap(jax.jit(soft_cap))(x), soft_cap(x), rtol=1e-6)
slope = jax.grad(lambda x: soft_cap(x).sum())(x)
np.testing.assert_allclose(slope, 1 - np.tanh(x / 30) ** 2, rtol=1e-3, atol=1e-5)

# 7. Lowered for a GPU it is a launch, with the compiled kernel in the program.
traced = jax.jit(soft_cap).trace(jax.ShapeDtypeStruct(x.shape, x.dtype))
program = traced.lower(lowering_platforms=("cuda",)).as_text()
assert 'kernel = "soft_cap"' in program and "normfuse_launch" in program
assert soft_cap(x.astype("bfloat16")).dtype == "bfloat16"
print("soft_cap: right here, and compiled for CUDA")
