"""The CSV file of loss curves in bfloat16 and FP8, its statistics, and its picture."""

import csv
import dataclasses
import io
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from headline import OURS, THEIRS

QUANTIZATIONS = {"bf16": None, "fp8": "fp8"}
LOSSES = {"loss": "training", "val_loss": "held-out"}
Run = tuple[int, str]  # seed and quantization


# ---------------------------------------------------------------- the curves and their file


@dataclasses.dataclass(frozen=True)
class Point:
    """A row of the file: a run after so many steps."""

    seed: int
    quantization: str
    step: int
    steps: int  # steps of the whole run
    tokens: int
    loss: float  # in training, nats per token: mean of the steps since the row before
    val_loss: float  # on the held-out text
    ms: float  # mean time of the steps since the row before

    @property
    def run(self) -> Run:
        return self.seed, self.quantization


class Curves:
    """The points in a CSV file.

    Each row also says what it was measured with. `settings` decide the curves, so that all rows of
    a file have the same; device and versions may differ.
    """

    _FIELDS = {field.name: field.type for field in dataclasses.fields(Point)}
    _COMMON = ("date", "device", "jax", "normfuse", "settings")

    def __init__(self, path: pathlib.Path, common: dict[str, str] | None = None) -> None:
        """Reads the file, if there is one; `common` are the settings of new rows."""
        self._path, self.common = path, common or {}
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # without a cut line
        self._rows = list(csv.DictReader(io.StringIO(whole)))
        known = {row["settings"] for row in self._rows}
        if common is None and self._rows:
            self.common = {name: self._rows[-1][name] for name in self._COMMON}
        if other := known - {self.common.get("settings")}:
            raise SystemExit(
                f"loss_curves.py: {path} has curves of other settings ({', '.join(sorted(other))}; "
                f"now {self.common['settings']}): give another --out, or remove it."
            )

    @property
    def points(self) -> list[Point]:
        return [
            Point(**{name: kind(row[name]) for name, kind in self._FIELDS.items()})
            for row in self._rows
        ]

    def add(self, point: Point) -> None:
        self._rows.append(self.common | {k: str(v) for k, v in vars(point).items()})
        self._write(self._path, self._rows[-1:], "a")

    def drop(self, unwanted: Callable[[Point], bool]) -> None:
        self._rows = [row for row, point in zip(self._rows, self.points) if not unwanted(point)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.with_suffix(".tmp")
        self._write(whole, self._rows, "w")
        os.replace(whole, self._path)

    def _write(self, path: pathlib.Path, rows: Sequence[dict[str, str]], mode: str) -> None:
        with open(path, mode, newline="") as file:
            writer = csv.DictWriter(file, [*self._COMMON, *self._FIELDS], lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)


# ---------------------------------------------------------------- statistics of the curves


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The last losses of each seed, bfloat16's and FP8's."""

    pairs: Sequence[tuple[float, float]]

    @property
    def gap(self) -> float:
        return statistics.fmean(fp8 - bf16 for bf16, fp8 in self.pairs)

    @property
    def range(self) -> float:
        return max(bf16 for bf16, _ in self.pairs) - min(bf16 for bf16, _ in self.pairs)

    @property
    def holds(self) -> bool:
        """Whether the mean gap is at most the range; not if a loss is not a number."""
        return abs(self.gap) <= self.range


def last_losses(points: Sequence[Point]) -> dict[Run, Point]:
    """Returns the last point of each complete run."""
    return {point.run: point for point in points if point.step == point.steps}


def compare(points: Sequence[Point]) -> dict[str, Comparison]:
    """Compares each loss over the seeds whose two runs are complete; empty for fewer than two."""
    last = last_losses(points)
    seeds = [s for s in sorted({s for s, _ in last}) if all((s, q) in last for q in QUANTIZATIONS)]
    if len(seeds) < 2:
        return {}
    of = lambda seed, name: tuple(getattr(last[seed, q], name) for q in QUANTIZATIONS)
    return {name: Comparison([of(seed, name) for seed in seeds]) for name in LOSSES}


def report(points: Sequence[Point]) -> str:
    """Returns the tables of last losses and of speed, and the verdict, in Markdown."""
    last = last_losses(points)
    heads = [f"{loss}, {q}" for loss in LOSSES.values() for q in (*QUANTIZATIONS, "gap")]
    lines = [f"| seed | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for seed in sorted({seed for seed, _ in last}):
        cells = []
        for name in LOSSES:
            found = [getattr(last.get((seed, q)), name, None) for q in QUANTIZATIONS]
            cells += ["" if value is None else f"{value:.4f}" for value in found]
            cells.append("" if None in found else f"{found[1] - found[0]:+.4f}")
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    lines += ["", "| | ms a step | tokens/s |", "|---|---|---|"]
    for quantization in QUANTIZATIONS:
        times = [point.ms for point in points if point.quantization == quantization]
        if times:
            ms, tokens = statistics.median(times), points[0].tokens / points[0].step
            lines.append(f"| {quantization} | {ms:.2f} | {tokens / ms * 1e3:,.0f} |")
    compared = compare(points)
    lines.append("")
    for name, found in compared.items():
        lines.append(
            f"{LOSSES[name]}: mean gap {found.gap:+.4f}, range of bf16's {len(found.pairs)} seeds "
            f"{found.range:.4f}: {'holds' if found.holds else 'DOES NOT HOLD'}"
        )
    if not compared:
        lines.append("no verdict yet: the range needs two seeds with both runs complete")
    return "\n".join(lines)


def plot(path: pathlib.Path, points: Sequence[Point], title: str) -> None:
    """Draws the losses of all runs, and FP8's gap within the range of bf16's seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4), layout="constrained")
    losses(left, points)
    gaps(right, points)
    end = max(point.tokens / point.step * point.steps for point in points)
    for axes in (left, right):
        axes.set_xlim(0, end)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("tokens")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            columns = {left: 1, right: 3}[axes]  # one row, above what is drawn
            axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=columns)
    left.set_ylabel("nats per token")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, weight="bold")
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def losses(axes: Any, points: Sequence[Point]) -> None:
    """Draws the losses in training as lines, and those on the held-out text as dots.

    Where runs agree, FP8's thin line and small dots lie within bfloat16's broad and large ones.
    """
    found = [p for p in points if math.isfinite(p.loss) and math.isfinite(p.val_loss)]
    late = [p for p in found if p.step > 0.08 * p.steps] or found  # the first losses fall fast
    top = max((max(p.loss, p.val_loss) for p in late), default=math.inf)
    # The last dots lie on the edge, and whole: so those above it are left out here.
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "clip_on": False, "zorder": 3}
    seeds = sorted({point.seed for point in points})
    for quantization in QUANTIZATIONS:
        fp8 = quantization == "fp8"
        color, name, width, size = (OURS, "FP8", 1.0, 2.5) if fp8 else (THEIRS, "bf16", 3.2, 5.5)
        for number, seed in enumerate(seeds):
            some = [point for point in points if point.run == (seed, quantization)]
            at, labels = [p.tokens for p in some], [f"{name}, {loss}" for loss in LOSSES.values()]
            training, held_out = labels if number == 0 else (None, None)
            axes.plot(at, [p.loss for p in some], color=color, linewidth=width, label=training)
            values = [p.val_loss if p.val_loss <= top else math.nan for p in some]
            axes.plot(at, values, color=color, markersize=size, label=held_out, **dots)
    if late:
        bottom = min(min(p.loss, p.val_loss) for p in found)
        axes.set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
    axes.set_title(f"loss, {len(seeds)} seed{'s' * (len(seeds) > 1)}", loc="left", fontsize=10.5)


