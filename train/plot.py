"""The plot of runs' losses."""

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from .run_dir import RunResults  # noqa: E402

_COLOURS = ("#0b6e99", "#c2571a", "#3c7d3c", "#7b4fa3", "#a3344f", "#6b6b6b")


def plot_loss(file: Path | BinaryIO, runs: Sequence[RunResults]) -> None:
    """Draws training loss, validation points and reference lines, in bits per byte, as a PNG."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=160, layout="constrained")
    end = max((line["step"] for run in runs for line in run.steps("step")), default=1)
    for run, colour in zip(runs, itertools.cycle(_COLOURS)):
        steps, checks = run.steps("step"), run.validations()
        x = np.array([line["step"] for line in steps])
        y = np.array([run.bits_per_byte(line["loss"]) for line in steps])
        axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.3)
        axes.plot(x, _smooth(y, end), color=colour, linewidth=1.4, label=f"{run.label}: training")
        at, bits = ([line[name] for line in checks] for name in ("step", "val_bits_per_byte"))
        label = f"{run.label}: validation{f', {bits[-1]:.3f} at the end' if bits else ''}"
        axes.plot(at, bits, "o", color=colour, markersize=4.5, clip_on=False, label=label)
    texts = {tuple(run.references.items()) for run in runs if run.references}
    for name, bits in next(iter(texts)) if len(texts) == 1 else ():  # baselines of one text
        axes.axhline(bits, color="0.4", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        label = f"{name} {bits:.2f}"
        axes.text(end, bits, label, ha="right", va="top", fontsize=8, color="0.4", zorder=0)
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(0, end))
    axes.spines[["top", "right"]].set_visible(False)
    for text in axes.legend(frameon=False, fontsize=9, loc="upper right").get_texts():
        text.set_parse_math(False)  # a `$` in a name begins no formula
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # drawn as a box
        figure.savefig(file, format="png")
    plt.close(figure)


def _smooth(values: np.ndarray, end: int) -> np.ndarray:
    """Averages each value with its neighbours, over a fiftieth of the longest run's steps."""
    half = min(end // 100, len(values))
    padded = np.pad(values, half, constant_values=np.nan)
    return np.nanmean(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
