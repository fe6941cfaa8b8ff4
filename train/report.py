"""`normfuse report`: compares runs in a table and a picture."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from normfuse.train import metrics
from normfuse.train.display import duration, short
from normfuse.train.errors import UsageError
from normfuse.train.outdir import OutDir


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Compares training runs: a table, and their losses in one picture."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN...")]
    """Folders of runs, their --out-dir."""
    plot: Path = Path("report.png")
    """The picture to write."""


def main(argv: list[str]):
    """Prints the table and writes the picture.

    Raises:
      UsageError: a folder holds no run, or the picture cannot be written.
    """
    config = tyro.cli(ReportConfig, prog="normfuse report", args=argv)
    if not config.runs:
        raise UsageError("RUN is missing: give the folders of one or more training runs.")
    runs = {str(run): _lines(OutDir(run)) for run in config.runs}
    Console().print(_table(runs))
    from normfuse.train.plot import plot_loss

    try:
        plot_loss(config.plot, runs)
    except OSError as error:
        raise UsageError(f"--plot {config.plot} cannot be written: {error}") from None
    print(f"plot  {config.plot}")


def _lines(out: OutDir) -> list[dict]:
    lines = metrics.read(out.metrics)
    if not any("loss" in line for line in lines):
        raise UsageError(f"RUN {out.path} holds no metrics.jsonl with steps: is it a run's folder?")
    return lines


def _table(runs: dict[str, list[dict]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("run", "steps", "first loss", "last loss", "val loss", "bits/byte"):
        table.add_column(name, justify="left" if name == "run" else "right")
    table.add_column("tokens/s", justify="right")
    table.add_column("time", justify="right")
    for name, lines in runs.items():
        steps = [line for line in lines if line.get("loss") is not None]
        checks = [line for line in lines if line.get("val_loss") is not None]
        times = sorted(line["step_time_s"] for line in steps)
        tokens = steps[-1]["tokens"] / steps[-1]["step"]
        speed = tokens / times[len(times) // 2]
        validation = checks[-1]["val_loss"] if checks else math.nan
        table.add_row(
            name,
            str(steps[-1]["step"]),
            f"{steps[0]['loss']:.4f}",
            f"{steps[-1]['loss']:.4f}",
            f"{validation:.4f}" if checks else "-",
            f"{validation / metrics.NATS_PER_BIT:.3f}" if checks else "-",
            short(speed),
            duration(sum(times)),
        )
    return table
