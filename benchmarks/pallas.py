"""Device times of the Pallas kernels beside the native ones, XLA's and a copy's, from CUPTI.

    python benchmarks/pallas.py                 # both tables
    python benchmarks/pallas.py --norms         # RMSNorm: fractions of the device's copy rate
    python benchmarks/pallas.py --matmul        # dense with its activation: TFLOP/s
    python benchmarks/pallas.py --sweep         # the same under other shapes of the kernels

The matrix product runs at the device's limit of power, so its variants take turns and the median of
several rounds counts.
"""

import argparse
import functools
import itertools
import statistics

import gpu_kernels
import jax
import jax.numpy as jnp
from gpu_kernels import SHAPES, copy_rate, microseconds
from jax.experimental.mosaic.gpu import profiler

from normfuse import dense
from normfuse.layers.activations import resolve
from normfuse.native import dense as native_dense
from normfuse.native import rms_norm
from normfuse.native.fallback import Order
from normfuse.native.pallas import matmul_hopper, triton

PALLAS = Order(("pallas",), strict=True)
MORE = [(131072, 512), (32768, 2048), (26214, 5120), (18724, 7168), (8192, 16384)]
PRODUCTS = [(16384, 4096, 14336), (16384, 14336, 4096), (2048, 4096, 14336), (512, 4096, 4096)]
ACTIVATIONS = [None, "gelu_tanh", "gelu"]


def pallas_norms():
    """As `gpu_kernels.native`, by Pallas."""
    plain = {"scale_offset": 0.0, "has_scale": True, "has_residual": False, "order": PALLAS}
    add, out = plain | {"has_residual": True}, gpu_kernels.OUT
    back = functools.partial(rms_norm.backward, with_dscale=True)
    return {
        "forward": lambda x, dy, r, w, s: rms_norm.forward(x, w, **plain, **out),
        "backward": lambda x, dy, r, w, s: back(dy, x, w, s, **plain),
        "add forward": lambda x, dy, r, w, s: rms_norm.forward(x, r, w, **add, **out),
        "add backward": lambda x, dy, r, w, s: back(dy, x, w, s, r, **add),
    }


def norms(shapes, rate: float) -> None:
    """Prints fractions of the copy rate: Pallas (native, XLA)."""
    ours, native, xla = pallas_norms(), gpu_kernels.native(), gpu_kernels.plain_jax()
    print(f"{'pallas (native, XLA)':20}" + "".join(f"{name:>28}" for name in ours))
    for rows, n in shapes:
        arrays = gpu_kernels.operands(rows, n)
        line = f"{rows:>7} x {n:<8}"
        for name, fn in ours.items():
            floor = native[name][1] * arrays[0].nbytes / rate
            times = [measured(f, *arrays) for f in (fn, native[name][0], xla[name])]
            p, q, r = (floor / time for time in times)
            line += f"{times[0]:10.1f} us {p:.2f} ({q:.2f}, {r:.2f})"
        print(line, flush=True)


def measured(fn, *arrays) -> float:
    """Microseconds, or NaN with the reason printed."""
    try:
        return microseconds(fn, *arrays)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        print(f"  {type(error).__name__}: {str(error)[:200]}")
        return float("nan")


def product_operands(m: int, k: int, n: int):
    """(x, kernel, bias) of standard normals, the product's variance about one."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, ((m, k), (k, n))))
    return x, w * k**-0.5, jax.random.normal(keys[2], (n,), jnp.bfloat16)


def rounds(variants, operands, count: int = 5) -> dict[str, float]:
    """Median microseconds of each variant, all of them in turn."""
    times = {name: [] for name in variants}
    for _ in range(count):
        for name, fn in variants.items():
            times[name].append(microseconds(fn, *operands, iterations=5))
    return {name: statistics.median(of) for name, of in times.items()}


def matmul(shapes) -> None:
    """Prints TFLOP/s of dense with each activation, and of XLA's bare product."""
    names = ["pallas", "xla"]
    print(
        f"{'tokens x in x out':22}"
        + "".join(f"{f'{a} {i}':>18}" for a in ACTIVATIONS for i in names)
    )
    for m, k, n in shapes:
        operands, variants = product_operands(m, k, n), {}
        for a, i in itertools.product(ACTIVATIONS, names):
            if a is None:
                fn = functools.partial(dense, implementation=i)
                variants[f"{a} {i}"] = jax.jit(lambda x, w, b, fn=fn: fn(x, w))
            else:
                variants[f"{a} {i}"] = jax.jit(
                    functools.partial(dense, activation=a, implementation=i)
                )
        times = rounds(variants, operands)
        rates = "".join(f"{2e-6 * m * k * n / time:18.1f}" for time in times.values())
        print(f"{m:>6} x {k:>5} x {n:<6}" + rates, flush=True)


