"""The folder of a run: its files, whether a run may use it, and what reports read back from it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import UsageError, metrics
from .config import TrainConfig


class RunDir:
    """The files of one run.

    Args:
      path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.plot = path / "loss.png"
        self.sample = path / "sample.txt"
        self.text = path / "text.json"
        self.tokenizer = path / "tokenizer.json"
        self.stacks = path / "stacks.txt"
        self.profile = path / "profile"
        self.tensorboard = path / "tensorboard"

    def bad_batch(self, step: int) -> Path:
        return self.path / f"bad_batch_{step}.npy"

    def has_checkpoints(self) -> bool:
        """Returns whether a step was saved completely; unfinished saves have other names."""
        folder = self.checkpoints
        return folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())

    def make(self) -> None:
        """Creates the folder and checks that it can be written to.

        Raises:
          UsageError: it cannot.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UsageError(f"--out-dir {self.path} cannot be written to: {error}") from None

    def results(self, label: str) -> "RunResults":
        """Reads what a plot or report shows of the run; leaves out what is missing or cut off."""
        text = _read_object(self.text)
        return RunResults(
            label,
            metrics.read(self.metrics),
            text.get("tokens_per_byte", 1.0),
            text.get("references", {}),
            _read_object(self.profile / "breakdown.json"),
        )


@dataclass(frozen=True)
class RunResults:
    """One run as plots and reports show it.

    Attributes:
      label: its name in plots.
      lines: its metrics.jsonl.
      tokens_per_byte: of its text.
      references: name of a simple model to its bits per byte on the held-out text.
      breakdown: milliseconds of a step by kind of operation; empty without a profile.
    """

    label: str
    lines: Sequence[Mapping[str, Any]]
    tokens_per_byte: float = 1.0
    references: Mapping[str, float] = field(default_factory=dict)
    breakdown: Mapping[str, float] = field(default_factory=dict)

    def steps(self) -> list[Mapping[str, Any]]:
        """Returns the lines of steps with a finite loss."""
        return [line for line in self.lines if line.get("loss") is not None and "lr" in line]

    def validations(self) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line.get("val_loss") is not None]

    def bits_per_byte(self, loss: float) -> float:
        """Converts a loss in nats per token."""
        return loss / metrics.NATS_PER_BIT * self.tokens_per_byte


def choose(config: TrainConfig, unix_time: int) -> RunDir:
    """Returns the run's folder after checking it against `--resume`, without creating it.

    Args:
      config: the run's.
      unix_time: names a new folder; must be the same on every process.

    Raises:
      UsageError: the folder holds something else, or `--resume` forbids what it holds.
    """
    if config.out_dir is None:
        if config.resume == "must":
            raise UsageError("--resume must needs --out-dir, the folder of the run to continue.")
        return RunDir(_new_folder(config.preset, unix_time))
    out = RunDir(config.out_dir)
    if config.resume == "must" and not out.has_checkpoints():
        raise UsageError(
            f"--resume must: --out-dir {out.path} holds no checkpoint. Give the folder of a run "
            "that has saved one, or --resume auto."
        )
    if not out.path.exists():
        return out
    is_run = out.config.exists() or out.has_checkpoints()
    if config.resume == "never" and is_run:
        raise UsageError(
            f"--resume never: --out-dir {out.path} already holds a run. Give another --out-dir, "
            "or --resume auto to continue it."
        )
    if not is_run and any(out.path.iterdir()):
        raise UsageError(
            f"--out-dir {out.path} is not empty and holds no run of normfuse. Give another."
        )
    return out


def _new_folder(preset: str, unix_time: int) -> Path:
    name = f"{preset}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(unix_time))}"
    path, count = Path("runs") / name, 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{name}-{count}"
    return path


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
