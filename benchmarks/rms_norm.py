"""Device times of RMSNorm, a copy and every library at hand, in one run.

    python -m benchmarks.rms_norm                    # the headline: four shapes, bfloat16
    python -m benchmarks.rms_norm --part shapes      # or widths, dtypes, modes, small
    python -m benchmarks.rms_norm --residual         # the same with a residual, added before

Times are sums over a call's kernels, from CUPTI; inputs are taken in turn so that none is in the
cache, except for `small`, where they are found there as after a matrix product. A fraction is the
time in which the device would copy the bytes that must move over the time taken: each large array
read or written once. torch and Liger, where installed, run in a process of their own.

Writes rms_norm_PART.csv and .png, or add_rms_norm_PART, into --out.
"""

import argparse
import csv
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import norms
from benchmarks.device_time import Copies, microseconds, sets_for

HEADLINE = [(65536, 1024), (32768, 4096), (16384, 8192), (4096, 32768)]
SHAPES = [(131072, 256), (131072, 512), (32768, 2048), (8192, 16384), (2048, 65536), (2048, 262144)]
WIDTHS = [
    (134217, 1000),
    (52428, 2560),
    (26214, 5120),
    (18724, 7168),
    (10922, 12288),
    (7281, 18432),
]
SMALL = [(rows, n) for n in (4096, 8192) for rows in (1, 8, 64, 512)]

PARTS = {  # shapes, dtypes, modes
    "headline": (HEADLINE, ["bfloat16"], ["forward", "backward"]),
    "shapes": (SHAPES, ["bfloat16"], ["forward", "backward"]),
    "widths": (WIDTHS, ["bfloat16"], ["forward", "backward"]),
    "dtypes": (HEADLINE, ["float16", "float32"], ["forward", "backward"]),
    "modes": (HEADLINE, ["bfloat16"], ["dx", "both"]),
    "small": (SMALL, ["bfloat16"], ["forward", "backward"]),
}


def operands(rows: int, n: int, dtype: str, count: int) -> list[tuple]:
    """`count` sets of (x, residual, scale, dy, dh, rstd)."""

    @jax.jit
    def draw(key):
        *keys, last = jax.random.split(key, 5)
        x, residual, dy, dh = (jax.random.normal(k, (rows, n), dtype) for k in keys)
        scale = 1 + 0.1 * jax.random.normal(last, (n,))
        return x, residual, scale, dy, dh, jax.random.uniform(last, (rows, 1), minval=0.5)

    return [draw(jax.random.key(i)) for i in range(count)]


def measure(
    norm: str, libraries: dict[str, norms.Contestant], part: str, residual: bool, copies: Copies
) -> list[dict]:
    """One record a shape, dtype, mode and library."""
    shapes, dtypes, modes = PARTS[part]
    modes, records = [mode for mode in modes if mode in libraries["normfuse"]], []
    torch = torch_times(shapes, dtypes, modes, residual, norm)
    for (rows, n), dtype in [(shape, dtype) for dtype in dtypes for shape in shapes]:
        size = rows * n * jnp.dtype(dtype).itemsize
        sets = operands(rows, n, dtype, 1 if part == "small" else sets_for(3 * size))
        for mode in modes:
            nbytes = norms.moved(mode, residual) * size
            common = {"rows": rows, "features": n, "dtype": dtype, "mode": mode, "bytes": nbytes}
            times = {"copy": copies.microseconds(nbytes // 2)}
            for name, contestant in libraries.items():
                try:
                    times[name] = microseconds(contestant[mode], sets)
                except Exception as error:  # a rival that cannot do it: said, not hidden
                    print(f"{name} {mode} {rows}x{n} {dtype}: {str(error).splitlines()[0][:120]}")
            times |= torch.get((rows, n, dtype, mode), {})
            for name, us in times.items():
                fraction = nbytes / copies.rate / us
                records.append(common | {"library": name, "us": us, "fraction": fraction})
            show(common, times, nbytes / copies.rate)
    return records


def show(common: dict, times: dict[str, float], floor: float) -> None:
    """One line of the table: fractions, and our microseconds."""
    line = "{rows:>7} x {features:<6} {dtype:<8} {mode:<8}".format(**common)
    line += f" {common['bytes'] / 1e6:7.1f} MB  {times['normfuse']:7.1f} us "
    print(line + "  ".join(f"{name} {floor / us:.3f}" for name, us in times.items()), flush=True)


def torch_times(shapes, dtypes, modes, residual, norm: str) -> dict[tuple, dict[str, float]]:
    """torch's and Liger's, measured in another process; nothing without torch."""
    work = [
        (rows, n, dtype, mode)
        for rows, n in shapes
        for dtype in dtypes
        for mode in modes
        if mode in ("forward", "backward") and not residual
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.torch_norms", norm],
        input=json.dumps(work),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print("torch:", (done.stderr.strip().splitlines() or ["no answer"])[-1])
        return {}
    return {tuple(key): times for key, times in json.loads(done.stdout.splitlines()[-1])}


def draw(records: list[dict], title: str, path: pathlib.Path) -> None:
    """Fractions of the copy rate as bars, one group for each shape, one panel for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((r["mode"], r["dtype"]) for r in records))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 0.6 + 2.6 * len(panels)), squeeze=False, layout="constrained"
    )
    libraries = list(dict.fromkeys(r["library"] for r in records if r["library"] != "copy"))
    for (mode, dtype), ax in zip(panels, axes[:, 0]):
        here = [r for r in records if (r["mode"], r["dtype"]) == (mode, dtype)]
        shapes = list(dict.fromkeys((r["rows"], r["features"]) for r in here))
        for i, library in enumerate(libraries):
            height = {
                (r["rows"], r["features"]): r["fraction"] for r in here if r["library"] == library
            }
            at = [k + 0.85 * (i / len(libraries) - 0.5) for k in range(len(shapes))]
            ax.bar(
                at,
                [height.get(shape, 0) for shape in shapes],
                0.85 / len(libraries),
                label=library,
                align="edge",
                color="C3"
                if library == "normfuse"
                else plt.get_cmap("Greys")(0.15 + 0.8 * i / len(libraries)),
            )
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set_xticks(range(len(shapes)), [f"{rows} × {n}" for rows, n in shapes])
        ax.set_ylabel("fraction of copy rate")
        ax.set_title(f"{mode}, {dtype}", fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(ncols=len(libraries), fontsize=8, frameon=False, loc="lower left",
                      bbox_to_anchor=(0, 1.12))  # fmt: skip
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def main(
    norm: str = "rms_norm",
    contestants: Callable[[bool], dict[str, norms.Contestant]] = norms.contestants,
) -> None:
    """Measures `rms_norm` or `layer_norm`, by contestants with or without a residual."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{norm}")
    parser.add_argument("--part", choices=PARTS, default="headline")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    residual, copies = arguments.residual, Copies()
    name = "add_" * residual + norm
    device = jax.devices()[0].device_kind
    title = f"{name}, {device}, JAX {jax.__version__}, copy {copies.rate / 1e6:.2f} TB/s"
    print(title)
    records = measure(norm, contestants(residual), arguments.part, residual, copies)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{name}_{arguments.part}"
    with open(f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)
    draw(records, title, pathlib.Path(f"{stem}.png"))


if __name__ == "__main__":
    main()
