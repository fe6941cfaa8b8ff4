"""Device times of RMSNorm, a copy and every library at hand, in one run.

    python -m benchmarks.rms_norm                    # the headline: four shapes, bfloat16
    python -m benchmarks.rms_norm --part shapes      # or widths, dtypes, small
    python -m benchmarks.rms_norm --residual         # the same with a residual, added before

Times are sums over a call's kernels, from CUPTI; inputs are taken in turn so that none is in the
cache, except for `small`, where they are found there as after a matrix product. A fraction is the
time in which the device would copy the bytes that must move over the time taken: each large array
read or written once.

Writes rms_norm_PART.csv, or add_rms_norm_PART.csv, into --out.
"""

import argparse
import csv
import pathlib
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
    libraries: dict[str, norms.Contestant], part: str, residual: bool, copies: Copies
) -> list[dict]:
    """One record a shape, dtype, mode and library."""
    shapes, dtypes, modes = PARTS[part]
    records = []
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
    print(f"{name}, {device}, JAX {jax.__version__}, copy {copies.rate / 1e6:.2f} TB/s")
    records = measure(contestants(residual), arguments.part, residual, copies)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / f"{name}_{arguments.part}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)


if __name__ == "__main__":
    main()
