"""Dense layers on one GPU and the same in plain jnp: time that is not GEMM, time, temporaries.

    python benchmarks/dense.py                   # layers, forward and backward
    python benchmarks/dense.py --accumulation    # gradients of eight microbatches
    python benchmarks/dense.py --cublas          # either of them without XLA's Triton GEMMs
    python benchmarks/dense.py --sweep           # layouts of the kernels after a product

Times are of the device (CUPTI), the median of the calls; both versions are timed by turns in one
process. bfloat16, the norm's scale float32. The floor is the time in which a copy would move what
the kernels that are not GEMMs must read and write.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import pathlib
import re
import statistics
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from device_time import GEMM, by_turns
from jax.experimental.mosaic.gpu import profiler

from normfuse import accumulate_gradients, gated_product

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from dense_layers import LAYERS, MOVED, both_ways, kernel_shapes, project, rms  # noqa: E402

DIM, HIDDEN = 4096, 14336
COPY_RATE = 4.17e6  # bytes a microsecond, one H200's copy within the device
f32, bf16 = jnp.float32, jnp.bfloat16


# ---------------------------------------------------------------- layers


def operands(layer: str, tokens: int):
    """x, scale and the kernels, and the gradient of the result."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape, bf16)
    kernels = [draw(*shape) * 0.02 for shape in kernel_shapes(layer, DIM, HIDDEN)]
    x, scale = draw(tokens, DIM), 1 + 0.1 * jax.random.normal(next(keys), (DIM,))
    return (x, scale, *kernels), draw(tokens, kernels[-1].shape[1])


def layers(versions_of, tokens, iterations: int, gemms: bool, options: dict[str, bool]) -> None:
    """Prints a table of the layers; with `gemms`, every GEMM by the kernel's name."""
    for (name, versions), count in itertools.product(versions_of.items(), tokens):
        args = operands(name, count)
        compiled = {
            key: jax.jit(both_ways(fn)).lower(*args).compile(options)
            for key, fn in versions.items()
        }
        runs = by_turns({key: (fn, args) for key, fn in compiled.items()}, iterations)
        print(f"\n{name}, {count} tokens")
        for key, samples in runs.items():
            total = [sum(us for _, us in sample) for sample in samples]
            other = [sum(us for n, us in sample if not GEMM.search(n)) for sample in samples]
            temporary = compiled[key].memory_analysis().temp_size_in_bytes
            wide, hidden = MOVED.get((name, key), (0, 0))
            floor = 2 * count * (wide * DIM + hidden * HIDDEN) / COPY_RATE
            print(
                f"  {key:24} not GEMM {statistics.median(other):7.1f} us (floor {floor:6.1f})  "
                f"whole {statistics.median(total):8.1f} us  "
                f"temporaries {temporary / 2**20:7.0f} MiB",
                flush=True,
            )
            show_kernels(samples, gemms)


def show_kernels(samples, gemms: bool) -> None:
    """Every kernel with its median time, one line; GEMMs together if not `gemms`."""
    times = collections.defaultdict(list)
    for sample in samples:
        total = collections.Counter()
        for name, us in sample:
            total["GEMMs" if GEMM.search(name) and not gemms else name] += us
        for name, us in total.items():
            times[name].append(us)
    line = ", ".join(f"{name[:60]} {statistics.median(us):.1f}" for name, us in times.items())
    print(f"    {line}", flush=True)


# ---------------------------------------------------------------- accumulation


def block(x, scale, gate, up, down, *, ours: bool):
    if ours:
        return x + gated_product(*project(x, scale, gate, up), down)
    n = rms(x, scale)
    return x + (jax.nn.silu(n @ gate.astype(n.dtype)) * (n @ up.astype(n.dtype))) @ down.astype(
        n.dtype
    )


def loss(ours: bool) -> Callable:
    return lambda p, x: jnp.sum(block(x, *p, ours=ours).astype(f32) ** 2) * 1e-6


def summed(fn: Callable) -> Callable:
    """The way users write it: float32 sums of `jax.grad` in a scan."""

    def run(params, xs):
        def add(sums, x):
            return jax.tree.map(lambda s, g: s + g.astype(f32), sums, jax.grad(fn)(params, x)), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, f32), params)
        return jax.lax.scan(add, zeros, xs)[0]

    return run


def accumulation(microbatches, iterations: int, options: dict[str, bool]) -> None:
    """Prints a table of gradient accumulation over eight microbatches."""
    for count in microbatches:
        (x, *params), _ = operands("norm + SwiGLU MLP", count)
        xs, params = jnp.stack([x * (1 + i / 8) for i in range(8)]), tuple(params)
        wide = jax.tree.map(lambda p: p.astype(f32), params)
        ours = lambda p, xs: accumulate_gradients(loss(True), p, xs)[1]
        versions = {
            "jnp, bf16 kernels": (summed(loss(False)), params),
            "normfuse, bf16 kernels, summed in a scan": (summed(loss(True)), params),
            "normfuse, accumulate_gradients": (ours, params),
            "normfuse, f32 kernels, summed in a scan": (summed(loss(True)), wide),
        }
        compiled = {k: jax.jit(fn).lower(p, xs).compile(options) for k, (fn, p) in versions.items()}
        runs = by_turns({k: (c, (versions[k][1], xs)) for k, c in compiled.items()}, iterations)
        print(f"\n8 x {count} tokens")
        times = {}
        for key, samples in runs.items():
            times[key] = statistics.median(sum(us for _, us in sample) for sample in samples)
            text = compiled[key].as_text()
            added = len(re.findall(r'"beta":1\b', text))
            temporary = compiled[key].memory_analysis().temp_size_in_bytes / 2**20
            faster = times["jnp, bf16 kernels"] / times[key]
            print(
                f"  {key:42} {times[key] / 1e3:7.3f} ms  {faster:.3f} times as fast  "
                f"temporaries {temporary:5.0f} MiB  GEMMs with beta = 1: {added}",
                flush=True,
            )
        check(ours, params, xs)


