"""`normfuse report`: compares runs in a table and in one page with pictures."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from .display import duration, short
from .errors import UsageError
from .outdir import OutDir

_COLUMNS = ("run", "steps", "first loss", "last loss", "val loss", "bits/byte", "tokens/s", "time")


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Compares training runs: a table, and a page with pictures of loss, speed and profile."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN...")]
    """Folders of runs, their --out-dir."""
    html: Path = Path("report.html")
    """The page to write: one file, pictures and all."""
    pictures: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Where to write the pictures as files, too."""


def main(argv: list[str]):
    """Prints the table and writes the page.

    Raises:
      UsageError: a folder holds no run, or the page cannot be written.
    """
    config = tyro.cli(ReportConfig, prog="normfuse report", args=argv)
    if not config.runs:
        raise UsageError("RUN is missing: give the folders of one or more training runs.")
    from . import page
    from .history import History, read

    def history(run: Path) -> History:
        found = read(OutDir(run), str(run))
        if not found.steps():
            raise UsageError(f"RUN {run} holds no metrics.jsonl with steps: is it a run's folder?")
        return found

    runs = [history(run) for run in config.runs]
    rows = [_row(run) for run in runs]
    console, table = Console(), _table(rows)
    if not console.is_terminal:  # a file or a pipe has no width to keep to
        console.width = 10_000
        console.width = console.measure(table).maximum
    console.print(table)
    pictures = page.draw(runs)
    try:
        if config.pictures is not None:
            config.pictures.mkdir(parents=True, exist_ok=True)
            for name, picture in pictures.items():
                (config.pictures / f"{name}.png").write_bytes(picture)
        config.html.write_text(page.write(_COLUMNS, rows, pictures))
    except OSError as error:
        raise UsageError(f"--html {config.html} cannot be written: {error}") from None
    print(f"page  {config.html}")


def _row(run) -> list[str]:
    steps, checks = run.steps(), run.validations()
    times = sorted(line["step_time_s"] for line in steps)
    speed = steps[-1]["tokens"] / steps[-1]["step"] / times[len(times) // 2]
    return [
        run.label,
        str(steps[-1]["step"]),
        f"{steps[0]['loss']:.4f}",
        f"{steps[-1]['loss']:.4f}",
        f"{checks[-1]['val_loss']:.4f}" if checks else "-",
        f"{checks[-1]['val_bits_per_byte']:.3f}" if checks else "-",
        short(speed),
        duration(math.fsum(times)),
    ]


def _table(rows: list[list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name, *cells in zip(_COLUMNS, *rows, strict=True):
        if name == "run":
            table.add_column(name, overflow="fold")  # what gives way on a narrow terminal
        else:
            width = max(map(len, [*name.split(), *cells]))
            table.add_column(name, justify="right", min_width=width)
    for row in rows:
        table.add_row(*row)
    return table
