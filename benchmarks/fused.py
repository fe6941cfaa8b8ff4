"""MLPs with and without fused kernels on one GPU: time, and time beyond the bare GEMMs.

    python benchmarks/fused.py                   # layers, forward and backward
    python benchmarks/fused.py --sweep           # the gradient's fused kernel: both parts
    python benchmarks/fused.py --sweep stored    # kernels stored (out, in), as Equinox stores them
    python benchmarks/fused.py --sweep schedules # other schedules

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
from dense import DIM, HIDDEN, LAYERS, bf16, f32, operands, show_kernels
from dense_layers import FUSED, both_ways
from device_time import GEMM, by_turns

from normfuse.layers.dense import pallas_gradient, product_gradient
from normfuse.layers.dense.epilogue import SCALARS, Epilogue
from normfuse.layers.dense.matmul import Product
from normfuse.layers.dense.product_gradient import Gradient
from normfuse.native.implementation import Order


def total(sample) -> float:
    return sum(us for _, us in sample)


def beyond(run, products: dict[str, float]) -> float:
    """Microseconds of kernels other than GEMMs; of fused kernels those beyond a bare product."""
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


# ---------------------------------------------------------------- the gradient's fused kernel


def gradient_of(name: str, gated: bool, with_value: bool, contract: int) -> Gradient:
    """The gradient of an activation before a product; `contract` is w's axis of dy's columns."""
    epilogue = Epilogue(
        function=SCALARS[name], axes=(), has_up=gated, with_value=with_value, out_dtype="bfloat16"
    )
    return Gradient(epilogue, Product.of(2, 2, contract=1 - contract))


def step(spec: Gradient, kind: str):
    """`(dy, w, z[, up]) -> gradients` by one kind of kernel."""
    # Copies of operands that a kernel overwrites are made for the caller: `whole` leaves them out.
    order = Order((kind,), strict=True)
    return jax.jit(functools.partial(product_gradient.kernel, spec, order=order))


def whole(sample) -> float:
    return sum(us for name, us in sample if "copy" not in name.lower())


def error(got, want) -> str:
    """The norm of each result's difference, relative to the result's."""
    norm = lambda a: float(jnp.linalg.norm(a.astype(f32)))
    return " ".join(f"{norm(a - b) / norm(b):.1e}" for a, b in zip(got, want, strict=True))


STORED = [(16384, 4096, 14336), (16384, 2048, 8192), (2048, 4096, 14336), (2048, 2048, 8192)]


def sweep_stored(cases, iterations: int) -> None:
    """Times the fused gradient, and cuBLAS and the pass, for kernels stored as Equinox stores them.

    w is (out, in) = (dim, hidden), so `Gradient.contract` is 0.
    """
    print("\nsilu, gated, with the value, kernels stored (out, in)")
    spec = gradient_of("silu", gated=True, with_value=True, contract=0)
    for tokens, dim, hidden in cases:
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = (tokens, dim), (dim, hidden), (tokens, hidden), (tokens, hidden)
        dy, w, z, up = (jax.random.normal(k, s, bf16) for k, s in zip(keys, shapes))
        arrays = dy, 0.02 * w, z, up
        calls = {kind: (step(spec, kind), arrays) for kind in ("pallas", "native")}
        runs = by_turns(calls, iterations, warm=1.0)
        fused, pair = (statistics.median(map(whole, runs[kind])) for kind in calls)
        got, want = (fn(*arrays) for fn, _ in calls.values())
        print(
            f"  {tokens:>5} tokens, {dim} / {hidden:<5}  fused {fused:8.1f} us  "
            f"cuBLAS and a pass {pair:8.1f} us  ratio {fused / pair:.3f}  "
            f"difference {error(got, want)}",
            flush=True,
        )


def sweep_schedules(tokens: int, iterations: int) -> None:
    """Times schedules of the fused gradient, and the product and the pass; and its error."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (tokens, DIM), (HIDDEN, DIM), (tokens, HIDDEN), (tokens, HIDDEN)
    dy, w, z, up = (jax.random.normal(k, s, bf16) for k, s in zip(keys, shapes))
    original = pallas_gradient.Shape
    for name, extra, value in (
        ("silu", (up,), True),
        ("silu", (up,), False),
        ("gelu_tanh", (), True),
    ):
        arrays = (dy, 0.02 * w, z, *extra)
        stored, turned = (gradient_of(name, bool(extra), value, contract) for contract in (1, 0))
        transposed = (dy, arrays[1].T, z, *extra)
        calls: dict[str, tuple] = {
            "dot": (jax.jit(lambda dy, w, *_: dy @ w.T), arrays),
            "native": (step(stored, "native"), arrays),
            "native, kernel (out, in)": (step(turned, "native"), transposed),
            "fused, kernel (out, in)": (step(turned, "pallas"), transposed),
        }
        for width in (4, 8, 16):
            pallas_gradient.Shape = functools.partial(original, width=width)
            jax.clear_caches()
            fn = step(stored, "pallas").lower(*arrays).compile()
            calls[f"fused, tiles {width} wide"] = fn, arrays
        pallas_gradient.Shape = original
        runs = by_turns(calls, iterations)
        times = {key: statistics.median(map(whole, samples)) for key, samples in runs.items()}
        print(f"\n{name}, {1 + len(extra)} operands, with the value: {value}")
        want = calls["native"][0](*arrays)
        for key, us in times.items():
            line = f"  {key:34} {us:8.1f} us, beyond the product {us - times['dot']:7.1f}"
            if key.startswith("fused"):
                fn, operands = calls[key]
                line += f"  from native's {error(fn(*operands), want)}"
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--sweep",
        nargs="*",
        choices=["stored", "schedules"],
        help="the gradient's fused kernel alone: both parts where none is named",
    )
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--iterations", type=int, default=9)
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    if arguments.sweep is not None:
        parts = arguments.sweep or ["stored", "schedules"]
        if "stored" in parts:
            sweep_stored(STORED, arguments.iterations)
        if "schedules" in parts:
            sweep_schedules((arguments.tokens or [16384])[0], arguments.iterations)
    else:
        layers(arguments.tokens or [16384, 2048], arguments.iterations)


if __name__ == "__main__":
    main()
