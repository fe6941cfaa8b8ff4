"""One optimizer step: gradient, guard, update; compiled once, its state updated in place."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from ..models.functional import Functional, Params
from .gradients import laid_out_as, loss_and_gradient
from .mesh import batch_sharding, replicated

_USUAL_STEPS = 20  # over about so many the usual loss is the mean


class State(NamedTuple):
    """What a step reads and writes, and a checkpoint holds.

    Attributes:
      step: optimizer steps taken, int32.
      params: the parameters.
      optimizer: optax's state.
      skipped: updates left out because the step was bad, int32.
      usual_loss: mean loss of the last good steps, float32.
    """

    step: Array
    params: Params
    optimizer: Any
    skipped: Array
    usual_loss: Array


class Metrics(NamedTuple):
    """What a step reports.

    Attributes:
      loss: mean cross-entropy in nats per token, float32.
      grad_norm: global norm of the gradient before clipping, float32.
      learning_rate: of the update, float32.
      skipped: `State.skipped` after the step.
      usual_loss: `State.usual_loss` before the step.
    """

    loss: Array
    grad_norm: Array
    learning_rate: Array
    skipped: Array
    usual_loss: Array


def _after(params: Params, accept: Array, mesh: Mesh) -> tuple[Array, Params]:
    """Has what needs the returned `accept` computed after the new parameters, on the CPU.

    There XLA computes an optimizer's moments twice, for themselves and for the parameters. In no
    order, the first would overwrite the old moments while the second may still read them, and so
    all moments are copied at every step. Elsewhere one kernel may have all three as results, and
    nothing is done.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return accept, params
    accept, params = jax.lax.optimization_barrier((accept, params))
    if mesh.size == 1 and jax.__version_info__ < (0, 11):
        # XLA then forgets barriers before it places copies, but not what a value is made of.
        some = sum(x.ravel()[0] for x in jax.tree.leaves(params))
        accept &= some == some
    return accept, params


@dataclass(frozen=True)
class Program:
    """What a run does with its state, as functions on the mesh.

    Attributes:
      model: the transformer.
      optimizer: the gradient transformation.
      learning_rate: its schedule.
      mesh: the mesh.
      microbatches: parts of a batch.
      skip_limit: updates that may be left out before the run is halted.
      spike: a loss above this many times the usual one is bad; 0: only one that is not finite.
      parts: of a microbatch, computed side by side.
    """

    model: Functional
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    mesh: Mesh
    microbatches: int
    skip_limit: int
    spike: float = 0.0
    parts: int = 1

    def abstract(self) -> State:
        """Gives the state's shapes, dtypes and shardings, without allocating any of it."""
        key = jax.eval_shape(jax.random.key, 0)  # the mesh's devices may be only described
        shapes = jax.eval_shape(self._init, key)
        make = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(make, shapes, self.model.shardings(shapes, self.mesh))

    def shardings(self) -> State:
        """Gives the state's shardings: moments lie as their parameters do, scalars everywhere."""
        return jax.tree.map(lambda x: x.sharding, self.abstract())

    def init(self, seed: int) -> State:
        """Makes the state a run starts from: the same values on every mesh."""
        return jax.jit(self._init, out_shardings=self.shardings())(jax.random.key(seed))

    def lower(self, batch_size: int, seq_len: int) -> jax.stages.Lowered:
        """Traces the step `(state, tokens) -> (state, metrics)` for `(batch, seq + 1)` tokens.

        Compiled, it accepts exactly these shapes and shardings: a run cannot compile twice.
        """
        shape = (batch_size, seq_len + 1)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(self.mesh))
        out = (self.shardings(), replicated(self.mesh))
        return jax.jit(self._step, donate_argnums=0, out_shardings=out).lower(
            self.abstract(), tokens
        )

    def _init(self, key: Array) -> State:
        params = self.model.init(key)
        zero = jnp.zeros((), jnp.int32)
        return State(zero, params, self.optimizer.init(params), zero, jnp.zeros((), jnp.float32))

    def _step(self, state: State, tokens: Array) -> tuple[State, Metrics]:
        loss, gradient = loss_and_gradient(
            self.model,
            state.params,
            tokens,
            microbatches=self.microbatches,
            mesh=self.mesh,
            parts=self.parts,
        )
        gradient = laid_out_as(self.model.shardings(gradient, self.mesh), gradient, self.mesh)
        grad_norm = optax.tree.norm(gradient)
        taken = state.step - state.skipped
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if self.spike:
            judged = taken >= _USUAL_STEPS  # the first losses fall too fast to be judged
            good &= ~judged | (loss <= self.spike * state.usual_loss)
        skipped = state.skipped + jnp.where(good, 0, 1)
        # Past the limit nothing changes any more: the state stays that before the bad step while
        # the host, which sees a step's metrics only after it has started the next, finds out.
        running = skipped <= self.skip_limit
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.params)
        mean = state.usual_loss
        share = 1 / jnp.minimum(taken + 1, _USUAL_STEPS).astype(jnp.float32)
        usual = mean + (loss.astype(jnp.float32) - mean) * share
        accept = good & running
        keep = lambda accept: lambda new, old: jnp.where(accept, new, old)
        params = optax.apply_updates(state.params, updates)
        params = jax.tree.map(keep(accept), params, state.params)
        after, params = _after(params, accept, self.mesh)
        optimizer, usual = jax.tree.map(keep(after), (optimizer, usual), (state.optimizer, mean))
        step = state.step + jnp.where(running, 1, 0)
        rate = jnp.asarray(self.learning_rate(taken), jnp.float32)
        metrics = Metrics(loss, grad_norm, rate, skipped, mean)
        return State(step, params, optimizer, skipped, usual), metrics