def both_ways(m: int, k: int, n: int) -> None:
    """Prints microseconds of dense with bias and activation, forward and backward."""
    x, w, b = product_operands(m, k, n)
    dy = jax.random.normal(jax.random.key(1), (m, n), jnp.bfloat16)

    def step(x, w, b, dy, activation, implementation):
        fn = functools.partial(dense, activation=activation, implementation=implementation)
        y, pull = jax.vjp(fn, x, w, b)
        return y, pull(dy)

    def products(x, w, b, dy):
        return x @ w, dy @ w.T, x.T @ dy

    variants = {"the three products": jax.jit(products)}
    for a, i in itertools.product(ACTIVATIONS[1:], ["pallas", "xla"]):
        variants[f"{a} {i}"] = jax.jit(functools.partial(step, activation=a, implementation=i))
    for name, time in rounds(variants, (x, w, b, dy)).items():
        print(f"{m} x {k} x {n} forward and backward, {name:22} {time:9.1f} us", flush=True)
        _, runs = profiler.measure(variants[name], aggregate=False, iterations=2)(x, w, b, dy)
        for kernel, ms in runs[-1]:
            print(f"    {1e3 * ms:9.1f} us  {kernel[:80]}")


def norm_shapes(name: str, n: int):
    """Shapes of the Triton kernels worth a try."""
    columns = triton.power_of_two(n)
    for size, each in itertools.product((columns, 2 * columns, 4096, 8192), (8, 16, 32)):
        rows, warps = size // columns, size // each // 32
        if rows < 1 or warps > 32 or warps < 1:
            continue
        for programs in (1, 2, 4, 8) if name == "backward" else (1,):
            if programs * warps <= 64:
                yield triton.Shape(rows, columns, warps, programs)


def sweep_norms(shapes, rate: float) -> None:
    """Times each shape of the Triton kernels, and prints the best."""
    original = triton.shape_for
    for (rows, n), name in itertools.product(shapes, ("forward", "backward")):
        arrays, fn, found = gpu_kernels.operands(rows, n), pallas_norms()[name], []
        floor = (2 if name == "forward" else 3) * arrays[0].nbytes / rate
        for shape in dict.fromkeys(norm_shapes(name, n)):
            triton.shape_for = lambda call, shape=shape: shape
            jax.clear_caches()
            try:
                found.append((microseconds(functools.partial(fn), *arrays, iterations=6), shape))
            except jax.errors.JaxRuntimeError as error:
                print(f"  {shape}: {str(error)[:100]}")
        triton.shape_for = original
        print(f"{name} {rows} x {n}, {len(found)} shapes")
        for time, shape in sorted(found, key=lambda pair: pair[0])[:6]:
            print(f"  {time:8.1f} us {floor / time:.3f}  {shape}", flush=True)


def product_shapes():
    """Shapes of the Hopper kernel worth a try."""
    base = matmul_hopper.Shape
    tiles = [
        {},
        {"rows": 64, "columns": 256, "split": "rows"},
        {"rows": 128, "columns": 128, "split": "rows"},
    ]
    for cluster, tile in itertools.product(("", "rows", "columns"), tiles):
        yield base(**tile, cluster=cluster)
    for width in (4, 16, 32):
        yield base(width=width)
        yield base(**tiles[1], width=width)


def sweep_matmul(m: int, k: int, n: int) -> None:
    """Times each shape of the Hopper kernel, without and with an activation."""
    x, w, b = product_operands(m, k, n)
    dot = jax.jit(lambda x, w: x @ w)
    flops = 2e-6 * m * k * n
    original, found = matmul_hopper.shape_for, []
    for shape in product_shapes():
        matmul_hopper.shape_for = lambda *_, shape=shape: shape
        line = f"  {shape}"
        for activation in (None, "gelu_tanh"):
            options = {"precision": None, "keep": False, "order": PALLAS}
            fn = functools.partial(native_dense.forward, function=resolve(activation), **options)
            fn = jax.jit(lambda x, w, fn=fn: fn(x, w))
            try:
                ours = microseconds(fn, x, w, iterations=4)
                theirs = microseconds(dot, x, w, iterations=4)
                line += f"  {flops / ours:6.1f} ({theirs / ours:.3f})"
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                line += f" {str(error)[:100]}"
                break
        else:
            found.append((ours / theirs, line))
            continue
        print(line, flush=True)
    matmul_hopper.shape_for = original
    print(f"{m} x {k} x {n}: TFLOP/s (times cuBLAS's), without an activation and with gelu_tanh")
    for _, line in sorted(found):
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("norms", "matmul", "sweep", "more"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--n", type=int, nargs="+", help="only norms of rows of these lengths")
    arguments = parser.parse_args()
    both = arguments.norms == arguments.matmul
    rate = copy_rate() if both or arguments.norms else 0.0
    print(f"{jax.devices()[0].device_kind}, copy {rate / 1e6:.2f} TB/s, JAX {jax.__version__}")
    if both or arguments.matmul:
        if arguments.sweep:
            sweep_matmul(*PRODUCTS[0])
        else:
            matmul(PRODUCTS)
            both_ways(*PRODUCTS[0])
    if both or arguments.norms:
        shapes = SHAPES + MORE * (arguments.more or arguments.n is not None)
        shapes = [shape for shape in shapes if not arguments.n or shape[1] in arguments.n]
        sweep_norms(shapes, rate) if arguments.sweep else norms(shapes, rate)


if __name__ == "__main__":
    main()
