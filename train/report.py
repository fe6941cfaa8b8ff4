"""`normfuse report`: compares runs in a table and in a plot of their losses."""

import io
import itertools
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from . import UsageError
from .arguments import expanded, named, one_line, printable
from .display import duration, short
from .files import write
from .run_dir import RunDir, RunResults

_COLUMNS = ("run", "steps", "first loss", "last loss", "val loss", "bits/byte", "tokens/s", "time")
_COLOURS = ("#0b6e99", "#c2571a", "#3c7d3c", "#7b4fa3", "#a3344f", "#6b6b6b")


def plot_loss(file: Path, runs: Sequence[RunResults]) -> None:
    """Draws training loss and validation points, in bits per byte, as a PNG.

    A run that diverges does not flatten the others: the axis ends at 1.5 times the largest first
    loss, and at 4 times the median of these, and says what lies above.
    """
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    axes = figure.subplots()
    end = max((line["step"] for run in runs for line in run.steps("step")), default=1)
    curves = [np.array([run.bits_per_byte(x["loss"]) for x in run.steps("step")]) for run in runs]
    tops = [min(max(y), 1.5 * y[0]) for y in curves if y.size] or [math.inf]
    top = min(max(tops), 4 * statistics.median_low(tops))
    for run, y, colour in zip(runs, curves, itertools.cycle(_COLOURS)):
        steps, checks = run.steps("step"), run.validations()
        x = np.array([line["step"] for line in steps])
        axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.3)
        axes.plot(x, _smooth(y, end), color=colour, linewidth=1.4, label=f"{run.label}: training")
        at, bits = ([line[name] for line in checks] for name in ("step", "val_bits_per_byte"))
        label = f"{run.label}: validation{f', {bits[-1]:.3f} at the end' if bits else ''}"
        shown = [b if b <= top else math.nan for b in bits]
        axes.plot(at, shown, "o", color=colour, markersize=4.5, clip_on=False, label=label)
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(0, end))
    every = np.concatenate(curves or [np.zeros(0)])
    if (every > top).any():
        axes.set_ylim(0, top)
        above = f"{np.mean(every > top):.2%} of the losses are above, up to {every.max():.3g}"
        axes.set_title(f"the axis is cut: {above}", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    for text in axes.legend(frameon=False, fontsize=9, loc="upper right").get_texts():
        text.set_parse_math(False)  # a `$` in a name begins no formula
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # drawn as a box
        figure.savefig(picture := io.BytesIO(), format="png")
    write(file, picture.getvalue())


def _smooth(values: np.ndarray, end: int) -> np.ndarray:
    """Averages each value with its neighbours, over a fiftieth of the longest run's steps."""
    half = min(end // 100, len(values))
    padded = np.pad(values, half, constant_values=np.nan)
    return np.nanmean(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def report(folders: Sequence[Path], plot: Path) -> None:
    """Prints the table and writes the plot.

    Raises:
      UsageError: a folder holds no run, or the plot cannot be written.
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
    plot = expanded(plot, "--plot")
    rows = [_COLUMNS, *map(_row, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    print(*(printable(line, except_for="") for line in lines), "", sep="\n")
    with named("--plot", plot, "be written"):
        plot_loss(plot, runs)
    print(f"plot  {one_line(plot)}")


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
