"""Draws the pictures of README.md and docs/performance.md and prints their tables.

    python benchmarks/headline.py

Nothing is measured here: the numbers are read from the CSV files in benchmarks/results, whose
reports name the machine, the date and the command. A test compares the tables with the documents'.
"""

import csv
import pathlib
import statistics

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"

OURS, THEIRS = "#c0392b", "#9aa5ae"
NAMES = {  # in the pictures
    "XLA": "XLA, best jnp",
    "nnx": "nnx.RMSNorm",
    "plain jnp": "plain jnp, bfloat16",
    "torch.compile": "torch.compile, bfloat16",
}


def norm(
    mode: str, rows: int, features: int, part: str = "headline", of: str = "rms_norm"
) -> dict[str, float]:
    """Microseconds by library, of bfloat16 rows.

    One run timed all but TransformerEngine, of whose two backends the faster counts.
    """
    times: dict[str, float] = {}
    files = [f"2026-11-25_h200_{of}_{part}"]
    files += ["2026-11-21_h200_transformer_engine"] * (of == "rms_norm")
    for file in files:
        with open(RESULTS / f"{file}.csv", newline="") as lines:
            for row in csv.DictReader(lines):
                shape = (row["mode"], int(row["rows"]), int(row["features"]))
                if shape == (mode, rows, features) and row["dtype"] == "bfloat16":
                    library, time = row["library"].removesuffix(", cuDNN"), float(row["us"])
                    times[library] = min(time, times.get(library, time))
    return times


