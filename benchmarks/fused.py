"""MLPs with fused kernels on one GPU beside the others: time, and time beyond the bare GEMMs.

    python benchmarks/fused.py                   # layers, forward and backward
    python benchmarks/fused.py --sweep           # schedules of the gradient's fused kernel

As in `benchmarks/dense.py`, times are of the device (CUPTI), medians of calls that take turns on a
warm GPU. A fused kernel counts as what it takes beyond cuBLAS's bare product of its shape, which is
timed in the same turns.
"""

import argparse
import functools
import itertools
import statistics

import jax
import jax.numpy as jnp
from dense import DIM, GEMM, HIDDEN, LAYERS, bf16, by_turns, f32, operands, show_kernels
from dense_layers import FUSED, both_ways

from normfuse.layers.dense.epilogue import SCALARS
from normfuse.native import product_gradient
from normfuse.native.implementation import Order
from normfuse.native.pallas import gradient_hopper


def total(sample) -> float:
    return sum(us for _, us in sample)


def beyond(run, products: dict[str, float]) -> float:
    """Microseconds of what is no GEMM, and of fused kernels what their bare product would not."""
    others = [(name, us) for name, us in run if not GEMM.search(name)]
    fused = [name for name, _ in others if "mosaic" in name]
    bare = [products["backward" if "gradient" in name else "forward"] for name in fused]
    return total(others) - sum(bare)


def layers(tokens, iterations: int) -> None:
    """Prints a table of the MLPs."""
    for (name, more), count in itertools.product(FUSED.items(), tokens):
        args = operands(name, count)
        (x, _, kernel, *_, down), dy = args
        bare = {
            "forward": (jax.jit(lambda x, w: x @ w), (x, kernel)),
            "backward": (jax.jit(lambda dy, w: dy @ w.T), (dy, down)),
        }
        calls = {
            key: (jax.jit(both_ways(fn)).lower(*args).compile(), args)
            for key, fn in (LAYERS[name] | more).items()
        }
        runs = by_turns(calls | bare, iterations)
        products = {key: statistics.median(map(total, runs[key])) for key in bare}
        line = ", ".join(f"{key} {us:.1f}" for key, us in products.items())
        print(f"\n{name}, {count} tokens; bare products: {line} us")
        for key, (fn, _) in calls.items():
            other = [beyond(run, products) for run in runs[key]]
            whole = statistics.median(map(total, runs[key]))
            memory = fn.memory_analysis()
            temporary = memory.temp_size_in_bytes / 2**20 if memory else 0
            print(
                f"  {key:24} whole {whole:8.1f} us  beyond the GEMMs "
                f"{statistics.median(other):7.1f} us  temporaries {temporary:5.0f} MiB",
                flush=True,
            )
            show_kernels(runs[key], gemms=False)


def sweep(tokens: int, iterations: int) -> None:
    """Times schedules of the fused gradient beside the product and the pass, and its error."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (tokens, DIM), (HIDDEN, DIM), (tokens, HIDDEN), (tokens, HIDDEN)
    dy, w, z, up = (jax.random.normal(k, s, bf16) for k, s in zip(keys, shapes))
    original = gradient_hopper.Shape
    for name, extra, value in (
        ("silu", (up,), True),
        ("silu", (up,), False),
        ("gelu_tanh", (), True),
    ):
        arrays = (dy, 0.02 * w, z, *extra)
        flags = {"function": SCALARS[name], "with_value": value, "precision": None}

        def step(kind, contract, dy, w, *operands, flags=flags):
            # copies of what is overwritten are of the caller's arrays: not counted
            how = {"strict": Order((kind,), strict=True), "contract": contract, **flags}
            return product_gradient.backward(dy, w, *operands, **how)

        turned = (dy, arrays[1].T, z, *extra)
        calls: dict[str, tuple] = {
            "dot": (jax.jit(lambda dy, w, *_: dy @ w.T), arrays),
            "native": (jax.jit(functools.partial(step, "native", 1)), arrays),
            "native, kernel (out, in)": (jax.jit(functools.partial(step, "native", 0)), turned),
            "fused, kernel (out, in)": (jax.jit(functools.partial(step, "pallas", 0)), turned),
        }
        for width in (4, 8, 16):
            gradient_hopper.Shape = functools.partial(original, width=width)
            jax.clear_caches()
            fn = jax.jit(functools.partial(step, "pallas", 1)).lower(*arrays).compile()
            calls[f"fused, tiles {width} wide"] = fn, arrays
        gradient_hopper.Shape = original
        runs = by_turns(calls, iterations)
        ours = lambda sample: sum(us for n, us in sample if "copy" not in n.lower())
        times = {key: statistics.median(map(ours, samples)) for key, samples in runs.items()}
        print(f"\n{name}, {1 + len(extra)} operands, with the value: {value}")
        want = calls["native"][0](*arrays)
        for key, us in times.items():
            line = f"  {key:34} {us:8.1f} us, beyond the product {us - times['dot']:7.1f}"
            if key.startswith("fused"):
                fn, operands = calls[key]
                got = fn(*operands)
                far = [
                    float(jnp.linalg.norm((a - b).astype(f32)) / jnp.linalg.norm(b.astype(f32)))
                    for a, b in zip(got, want)
                ]
                line += "  from native's " + " ".join(f"{e:.1e}" for e in far)
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--iterations", type=int, default=9)
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    if arguments.sweep:
        sweep((arguments.tokens or [16384])[0], arguments.iterations)
    else:
        layers(arguments.tokens or [16384, 2048], arguments.iterations)


if __name__ == "__main__":
    main()
