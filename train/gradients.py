"""The loss, and its gradient over microbatches with one reduction between replicas per step."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from normfuse.models.functional import Functional, Params, build
from normfuse.models.sharding import Sharding, on_mesh


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


def mean_loss(model: Functional, params: Params, tokens: Array) -> Array:
    """Gives the mean loss of `(batch, seq + 1)` tokens: the first are inputs, the last targets."""
    return token_losses(model.apply(params, tokens[:, :-1]), tokens[:, 1:]).mean()


def loss_and_gradient(
    model: Functional, params: Params, tokens: Array, *, microbatches: int, mesh: Mesh
) -> tuple[Array, Params]:
    """Gives a batch's mean loss and its gradient, computed in `microbatches` parts.

    Over microbatches, gradients are summed in float32. Each replica sums its own and they are
    added up once at the end: "data" becomes a leading axis of the gradients (by `vmap`) that stays
    split over the replicas until then. Over "fsdp" every microbatch is reduced, or each device
    would have to hold a whole gradient.

    Args:
      model: the transformer.
      params: its parameters.
      tokens: `(batch, seq + 1)` integers, rows split over "data" and "fsdp".
      microbatches: parts; with the mesh's "data" and "fsdp" they divide the batch.
      mesh: the mesh.
    """
    gradient = lambda model: (
        lambda rows: jax.value_and_grad(lambda params: mean_loss(model, params, rows))(params)
    )
    if microbatches == 1:
        return gradient(model)(tokens)
    replicas = mesh.shape["data"]
    inner = build(model.framework, model.config, _without_data(model.sharding))
    per_replica = jax.vmap(gradient(inner), spmd_axis_name="data")
    rows = _split(tokens, microbatches, replicas, mesh.shape["fsdp"])
    place = _placed(model, mesh)
    like = jax.eval_shape(per_replica, jax.eval_shape(lambda rows: rows[0], rows))
    zeros = place(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like))

    def add(total, rows):
        new = per_replica(rows)
        return place(jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, new)), None

    total, _ = jax.lax.scan(add, zeros, rows)
    return jax.tree.map(lambda t: t.sum(0) / (microbatches * replicas), total)


def _split(tokens: Array, microbatches: int, replicas: int, fsdp: int) -> Array:
    """Cuts a batch into `(microbatches, replicas, rows, seq + 1)`, each device keeping its rows."""
    rows = tokens.reshape(replicas, fsdp, microbatches, -1, tokens.shape[-1])
    rows = rows.transpose(2, 0, 1, 3, 4).reshape(microbatches, replicas, -1, tokens.shape[-1])
    return jax.lax.with_sharding_constraint(rows, P(None, "data", "fsdp", None))


def _placed(model: Functional, mesh: Mesh):
    """Makes the constraint for gradients with a leading axis of replicas."""
    specs = jax.tree.map(lambda s: P("data", *s.spec), model.shardings(model.abstract, mesh))
    return lambda total: jax.lax.with_sharding_constraint(total, (P("data"), specs))


def _without_data(sharding: Sharding) -> Sharding:
    """Drops "data" from every spec: under the `vmap` it is the mapped axis."""
    fields = dataclasses.fields(sharding)
    return Sharding(
        **{f.name: on_mesh(getattr(sharding, f.name), ("fsdp", "tensor")) for f in fields}
    )
