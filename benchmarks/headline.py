"""Prints the tables of README.md and docs/performance.md that a test compares with them.

    python benchmarks/headline.py

Nothing is measured here: the numbers are read from the CSV files in benchmarks/results, whose
reports name the machine, the date and the command. A test compares the tables with the documents'.
"""

import csv
import pathlib
import statistics

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def recorded(name: str) -> list[dict[str, str]]:
    """Rows of a CSV file; "report" names the run."""
    with open(RESULTS / f"{name}.csv", newline="") as lines:
        return [*csv.DictReader(lines)]


def norm(
    mode: str, rows: int, features: int, part: str = "headline", of: str = "rms_norm"
) -> dict[str, float]:
    """Microseconds by library, of bfloat16 rows.

    One run timed all but TransformerEngine, of whose two backends the faster counts.
    """
    times: dict[str, float] = {}
    reports = [f"2026-11-25_h200_{of}_{part}"]
    reports += ["2026-11-21_h200_transformer_engine"] * (of == "rms_norm")
    for row in recorded("norms"):
        shape = (row["mode"], int(row["rows"]), int(row["features"]))
        same = shape == (mode, rows, features) and row["dtype"] == "bfloat16"
        if row["report"] in reports and same:
            library, time = row["library"].removesuffix(", cuDNN"), float(row["us"])
            times[library] = min(time, times.get(library, time))
    return times


def whole(part: str, report: str) -> dict[str, float]:
    """Milliseconds by library, of the run whose ratio to plain XLA is the median."""
    runs: dict[str, dict[str, float]] = {}
    for row in recorded("times"):
        if (row["part"], row["report"]) == (part, report):
            runs.setdefault(row["run"], {})[row["library"]] = float(row["ms"])
    ratio = lambda run: list(run.values())[1] / list(run.values())[0]
    middle = statistics.median_low(map(ratio, runs.values()))
    return next(run for run in runs.values() if ratio(run) == middle)


def table() -> str:
    """The README's table: theirs, ours, ratio."""
    forward, backward = norm("forward", 32768, 4096), norm("backward", 32768, 4096)
    both = {name: forward[name] + backward[name] for name in forward if name in backward}
    few = norm("backward", 64, 4096, "small")
    mlp_fp8 = whole("norm + SwiGLU MLP 4096 -> 14336, 16384 tokens", "2026-11-24_h200_fp8")
    step_fp8 = whole("1b step in FP8", "2026-11-27_h200_step")
    rows = [
        (
            "RMSNorm, forward and backward, 32768 × 4096",
            {"`nnx.RMSNorm`": both["nnx"]},
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
            "SwiGLU MLP with its norm in FP8, forward and backward, 16384 tokens, 4096 / 14336",
            {
                "plain jnp, bfloat16": mlp_fp8["plain jnp"],
                "Flax's `fp8_ops`": mlp_fp8["Flax's fp8_ops"],
            },
            mlp_fp8["normfuse"],
            "{:.1f} ms",
        ),
        (
            "Training step in FP8, 1.24 billion parameters, 16384 tokens",
            {"ours, bfloat16": step_fp8["normfuse in bfloat16"]},
            step_fp8["normfuse"],
            "{:.1f} ms",
        ),
    ]
    lines = ["| one H200, bfloat16 | theirs | ours | ratio |", "|---|---|---|---|"]
    for what, theirs, ours, unit in rows:
        named = "<br>".join(f"{unit.format(time)} {name}" for name, time in theirs.items())
        ratios = "<br>".join(f"{time / ours:.2f}×" for time in theirs.values())
        lines.append(f"| {what} | {named} | {unit.format(ours)} | {ratios} |")
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


if __name__ == "__main__":
    print(table(), *tables(), sep="\n\n")
