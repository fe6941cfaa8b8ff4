"""The CSV file of loss curves in bfloat16, FP8 and others, its statistics, and its picture."""

import csv
import dataclasses
import io
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headline import OURS, THEIRS

BASE = "bf16"  # the version that others are compared with
MORE = ("#1f618d", "#b9770e", "#6c3483")  # colours of versions after the second
LOSSES = {"loss": "training", "val_loss": "held-out"}
Run = tuple[int, str]  # seed and version


# ---------------------------------------------------------------- the curves and their file


@dataclasses.dataclass(frozen=True)
class Point:
    """A row of the file: a run after so many steps."""

    seed: int
    version: str
    step: int
    steps: int  # steps of the whole run
    tokens: int
    loss: float  # in training, nats per token: mean of the steps since the row before
    val_loss: float  # on the held-out text
    ms: float  # mean time of the steps since the row before

    @property
    def run(self) -> Run:
        return self.seed, self.version


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

    def take(self, other: "Curves") -> None:
        """Takes the runs of another file, which replace those here."""
        taken = {point.run for point in other.points}
        self.drop(lambda point: point.run in taken)
        for point, row in zip(other.points, other._rows):
            self.common = {name: row[name] for name in self._COMMON}
            self.add(point)

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
    """The last losses of each seed, bfloat16's and those of another version.

    `tokens` is how many times bfloat16's tokens the version needs for the same loss.
    """

    pairs: Sequence[tuple[float, float]]
    tokens: float = math.nan

    @property
    def gap(self) -> float:
        return statistics.fmean(other - base for base, other in self.pairs)

    @property
    def range(self) -> float:
        return max(base for base, _ in self.pairs) - min(base for base, _ in self.pairs)

    @property
    def holds(self) -> bool:
        """Whether the mean gap is at most the range; not if a loss is not a number."""
        return abs(self.gap) <= self.range


def versions(points: Sequence[Point]) -> list[str]:
    """Returns the versions that the points are of, bfloat16 first."""
    return sorted({point.version: None for point in points}, key=lambda name: name != BASE)


def last_losses(points: Sequence[Point]) -> dict[Run, Point]:
    """Returns the last point of each complete run."""
    return {point.run: point for point in points if point.step == point.steps}


def compare(points: Sequence[Point]) -> dict[tuple[str, str], Comparison]:
    """Compares each loss over the seeds whose two runs are complete; empty for fewer than two.

    The keys are a version and a loss.
    """
    last, found = last_losses(points), {}
    for version in versions(points):
        seeds = sorted(seed for seed, name in last if name == version and (seed, BASE) in last)
        if version == BASE or len(seeds) < 2:
            continue
        for loss in LOSSES:
            both = [[getattr(last[s, name], loss) for s in seeds] for name in (BASE, version)]
            curves = [mean_curve(points, name, loss, seeds) for name in (BASE, version)]
            found[version, loss] = Comparison([*zip(*both)], tokens_ratio(*curves))
    return found


def mean_curve(
    points: Sequence[Point], version: str, loss: str, seeds: Sequence[int]
) -> list[tuple[int, float]]:
    """Returns the tokens of each point with the mean of the seeds' losses there."""
    of: dict[int, list[float]] = {}
    for point in points:
        if point.version == version and point.seed in seeds:
            of.setdefault(point.tokens, []).append(getattr(point, loss))
    return [(tokens, statistics.fmean(values)) for tokens, values in sorted(of.items())]


