"""What the backward pass keeps of a block, and what it computes again."""

from collections.abc import Callable, Sequence

import jax

from .config import Remat


def remat(
    block: Callable,
    mode: Remat,
    checkpoint: Callable = jax.checkpoint,
    names: Sequence[str] = (),
) -> Callable:
    """Wraps a block so that its backward pass recomputes what `mode` says.

    Args:
      block: the function of one block.
      mode: "none" keeps everything; "block" keeps the block's input only; "dots" keeps the results
        of the products with weights too (not attention's scores), so no GEMM runs twice.
      checkpoint: `jax.checkpoint`, or a framework's own version of it.
      names: of what is kept besides (`jax.ad_checkpoint.checkpoint_name`).
    """
    if mode == "none":
        return block
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(*names)
    if mode == "dots":
        dots = policies.dots_with_no_batch_dims_saveable
        policy = policies.save_from_both_policies(dots, policy)
    return checkpoint(block, policy=policy)
