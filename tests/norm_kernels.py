"""The norms' kernels by name, for tests that run each of them."""

from typing import Any

import jax.numpy as jnp

from normfuse.layers.norm import cuda, op
from normfuse.layers.norm.spec import Norm
from normfuse.native.kernel import Kernel

KERNELS = {
    found.name.removeprefix("norm_"): found for found in vars(op).values() if type(found) is Kernel
}
CUDA = {name: kernel.bodies["cuda"] for name, kernel in KERNELS.items()}
assert CUDA["forward"] is cuda.forward


def norm_of(params: dict[str, Any]) -> Norm:
    """The static parameters; `out_dtype` may be a dtype."""
    if "out_dtype" in params:
        params = params | {"out_dtype": jnp.dtype(params["out_dtype"]).name}
    return Norm(**params)
