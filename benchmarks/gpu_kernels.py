"""Device times of the CUDA RMSNorm kernels beside XLA's and a copy's, from CUPTI.

    python benchmarks/gpu_kernels.py             # a table: fractions of the device's copy rate
    python benchmarks/gpu_kernels.py --small     # decode-sized inputs, in microseconds
    python benchmarks/gpu_kernels.py --sweep     # other layouts of the same kernels, the best first

A fraction is the time in which a copy would move the same bytes over the time taken: each input
read once and each output written once. Inputs are bfloat16, the scale float32.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from normfuse.native import compiler, cuda_layout, rms_norm
from normfuse.native.cuda_layout import RowLayout

SHAPES = [(65536, 1024), (32768, 4096), (16384, 8192), (4096, 32768)]
MORE = [(131072, 512), (32768, 2048), (26214, 5120), (18724, 7168), (10922, 12288), (8192, 16384)]
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


def forward_layouts(n: int) -> Iterator[RowLayout]:
    """Layouts of the forward kernel worth a try for bfloat16 rows of n."""
    vectors = n // 8
    for slices, chunks in itertools.product((1, 2, 4, 8), (1, 2, 3, 4)):
        threads = -(-vectors // (slices * chunks))
        if vectors % (slices * chunks) or threads % 32 or not 32 <= threads <= 1024:
            continue
        for rows, registers in itertools.product((1, 4, 8), (32, 40, 64)):
            blocks = 65536 // (registers * threads * rows)
            if threads * rows not in range(128, 1025) or (rows > 1 and threads > 64):
                continue
            if registers >= 24 + 4 * chunks and 1 <= blocks <= 16:
                yield RowLayout(n, 8, chunks, threads, rows, slices, blocks)


def backward_layouts(n: int) -> Iterator[RowLayout]:
    """Layouts of the backward kernel worth a try for bfloat16 rows of n."""
    vectors = n // 8
    for slices, chunks in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        threads = -(-vectors // (slices * chunks))
        if vectors % (slices * chunks) or threads % 32 or not 32 <= threads <= 1024:
            continue
        for size, blocks in itertools.product((128, 256, 512, 1024), (1, 2, 3, 4, 8)):
            rows = max(1, size // threads)
            registers = 65536 // (threads * rows * blocks)
            if threads * rows <= 1024 and 24 + 16 * chunks <= registers <= 48 + 32 * chunks:
                yield RowLayout(n, 8, chunks, threads, rows, slices, blocks)


def sweep(shapes, rate: float) -> None:
    """Times each layout, and prints the best ten of each kernel and shape."""
    for (rows, n), name in itertools.product(shapes, ("forward", "backward")):
        arrays, (fn, moved) = operands(rows, n), native()[name]
        floor = moved * arrays[0].nbytes / rate
        chosen = f"{name}_layout"
        original, found = getattr(cuda_layout, chosen), []
        candidates = (forward_layouts if name == "forward" else backward_layouts)(n)
        for layout in dict.fromkeys(candidates):
            setattr(cuda_layout, chosen, lambda *_, layout=layout, **__: layout)
            jax.clear_caches()
            try:
                time = microseconds(functools.partial(fn), *arrays, iterations=8)
            except (jax.errors.JaxRuntimeError, compiler.CompileError) as error:
                print(f"  {layout}: {str(error)[:120]}")
                continue
            found.append((time, layout))
        setattr(cuda_layout, chosen, original)
        print(f"{name} {rows} x {n}, {len(found)} layouts")
        for time, layout in sorted(found, key=lambda pair: pair[0])[:8]:
            sizes = {k: v for k, v in dataclasses.asdict(layout).items() if k != "features"}
            print(f"  {time:8.1f} us {floor / time:.3f}  {sizes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="decode-sized inputs")
    parser.add_argument("--sweep", action="store_true", help="time other layouts")
    parser.add_argument("--n", type=int, help="only the shape with rows of this length")
    parser.add_argument("--all", action="store_true", help="more row lengths")
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"{jax.devices()[0].device_kind}, copy {rate / 1e6:.2f} TB/s, JAX {jax.__version__}")
    print("NVRTC {}.{}".format(*compiler.version()))
    if arguments.small:
        small()
    elif arguments.sweep:
        shapes = [shape for shape in SHAPES + MORE if arguments.n == shape[1]]
        sweep(shapes or SHAPES, rate)
    else:
        table(SHAPES + MORE * arguments.all, rate)


if __name__ == "__main__":
    main()
