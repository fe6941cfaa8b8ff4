"""Output of a run for people: a live bar on a terminal, plain lines in a file or a pipe."""

import contextlib
import math

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from .arguments import printable


class Display:
    """Shows the progress of a run. On a terminal a bar stays at the bottom and notes go above it.

    `steps` is the run's last. With `quiet`, of all processes but the first, it shows nothing.
    """

    def __init__(self, console: Console, steps: int, *, quiet: bool = False) -> None:
        self.console, self._steps, self._quiet = console, steps, quiet
        self._bar: Progress | None = None
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

    def step(self, step: int, figures: list[str]) -> None:
        """Shows a step's figures: every step on the bar, about twenty steps as lines."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=" · ".join(figures))
        elif step == 1 or step % self._every == 0 or step == self._steps:
            width = len(str(self._steps))
            self.note(f"step {step:>{width}}/{self._steps}  " + "  ".join(figures))

    def stop(self) -> None:
        """Removes the bar's animation; the last step's figures stay."""
        if self._bar is not None:
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
