"""Output of a run for people: lines, and on a terminal one more that every step overwrites."""

import contextlib
import math
import shutil
import sys

from .arguments import printable

_CLEAR = "\r\x1b[K"  # a terminal's last line


class Display:
    """Shows the progress of a run on the standard output.

    `steps` is the run's last. With `quiet`, of all processes but the first, it shows nothing.
    """

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self._steps, self._quiet = steps, quiet
        self._is_terminal = sys.stdout.isatty()
        self._every = max(1, steps // 20)

    def note(self, text: str) -> None:
        self._print(text + "\n")

    def fact(self, label: str, value: str) -> None:
        self.note(f"{label:<12}{value}")

    def step(self, step: int, figures: list[str]) -> None:
        """Shows a step's figures: about twenty steps as lines, on a terminal every step."""
        line = f"step {step:>{len(str(self._steps))}}/{self._steps}  " + "  ".join(figures)
        if step == 1 or step % self._every == 0 or step == self._steps:
            self.note(line)
        elif self._is_terminal:
            self._print(line[: shutil.get_terminal_size().columns - 1])

    def _print(self, text: str) -> None:
        if not self._quiet:
            # A reader that has left, or a log on a full disk, must not end the run.
            with contextlib.suppress(OSError):
                print(_CLEAR * self._is_terminal + printable(text), end="", flush=True)


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
