"""The page of a report: one HTML file that needs no other."""

import base64
import html
import io
from collections.abc import Mapping, Sequence

from . import plot
from .history import History

_TITLES = {
    "loss": "Loss",
    "throughput": "Throughput",
    "breakdown": "Where a step's time goes",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 860px; margin: 2.5em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3em .8em; text-align: right; border-bottom: 1px solid #ddd; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
img { width: 100%; } .wide { overflow-x: auto; }
"""


def draw(runs: Sequence[History]) -> dict[str, bytes]:
    """Draws the pictures of runs as PNGs: loss, throughput, and the breakdown of those profiled."""
    profiled = [run for run in runs if run.breakdown]
    pictures = {"loss": (plot.plot_loss, runs), "throughput": (plot.plot_throughput, runs)}
    if profiled:
        pictures["breakdown"] = (plot.plot_breakdown, profiled)
    drawn = {}
    for name, (picture, shown) in pictures.items():
        file = io.BytesIO()
        picture(file, shown)
        drawn[name] = file.getvalue()
    return drawn


def write(
    columns: Sequence[str], rows: Sequence[Sequence[str]], pictures: Mapping[str, bytes]
) -> str:
    """Writes the page: a table and pictures under their titles."""
    table = "\n".join([_row(columns, "th"), *(_row(cells, "td") for cells in rows)])
    parts = ["<h1>normfuse report</h1>", f'<div class="wide"><table>\n{table}\n</table></div>']
    for name, picture in pictures.items():
        data = base64.b64encode(picture).decode()
        parts.append(f"<h2>{_TITLES[name]}</h2>")
        parts.append(f'<img alt="{_TITLES[name]}" src="data:image/png;base64,{data}">')
    head = f'<meta charset="utf-8"><title>normfuse report</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n'


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