def whole(part: str, file: str = "2026-11-22_h200_step") -> dict[str, float]:
    """Milliseconds by library, of the run whose ratio to plain XLA is the median."""
    runs: dict[str, dict[str, float]] = {}
    with open(RESULTS / f"{file}.csv", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["part"] == part:
                runs.setdefault(row.get("run", ""), {})[row["library"]] = float(row["ms"])
    ratio = lambda run: list(run.values())[1] / list(run.values())[0]
    middle = statistics.median_low(map(ratio, runs.values()))
    return next(run for run in runs.values() if ratio(run) == middle)


def table() -> str:
    """The README's table: theirs, ours, ratio."""
    forward, backward = norm("forward", 32768, 4096), norm("backward", 32768, 4096)
    both = {name: forward[name] + backward[name] for name in forward if name in backward}
    few = norm("backward", 64, 4096, "small")
    mlp, step = whole("SwiGLU MLP"), whole("1b step")
    mlp_fp8 = whole("norm + SwiGLU MLP 4096 -> 14336, 16384 tokens", "2026-11-24_h200_fp8")
    step_fp8 = whole("1b step in FP8", "2026-11-27_h200_step")
    torchao = whole("1b step beside torchao", "2026-11-25_h200_step")
    loss = whole("loss 16384 x 2048 -> 128256", "2026-11-23_h200")
    rows = [
        (
            "RMSNorm, forward and backward, 32768 × 4096",
            {"`nnx.RMSNorm`": both["nnx"], "TransformerEngine": both["TransformerEngine"]},
            both["normfuse"],
            "{:.0f} µs",
        ),
        (
            "RMSNorm, backward, 64 × 4096",
            {"`nnx.RMSNorm`": few["nnx"], "XLA, best jnp": few["XLA"]},
            few["normfuse"],
            "{:.1f} µs",
        ),
        (
            "SwiGLU MLP with its norm, forward and backward, 16384 tokens, 4096 / 14336",
            {"plain jnp": mlp["plain jnp"]},
            mlp["normfuse"],
            "{:.1f} ms",
        ),
        (
            "Whole training step, 1.24 billion parameters, 16384 tokens",
            {
                "same model, XLA's norms": step["normfuse with --implementation xla"],
                "`torch.compile`": step["torch.compile"],
            },
            step["normfuse"],
            "{:.1f} ms",
        ),
        (
            "The same MLP in FP8",
            {
                "plain jnp, bfloat16": mlp_fp8["plain jnp"],
                "Flax's `fp8_ops`": mlp_fp8["Flax's fp8_ops"],
            },
            mlp_fp8["normfuse"],
            "{:.1f} ms",
        ),
        (
            "The same training step in FP8",
            {"ours, bfloat16": step_fp8["normfuse in bfloat16"]},
            step_fp8["normfuse"],
            "{:.1f} ms",
        ),
        (
            "The same before its loss was in FP8, beside torchao",
            {"torchao's FP8 and `torch.compile`": torchao["torchao"]},
            torchao["normfuse"],
            "{:.1f} ms",
        ),
        (
            "Loss of 16384 tokens, 2048 → 128256, and its gradients",
            {"plain jnp": loss["plain jnp"], "Liger": loss["Liger"]},
            loss["normfuse"],
            "{:.1f} ms",
        ),
    ]
    lines = ["| one H200, bfloat16 | theirs | ours | ratio |", "|---|---|---|---|"]
    for what, theirs, ours, unit in rows:
        named = "<br>".join(f"{unit.format(time)} {name}" for name, time in theirs.items())
        ratios = "<br>".join(f"{time / ours:.2f}×" for time in theirs.values())
        lines.append(f"| {what} | {named} | **{unit.format(ours)}** | {ratios} |")
    return "\n".join(lines)


def norm_table(shapes: list[tuple[int, int]], libraries: dict[str, str], **run: str) -> str:
    """A table of docs/performance.md: µs by library."""
    lines = [f"| rows × features | | {' | '.join(libraries.values())} |"]
    lines.append("|---" * (2 + len(libraries)) + "|")
    for rows, features in shapes:
        for mode in ("forward", "backward"):
            times = norm(mode, rows, features, **run)
            digits = 2 if run.get("part") == "small" else 1
            cells = [f"{times[name]:.{digits}f}" for name in libraries]
            best = min(cells, key=float)
            cells = [f"**{cell}**" if cell == best else cell for cell in cells]
            lines.append(f"| {rows} × {features} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


LIBRARIES = {
    "normfuse": "normfuse",
    "XLA": "XLA, best jnp",
    "nnx": "Flax nnx",
    "Equinox": "Equinox",
    "tokamax": "tokamax",
    "torch": "torch",
    "Liger": "Liger",
}


def tables() -> list[str]:
    """The tables of docs/performance.md."""
    long = [(65536, 1024), (32768, 4096), (16384, 8192), (4096, 32768)]
    few = [(1, 4096), (8, 4096), (64, 4096), (512, 4096), (8, 8192)]
    everyone = LIBRARIES | {"TransformerEngine": "TransformerEngine"}
    names = ("normfuse", "XLA", "Pallas", "tokamax", "torch", "Liger")
    centred = {name: LIBRARIES.get(name, name) for name in names}
    return [
        norm_table(long, everyone),
        norm_table(few, LIBRARIES, part="small"),
        norm_table(long, centred, of="layer_norm"),
    ]


def bars(axes, title: str, times: dict[str, float], unit: str) -> None:
    """Horizontal bars, shortest first, each labelled with its name, time and ratio to ours."""
    ours = times["normfuse"]
    ordered = sorted(times.items(), key=lambda item: item[1], reverse=True)
    for place, (name, time) in enumerate(ordered):
        mine = name == "normfuse"
        axes.barh(place, time, color=OURS if mine else THEIRS, height=0.72)
        label = f"{time:.1f} {unit}" + ("" if mine else f"   {time / ours:.2f}×")
        axes.text(time, place, f"  {label}", va="center", weight="bold" if mine else "normal")
    axes.set_yticks(range(len(ordered)), [NAMES.get(name, name) for name, _ in ordered])
    axes.set_xlim(0, 1.32 * max(times.values()))
    axes.set_ylim(len(ordered) - 5.5, len(ordered) - 0.5)  # bars of one thickness, at the top
    axes.set_title(title, loc="left", fontsize=10.5, pad=6)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def draw(path: pathlib.Path, title: str, panels: list) -> None:
    """One row of panels: (title, times, unit)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 2.5), squeeze=False)
    for one, (name, times, unit) in zip(axes[0], panels, strict=True):
        bars(one, name, times, unit)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, weight="bold")
    figure.tight_layout(w_pad=2.5)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def among(times: dict[str, float], *names: str) -> dict[str, float]:
    return {name: times[name] for name in ("normfuse", *names)}


def main() -> None:
    rivals = ("nnx", "XLA", "Liger", "TransformerEngine")
    draw(
        IMAGES / "rms_norm_h200.png",
        "RMSNorm on one NVIDIA H200, bfloat16: device time, shorter is better",
        [
            ("forward, 32768 × 4096", among(norm("forward", 32768, 4096), *rivals), "µs"),
            ("backward, 32768 × 4096", among(norm("backward", 32768, 4096), *rivals), "µs"),
        ],
    )
    mlp = whole("norm + SwiGLU MLP 4096 -> 14336, 16384 tokens", "2026-11-24_h200_fp8")
    step = whole("1b step in FP8", "2026-11-25_h200_step")
    draw(
        IMAGES / "whole_h200.png",
        "In a model, one NVIDIA H200, normfuse in FP8: time, shorter is better",
        [
            (
                "SwiGLU MLP with its norm, forward and backward",
                among(mlp, "XLA's best FP8", "Flax's fp8_ops", "plain jnp"),
                "ms",
            ),
            (
                "training step, 1.24 billion parameters",
                among(step, "normfuse in bfloat16", "torch.compile"),
                "ms",
            ),
        ],
    )
    print(table(), *tables(), sep="\n\n")


if __name__ == "__main__":
    main()
