"""What a run tells of its steps: lines for metrics.jsonl, figures for the display."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..models.config import flops_per_token
from .config import TrainConfig
from .display import Display, Pace, Shown
from .errors import RunError
from .evaluate import Validation
from .metrics import NATS_PER_BIT
from .step import Metrics, State


@dataclass
class Reporter:
    """Turns a step's metrics into its line in metrics.jsonl and its figures on the display.

    Args:
      config: the run's.
      write: takes a line of metrics.jsonl.
      display: the bar.
      peak: FLOP/s of all devices together, or None.
      skip_limit: updates that may be left out.
      tokens_per_byte: of the text.
    """

    config: TrainConfig
    write: Callable[[dict], None]
    display: Display
    peak: float | None
    skip_limit: int
    tokens_per_byte: float = 1.0
    skipped: int = 0
    _finished: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        self._pace = Pace(self.config.tokens_per_step)
        model = self.config.transformer()
        self._flops = flops_per_token(model, self.config.seq_len)

    def step(self, step: int, metrics: Metrics, started: float):
        """Waits for a step's metrics and reports them.

        Raises:
          BadStep: more updates were left out than allowed; the state is that before the step.
        """
        loss, grad_norm, rate, skipped, usual = (np.asarray(x) for x in metrics)
        now = time.perf_counter()
        seconds = now - max(started, self._finished)
        self._finished = now
        left_out, self.skipped = int(skipped) > self.skipped, int(skipped)
        if left_out:
            self._note_skip(step, float(loss), float(grad_norm), float(usual))
        tokens = self.config.tokens_per_step
        entry = {
            "step": step,
            "loss": float(loss),
            "tokens": step * tokens,
            "tokens_per_s": tokens / seconds,
            "step_time_s": seconds,
            "grad_norm": float(grad_norm),
            "lr": float(rate),
            "time": time.time(),
        }
        self.write(entry | ({"skipped": True} if left_out else {}))
        self._show(step, float(loss), seconds)

    def validation(self, step: int, found: Validation):
        """Reports a validation after `step`."""
        self.write(validation_line(step, found))
        self.display.note(
            f"step {step}: validation loss {found.loss:.4f} nats/token, "
            f"{found.bits_per_byte:.3f} bits/byte"
        )

    def _show(self, step: int, loss: float, seconds: float):
        pace = self._pace.add(seconds)
        mfu = pace * self._flops / self.peak if self.peak else None
        bits = loss / NATS_PER_BIT * self.tokens_per_byte
        eta = self._pace.eta(self.config.steps - step)
        self.display.step(Shown(step, loss, bits, pace, mfu, eta))

    def _note_skip(self, step: int, loss: float, grad_norm: float, usual: float):
        spike = math.isfinite(loss) and math.isfinite(grad_norm)
        event = "spike" if spike else "not finite"
        what = f"step {step}: {event}: loss {loss:.4f}, gradient norm {grad_norm:g}"
        if usual:
            what += f", where the usual loss is {usual:.4f}"
        if self.skipped > self.skip_limit:
            self.write({"event": event, "step": step, "loss": loss, "time": time.time()})
            raise BadStep(step, what)
        left = self.skip_limit - self.skipped
        self.display.note(f"{what}; update left out, {left} more may be", "yellow")


class BadStep(RunError):
    """The loss or gradient of `step` was not finite, or the loss a spike; no update was made.

    Attributes:
      step: the step.
      state: that before the step, but for its count of updates left out; set by the loop.
    """

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step
        self.state: State | None = None


def validation_line(step: int, found: Validation) -> dict:
    """Gives the line of metrics.jsonl for a validation after `step`."""
    return {"step": step, "val_loss": found.loss, "val_bits_per_byte": found.bits_per_byte}
