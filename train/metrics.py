"""The figures of a run: metrics.jsonl, TensorBoard's events, throughput, and MFU's peak.

metrics.jsonl holds one JSON object a line, and each step once, whatever interrupted the run. Step
lines have `step` (from 1), `loss` (nats per token, the float32 value exactly), `tokens` seen so
far, `tokens_per_s`, `step_time_s`, `grad_norm`, `lr` and `time` (Unix seconds); validation lines
`step`, `val_loss` and `val_bits_per_byte`; a resume adds `{"event": "resume", ...}`.
"""

import collections
import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from . import RunError
from .arguments import read_bytes, reason

NATS_PER_BIT = math.log(2)

# Dense matrix products, TFLOP/s, from the vendors' data sheets: bfloat16, and what float32 operands
# run at by XLA's default (TF32 on NVIDIA GPUs, one of several bfloat16 passes on TPUs). The first
# key that a device's `device_kind` starts with counts.
_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA GB200": {"bfloat16": 2500, "float32": 1250},
    "NVIDIA B200": {"bfloat16": 2250, "float32": 1100},
    "NVIDIA GH200": {"bfloat16": 989.5, "float32": 494.7},
    "NVIDIA H200": {"bfloat16": 989.5, "float32": 494.7},
    "NVIDIA H100 PCIe": {"bfloat16": 756, "float32": 378},
    "NVIDIA H100 NVL": {"bfloat16": 835, "float32": 417.5},
    "NVIDIA H100": {"bfloat16": 989.5, "float32": 494.7},
    "NVIDIA H20": {"bfloat16": 148, "float32": 74},
    "NVIDIA A100": {"bfloat16": 312, "float32": 156},
    "NVIDIA A10G": {"bfloat16": 70, "float32": 35},
    "NVIDIA A10": {"bfloat16": 125, "float32": 62.5},
    "NVIDIA L40S": {"bfloat16": 362, "float32": 183},
    "NVIDIA L4": {"bfloat16": 121, "float32": 60},
    "TPU v4": {"bfloat16": 275, "float32": 275},
    "TPU v5 lite": {"bfloat16": 197, "float32": 197},
    "TPU v5p": {"bfloat16": 459, "float32": 459},
    "TPU v5": {"bfloat16": 459, "float32": 459},
    "TPU v6 lite": {"bfloat16": 918, "float32": 918},
}
_TENSORBOARD = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_s": "speed/tokens_per_s",
    "val_loss": "validation/loss",
    "val_bits_per_byte": "validation/bits_per_byte",
}


def peak_flops(device_kind: str, precision: str) -> float | None:
    """Returns a device's peak FLOP/s for matrix products; None for one not in the table."""
    found = (peaks for name, peaks in _TFLOPS.items() if device_kind.startswith(name))
    return next((peaks[precision] * 1e12 for peaks in found), None)


class Throughput:
    """The speed at which steps run now: by the median of the last ten.

    A mean would show every wait for ten steps: at the start of the run for the devices and the
    text, later for a checkpoint that is written at the same time.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._seconds: collections.deque[float] = collections.deque(maxlen=10)

    def add(self, step_time_s: float) -> float:
        """Adds a step's seconds; returns the last steps' tokens per second."""
        self._seconds.append(step_time_s)
        return self._tokens / self.step_time_s

    @property
    def step_time_s(self) -> float:
        return statistics.median_low(self._seconds)


class MetricsLog:
    """Appends to a run's metrics.jsonl, and to TensorBoard's events if asked.

    The operating system has every line of metrics.jsonl when `write` returns. All methods raise a
    RunError if it cannot be written.

    Args:
      path: the file; None writes nothing (all processes but the first).
      from_step: a resumed run's last step: lines of later steps are dropped, as is a line that was
        cut off. None starts a new file.
      final: the run's last step. A resume at that step drops its validation, which is repeated.
      tensorboard: folder for the events; None for none.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        from_step: int | None = None,
        final: int | None = None,
        tensorboard: Path | None = None,
    ) -> None:
        self._path, self._file, self._events = path, None, None
        if path is None:
            return
        whole = path.with_suffix(".tmp")
        with self._explained():
            lines = [] if from_step is None else read(path)
            kept = [x for x in lines if _keeps(x, from_step or 0, final)]
            whole.write_text("".join(_line(entry) for entry in kept), encoding="utf-8")
            os.replace(whole, path)
            self._file = path.open("a", buffering=1, encoding="utf-8")
        if tensorboard is not None:
            from tensorboardX import SummaryWriter

            purge = None if from_step is None else from_step + 1  # hides later steps' events
            self._events = SummaryWriter(str(tensorboard), purge_step=purge)
        if from_step is not None:
            self.write({"event": "resume", "from_step": from_step, "time": time.time()})

    def write(self, entry: dict[str, Any]) -> None:
        with self._explained():
            if self._file:
                self._file.write(_line(entry))
        if self._events:
            for name in _TENSORBOARD.keys() & {n for n, x in entry.items() if x is not None}:
                self._events.add_scalar(_TENSORBOARD[name], entry[name], entry["step"])

    def sync(self) -> None:
        """Returns when all lines are on the disk."""
        with self._explained():
            if self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        if self._events:
            self._events.flush()

    def close(self) -> None:
        with self._explained():
            if self._file:
                self._file.close()
            if self._events:
                self._events.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = reason(error, self._path)
            raise RunError(f"{self._path} could not be written: {why}") from error


def read(path: Path) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl, without lines that a crash has damaged; empty if there is none."""
    try:
        content = read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry for line in content.split(b"\n") if (entry := _entry(line)) is not None]


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value read from JSON is a finite number, of a size that a plot can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _entry(line: bytes) -> dict[str, Any] | None:
    """Reads a line; None if it is not one that a run writes."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    step = found.get("from_step" if found.get("event") == "resume" else "step")
    return found if isinstance(step, int) and is_number(step) else None


def _keeps(entry: dict[str, Any], from_step: int, final: int | None) -> bool:
    if entry.get("event") == "resume":
        return entry["from_step"] <= from_step
    if "val_loss" in entry and from_step == final:
        return entry["step"] < from_step
    return entry["step"] <= from_step


def _line(entry: dict[str, Any]) -> str:
    # NaN is not JSON: readers in other languages stop at it.
    bare = lambda x: None if isinstance(x, float) and not math.isfinite(x) else x
    return json.dumps({name: bare(value) for name, value in entry.items()}) + "\n"
