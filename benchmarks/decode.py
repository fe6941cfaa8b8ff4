"""What the norm costs where launches count: chains of 24 × (norm + product), and eager calls.

    python benchmarks/decode.py

A chain is one jitted program of decode size. Our kernels, what `implementation=None` takes and
XLA's norm run by turns, 50 calls in flight each time; a line gives the medians, and those of the
ratios to XLA's (below 1: ours is faster). Then the host's time for one eager call of `rms_norm`,
the device's work hidden behind the next calls.
"""

import statistics
import time

import jax
import jax.numpy as jnp

from normfuse import rms_norm

LAYERS = 24
SHAPES = [(64, 1024), (64, 4096), (512, 4096)]


def chain(implementation: str | None):
    """x -> x after 24 layers of norm and product."""

    @jax.jit
    def run(x, scale, kernels):
        for kernel in kernels:
            x = rms_norm(x, scale, implementation=implementation) @ kernel
        return x

    return run


def microseconds(run, operands, calls: int = 50) -> float:
    """Of one call, with `calls` in flight."""
    begin = time.perf_counter()
    for _ in range(calls):
        out = run(*operands)
    out.block_until_ready()
    return 1e6 * (time.perf_counter() - begin) / calls


def compare(rows: int, n: int, turns: int = 15) -> None:
    key = jax.random.key(0)
    x = jax.random.normal(key, (rows, n), jnp.bfloat16)
    kernels = [
        jax.random.normal(k, (n, n), jnp.bfloat16) / n**0.5 for k in jax.random.split(key, LAYERS)
    ]
    operands = x, jnp.ones(n), kernels
    runs = {str(name): chain(name) for name in ("native", None, "xla")}
    for run in runs.values():
        microseconds(run, operands)
    times = [[microseconds(run, operands) for run in runs.values()] for _ in range(turns)]
    line = f"24 x (norm + product), {rows:>3} x {n}: "
    for column, name in enumerate(runs):
        median = statistics.median(turn[column] for turn in times)
        ratio = statistics.median(turn[column] / turn[-1] for turn in times)
        line += f" {name} {median:6.1f} us ({ratio:.3f})"
    print(line, flush=True)


def eager(rows: int = 64, n: int = 4096, calls: int = 300) -> None:
    x, scale = jnp.ones((rows, n), jnp.bfloat16), jnp.ones(n)
    for implementation in ("native", "xla"):
        run = lambda x, scale, name=implementation: rms_norm(x, scale, implementation=name)
        microseconds(run, (x, scale))
        host = statistics.median(microseconds(run, (x, scale), calls) for _ in range(5))
        print(f"eager call, {implementation}: {host:.1f} us of the host")


if __name__ == "__main__":
    print(jax.devices()[0].device_kind, "JAX", jax.__version__)
    for shape in SHAPES:
        compare(*shape)
    eager()
