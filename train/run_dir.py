"""The folder of a run: its files, whether a run may use it, and reading results back from it."""

import contextlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import UsageError, metrics
from .arguments import named, one_line, printable, read_bytes
from .config import TrainConfig, flat
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
        return folder.is_dir() and any(is_step(entry.name) for entry in folder.iterdir())

    def is_run(self) -> bool:
        """Returns whether a run has used the folder."""
        return self.config.exists() or self.has_checkpoints()

    def make(self) -> None:
        """Creates the folder, if it is missing; UsageError if it cannot be written to."""
        with named("--out-dir", self.path, "be written to"):
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()

    def make_new(self) -> int:
        """Creates a folder that no other run has; returns 1, or N where it is called `NAME-N`."""
        with named("--out-dir", self.path, "be written to"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for count in itertools.count(1):
                with contextlib.suppress(FileExistsError):
                    numbered(self.path, count).mkdir()
                    return count
        raise AssertionError("unreachable")

    def results(self, label: str) -> "RunResults":
        """Reads the results of the run for plots and reports, without missing or damaged parts.

        Raises:
          OSError: a file is there and cannot be read.
        """
        text = _read_object(self.text)
        per_byte, references = text.get("tokens_per_byte"), text.get("references")
        return RunResults(
            label,
            metrics.read(self.metrics),
            per_byte if is_number(per_byte) and per_byte > 0 else 1.0,
            _numbers(references) if isinstance(references, dict) else {},
            _numbers(_read_object(self.profile / "breakdown.json")),
            self._settings(),
        )

    def _settings(self) -> dict[str, str]:
        import yaml

        try:
            found = yaml.safe_load(read_bytes(self.config))
            settings = flat(found) if isinstance(found, dict) else {}
        except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError, yaml.YAMLError):
            return {}
        return {printable(str(name), kept=""): one_line(x) for name, x in settings.items()}


@dataclass(frozen=True)
class RunResults:
    """One run as plots and reports show it."""

    label: str  # its name in plots
    lines: Sequence[Mapping[str, Any]]  # its metrics.jsonl
    tokens_per_byte: float = 1.0
    # Bits per byte of simple models, by name, on the held-out text.
    references: Mapping[str, float] = field(default_factory=dict)
    # Milliseconds of a step by kind of operation; empty without a profile.
    breakdown: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)  # its config.yaml, by dotted names

    def steps(self, *names: str) -> list[Mapping[str, Any]]:
        """Returns the lines of steps with a finite loss, and with numbers by these names, too."""
        lines = [line for line in self.lines if "event" not in line]
        return [x for x in lines if all(is_number(x.get(name)) for name in ("loss", *names))]

    def validations(self) -> list[Mapping[str, Any]]:
        names = ("val_loss", "val_bits_per_byte")
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
        if config.resume == "must":
            raise UsageError("--resume must needs --out-dir, the folder of the run to continue.")
        now = time.strftime("%Y%m%d-%H%M%S", time.localtime(unix_time))
        return RunDir(Path("runs") / f"{config.preset}-{now}")
    out = RunDir(config.out_dir)
    _check(config, out)
    return out


def _check(config: TrainConfig, out: RunDir) -> None:
    with named("--out-dir", out.path):
        found = list(out.path.iterdir()) if out.path.exists() else []
        if found not in ([], [out.lock]) and not out.is_run():
            raise UsageError(
                f"--out-dir {out.path} is not empty and holds no run of normfuse. Give another."
            )
        wanted = (True, out.checkpoints), (config.profile, out.profile)
        for needed, folder in (*wanted, (config.tensorboard, out.tensorboard)):
            if needed and folder.exists() and not folder.is_dir():  # not found by the first save
                raise UsageError(
                    f"--out-dir {out.path}: its {folder.name} must be a folder, and is none. Move "
                    "it away, or give another --out-dir."
                )
        if config.resume == "must" and not out.is_run():
            raise _nothing_to_resume(out)
        if config.resume == "never" and out.is_run():
            raise UsageError(
                f"--resume never: --out-dir {out.path} already holds a run. Give another "
                "--out-dir, or --resume auto to continue it."
            )


def resumes(config: TrainConfig, out: RunDir) -> bool:
    """Returns whether to continue what the folder holds, now that no other run writes there.

    Raises:
      UsageError: `--resume` forbids what another run may have left since `choose`.
    """
    if config.out_dir is None:
        return False
    _check(config, out)
    with named("--out-dir", out.path):
        found = out.has_checkpoints()
    if config.resume == "must" and not found:
        raise _nothing_to_resume(out)
    return found


def is_step(name: str) -> bool:
    """Returns whether a checkpoint's folder has this name: a number as Python writes it."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _nothing_to_resume(out: RunDir) -> UsageError:
    return UsageError(
        f"--resume must: --out-dir {out.path} holds no checkpoint. Give the folder of a run that "
        "has saved one, or --resume auto."
    )


def numbered(path: Path, count: int) -> Path:
    """Returns the folder's name for the run that is the `count`th to want it."""
    return path if count == 1 else path.with_name(f"{path.name}-{count}")


def _read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a missing or damaged file is an empty one."""
    try:
        found = json.loads(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    shown = {printable(name, kept=""): value for name, value in found.items()}
    return {name: value for name, value in shown.items() if is_number(value)}
