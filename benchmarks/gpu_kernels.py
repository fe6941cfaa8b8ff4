"""Device times of the CUDA RMSNorm kernels beside XLA's and a copy's, from CUPTI.

    python benchmarks/gpu_kernels.py             # a table: fractions of the device's copy rate
    python benchmarks/gpu_kernels.py --small     # decode-sized inputs, in microseconds
    python benchmarks/gpu_kernels.py --sweep     # the same with other layouts (and see layouts.py)

A fraction is the time in which a copy would move the same bytes over the time taken: each input
read once and each output written once. Inputs are bfloat16, the scale float32.
"""

import argparse
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from normfuse.native import compiler, cuda_layout, rms_norm
from normfuse.native.cuda_layout import RowLayout

SHAPES = [(65536, 1024), (32768, 4096), (16384, 8192), (4096, 32768)]
MORE = [
    (524288, 256),
    (131072, 512),
    (32768, 2048),
    (52428, 2560),
    (26214, 5120),
    (18724, 7168),
    (10922, 12288),
    (8192, 16384),
    (7281, 18432),
    (2048, 65536),
    (512, 262144),
    (134217, 1000),
]
SMALL = [(1, 4096), (8, 4096), (64, 4096), (512, 4096), (64, 8192), (64, 1024)]
EPS = 1e-6
FLAGS = {"scale_offset": 0.0, "has_scale": True, "strict": True}
OUT = {"eps": EPS, "out_dtype": jnp.dtype("bfloat16"), "with_rstd": True}


def microseconds(fn: Callable, *operands, iterations: int = 20) -> float:
    """Median device time of all kernels of one call."""
    _, runs = profiler.measure(fn, aggregate=False, iterations=iterations)(*operands)
    return 1e3 * statistics.median(sum(ms for _, ms in run) for run in runs)


def operands(rows: int, n: int):
    """(x, dy, other, scale, rstd), the arrays (rows, n, 1)."""
    keys = jax.random.split(jax.random.key(0), 4)
    wide = [jax.random.normal(key, (rows, n, 1), jnp.bfloat16) for key in keys[:3]]
    scale = 1 + 0.1 * jax.random.normal(keys[3], (n,))
    return *wide, scale, jax.random.uniform(keys[3], (rows, 1), minval=0.5)


def native():
    """name -> (function of the operands, arrays of the size of x that it moves)."""
    plain, add = FLAGS | {"has_residual": False}, FLAGS | {"has_residual": True}
    return {
        "forward": (lambda x, dy, r, w, s: rms_norm.forward(x, w, **plain, **OUT), 2),
        "backward": (
            lambda x, dy, r, w, s: rms_norm.backward(dy, x, w, s, with_dscale=True, **plain),
            3,
        ),
        "add forward": (lambda x, dy, r, w, s: rms_norm.forward(x, r, w, **add, **OUT), 4),
        "add backward": (
            lambda x, dy, r, w, s: rms_norm.backward(dy, x, w, s, r, with_dscale=True, **add),
            4,
        ),
    }


def plain_jax():
    """The same four in plain JAX, as XLA fuses them best."""

    def norm(x, w):
        wide = x.astype(jnp.float32)
        rstd = jax.lax.rsqrt(jnp.mean(wide * wide, 1, keepdims=True) + EPS)
        return (wide * rstd * w[:, None]).astype(x.dtype)

    def add(x, r, w):
        h = x + r
        return h, norm(h, w)

    return {
        "forward": lambda x, dy, r, w, s: norm(x, w),
        "backward": lambda x, dy, r, w, s: jax.vjp(norm, x, w)[1](dy),
        "add forward": lambda x, dy, r, w, s: add(x, r, w),
        "add backward": lambda x, dy, r, w, s: jax.vjp(add, x, r, w)[1]((r, dy)),
    }


def copy_rate() -> float:
    """Bytes read and written per microsecond by the driver's own copy within the device."""
    from cuda.bindings import driver

    def call(name, *arguments):
        result, *values = getattr(driver, name)(*arguments)
        if result != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {result}")
        return values[0] if values else None

    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", 0))
    size, count, times = 512 << 20, 10, []
    source, target = call("cuMemAlloc", size), call("cuMemAlloc", size)
    begin, end = (call("cuEventCreate", 0) for _ in range(2))
    for _ in range(7):
        call("cuEventRecord", begin, 0)
        for _ in range(count):
            call("cuMemcpyDtoDAsync", target, source, size, 0)
        call("cuEventRecord", end, 0)
        call("cuEventSynchronize", end)
        times.append(call("cuEventElapsedTime", begin, end) / count)
    for pointer in (source, target):
        call("cuMemFree", pointer)
    return 2 * size / (1e3 * statistics.median(times))


def table(shapes, rate: float) -> None:
    """Prints fractions of the copy rate, ours and XLA's."""
    xla = plain_jax()
    print(f"{'':16}" + "".join(f"{name:>26}" for name in xla))
    for rows, n in shapes:
        arrays = operands(rows, n)
        line = f"{rows:>7} x {n:<6}"
        for name, (fn, moved) in native().items():
            floor = moved * arrays[0].nbytes / rate
            ours, theirs = (microseconds(f, *arrays) for f in (fn, xla[name]))
            line += f"{ours:9.1f} us {floor / ours:.3f} ({floor / theirs:.2f})"
        print(line, flush=True)


def small() -> None:
    """Prints microseconds of the forward kernel, ours and XLA's."""
    for rows, n in SMALL:
        arrays = operands(rows, n)
        ours, theirs = (
            microseconds(fn, *arrays) for fn in (native()["forward"][0], plain_jax()["forward"])
        )
        print(f"forward {rows:>4} x {n:<6} {ours:6.2f} us   XLA {theirs:6.2f} us", flush=True)


def sweep_small() -> None:
    """Times the forward kernel with other numbers of vectors to a thread."""
    original = cuda_layout.forward_layout
    for rows, n in SMALL:
        arrays, (fn, _) = operands(rows, n), native()["forward"]
        found = []
        for chunks in (1, 2, 3, 4, 6, 8):
            threads = -(-n // (8 * chunks * 32)) * 32
            if not 32 <= threads <= 1024:
                continue
            for block_rows in sorted({1, max(1, 256 // threads)}):
                layout = RowLayout(n, 8, chunks, threads, block_rows)
                cuda_layout.forward_layout = lambda *_, layout=layout, **__: layout
                jax.clear_caches()
                time = microseconds(functools.partial(fn), *arrays, iterations=40)
                found.append((time, f"{chunks} x {threads} x {block_rows}"))
        cuda_layout.forward_layout = original
        jax.clear_caches()
        theirs = microseconds(plain_jax()["forward"], *arrays, iterations=40)
        best = "   ".join(f"{time:.2f} us {name}" for time, name in sorted(found)[:5])
        print(f"forward {rows:>4} x {n:<6} XLA {theirs:.2f}   {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="decode-sized inputs")
    parser.add_argument("--sweep", action="store_true", help="decode-sized inputs, other layouts")
    parser.add_argument("--all", action="store_true", help="more row lengths")
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"{jax.devices()[0].device_kind}, copy {rate / 1e6:.2f} TB/s, JAX {jax.__version__}")
    print("NVRTC {}.{}".format(*compiler.version()))
    if arguments.small:
        small()
    elif arguments.sweep:
        sweep_small()
    else:
        table(SHAPES + MORE * arguments.all, rate)


if __name__ == "__main__":
    main()
