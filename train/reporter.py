"""What a run tells of its steps: lines for metrics.jsonl, figures for the display."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from normfuse.models.config import flops_per_token
from normfuse.train.config import TrainConfig
from normfuse.train.display import Display, Pace, Shown
from normfuse.train.errors import RunError
from normfuse.train.metrics import NATS_PER_BIT
from normfuse.train.step import Metrics


@dataclass
class Reporter:
    """Turns a step's metrics into its line in metrics.jsonl and its figures on the display.

    Args:
      config: the run's.
      write: takes a line of metrics.jsonl.
      display: the bar.
      peak: FLOP/s of all devices together, or None.
      skip_limit: updates that may be left out.
    """

    config: TrainConfig
    write: Callable[[dict], None]
    display: Display
    peak: float | None
    skip_limit: int
    skipped: int = 0
    last_loss: float = math.nan
    _finished: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        self._pace = Pace(self.config.tokens_per_step)
        model = self.config.transformer()
        self._flops = flops_per_token(model, self.config.seq_len)

    def step(self, step: int, metrics: Metrics, started: float):
        """Waits for a step's metrics and reports them.

        Raises:
          NotFinite: more updates were left out than allowed; the state is that before the step.
        """
        loss, grad_norm, rate, skipped = (np.asarray(x) for x in metrics)
        now = time.perf_counter()
        seconds = now - max(started, self._finished)
        self._finished = now
        left_out, self.skipped = int(skipped) > self.skipped, int(skipped)
        if left_out:
            self._note_skip(step, float(loss), float(grad_norm))
        else:
            self.last_loss = float(loss)
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

    def validation(self, step: int, loss: float):
        """Reports a validation after `step`."""
        line = validation_line(step, loss)
        self.write(line)
        bits = line["val_bits_per_byte"]
        self.display.note(
            f"step {step}: validation loss {loss:.4f} nats/byte, {bits:.3f} bits/byte"
        )

    def _show(self, step: int, loss: float, seconds: float):
        pace = self._pace.add(seconds)
        mfu = pace * self._flops / self.peak if self.peak else None
        self.display.step(Shown(step, loss, pace, mfu, self._pace.eta(self.config.steps - step)))

    def _note_skip(self, step: int, loss: float, grad_norm: float):
        what = f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}"
        if self.skipped > self.skip_limit:
            self.write({"event": "not finite", "step": step, "loss": loss, "time": time.time()})
            raise NotFinite(step, f"{what}; the last finite loss was {self.last_loss:.4f}")
        left = self.skip_limit - self.skipped
        self.display.note(f"{what}: update left out, {left} more may be", "yellow")


class NotFinite(RunError):
    """A loss or gradient was not finite at `step`; the update was not made."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


def validation_line(step: int, loss: float) -> dict:
    """Gives the line of metrics.jsonl for a validation after `step`."""
    return {"step": step, "val_loss": loss, "val_bits_per_byte": loss / NATS_PER_BIT}
