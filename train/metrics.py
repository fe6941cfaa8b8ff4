"""metrics.jsonl: one JSON object a line, each step once, whatever interrupted the run.

Step lines hold `step` (from 1), `loss` (nats per token, the float32 value exactly), `tokens` seen
so far, `tokens_per_s`, `step_time_s`, `grad_norm`, `lr` and `time` (Unix seconds); validation lines
`step`, `val_loss` and `val_bits_per_byte`; a resumed run adds `{"event": "resume", ...}`.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from .errors import RunError

NATS_PER_BIT = math.log(2)


class MetricsLog:
    """Appends to a run's metrics.jsonl; every line is with the operating system when it returns.

    Args:
      path: the file.
      from_step: a resumed run's last step: what the file says of later steps is dropped, as is a
        line that was cut off. None starts a new file.
      final: the run's last step. When resuming there, its validation is made again, and dropped.

    Raises:
      RunError: the file cannot be written; so do the methods.
    """

    def __init__(self, path: Path, *, from_step: int | None = None, final: int | None = None):
        kept = [] if from_step is None else [x for x in read(path) if _keeps(x, from_step, final)]
        self._path, whole = path, path.with_suffix(".tmp")
        with self._explained():
            whole.write_text("".join(_line(entry) for entry in kept))
            os.replace(whole, path)
            self._file = path.open("a", buffering=1)
        if from_step is not None:
            self.write({"event": "resume", "from_step": from_step, "time": time.time()})

    def write(self, entry: dict[str, Any]):
        with self._explained():
            self._file.write(_line(entry))

    def sync(self):
        """Returns when all lines are on the disk."""
        with self._explained():
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self):
        with self._explained():
            self._file.close()

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except OSError as error:
            raise RunError(f"{self._path} could not be written: {error.strerror}") from error


class Sink(Protocol):
    """Takes the lines of metrics.jsonl."""

    def write(self, entry: dict[str, Any]): ...
    def sync(self): ...
    def close(self): ...


class Sinks:
    """Passes each line to several sinks, or to none on the processes that write nothing."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = sinks

    def write(self, entry: dict[str, Any]):
        for sink in self._sinks:
            sink.write(entry)

    def sync(self):
        for sink in self._sinks:
            sink.sync()

    def close(self):
        for sink in self._sinks:
            sink.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl; a line cut off by a crash is left out. A missing file is empty."""
    return list(_entries(path)) if path.exists() else []


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry


def _keeps(entry: dict[str, Any], from_step: int, final: int | None) -> bool:
    if "event" in entry:
        return entry.get("from_step", entry.get("step", 0)) <= from_step
    if "val_loss" in entry and from_step == final:
        return entry["step"] < from_step
    return entry.get("step", 0) <= from_step


def _line(entry: dict[str, Any]) -> str:
    # NaN is not JSON: readers in other languages stop at it.
    bare = lambda x: None if isinstance(x, float) and not math.isfinite(x) else x
    return json.dumps({name: bare(value) for name, value in entry.items()}) + "\n"
