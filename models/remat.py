"""What the backward pass keeps of a block, and what it computes again."""

from collections.abc import Callable

import jax

from normfuse.models.config import Remat


def remat(block: Callable, mode: Remat, checkpoint: Callable = jax.checkpoint) -> Callable:
    """Wraps a block so that its backward pass recomputes what `mode` says.

    Args:
      block: the function of one block.
      mode: "none" keeps everything; "block" keeps the block's input only; "dots" keeps the results
        of the products with weights too (not attention's scores), so no GEMM runs twice.
      checkpoint: `jax.checkpoint`, or a framework's own version of it.
    """
    if mode == "none":
        return block
    policies = jax.checkpoint_policies
    dots = policies.dots_with_no_batch_dims_saveable
    return checkpoint(block, policy=dots if mode == "dots" else policies.nothing_saveable)
