"""The folder of a run: what lies where, whether it may be used, and whether a run goes on in it."""

import time
from dataclasses import dataclass
from pathlib import Path

from .config import TrainConfig
from .errors import UsageError


@dataclass(frozen=True)
class OutDir:
    """The files of one run.

    Attributes:
      path: the folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def text(self) -> Path:
        return self.path / "text.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks.txt"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def bad_batch(self, step: int) -> Path:
        return self.path / f"bad_batch_{step}.npy"

    def has_checkpoints(self) -> bool:
        """Tells whether a step was saved completely; unfinished saves have other names."""
        folder = self.checkpoints
        return folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())


def choose(config: TrainConfig, unix_time: int) -> OutDir:
    """Chooses the run's folder and checks it against `--resume`, without making it.

    Args:
      config: the run's.
      unix_time: names a new folder; the same on every process.

    Raises:
      UsageError: the folder holds something else, or `--resume` forbids what it holds.
    """
    if config.out_dir is None:
        if config.resume == "must":
            raise UsageError("--resume must needs --out-dir, the folder of the run to continue.")
        return OutDir(_new_folder(config.preset, unix_time))
    out = OutDir(config.out_dir)
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
            f"--out-dir {out.path} is not empty and holds no run of this program. Give another."
        )
    return out


def make(out: OutDir):
    """Makes the folder and checks that it can be written to.

    Raises:
      UsageError: it cannot.
    """
    try:
        out.path.mkdir(parents=True, exist_ok=True)
        probe = out.path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out-dir {out.path} cannot be written to: {error}") from None


def _new_folder(preset: str, unix_time: int) -> Path:
    name = f"{preset}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(unix_time))}"
    path, count = Path("runs") / name, 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{name}-{count}"
    return path
