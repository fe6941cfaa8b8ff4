"""The CPU kernels compared with XLA's own fusion of the same formulas.

    python benchmarks/cpu_rms_norm.py

Both run by turns, so that a busy machine slows both; a line gives the median time of each and the
median of the ratios of neighbours (above 1: the kernels are faster).
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from normfuse.layers.norm.op import backward_kernel, forward_kernel
from normfuse.layers.norm.spec import Norm

SHAPES = ((4096, 1024), (512, 4096), (65536, 64), (64, 65536), (4, 1048576))


def definitions(n: int):
    """Forward and backward in plain JAX, jitted as a user would write them."""

    def forward(x, scale):
        h = x.astype(jnp.float32)
        rstd = jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        return (h * rstd * scale).astype(x.dtype), rstd

    def backward(dy, x, scale, rstd):
        dy32, h = dy.astype(jnp.float32), x.astype(jnp.float32)
        g = dy32 * scale
        c = jnp.mean(g * h, -1, keepdims=True)
        return (rstd * g - h * rstd**3 * c).astype(x.dtype), jnp.sum(dy32 * h * rstd, 0)

    return jax.jit(forward), jax.jit(backward)


def kernels(n: int):
    """The same through the compiled handlers."""

    def forward(x, scale):
        norm = Norm(eps=1e-6, out_dtype=x.dtype.name, has_scale=True, with_rstd=True)
        y, rstd = forward_kernel(norm, x[..., None], scale)
        return y[..., 0], rstd

    def backward(dy, x, scale, rstd):
        norm = Norm(has_scale=True, with_dscale=True)
        dx, dscale = backward_kernel(norm, dy[..., None], x[..., None], scale, rstd)
        return dx[..., 0], dscale

    return jax.jit(forward), jax.jit(backward)


def compare(ours, theirs, args, repeats: int) -> tuple[float, float, float]:
    """Median times in ms of two functions called by turns, and the median of the ratios."""
    times = []
    for _ in range(repeats + 2):
        pair = []
        for fn in (ours, theirs):
            start = time.perf_counter()
            jax.block_until_ready(fn(*args))
            pair.append(1e3 * (time.perf_counter() - start))
        times.append(pair)
    times = times[2:]
    ratio = statistics.median(b / a for a, b in times)
    return *(statistics.median(t) for t in zip(*times, strict=True)), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=31)
    repeats = parser.parse_args().repeats
    print(f"{'shape':>14} {'dtype':>8} {'pass':>8} {'ours ms':>8} {'XLA ms':>8} {'XLA/ours':>8}")
    rng = np.random.default_rng(0)
    for rows, n in SHAPES:
        for dtype in ("float32", "bfloat16"):
            x, dy = (jnp.asarray(rng.standard_normal((rows, n)), dtype) for _ in range(2))
            scale = jnp.asarray(rng.standard_normal(n), "float32")
            ours, theirs = kernels(n), definitions(n)
            rstd = theirs[0](x, scale)[1]
            for index, args in enumerate(((x, scale), (dy, x, scale, rstd))):
                times = compare(ours[index], theirs[index], args, repeats)
                name = ("forward", "backward")[index]
                print(
                    f"{f'{rows}x{n}':>14} {dtype:>8} {name:>8} "
                    + "".join(f"{t:8.2f} " for t in times)
                )


if __name__ == "__main__":
    main()
