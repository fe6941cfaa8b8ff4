"""Output of a run for people: a live bar on a terminal, plain lines in a file or a pipe."""

import contextlib
import math
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from .arguments import printable


@dataclass(frozen=True)
class StepFigures:
    """The figures shown of a step; `mfu` is None on a device whose peak is not known."""

    step: int
    loss: float
    bits_per_byte: float
    tokens_per_s: float
    mfu: float | None
    eta_s: float

    def texts(self) -> list[str]:
        found = [
            f"loss {self.loss:.4f}",
            f"{self.bits_per_byte:.3f} bits/byte",
            f"{short(self.tokens_per_s)} tokens/s",
        ]
        if self.mfu is not None:
            found.append(f"MFU {self.mfu:.1%}")
        return [*found, f"ETA {duration(self.eta_s)}"]


class Display:
    """Shows the progress of a run. On a terminal a bar stays at the bottom and notes go above it.

    `steps` is the run's last. With `quiet`, of all processes but the first, it shows nothing.
    """

    def __init__(self, console: Console, steps: int, *, quiet: bool = False) -> None:
        self.console, self._steps, self._quiet = console, steps, quiet
        self._bar: Progress | None = None
        self._figures = ""
        self._every = max(1, steps // 20)

    def note(self, text: str, style: str | None = None) -> None:
        """Prints a line above the bar."""
        self._print(Text(printable(text), style or ""))

    def fact(self, label: str, value: str) -> None:
        """Prints a labelled fact about the run."""
        self._print(Text(f"{label:<12}", style="cyan").append(printable(value), style="default"))

    def _print(self, text: Text) -> None:
        if not self._quiet:
            # A reader that has left, or a log on a full disk, must not end the run.
            with contextlib.suppress(OSError, SystemExit):  # rich exits on a broken pipe
                self.console.print(text, soft_wrap=True)

    def start(self) -> None:
        """Shows the bar, on a terminal."""
        if self._quiet or not self.console.is_terminal:
            return
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}", style="bold"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[figures]}"),
        )
        self._bar = Progress(*columns, console=self.console, expand=True, refresh_per_second=8)
        self._task = self._bar.add_task("", total=self._steps, figures="compiling")
        self._bar.start()

    def step(self, shown: StepFigures) -> None:
        """Shows a step's figures: every step on the bar, about twenty steps as lines."""
        if self._bar is not None:
            self._figures = " · ".join(shown.texts())
            self._bar.update(self._task, completed=shown.step, figures=self._figures)
        elif shown.step == 1 or shown.step % self._every == 0 or shown.step == self._steps:
            width = len(str(self._steps))
            self.note(f"step {shown.step:>{width}}/{self._steps}  " + "  ".join(shown.texts()))

    def phase(self, name: str) -> None:
        """Names on the bar the work that the run does between steps."""
        if self._bar is not None:
            self._bar.update(self._task, figures=name)

    def stop(self) -> None:
        """Removes the bar's animation; the last step's figures stay."""
        if self._bar is not None:
            self._bar.update(self._task, figures=self._figures)
            self._bar.stop()
            self._bar = None


def duration(seconds: float) -> str:
    """Formats seconds as `m:ss` or `h:mm:ss`."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(number: float) -> str:
    """Formats a number with three digits and a unit: 12.3k, 1.24M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:  # else "1e+03" of the unit below
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def shell_command(command: str) -> str:
    """Returns `normfuse COMMAND` as this process was started: by a path, a name, or Python's -m."""
    program = sys.argv[0]
    if Path(program).name == "normfuse":
        return f"{_shortest('normfuse', program)} {command}"
    module = "normfuse.train" if command == "train" else f"normfuse.train.cli {command}"
    return f"{_shortest('python', sys.executable)} -m {module}"


def quoted(path: Path | str) -> str:
    """Returns a path as one word of a shell's, which no program takes for a flag; or a text."""
    is_flag = isinstance(path, Path) and str(path).startswith("-")
    text = f"./{path}" if is_flag else str(path)
    if text.isprintable():
        return shlex.quote(text)
    plain = lambda byte: chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}"
    return f"$'{''.join(map(plain, os.fsencode(text)))}'"


def _shortest(name: str, path: str) -> str:
    """Returns a program's name where the shell finds it by that, else its path."""
    found = shutil.which(name)
    same = found is not None and Path(found).absolute() == Path(path).absolute()
    return name if same else shlex.quote(path)
