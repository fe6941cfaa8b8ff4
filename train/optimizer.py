"""AdamW under a warm-up and a cosine decay."""

import jax
import optax

from .config import OptimConfig


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Gives the learning rate of step k, from 0: linear up, then a cosine down to `final_lr`."""
    warmup = steps // 20 if config.warmup is None else config.warmup
    last = config.lr * config.final_lr
    # The first update uses 1/(warmup + 1) of the rate, not zero: no step is wasted.
    return optax.join_schedules(
        [
            optax.linear_schedule(config.lr / (warmup + 1), config.lr, warmup),
            optax.cosine_decay_schedule(config.lr, max(steps - warmup, 1), last / config.lr),
        ],
        [warmup],
    )


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Clips by the global norm, then AdamW with its decay on matrices only.

    References: Loshchilov and Hutter, arXiv:1711.05101; Pascanu et al., arXiv:1211.5063.
    """
    clip = optax.clip_by_global_norm(config.clip) if config.clip else optax.identity()
    matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    adamw = optax.adamw(
        schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=matrices,
    )
    return optax.chain(clip, adamw)
