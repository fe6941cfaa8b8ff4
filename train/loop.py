"""The loop: steps follow each other on the devices while the host reports the one before."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jax import Array

from ..models.functional import Params
from .config import TrainConfig
from .evaluate import Validation
from .reporter import BadStep, Reporter
from .step import Metrics, State


@dataclass
class Loop:
    """Takes the steps of a run, with validations and checkpoints in between.

    Args:
      config: the run's.
      step: the compiled step.
      batches: batches on the devices, from the first step to take.
      evaluate: `(params, tokens)` to the validation's result, None when interrupted.
      save: saves the state of a step.
      reporter: told of every step.
      stopping: whether to stop, the same on all processes.
      on_step: called before each step, with its number and with what waits for those before.
    """

    config: TrainConfig
    step: Callable[[State, Array], tuple[State, Metrics]]
    batches: Iterator[Array]
    evaluate: Callable[[Params, int], Validation | None]
    save: Callable[[State, int], None]
    reporter: Reporter
    stopping: Callable[[], bool]
    on_step: Callable[[int, Callable[[], None]], None] = lambda step, settle: None

    def run(self, state: State, done: int) -> tuple[State, int]:
        """Takes steps `done + 1` to the last, or until asked to stop; saves where it ends.

        The host reads the metrics of a step after it has handed the next to the devices.

        Returns: the state and the steps taken in all.
        Raises:
          BadStep: with the state before it.
        """
        config = self.config
        waiting: list[tuple[int, Metrics, float]] = []

        def drain():
            while waiting:
                self.reporter.step(*waiting.pop(0))

        try:
            for step in range(done + 1, config.steps + 1):
                if self.stopping():
                    break
                self.on_step(step, drain)
                started = time.perf_counter()
                state, metrics = self.step(state, next(self.batches))
                waiting.append((step, metrics, started))
                if len(waiting) > 1:
                    self.reporter.step(*waiting.pop(0))
                done = step
                if _due(step, config.eval.every) and step < config.steps:
                    drain()
                    self._validate(state, step)
                if _due(step, config.checkpoint.every) and step < config.steps:
                    drain()  # the file must hold every step that the checkpoint has taken
                    self.save(state, step)
            drain()
        except BadStep as bad:
            bad.state = state  # past the limit, steps leave it alone
            raise
        if done > 0:
            self.save(state, done)
        return state, done

    def _validate(self, state: State, step: int):
        self.reporter.display.phase("validating")
        found = self.evaluate(state.params, self.config.eval.tokens)
        if found is not None:
            self.reporter.validation(step, found)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