def gaps(axes: Any, points: Sequence[Point]) -> None:
    """Draws FP8's held-out loss less bf16's by seed, its mean, and the range of bf16's seeds."""
    axes.set_title("held-out loss, FP8's less bf16's", loc="left", fontsize=10.5)
    axes.axhline(0, color="black", linewidth=0.6, linestyle=(0, (4, 3)))
    value = {(point.run, point.step): point.val_loss for point in points}
    place = {point.step: point.tokens for point in points}
    pairs: dict[int, dict[int, tuple[float, float]]] = {}  # by seed, by step
    for (seed, _), step in sorted(value):
        both = [value.get(((seed, quantization), step)) for quantization in QUANTIZATIONS]
        if None not in both:
            pairs.setdefault(seed, {})[step] = both[0], both[1]
    for number, own in enumerate(pairs.values()):
        gap = [fp8 - bf16 for bf16, fp8 in own.values()]
        style: dict[str, Any] = {"color": OURS, "linewidth": 0.8, "alpha": 0.6}
        axes.plot([place[s] for s in own], gap, label=None if number else "a seed", **style)
    steps = [step for step in sorted(place) if all(step in own for own in pairs.values())]
    if len(pairs) < 2 or not steps:
        return
    found = [Comparison([own[step] for own in pairs.values()]) for step in steps]
    at, edge = [place[step] for step in steps], [one.range for one in found]
    style = {"color": THEIRS, "alpha": 0.3, "linewidth": 0, "label": "range of bf16's seeds"}
    axes.fill_between(at, [-width for width in edge], edge, **style)
    axes.plot(at, [one.gap for one in found], color=OURS, linewidth=2.2, label="mean")
    late = found[len(found) // 4 :]  # the first losses fall fast
    tall = max(max(abs(one.gap), one.range) for one in late)
    if 0 < tall < math.inf:
        axes.set_ylim(-1.6 * tall, 1.6 * tall)
