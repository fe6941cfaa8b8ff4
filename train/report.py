"""`normfuse report`: compares runs in a table and in one HTML page with their losses."""

import base64
import html
import io
import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import UsageError, plot
from .arguments import expanded, named, one_line
from .display import duration, short
from .run_dir import RunDir, RunResults

_COLUMNS = ("run", "steps", "first loss", "last loss", "val loss", "bits/byte", "tokens/s", "time")
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


def report(folders: Sequence[Path], page: Path) -> None:
    """Prints the table and writes the page.

    Raises:
      UsageError: a folder holds no run, or the page cannot be written.
    """
    if not folders:
        raise UsageError("RUN is missing: give the folders of one or more training runs.")
    runs = []
    for folder in folders:
        with named("RUN", folder):
            runs.append(RunDir(expanded(folder, "RUN")).results(one_line(folder)))
        if not runs[-1].steps("step"):
            raise UsageError(
                f"RUN {folder} holds no metrics.jsonl with steps: is it a run's folder?"
            )
    page = expanded(page, "--html")
    tables = [[_COLUMNS, *map(_row, runs)], *_differences(runs)]
    for names, *rows in tables:
        table = Table(box=box.SIMPLE_HEAD)
        for name in names:
            table.add_column(Text(name))
        for row in rows:
            table.add_row(*map(Text, row))  # a string would be read as rich's markup
        console = Console()
        console.width = console.width if console.is_terminal else 1000  # files have no width
        console.print(table)
    with named("--html", page, "be written"):
        page.write_text(_html(tables, runs), encoding="utf-8")
    print(f"page  {one_line(page)}")


def _differences(runs: Sequence[RunResults]) -> list[Rows]:
    """Returns a table of the settings that differ between runs, if any do."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name, "-") for run in runs] for name in names}
    differ = {
        name: each
        for name, each in values.items()
        if len(set(each)) > 1 and name.split(".")[0] not in _NO_SETTINGS
    }
    if not differ:
        return []
    rows = [[run.label, *(each[i] for each in differ.values())] for i, run in enumerate(runs)]
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


def _html(tables: Sequence[Rows], runs: Sequence[RunResults]) -> str:
    """Returns the page: the tables and the plot, in one file."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    parts = ["<h1>normfuse report</h1>"]
    for title, (names, *rows) in zip(("Runs", "Settings that differ"), tables):
        table = "\n".join([line(names, "th"), *(line(cells, "td") for cells in rows)])
        parts.append(f'<h2>{title}</h2><div class="wide"><table>\n{table}\n</table></div>')
    file = io.BytesIO()
    plot.plot_loss(file, runs)
    data = base64.b64encode(file.getvalue()).decode()
    parts.append(f'<h2>Loss</h2>\n<img alt="Loss" src="data:image/png;base64,{data}">')
    head = f'<meta charset="utf-8"><title>normfuse report</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n'