def check(ours, params, xs) -> None:
    """Against gradients of one microbatch at a time, added in float32."""
    run = jax.jit(ours)  # one program for both: other GEMMs round activations elsewhere
    got, want = run(params, xs), None
    for i in range(len(xs)):
        one = run(params, jnp.where(jnp.arange(len(xs))[:, None, None] == i, xs, 0))
        want = one if want is None else jax.tree.map(jnp.add, want, one)
    norm = lambda a: float(jnp.linalg.norm(a))
    errors = [norm(g - w) / norm(w) for g, w in zip(got[1:], want[1:])]
    print(f"  relative to unfused float32 sums: {max(errors):.1e}", flush=True)


# ---------------------------------------------------------------- layouts


def sweep(iterations: int) -> None:
    """Times layouts of the kernels after a product, the best first."""
    from normfuse.layers.dense import epilogue
    from normfuse.layers.dense.epilogue import SCALARS, Epilogue
    from normfuse.native.implementation import NATIVE

    keys = jax.random.split(jax.random.key(0), 3)
    dy, z, up = (jax.random.normal(key, (16384, HIDDEN), bf16) for key in keys)
    bias = jnp.zeros((HIDDEN,), f32)
    gated = Epilogue(function=SCALARS["silu"], axes=(), has_up=True, out_dtype="bfloat16")
    plain = Epilogue(function=SCALARS["gelu_tanh"], axes=(), out_dtype="bfloat16")
    valued = dataclasses.replace(gated, with_value=True)
    shifted = dataclasses.replace(plain, axes=(1,), has_bias=True, with_dbias=True)
    forward = functools.partial(epilogue.forward_kernel, order=NATIVE)
    backward = functools.partial(epilogue.backward_kernel, order=NATIVE)
    arrays = dy, z, up, bias
    kernels = {
        "gated forward": (lambda dy, z, up, bias: forward(gated, z, up), 3),
        "gated backward": (lambda dy, z, up, bias: backward(gated, dy, z, up), 5),
        "gated backward, value": (lambda dy, z, up, bias: backward(valued, dy, z, up), 6),
        "gelu forward": (lambda dy, z, up, bias: forward(plain, z), 2),
        "gelu backward": (lambda dy, z, up, bias: backward(plain, dy, z), 3),
        "bias gelu backward": (lambda dy, z, up, bias: backward(shifted, dy, z, bias), 3),
    }
    originals = epilogue.flat_layout, epilogue.column_layout
    found: dict[str, list] = collections.defaultdict(list)
    for (name, (fn, moved)), unroll, threads, blocks in itertools.product(
        kernels.items(), (1, 2, 4), (256, 512), (2, 3, 4, 8)
    ):
        if blocks * threads not in (1024, 1536, 2048):
            continue

        def flat(size, itemsize, *_, unroll=unroll, threads=threads, blocks=blocks):
            return epilogue.Layout(
                unroll, size // unroll, 16 // itemsize, threads, 1, 1, unroll, blocks
            )

        def column(*args, unroll=unroll, threads=threads, blocks=blocks):
            layout = originals[1](*args)
            grid_y = -(-args[3].multiprocessors * blocks // layout.tiles)
            return dataclasses.replace(
                layout, height=threads // 32, unroll=unroll, min_blocks=blocks, grid_y=grid_y
            )

        epilogue.flat_layout, epilogue.column_layout = flat, column
        jax.clear_caches()
        _, runs = profiler.measure(jax.jit(fn), aggregate=False, iterations=iterations)(*arrays)
        mine = lambda run: sum(ms for kernel, ms in run if "copy" not in kernel.lower())
        us = 1e3 * statistics.median(map(mine, runs))
        share = moved * z.nbytes / COPY_RATE / us
        found[name].append((us, f"{us:7.1f} us {share:.3f} unroll {unroll} {threads} x {blocks}"))
    for name, rows in found.items():
        print(f"{name}: " + "; ".join(text for _, text in sorted(rows)[:5]), flush=True)
    epilogue.flat_layout, epilogue.column_layout = originals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulation", action="store_true")
    parser.add_argument("--cublas", action="store_true", help="let XLA choose no Triton GEMMs")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--layers", nargs="+", choices=LAYERS)
    parser.add_argument("--gemms", action="store_true", help="name each GEMM's kernel")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens, or tokens of a microbatch")
    parser.add_argument("--iterations", type=int, default=9)
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    options = {"xla_gpu_enable_triton_gemm": False} if arguments.cublas else {}
    if arguments.sweep:
        sweep(arguments.iterations)
    elif arguments.accumulation:
        accumulation(arguments.tokens or [256, 1024, 2048, 4096], arguments.iterations, options)
    else:
        tokens = arguments.tokens or [16384, 2048]
        chosen = {name: LAYERS[name] for name in arguments.layers or LAYERS}
        layers(chosen, tokens, arguments.iterations, arguments.gemms, options)


if __name__ == "__main__":
    main()
