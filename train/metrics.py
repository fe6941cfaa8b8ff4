"""The figures of a run: metrics.jsonl.

It holds one JSON object a line, and each step once, whatever interrupted the run. Step
lines have `step` (from 1), `loss` (nats per token, the float32 value exactly), `tokens` seen so
far, `tokens_per_s`, `step_time_s`, `grad_norm`, `lr` and `time` (Unix seconds); validation lines
`step`, `val_loss` and `val_bits_per_byte`; a resume adds `{"event": "resume", ...}`.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from . import RunError
from .arguments import reason
from .files import write

NATS_PER_BIT = math.log(2)


class MetricsLog:
    """Appends to a run's metrics.jsonl.

    The operating system has every line when `write` returns. All methods raise a RunError if it
    cannot be written.

    Args:
      path: the file; None writes nothing (all processes but the first).
      from_step: a resumed run's last step: lines of later steps are dropped, as is a line that was
        cut off. None starts a new file.
      final: the run's last step. A resume at that step drops its validation, which is repeated.
    """

    def __init__(
        self, path: Path | None, *, from_step: int | None = None, final: int | None = None
    ) -> None:
        self._path, self._file = path, None
        if path is None:
            return
        with self._explained():
            lines = [] if from_step is None else read(path)
            lines = [_line(entry) for entry in lines if _keeps(entry, from_step or 0, final)]
            write(path, "".join(lines))
            self._file = path.open("a", buffering=1, encoding="utf-8")
        if from_step is not None:
            self.write({"event": "resume", "from_step": from_step, "time": time.time()})

    def write(self, entry: dict[str, Any]) -> None:
        if self._file:
            with self._explained():
                self._file.write(_line(entry))

    def sync(self) -> None:
        """Returns when all lines are on the disk."""
        if self._file:
            with self._explained():
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            with self._explained():
                self._file.close()

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
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry for line in content.split(b"\n") if (entry := _entry(line)) is not None]


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value read from JSON is a finite number, of a size that a plot can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _entry(line: bytes) -> dict[str, Any] | None:
    """Reads a line; None if it is not one that a run writes."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    step = entry.get("from_step" if entry.get("event") == "resume" else "step")
    return entry if isinstance(step, int) and is_number(step) else None


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
