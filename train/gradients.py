"""The loss, and its gradient over microbatches with one reduction between replicas per step."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..layers.accumulate import accumulate_gradients
from ..models.functional import Functional, Params, build
from ..models.side_by_side import side_by_side


def token_losses(logits: Array, targets: Array) -> Array:
    """Gives the cross-entropy of every token, in nats.

    The target's logit is picked by comparing, not by gathering: with the vocabulary split over
    devices each looks at its own part, and no logits move.

    Args:
      logits: `(..., vocab)` float32.
      targets: `(...)` integers.
    Returns: `(...)` float32.
    """
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def mean_loss(model: Functional, params: Params, tokens: Array, parts: int = 1) -> Array:
    """Gives the mean loss of `(batch, seq + 1)` tokens: the first are inputs, the last targets.

    With `parts`, each is computed by itself in the same program, `side_by_side`.
    """
    loss = lambda rows: token_losses(model.apply(params, rows[:, :-1]), rows[:, 1:]).mean()
    losses = side_by_side(loss, interleaved(tokens, parts))
    return sum(losses[1:], losses[0]) / parts


def interleaved(x: Array, parts: int) -> list[Array]:
    """Cuts the rows of x into `parts`, of which each device has as many among its own."""
    if parts == 1:
        return [x]
    return list(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1))


def loss_and_gradient(
    model: Functional,
    params: Params,
    tokens: Array,
    *,
    microbatches: int,
    mesh: Mesh,
    parts: int = 1,
) -> tuple[Array, Params]:
    """Gives a batch's mean loss and its gradient, computed in `microbatches` parts.

    Over microbatches, gradients are summed in float32 (`normfuse.accumulate_gradients`). Each
    replica sums its own and they are added up once at the end. Over "fsdp" every microbatch is
    reduced, or each device would have to hold a whole gradient.

    Args:
      model: the transformer.
      params: its parameters.
      tokens: `(batch, seq + 1)` integers, rows split over "data" and "fsdp".
      microbatches: parts; with the mesh's "data" and "fsdp" they divide the batch.
      mesh: the mesh.
      parts: of each microbatch, which XLA may compute side by side.
    """
    loss = lambda model: lambda params, rows: mean_loss(model, params, rows, parts)
    if microbatches == 1:
        return jax.value_and_grad(loss(model))(params, tokens)
    # Under the `vmap` over replicas "data" is the mapped axis.
    inner = build(model.framework, model.config, model.sharding.without("data"))
    return accumulate_gradients(
        loss(inner),
        params,
        _split(tokens, microbatches, mesh.shape["data"], mesh.shape["fsdp"]),
        replicas="data",
        specs=jax.tree.map(lambda s: s.spec, model.shardings(model.abstract, mesh)),
    )


def laid_out_as(shardings: Params, gradient: Params, mesh: Mesh) -> Params:
    """Gives the gradient in the memory order of the parameters; on GPUs, where "fsdp" cuts it.

    XLA scatters a sum along the first dimension in memory. A gradient that is cut along another
    comes out transposed, and turned in the kernel of the update, which then cannot write over the
    parameter and its moments: each was copied. Turned by itself, it is read and written once.

    Args:
      shardings: of the parameters.
      gradient: in the same structure.
      mesh: theirs.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return gradient

    def lay_out(x: Array, sharding: NamedSharding) -> Array:
        spec = sharding.spec
        if "fsdp" not in spec[1:]:
            return x
        # In a shard_map: JAX 0.10's XLA would gather what has a layout constraint.
        return jax.shard_map(_row_major, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    return jax.tree.map(lay_out, gradient, shardings)


def _row_major(x: Array) -> Array:
    ordered = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(ordered)  # not in the update's kernel after all


def _split(tokens: Array, microbatches: int, replicas: int, fsdp: int) -> Array:
    """Cuts a batch into `(microbatches, rows, seq + 1)`, each device keeping its rows."""
    rows = tokens.reshape(replicas, fsdp, microbatches, -1, tokens.shape[-1])
    rows = rows.transpose(2, 0, 1, 3, 4).reshape(microbatches, -1, tokens.shape[-1])
    return jax.lax.with_sharding_constraint(rows, P(None, ("data", "fsdp"), None))
