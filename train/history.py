"""What a run's folder tells of it afterwards: for its own plot, and for reports of several."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import metrics
from .data import Text
from .metrics import NATS_PER_BIT
from .outdir import OutDir


@dataclasses.dataclass(frozen=True)
class History:
    """One run.

    Attributes:
      label: its name in pictures.
      lines: its metrics.jsonl.
      tokens_per_byte: of its text.
      references: a simple model's name to its bits per byte on the held-out text.
      breakdown: milliseconds of a step by kind of operation; empty if it was not profiled.
    """

    label: str
    lines: Sequence[Mapping[str, Any]]
    tokens_per_byte: float = 1.0
    references: Mapping[str, float] = dataclasses.field(default_factory=dict)
    breakdown: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def steps(self) -> list[Mapping[str, Any]]:
        """Gives the lines of steps whose loss was finite."""
        return [line for line in self.lines if line.get("loss") is not None and "lr" in line]

    def validations(self) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line.get("val_loss") is not None]

    def bits_per_byte(self, loss: float) -> float:
        """Converts nats per token."""
        return loss / NATS_PER_BIT * self.tokens_per_byte


def read(out: OutDir, label: str) -> History:
    """Reads a run's folder; what is not there, or was cut off, is left out."""
    text = _object(out.text)
    return History(
        label,
        metrics.read(out.metrics),
        text.get("tokens_per_byte", 1.0),
        text.get("references", {}),
        _object(out.profile / "breakdown.json"),
    )


def write_text(out: OutDir, text: Text, references: Mapping[str, float] | None = None):
    """Writes text.json: the text's identity, and what losses on it are compared with."""
    entries = text.identity() | {"tokens_per_byte": text.tokens_per_byte}
    if references is not None:
        entries |= {"references": references}
    out.text.write_text(json.dumps(entries, indent=2) + "\n")


def _object(path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
