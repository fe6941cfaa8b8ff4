"""`normfuse report`: compares runs in a table and in one HTML page with plots."""

import base64
import functools
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import UsageError, plot
from .arguments import expanded, named, printable
from .display import duration, short
from .run_dir import RunDir, RunResults

_COLUMNS = ("run", "steps", "first loss", "last loss", "val loss", "bits/byte", "tokens/s", "time")
_TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "throughput": "Throughput",
    "breakdown": "Where a step's time goes",
}
_NO_SETTINGS = ("out_dir", "resume", "distributed")  # these do not change a run
Rows = Sequence[Sequence[str]]
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 860px; margin: 2.5em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3em .8em; text-align: right; border-bottom: 1px solid #ddd; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
img { width: 100%; } .wide { overflow-x: auto; }
"""


def report(folders: Sequence[Path], page: Path, pictures: Path | None) -> None:
    """Prints the table and writes the page, and the plots as files to the folder `pictures`.

    Raises:
      UsageError: a folder holds no run, or the page cannot be written.
    """
    if not folders:
        raise UsageError("RUN is missing: give the folders of one or more training runs.")
    runs = []
    for folder in folders:
        with named("RUN", folder):
            label = printable(str(folder), kept="")  # whatever its name holds
            runs.append(RunDir(expanded(folder, "RUN")).results(label))
        if not runs[-1].steps("step"):
            raise UsageError(
                f"RUN {folder} holds no metrics.jsonl with steps: is it a run's folder?"
            )
    page = expanded(page, "--html")
    pictures = None if pictures is None else expanded(pictures, "--pictures")
    tables = [[_COLUMNS, *map(_row, runs)], *_differences(runs)]
    for rows in tables:
        console, table = Console(), _table(rows)
        if not console.is_terminal:  # files and pipes have no width
            console.width = 10_000
            console.width = console.measure(table).maximum
        console.print(table)
    plots = _plots(runs)
    if pictures is not None:
        with named("--pictures", pictures, "be written"):
            pictures.mkdir(parents=True, exist_ok=True)
            for name, png in plots.items():
                (pictures / f"{name}.png").write_bytes(png)
    with named("--html", page, "be written"):
        page.write_text(_html(tables, plots), encoding="utf-8")
    print(f"page  {printable(str(page), kept='')}")


def _differences(runs: Sequence[RunResults]) -> list[Rows]:
    """Returns a table of the settings that differ between runs, if any do."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name, "-") for run in runs] for name in names}
    differ = {
        name: found
        for name, found in values.items()
        if len(set(found)) > 1 and name.split(".")[0] not in _NO_SETTINGS
    }
    if not differ:
        return []
    rows = [[run.label, *(found[i] for found in differ.values())] for i, run in enumerate(runs)]
    return [[["run", *differ], *rows]]


def _row(run: RunResults) -> list[str]:
    steps, checks = run.steps("step"), run.validations()
    timed = run.steps("step", "step_time_s")
    times = sorted(line["step_time_s"] for line in timed if line["step_time_s"] > 0)
    counted = run.steps("step", "tokens")
    tokens = counted[-1]["tokens"] / max(counted[-1]["step"], 1) if counted else 0
    return [
        run.label,
        str(steps[-1]["step"]),
        f"{steps[0]['loss']:.4f}",
        f"{steps[-1]['loss']:.4f}",
        f"{checks[-1]['val_loss']:.4f}" if checks else "-",
        f"{checks[-1]['val_bits_per_byte']:.3f}" if checks else "-",
        short(tokens / times[len(times) // 2]) if times and tokens > 0 else "-",
        duration(math.fsum(times)) if times else "-",
    ]


def _table(rows: Rows) -> Table:
    """Returns rows, the first of which are the columns' names, as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    for name, *cells in zip(*rows, strict=True):
        if name == "run":
            table.add_column(name, overflow="fold")  # this column shrinks on a narrow terminal
        else:
            width = max(map(len, [*name.split(), *cells]))
            table.add_column(name, justify="right", min_width=width)
    for row in rows[1:]:
        table.add_row(*map(Text, row))  # a string would be read as rich's markup
    return table


def _plots(runs: Sequence[RunResults]) -> dict[str, bytes]:
    """Draws the plots of `_TITLES`, for the runs that have their data, as PNGs."""
    profiled = [run for run in runs if run.breakdown]
    having = lambda name: [run for run in runs if run.steps("step", name)]
    of = lambda name: functools.partial(plot.plot_steps, name=name, title=_TITLES[name].lower())
    drawn = {}
    for name, draw, shown in (
        ("loss", plot.plot_loss, runs),
        ("lr", of("lr"), having("lr")),
        ("grad_norm", of("grad_norm"), having("grad_norm")),
        ("throughput", plot.plot_throughput, having("tokens_per_s")),
        ("breakdown", plot.plot_breakdown, profiled),
    ):
        if shown:
            file = io.BytesIO()
            draw(file, shown)
            drawn[name] = file.getvalue()
    return drawn


def _html(tables: Sequence[Rows], plots: Mapping[str, bytes]) -> str:
    """Returns the page: the tables, and the plots under their titles, in one file."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    parts = ["<h1>normfuse report</h1>"]
    for i, (names, *rows) in enumerate(tables):
        parts += ["<h2>Settings that differ</h2>"] * (i == 1)
        table = "\n".join([line(names, "th"), *(line(cells, "td") for cells in rows)])
        parts.append(f'<div class="wide"><table>\n{table}\n</table></div>')
    for name, png in plots.items():
        data = base64.b64encode(png).decode()
        parts.append(f"<h2>{_TITLES[name]}</h2>")
        parts.append(f'<img alt="{_TITLES[name]}" src="data:image/png;base64,{data}">')
    head = f'<meta charset="utf-8"><title>normfuse report</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n'
