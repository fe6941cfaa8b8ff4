"""Plots of runs."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

from .metrics import NATS_PER_BIT  # noqa: E402
from .run_dir import RunResults  # noqa: E402

_COLOURS = ("#0b6e99", "#c2571a", "#3c7d3c", "#7b4fa3", "#a3344f", "#6b6b6b")
_LABEL = 60  # characters shown of a run's name
_ABOVE = {"loc": "lower left", "bbox_to_anchor": (0, 1)}  # places a legend above the curves
_SIZE = {"dpi": 160, "layout": "constrained"}
File = Path | BinaryIO


def plot_loss(file: File, runs: Sequence[RunResults]) -> None:
    """Draws training loss, validation points and reference lines, in bits per byte, as a PNG."""
    figure, axes = plt.subplots(figsize=(8, 4.5), **_SIZE)
    begin, end = _steps(runs)
    for colour, run in _coloured(runs):
        _draw_loss(axes, run, colour, end)
    # Baselines are those of a text: of several texts, each has the colour of its first run.
    texts: dict[tuple, str] = {}
    for colour, run in _coloured(runs):
        texts.setdefault(tuple(run.references.items()), colour)
    texts.pop((), None)
    for (name, bits), colour in ((x, texts[text]) for text in texts for x in text):
        colour = colour if len(texts) > 1 else "0.4"
        axes.axhline(bits, color=colour, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.7, zorder=0)
        axes.annotate(
            f"{name} {bits:.2f}",
            (end, bits),
            (-4, -3),
            textcoords="offset points",
            horizontalalignment="right",
            verticalalignment="top",
            fontsize=8,
            color=colour,
            zorder=0,  # below the curves
        )
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(begin, end))
    nats = axes.secondary_yaxis(
        "right",
        functions=(lambda x: np.multiply(x, NATS_PER_BIT), lambda x: np.divide(x, NATS_PER_BIT)),
    )
    nats.set_ylabel("nats per byte")
    _finish(figure, axes, file, loc="upper right", bbox_to_anchor=(1, 0.98))


def plot_throughput(file: File, runs: Sequence[RunResults]) -> None:
    """Draws tokens per second over the steps, as a PNG."""
    figure, axes = plt.subplots(figsize=(8, 3), **_SIZE)
    begin, end = _steps(runs)
    for colour, run in _coloured(runs):
        steps = run.steps("step", "tokens_per_s")
        y = np.array([line["tokens_per_s"] for line in steps])
        # Tokens of a window over its seconds: what a checkpoint or a slow step takes counts. Of one
        # step alone it says little: the host may read two of them at once.
        rate = 1 / _smooth(1 / np.maximum(y, 1e-9), np.nanmean, max(end, 500))
        label = f"{run.label}: median {np.median(y):,.0f}"
        axes.plot([line["step"] for line in steps], rate, color=colour, label=label)
    axes.set(xlabel="step", ylabel="tokens per second", xlim=(begin, end))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    _finish(figure, axes, file, **_ABOVE)


def plot_steps(file: File, runs: Sequence[RunResults], name: str, title: str) -> None:
    """Draws one of the figures of each step, such as `lr`, as a PNG."""
    figure, axes = plt.subplots(figsize=(8, 3), **_SIZE)
    begin, end = _steps(runs)
    for colour, run in _coloured(runs):
        steps = run.steps("step", name)
        x, y = [line["step"] for line in steps], np.array([line[name] for line in steps])
        if name != "lr":  # the schedule has no noise
            axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.3)
            y = _smooth(y, np.nanmean, end)
        axes.plot(x, y, color=colour, label=run.label)
    axes.set(xlabel="step", ylabel=title, xlim=(begin, end))
    _finish(figure, axes, file, **_ABOVE)


def plot_breakdown(file: File, runs: Sequence[RunResults]) -> None:
    """Draws the milliseconds of a step by kind of operation, as a PNG, of runs with a profile."""
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.breakdown))
    height = 0.8 / len(runs)
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.42 * len(kinds) * len(runs) ** 0.5), **_SIZE)
    for i, (colour, run) in enumerate(_coloured(runs)):
        total = sum(run.breakdown.values()) or 1
        values = [run.breakdown.get(kind, 0.0) for kind in kinds]
        at = np.arange(len(kinds)) + (i - (len(runs) - 1) / 2) * height
        label = f"{run.label}: {total:.3g} ms a step"
        bars = axes.barh(at, values, 0.9 * height, color=colour, label=label)
        texts = [f"{value:.3g} ms, {value / total:.0%}" for value in values]
        axes.bar_label(bars, texts, padding=4, fontsize=8, color="0.25")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set(xlabel="ms")
    _finish(figure, axes, file, loc="lower right")


def _coloured(runs: Sequence[RunResults]) -> list[tuple[str, RunResults]]:
    """Pairs runs with colours, under labels that fit a legend."""

    def fitting(label: str) -> str:
        label = f"…{label[-_LABEL:]}" if len(label) > _LABEL else label
        return f" {label}" if label.startswith("_") else label  # else matplotlib leaves it out

    named = [dataclasses.replace(run, label=fitting(run.label)) for run in runs]
    return [(_COLOURS[i % len(_COLOURS)], run) for i, run in enumerate(named)]


def _steps(runs: Sequence[RunResults]) -> tuple[int, int]:
    """Returns the first and the last step of all runs; of one step alone, the one before it too."""
    steps = [line["step"] for run in runs for line in run.lines if "step" in line] or [1]
    return min(min(steps), max(steps) - 1), max(steps)


def _finish(figure: Figure, axes: Axes, file: File, **legend: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    names = axes.legend(frameon=False, fontsize=9, **legend)
    for text in (*names.get_texts(), *axes.texts, *axes.get_yticklabels()):
        text.set_parse_math(False)  # a `$` in a name begins no formula
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # drawn as a box
        figure.savefig(file, format="png")
    plt.close(figure)


def _draw_loss(axes: Axes, run: RunResults, colour: str, end: int) -> None:
    steps, checks = run.steps("step"), run.validations()
    x = np.array([line["step"] for line in steps])
    y = np.array([run.bits_per_byte(line["loss"]) for line in steps])
    axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.3)
    label = f"{run.label}: training"
    axes.plot(x, _smooth(y, np.nanmean, end), color=colour, linewidth=1.4, label=label)
    if checks:
        at = [line["step"] for line in checks]
        bits = [line["val_bits_per_byte"] for line in checks]
        last = f"{run.label}: validation, {bits[-1]:.3f} at the end"
        style: dict[str, Any] = dict(
            color=colour, markersize=4.5, markeredgecolor="white", clip_on=False, zorder=3
        )
        axes.plot(at, bits, "o", label=last, **style)


def _smooth(values: np.ndarray, average: Callable[..., Any], end: int) -> np.ndarray:
    """Averages each value with its neighbours, over a fiftieth of the longest run's steps."""
    half = min(end // 100, len(values))
    if half == 0:
        return values
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return average(windows, axis=1)
