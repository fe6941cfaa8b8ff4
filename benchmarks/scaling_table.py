"""The table and the picture of the measurements of scaling."""

import csv
import datetime
import importlib.metadata
import itertools
import os
import pathlib
from typing import Any

import jax

from benchmarks.sharded_steps import PARTS

COLUMNS = (
    "date device jax normfuse settings part scaling gpus tokens version options ms tokens_per_s "
    "efficiency compile_s temporaries_mib communication_ms gemms_ms others_ms idle_ms behind_gemms "
    "behind_any gb_per_s losses"
).split()


class Table:
    """Prints rows and adds them to a CSV file, each at once: a run may be cut off.

    `settings` stand in every row, with the environment's of XLA, NCCL and CUDA.
    """

    def __init__(self, path: pathlib.Path, settings: dict[str, Any]):
        self.path = path
        names = ("NCCL_", "XLA_FLAGS", "CUDA_DEVICE_MAX")
        given = {k: v for k, v in sorted(os.environ.items()) if k.startswith(names)} | settings
        self.common = {
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "normfuse": importlib.metadata.version("normfuse"),
            "settings": " ".join(f"{name}={value}" for name, value in given.items()),
        }
        print(", ".join(map(str, self.common.values())), flush=True)

    def write(self, row: dict[str, Any]) -> None:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        new = not self.path.exists()
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(self.common | row)


def plot(paths: list[pathlib.Path], out: pathlib.Path) -> None:
    """Efficiency over the number of GPUs: a panel for each part and scaling, a line a version.

    Of XLA's own options only; where something was measured more than once, the last.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = efficiencies(paths)
    parts = [part for part in PARTS if any(row["part"] == part for row in rows)]
    modes = [mode for mode in ("weak", "strong") if any(row["scaling"] == mode for row in rows)]
    figure, axes = plt.subplots(
        len(modes),
        len(parts),
        figsize=(1 + 3.2 * len(parts), 0.8 + 2.7 * len(modes)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    lowest = min(float(row["efficiency"]) for row in rows)
    versions = list(dict.fromkeys(row["version"] for row in rows))
    lines: dict[str, Any] = {}
    for (i, mode), (k, part) in itertools.product(enumerate(modes), enumerate(parts)):
        ax = axes[i, k]
        for n, version in enumerate(versions):
            if line := curve(rows, part, mode, version):
                colour = "0.5" if version.startswith("jnp") else f"C{n}"
                (lines[version],) = ax.plot(*zip(*line), "o-", color=colour, markersize=4)
        ax.axhline(0.95, color="black", linewidth=0.6, linestyle=(0, (4, 3)))
        ax.set_title(f"{part}, {mode}", fontsize=10, loc="left")
        ax.set_xticks(sorted({1} | {int(row["gpus"]) for row in rows if row["part"] == part}))
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(lowest - 0.02, 1.03)
    for ax in axes[-1]:
        ax.set_xlabel("GPUs")
    for ax in axes[:, 0]:
        ax.set_ylabel("efficiency")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"tokens a second and GPU, over those of one {rows[0]['device']}", fontsize=11)
    figure.savefig(out, dpi=150)


def efficiencies(paths: list[pathlib.Path]) -> list[dict[str, str]]:
    """The tables' rows that have an efficiency, with XLA's own options."""
    rows = [row for path in paths for row in csv.DictReader(path.read_text().splitlines())]
    rows = [row for row in rows if row["efficiency"] and row["options"] == "default"]
    if not rows:
        raise SystemExit(f"{', '.join(map(str, paths))}: no row with an efficiency to draw")
    return rows


def curve(rows: list[dict[str, str]], part: str, mode: str, version: str) -> list[tuple]:
    """Numbers of GPUs and efficiencies, from 1 on one GPU; empty if nothing was measured."""
    found = {
        int(row["gpus"]): float(row["efficiency"])
        for row in rows
        if (row["part"], row["scaling"], row["version"]) == (part, mode, version)
    }
    return sorted(({1: 1.0} | found).items()) if found else []
