"""Device times of dense as one Pallas kernel, and as XLA's product and pass, from CUPTI.

    python -m benchmarks.pallas                  # TFLOP/s of a forward, and a step both ways
    python -m benchmarks.pallas --sweep          # other shapes of the Hopper kernel
    python -m benchmarks.pallas --norms 1024     # other shapes of RMSNorm's Triton kernels

`python -m benchmarks.rms_norm` has the norms beside the other implementations. The product runs
at the device's limit of power, so its variants take turns and the median of several rounds counts.
"""

import argparse
import functools
import itertools
import statistics

import jax
import jax.numpy as jnp

from benchmarks import norms, rms_norm
from benchmarks.device_time import Copies, kernels, microseconds
from normfuse import dense
from normfuse.layers.dense import one_kernel, pallas_hopper
from normfuse.layers.dense.one_kernel import Dense
from normfuse.native.implementation import Order
from normfuse.native.pallas import triton

PRODUCTS = [(16384, 4096, 14336), (16384, 14336, 4096), (2048, 4096, 14336), (512, 4096, 4096)]
ACTIVATIONS = [None, "gelu_tanh", "gelu"]


def operands(m: int, k: int, n: int):
    """(x, kernel, bias) of normals, the product's variance one."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, ((m, k), (k, n))))
    return x, w * k**-0.5, jax.random.normal(keys[2], (n,), jnp.bfloat16)


def rounds(variants, arrays, count: int = 5) -> dict[str, float]:
    """Median microseconds of each variant, all of them in turn."""
    times = {name: [] for name in variants}
    for _ in range(count):
        for name, fn in variants.items():
            times[name].append(microseconds(fn, [arrays], runs=5))
    return {name: statistics.median(of) for name, of in times.items()}


def forward(m: int, k: int, n: int) -> None:
    """Prints TFLOP/s with each activation; without one, of the bare product."""
    variants = {}
    for activation, name in itertools.product(ACTIVATIONS, ["pallas", "xla"]):
        fn = functools.partial(dense, activation=activation, implementation=name)
        if activation is None:
            fn = functools.partial(lambda x, w, b, fn: fn(x, w), fn=fn)
        variants[f"{activation} {name}"] = jax.jit(fn)
    times = rounds(variants, operands(m, k, n))
    rates = (f"{name} {2e-6 * m * k * n / time:.1f}" for name, time in times.items())
    print(f"{m:>6} x {k:>5} x {n:<6}" + "  ".join(rates), flush=True)


def both_ways(m: int, k: int, n: int) -> None:
    """Prints microseconds of a forward and backward with bias, kernel by kernel."""
    arrays = (*operands(m, k, n), jax.random.normal(jax.random.key(1), (m, n), jnp.bfloat16))

    def step(x, w, b, dy, activation, implementation):
        fn = functools.partial(dense, activation=activation, implementation=implementation)
        y, pull = jax.vjp(fn, x, w, b)
        return y, pull(dy)

    variants = {"the three products": jax.jit(lambda x, w, b, dy: (x @ w, dy @ w.T, x.T @ dy))}
    for a, i in itertools.product(ACTIVATIONS[1:], ["pallas", "xla"]):
        variants[f"{a} {i}"] = jax.jit(functools.partial(step, activation=a, implementation=i))
    for name, time in rounds(variants, arrays).items():
        print(f"{m} x {k} x {n} both ways, {name:20} {time:9.1f} us", flush=True)
        for kernel, us in kernels(variants[name], [arrays], 2)[-1]:
            print(f"    {us:9.1f} us  {kernel[:80]}")


def hopper_shapes():
    """Shapes of the Hopper kernel worth a try."""
    base = pallas_hopper.Shape
    tiles = [{}, {"rows": 64, "columns": 256, "split": "rows"}, {"split": "rows"}]
    for width, tile in itertools.product((4, 8, 16, 32), tiles):
        yield base(**tile, width=width)


def sweep(m: int, k: int, n: int) -> None:
    """Prints each shape's TFLOP/s and fraction of cuBLAS's, without and with an activation."""
    x, w, _ = operands(m, k, n)
    dot, flops = jax.jit(lambda x, w: x @ w), 2e-6 * m * k * n
    order = Order(("pallas",), strict=True)
    original, found = pallas_hopper.shape_for, []
    for shape in hopper_shapes():
        pallas_hopper.shape_for = lambda *_, shape=shape: shape
        line, fraction = f"  {shape}", 0.0
        for activation in (None, "gelu_tanh"):
            fn = functools.partial(one_kernel.kernel, Dense(activation=activation), order=order)
            try:
                ours, theirs = (microseconds(f, [(x, w)], runs=4) for f in (fn, dot))
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                line += f" {str(error)[:100]}"
                break
            fraction = theirs / ours
            line += f"  {flops / ours:6.1f} ({fraction:.3f})"
        found.append((fraction, line))
    pallas_hopper.shape_for = original
    print(f"{m} x {k} x {n}, without an activation and with gelu_tanh")
    for _, line in sorted(found, reverse=True):
        print(line, flush=True)


def triton_shapes(mode: str, n: int):
    """Shapes of the Triton kernels worth a try."""
    columns = triton.power_of_two(n)
    for size, each in itertools.product((columns, 2 * columns, 4096, 8192), (8, 16, 32)):
        rows, warps = size // columns, size // each // 32
        if rows < 1 or not 1 <= warps <= 32:
            continue
        for programs in (1, 2, 4, 8) if mode == "backward" else (1,):
            if programs * warps <= 64:
                yield triton.Shape(rows, columns, warps, programs)


def sweep_norms(n: int, rate: float) -> None:
    """Prints the best shapes of the Triton kernels for rows of n, as fractions of a copy's rate."""
    rows, contestant = (64 << 20) // n, norms.contestants(False)["Pallas"]
    sets, original = rms_norm.operands(rows, n, "bfloat16", 2), triton.shape_for
    for mode in ("forward", "backward"):
        found = []
        floor = norms.moved(mode, False) * rows * n * 2 / rate
        for shape in dict.fromkeys(triton_shapes(mode, n)):
            triton.shape_for = lambda call, shape=shape: shape
            jax.clear_caches()
            try:
                found.append((microseconds(contestant[mode], sets, runs=6), shape))
            except jax.errors.JaxRuntimeError as error:
                print(f"  {shape}: {str(error)[:100]}")
        triton.shape_for = original
        print(f"{mode} {rows} x {n}, {len(found)} shapes")
        for time, shape in sorted(found, key=lambda pair: pair[0])[:6]:
            print(f"  {time:8.1f} us {floor / time:.3f}  {shape}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time other shapes of the product")
    parser.add_argument("--norms", type=int, nargs="+", help="other shapes for rows of this length")
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    if arguments.norms:
        rate = Copies().rate
        for n in arguments.norms:
            sweep_norms(n, rate)
    elif arguments.sweep:
        sweep(*PRODUCTS[0])
    else:
        for shape in PRODUCTS:
            forward(*shape)
        both_ways(*PRODUCTS[0])


if __name__ == "__main__":
    main()
