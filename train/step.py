"""One optimizer step: loss, gradient, guard, update; compiled once, its state updated in place."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..layers.accumulate import accumulate_gradients
from ..models.config import TransformerConfig
from ..models.functional import Functional, Params, build
from .config import OptimConfig, TrainConfig
from .mesh import batch_sharding, make_sharding

# With this cuBLAS takes every product, with the addition after it (beta = 1). If Triton is on,
# versions before JAX 0.12's take products away before they look for sums, which costs a pass over
# the gradient of q, k and v with respect to x, and over that of gate and up.
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class State(NamedTuple):
    """The state that a step updates and a checkpoint holds."""

    step: Array  # optimizer steps taken, int32
    params: Params
    optimizer: Any  # optax's state
    halted: Array  # bool: a loss or gradient was not finite


class Metrics(NamedTuple):
    loss: Array  # mean cross-entropy in nats per token, float32
    grad_norm: Array  # global norm of the gradient before clipping, float32
    learning_rate: Array  # this update's learning rate, float32
    halted: Array  # `State.halted` after the step


@dataclass(frozen=True)
class Program:
    """A run's initialisation and step, as functions on the mesh."""

    model: Functional
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    mesh: Mesh
    microbatches: int  # parts of a batch

    def abstract(self) -> State:
        """Returns the state's shapes, dtypes and shardings, without allocating it."""
        key = jax.eval_shape(jax.random.key, 0)  # the mesh's devices may be only described
        shapes = jax.eval_shape(self._init, key)
        make = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(make, shapes, self.model.shardings(shapes, self.mesh))

    def shardings(self) -> State:
        """Returns the state's shardings: moments as their parameters, scalars replicated."""
        return jax.tree.map(lambda x: x.sharding, self.abstract())

    def init(self, seed: int, params: Params | None = None) -> State:
        """Makes the state a run starts from, of parameters or of random ones, alike on any mesh."""
        if params is not None:
            return jax.jit(self._start, out_shardings=self.shardings(), donate_argnums=0)(params)
        return jax.jit(self._init, out_shardings=self.shardings())(jax.random.key(seed))

    def lower(self, batch_size: int, seq_len: int) -> jax.stages.Lowered:
        """Traces the step `(state, tokens) -> (state, metrics)` for a batch of `data.batches`.

        The compiled step accepts exactly these shapes and shardings: a run cannot compile twice.
        """
        rows = batch_sharding(self.mesh)
        tokens = jax.ShapeDtypeStruct((batch_size, seq_len + 1), jnp.int32, sharding=rows)
        state = self.abstract()
        out = (jax.tree.map(lambda x: x.sharding, state), NamedSharding(self.mesh, P()))
        options = GPU_OPTIONS if _on_gpus(self.mesh) else None
        step = jax.jit(self._step, donate_argnums=0, out_shardings=out, compiler_options=options)
        return step.lower(state, tokens)

    def _init(self, key: Array) -> State:
        return self._start(self.model.init(key))

    def _start(self, params: Params) -> State:
        step, halted = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
        return State(step, params, self.optimizer.init(params), halted)

    def _step(self, state: State, tokens: Array) -> tuple[State, Metrics]:
        loss, gradient = loss_and_gradient(
            self.model, state.params, tokens, microbatches=self.microbatches, mesh=self.mesh
        )
        places = self.model.shardings(gradient, self.mesh)
        # Before its norm and the update read it: XLA scatters a sum only if one slice reads it.
        gradient = jax.lax.with_sharding_constraint(gradient, places)
        gradient = laid_out_as(places, gradient, self.mesh)
        grad_norm = optax.tree.norm(gradient)
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & ~state.halted
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.params)
        # After a bad step nothing changes any more: the state stays that before it until the host
        # notices, which reads a step's metrics only after it has started the next.
        keep = lambda new, old: jnp.where(good, new, old)
        params = optax.apply_updates(state.params, updates)
        params = jax.tree.map(keep, params, state.params)
        optimizer = jax.tree.map(keep, optimizer, state.optimizer)
        rate = jnp.asarray(self.learning_rate(state.step), jnp.float32)
        step = state.step + jnp.where(good, 1, 0)
        return State(step, params, optimizer, ~good), Metrics(loss, grad_norm, rate, ~good)


def make_program(config: TrainConfig, transformer: TransformerConfig, mesh: Mesh) -> Program:
    sharding = make_sharding(config.mesh, mesh, config.batch_size // config.microbatches)
    return Program(
        build(config.framework, transformer, sharding),
        make_optimizer(config.optim, config.steps),
        schedule(config.optim, config.steps),
        mesh,
        config.microbatches,
    )


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate by step, from 0: linear up, then a cosine down to `final_lr`."""
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
    """Returns AdamW with weight decay on matrices only, after clipping by the global norm.

    References: Loshchilov and Hutter, arXiv:1711.05101; Pascanu et al., arXiv:1211.5063.
    """
    clip = optax.clip_by_global_norm(config.clip) if config.clip else optax.identity()
    matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    adamw = optax.adamw(
        schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        mu_dtype=config.mu_dtype,
        weight_decay=config.weight_decay,
        mask=matrices,
    )
    return optax.chain(clip, adamw)


def loss_and_gradient(
    model: Functional, params: Params, tokens: Array, *, microbatches: int, mesh: Mesh
) -> tuple[Array, Params]:
    """Returns a batch's mean loss and its gradient, computed in `microbatches` parts.

    Gradients of microbatches are summed in float32 (`normfuse.accumulate_gradients`). Each replica
    sums its own, and one reduction at the end adds them up. Over "fsdp" every microbatch is
    reduced, or each device would have to hold a whole gradient.

    Args:
      tokens: a batch of `data.batches`, rows split over "data" and "fsdp".
      microbatches: parts; times the mesh's "data" and "fsdp" they divide the batch.
    """
    loss = lambda model: lambda params, rows: model.loss(params, rows[:, :-1], rows[:, 1:])
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


def _on_gpus(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "gpu"


def laid_out_as(shardings: Params, gradient: Params, mesh: Mesh) -> Params:
    """Returns the gradient in the parameters' memory order, on GPUs where "fsdp" splits it.

    XLA scatters a sum along the first dimension in memory, so a gradient split along another comes
    out transposed. If the update's kernel transposes it, it cannot write over the parameter and its
    moments, and each is copied. Transposed on its own, the gradient is read and written once.
    """
    if not _on_gpus(mesh):
        return gradient

    def lay_out(x: Array, sharding: NamedSharding) -> Array:
        spec = sharding.spec
        if "fsdp" not in spec[1:]:
            return x
        # In a shard_map: JAX 0.10's XLA would gather an array with a layout constraint.
        return jax.shard_map(_row_major, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    return jax.tree.map(lay_out, gradient, shardings)


def _row_major(x: Array) -> Array:
    ordered = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(ordered)  # keeps XLA from fusing it into the update


def _split(tokens: Array, microbatches: int, replicas: int, fsdp: int) -> Array:
    """Splits a batch into `(microbatches, rows, tokens)`; each device keeps its rows."""
    rows = tokens.reshape(replicas, fsdp, microbatches, -1, tokens.shape[1])
    rows = jnp.moveaxis(rows, 2, 0).reshape(microbatches, -1, tokens.shape[1])
    return jax.lax.with_sharding_constraint(rows, P(None, ("data", "fsdp"), None))
