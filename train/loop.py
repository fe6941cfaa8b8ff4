"""The training loop: steps run on the devices while the host logs the one before."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from jax import Array

from ..models.functional import Params
from . import RunError
from .config import TrainConfig
from .display import Display, duration, short
from .evaluate import Validation
from .metrics import NATS_PER_BIT
from .step import Metrics, State


class BadStep(RunError):
    """The loss or gradient of `step` was not finite; no update was made."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step
        # The state before it, but halted; set by the loop.
        self.state: State | None = None


@dataclass
class Loop:
    """Takes the steps of a run, with validations and checkpoints in between, and logs them."""

    config: TrainConfig
    step: Callable[[State, Array], tuple[State, Metrics]]  # compiled
    batches: Iterator[Array]  # on the devices, from the first step to take
    evaluate: Callable[[Params, int], Validation | None]  # takes a token count; None: stopped
    save: Callable[[State, int], None]
    write: Callable[[dict], None]  # takes a line of metrics.jsonl
    display: Display
    stopping: Callable[[], bool]  # returns True on all processes or on none
    tokens_per_byte: float = 1.0  # average over the text
    _finished: float = field(default_factory=time.perf_counter)
    # Those of the last steps, whose median is shown: a mean would show every wait ten times.
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    def run(self, state: State, done: int) -> tuple[State, int]:
        """Takes steps `done + 1` to the last, or until asked to stop; saves where it ends.

        The host reads the metrics of a step after it has handed the next to the devices.

        Returns: the state and the number of steps taken in all.
        """
        config = self.config
        waiting: list[tuple[int, Metrics, float]] = []

        def drain(keep: int = 0) -> None:
            while len(waiting) > keep:
                self.log(*waiting.pop(0))

        due = lambda step, every: 0 < every and step % every == 0 and step < config.steps
        try:
            for step in range(done + 1, config.steps + 1):
                if self.stopping():
                    break
                started = time.perf_counter()
                state, metrics = self.step(state, next(self.batches))
                waiting.append((step, metrics, started))
                drain(keep=1)
                done = step
                if due(step, config.eval.every):
                    drain()
                    self._validate(state, step)
                if due(step, config.checkpoint.every):
                    drain()  # the file must hold every step that the checkpoint has taken
                    self.save(state, step)
            drain()
        except BadStep as bad:
            bad.state = state  # steps after the bad one do not change it
            raise
        if done > 0:
            self.save(state, done)
        return state, done

    def _validate(self, state: State, step: int) -> None:
        validation = self.evaluate(state.params, self.config.eval.tokens)
        if validation is not None:
            self.write(validation.entry(step))
            self.display.note(f"step {step}: validation {validation}")

    def log(self, step: int, metrics: Metrics, started: float) -> None:
        """Waits for a step's metrics and logs them; BadStep if it was not finite."""
        loss, grad_norm, rate, halted = (np.asarray(x).item() for x in metrics)
        now = time.perf_counter()
        seconds = now - max(started, self._finished)
        self._finished = now
        if halted:
            self.write({"event": "not finite", "step": step, "loss": loss, "time": time.time()})
            text = f"step {step}: not finite: loss {loss:.4f}, gradient norm {grad_norm:g}"
            raise BadStep(step, text)
        tokens = self.config.tokens_per_step
        entry = {
            "step": step,
            "loss": loss,
            "tokens": step * tokens,
            "tokens_per_s": tokens / seconds,
            "step_time_s": seconds,
            "grad_norm": grad_norm,
            "lr": rate,
            "time": time.time(),
        }
        self.write(entry)
        self._seconds.append(seconds)
        usual_seconds = statistics.median_low(self._seconds)
        figures = [
            f"loss {loss:.4f}",
            f"{loss / NATS_PER_BIT * self.tokens_per_byte:.3f} bits/byte",
            f"{short(tokens / usual_seconds)} tokens/s",
            f"ETA {duration(usual_seconds * (self.config.steps - step))}",
        ]
        self.display.step(step, figures)