def tokens_ratio(base: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> float:
    """Returns how many times the tokens of `base` the curve `other` needs for the same loss.

    The loss is the higher one of the two at the end: the curve that ends lower had it earlier.
    """
    end, target = base[-1][0], max(base[-1][1], other[-1][1])
    if base[-1][1] < target:
        return end / tokens_at(base, target)
    return tokens_at(other, target) / end


def tokens_at(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """Returns where a curve was above a loss for the last time, between two points on a line."""
    for (before, high), (after, low) in reversed([*zip(curve, curve[1:])]):
        if high > loss >= low:
            return before + (after - before) * (high - loss) / (high - low)
    return math.nan


def report(points: Sequence[Point]) -> str:
    """Returns the tables of last losses and of speed, and the verdict, in Markdown."""
    last, names = last_losses(points), versions(points)
    columns = [name for one in names for name in ([one] if one == BASE else [one, "gap"])]
    heads = [f"{loss}, {name}" for loss in LOSSES.values() for name in columns]
    lines = [f"| seed | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for seed in sorted({seed for seed, _ in last}):
        cells = [cell for loss in LOSSES for cell in cells_of(last, seed, loss, names)]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    lines += ["", "| | ms a step | tokens/s |", "|---|---|---|"]
    for name in names:
        ms = statistics.median(point.ms for point in points if point.version == name)
        tokens = points[0].tokens / points[0].step
        lines.append(f"| {name} | {ms:.2f} | {tokens / ms * 1e3:,.0f} |")
    compared = compare(points)
    lines.append("")
    for (version, loss), found in compared.items():
        lines.append(
            f"{version}, {LOSSES[loss]}: mean gap {found.gap:+.4f}, range of bf16's "
            f"{len(found.pairs)} seeds {found.range:.4f}: "
            f"{'holds' if found.holds else 'DOES NOT HOLD'}; "
            f"{found.tokens:.3f} times the tokens for the same loss"
        )
    if not compared:
        lines.append("no verdict yet: the range needs two seeds with both runs complete")
    return "\n".join(lines)


def cells_of(last: dict[Run, Point], seed: int, loss: str, names: Sequence[str]) -> Iterator[str]:
    """Yields a seed's last losses, and after each but bfloat16's the gap to it."""
    base = getattr(last.get((seed, BASE)), loss, None)
    for name in names:
        found = getattr(last.get((seed, name)), loss, None)
        yield "" if found is None else f"{found:.4f}"
        if name != BASE:
            yield "" if found is None or base is None else f"{found - base:+.4f}"


def plot(path: pathlib.Path, points: Sequence[Point], title: str) -> None:
    """Draws the losses of all runs, and the others' gaps within the range of bf16's seeds."""
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
            columns = {left: 1, right: 2}[axes]  # few rows, above what is drawn
            axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=columns)
    left.set_ylabel("nats per token")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, weight="bold")
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def losses(axes: Any, points: Sequence[Point]) -> None:
    """Draws the losses in training as lines, and those on the held-out text as dots.

    Where runs agree, others' thin lines and small dots lie within bfloat16's broad and large ones.
    """
    found = [p for p in points if math.isfinite(p.loss) and math.isfinite(p.val_loss)]
    late = [p for p in found if p.step > 0.08 * p.steps] or found  # the first losses fall fast
    top = max((max(p.loss, p.val_loss) for p in late), default=math.inf)
    # The last dots lie on the edge, and whole: so those above it are left out here.
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "clip_on": False, "zorder": 3}
    seeds = sorted({point.seed for point in points})
    for name in versions(points):
        color, width, size = (
            (THEIRS, 3.2, 5.5) if name == BASE else (color_of(points, name), 1, 2.5)
        )
        for number, seed in enumerate(seeds):
            some = [point for point in points if point.run == (seed, name)]
            at, labels = [p.tokens for p in some], [f"{name}, {loss}" for loss in LOSSES.values()]
            training, held_out = labels if number == 0 else (None, None)
            axes.plot(at, [p.loss for p in some], color=color, linewidth=width, label=training)
            values = [p.val_loss if p.val_loss <= top else math.nan for p in some]
            axes.plot(at, values, color=color, markersize=size, label=held_out, **dots)
    if late:
        bottom = min(min(p.loss, p.val_loss) for p in found)
        axes.set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
    axes.set_title(f"loss, {len(seeds)} seed{'s' * (len(seeds) > 1)}", loc="left", fontsize=10.5)


def color_of(points: Sequence[Point], version: str) -> str:
    return (OURS, *MORE)[(versions(points).index(version) - 1) % 4]


def gaps(axes: Any, points: Sequence[Point]) -> None:
    """Draws the held-out losses less bf16's by seed, their means, and the range of bf16's seeds."""
    axes.set_title("held-out loss less bf16's", loc="left", fontsize=10.5)
    axes.axhline(0, color="black", linewidth=0.6, linestyle=(0, (4, 3)))
    place, drawn = {point.step: point.tokens for point in points}, []
    for name in versions(points)[1:]:
        pairs, color = pairs_of(points, name), color_of(points, name)
        for own in pairs.values():
            gap = [other - base for base, other in own.values()]
            style: dict[str, Any] = {"color": color, "linewidth": 0.8, "alpha": 0.6}
            axes.plot([place[s] for s in own], gap, **style)
        steps = [step for step in sorted(place) if all(step in own for own in pairs.values())]
        if len(pairs) < 2 or not steps:
            continue
        found = [Comparison([own[step] for own in pairs.values()]) for step in steps]
        at = [place[step] for step in steps]
        if not drawn:
            edge = [one.range for one in found]
            style = {
                "color": THEIRS,
                "alpha": 0.3,
                "linewidth": 0,
                "label": "range of bf16's seeds",
            }
            axes.fill_between(at, [-width for width in edge], edge, **style)
        axes.plot(at, [one.gap for one in found], color=color, linewidth=2.2, label=f"{name}, mean")
        late = found[len(found) // 4 :]  # the first losses fall fast
        drawn += [max(abs(one.gap), one.range) for one in late]
    if 0 < (tall := max(drawn, default=0)) < math.inf:
        axes.set_ylim(-1.6 * tall, 1.6 * tall)


def pairs_of(points: Sequence[Point], version: str) -> dict[int, dict[int, tuple[float, float]]]:
    """Returns bf16's held-out loss and a version's, by seed and step, where there are both."""
    value = {(point.run, point.step): point.val_loss for point in points}
    pairs: dict[int, dict[int, tuple[float, float]]] = {}
    for ((seed, name), step), other in sorted(value.items()):
        base = value.get(((seed, BASE), step))
        if name == version and base is not None:
            pairs.setdefault(seed, {})[step] = base, other
    return pairs
