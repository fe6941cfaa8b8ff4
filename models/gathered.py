"""Kernels gathered once a step over "fsdp", where blocks are computed again in the backward pass.

A block that is computed again gathers its kernels again. Kept from the forward pass they take the
memory of all blocks' kernels (of each "tensor" device's part) in the dtype of the products, and
half of what is gathered goes: ZeRO's second stage in place of its third. Parameters, gradients and
the optimizer's state stay in pieces.

References: Rajbhandari et al., ZeRO, arXiv:1910.02054; Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

import functools
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ..native.dtypes import holds
from .sharding import Sharding, constrain, is_split, on_mesh

NAME = "normfuse_gathered"  # what `jax.checkpoint` keeps


def gathered(layer: Any, dtype: str, sharding: Sharding) -> Any:
    """A block's parameters with its kernels whole over "fsdp", to be multiplied in `dtype`.

    As they are where no mesh in context splits them.

    Args:
      layer: a pytree of parameters in either framework's structure.
      dtype: of the products. A wider kernel is rounded before it is gathered; its gradient is not.
      sharding: where parameters lie.
    """

    def gather(path, kernel):
        if kernel.ndim < 2:
            return kernel
        spec = on_mesh(sharding.of_leaf(path), ("tensor",))
        # A kernel that the products take as it is stays linked to its main gradient.
        return (_whole if holds(dtype, kernel.dtype) else _rounded_whole)(kernel, dtype, spec)

    return jax.tree.map_with_path(gather, layer) if is_split("fsdp") else layer


def _whole(kernel: Array, dtype: str, spec: P) -> Array:
    narrow = kernel if holds(dtype, kernel.dtype) else kernel.astype(dtype)
    return checkpoint_name(constrain(narrow, spec), NAME)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _rounded_whole(kernel: Array, dtype: str, spec: P) -> Array:
    """As wide as the kernel again, so that its gradient is: XLA drops both conversions."""
    return _whole(kernel, dtype, spec).astype(kernel.dtype)


@_rounded_whole.defjvp
def _(dtype, spec, primals, tangents):
    (kernel,) = primals
    return _whole(kernel, dtype, spec).astype(kernel.dtype), tangents[0]
