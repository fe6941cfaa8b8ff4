"""Pictures of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from normfuse.train.metrics import NATS_PER_BIT  # noqa: E402

_COLOURS = ("#0b6e99", "#c2571a", "#3c7d3c", "#7b4fa3", "#a3344f", "#6b6b6b")


def plot_loss(
    path: Path,
    runs: Mapping[str, Sequence[dict[str, Any]]],
    references: Mapping[str, float] | None = None,
):
    """Draws training loss, validation points and reference lines, in bits per byte, as a PNG.

    Args:
      path: the picture to write.
      runs: a label to the lines of its metrics.jsonl, for each run.
      references: a name to its bits per byte.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=160, layout="constrained")
    for colour, (label, lines) in zip(_COLOURS * len(runs), runs.items(), strict=False):
        _draw_run(axes, lines, label, colour)
    ends = max((line.get("step", 1) for lines in runs.values() for line in lines), default=1)
    for name, bits in (references or {}).items():
        axes.axhline(bits, color="0.55", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            f"{name} {bits:.2f}",
            (ends, bits),
            (-4, -3),
            textcoords="offset points",
            horizontalalignment="right",
            verticalalignment="top",
            fontsize=8,
            color="0.4",
        )
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(0, ends))
    axes.set_ylim(bottom=0)
    nats = axes.secondary_yaxis(
        "right",
        functions=(lambda x: np.multiply(x, NATS_PER_BIT), lambda x: np.divide(x, NATS_PER_BIT)),
    )
    nats.set_ylabel("nats per byte")
    axes.spines["top"].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.98))
    figure.savefig(path)
    plt.close(figure)


def _draw_run(axes, lines: Sequence[dict[str, Any]], label: str, colour: str):
    steps = [line for line in lines if line.get("loss") is not None and "step" in line]
    checks = [line for line in lines if line.get("val_loss") is not None]
    x = np.array([line["step"] for line in steps])
    y = np.array([line["loss"] for line in steps]) / NATS_PER_BIT
    axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.3)
    axes.plot(x, _smooth(y), color=colour, linewidth=1.4, label=f"{label}: training")
    if checks:
        at = [line["step"] for line in checks]
        bits = [line["val_loss"] / NATS_PER_BIT for line in checks]
        last = f"{label}: validation, {bits[-1]:.3f} at the end"
        axes.plot(at, bits, "o", color=colour, markersize=4.5, markeredgecolor="white", label=last)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Averages each value with its neighbours, over a fiftieth of the run."""
    half = len(values) // 100
    if half == 0:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)
