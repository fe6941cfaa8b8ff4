"""The folder of a run: its files, whether a run may use it, and reading results back from it."""

import errno
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import UsageError, metrics
from .arguments import named
from .config import TrainConfig
from .files import PART
from .metrics import is_number


class RunDir:
    """The files of one run, in a folder that need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.plot = path / "loss.png"
        self.text = path / "text.json"
        self.tokenizer = path / "tokenizer.json"

    def bad_batch(self, step: int) -> Path:
        return self.path / f"bad_batch_{step}.npy"

    def has_checkpoints(self) -> bool:
        """Returns whether a step was saved completely; unfinished saves have other names.

        Raises:
          OSError: the folder of checkpoints is none, or cannot be read.
        """
        try:
            return any(is_step(entry.name) for entry in self.checkpoints.iterdir())
        except FileNotFoundError:
            return False

    def make(self, new: bool) -> None:
        """Creates the folder, which a `new` one must not be before.

        Raises:
          UsageError: it is there, or cannot be written to.
        """
        with named("--out-dir", self.path, "be written to"):
            self.path.mkdir(parents=True, exist_ok=not new)

    def results(self, label: str) -> "RunResults":
        """Reads the results of the run for plots and reports, without missing or damaged parts.

        Raises:
          OSError: metrics.jsonl is there and cannot be read.
        """
        try:
            per_byte = json.loads(self.text.read_bytes())["tokens_per_byte"]
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            per_byte = None
        return RunResults(
            label,
            metrics.read(self.metrics),
            per_byte if is_number(per_byte) and per_byte > 0 else 1.0,
        )


@dataclass(frozen=True)
class RunResults:
    """One run as plots and reports show it."""

    label: str  # its name in plots
    lines: Sequence[Mapping[str, Any]]  # its metrics.jsonl
    tokens_per_byte: float = 1.0

    def steps(self, *names: str) -> list[Mapping[str, Any]]:
        """Returns the lines of steps with a finite loss, and with numbers by these names, too."""
        lines = [line for line in self.lines if "event" not in line]
        return [x for x in lines if all(is_number(x.get(name)) for name in ("loss", *names))]

    def validations(self) -> list[Mapping[str, Any]]:
        names = ("step", "val_loss", "val_bits_per_byte")
        return [x for x in self.lines if all(is_number(x.get(name)) for name in names)]

    def bits_per_byte(self, loss: float) -> float:
        """Converts a loss in nats per token."""
        return loss / metrics.NATS_PER_BIT * self.tokens_per_byte


def choose(config: TrainConfig, unix_time: int) -> RunDir:
    """Returns the run's folder after checking it against `--resume`, without creating it.

    `unix_time` names a new folder; it must be the same on every process.

    Raises:
      UsageError: the folder holds something else, or `--resume` forbids what it holds.
    """
    if config.out_dir is None:
        now = time.strftime("%Y%m%d-%H%M%S", time.localtime(unix_time))
        out = RunDir(Path("runs") / f"{config.preset}-{now}")
    else:
        out = RunDir(config.out_dir)
    if config.out_dir is not None or config.resume == "must":
        resumes(config, out)
    return out


def resumes(config: TrainConfig, out: RunDir) -> bool:
    """Returns whether to continue what the folder holds.

    Raises:
      UsageError: the folder holds something else, or `--resume` forbids what it holds.
    """
    with named("--out-dir", out.path):
        names = {entry.name for entry in out.path.iterdir()} if out.path.exists() else set()
        saved = out.has_checkpoints()
        is_run = saved or out.config.exists()
        for file in out.config, out.metrics, out.plot, out.text, out.tokenizer:
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, "Is a folder, not a run's file", str(file))
    if {name for name in names if not name.endswith(PART)} - {out.lock.name} and not is_run:
        raise UsageError(
            f"--out-dir {out.path} is not empty and holds no run of normfuse. Give another."
        )
    if config.resume == "must" and not saved:
        raise UsageError(
            f"--resume must: --out-dir {out.path} holds no checkpoint. Give the folder of a run "
            "that has saved one, or --resume auto."
        )
    if config.resume == "never" and is_run:
        raise UsageError(
            f"--resume never: --out-dir {out.path} already holds a run. Give another --out-dir, or "
            "--resume auto to continue it."
        )
    return saved


def is_step(name: str) -> bool:
    """Returns whether a checkpoint's folder has this name: a number as Python writes it."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name
