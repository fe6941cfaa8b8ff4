"""Device times of element-wise ops, a copy, XLA's fusion and torch.cuda.jiterator.

    python benchmarks/elementwise.py               # the table, compile times, a second process
    python benchmarks/elementwise.py --sweep       # other layouts of the loop

Device time is CUPTI's, of all kernels of a call; a fraction is the time in which the driver's own
copy would move the same bytes over the time taken. torch, where it is installed, runs in a process
of its own.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

GATED = (
    "template <class T> T gated(T x, T g, float limit) { return (x < limit ? x : T(limit)) * g; }"
)
TORCH = """
template <typename T> T gated(T x, T g, float limit) { return (x < limit ? x : T(limit)) * g; }
"""
LIMIT = 1.5
COUNT = 1 << 27


def ours():
    from normfuse import elementwise

    derivative = {"x": "x < limit ? g : T(0)", "g": "x < limit ? x : T(limit)"}
    return elementwise(GATED, derivative=derivative, limit=LIMIT)


def twin(x, g):
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    return (jnp.where(wide < LIMIT, wide, LIMIT) * g).astype(x.dtype)


def inputs(dtype, count):
    """Sets of (x, g, ct), enough of them that none is found in the cache."""
    import jax
    from device_time import sets_for

    def one(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        return tuple(jax.random.normal(key, (count,), dtype) for key in keys)

    return [one(seed) for seed in range(sets_for(3 * count * jax.numpy.dtype(dtype).itemsize))]


def pull(f):
    """(x, g, ct) -> the cotangents of x and g."""
    import jax

    return lambda x, g, ct: jax.vjp(f, x, g)[1](ct)


def table(rate: float, counts) -> None:
    """Ours, XLA's and torch's, forward; ours and XLA's, backward."""
    from device_time import microseconds

    op, theirs = ours(), torch_times(counts)
    print(f"{'':24}{'ours':>18}{'XLA':>18}{'torch.cuda.jiterator':>24}")
    for dtype in ("float32", "bfloat16"):
        for count in counts:
            sets = inputs(dtype, count)
            size, two = sets[0][0].nbytes, [(x, g) for x, g, _ in sets]
            floor = 3 * size / rate
            line = [microseconds(op, two), microseconds(twin, two)]
            line += [theirs[f"{dtype} {count}"]] if theirs else []
            print(
                f"{dtype:9} {count:>12}  " + "".join(f"{t:9.1f} us {floor / t:.3f}" for t in line)
            )
            line = [microseconds(pull(op), sets), microseconds(pull(twin), sets)]
            floor = 5 * size / rate
            print(f"{'  gradient':24}" + "".join(f"{t:9.1f} us {floor / t:.3f}" for t in line))
            rows = [(x.reshape(-1, 4096), g[:4096]) for x, g in two]
            line = [microseconds(op, rows), microseconds(twin, rows)]
            floor = 2 * size / rate
            print(f"{'  with a row':24}" + "".join(f"{t:9.1f} us {floor / t:.3f}" for t in line))
            del sets, two, rows


def sweep(rate: float) -> None:
    """Packs a thread and threads a block, as fractions of the copy rate."""
    import itertools

    import jax
    from device_time import microseconds

    from normfuse.layers.elementwise import code, op

    kept = code.THREADS, code.PACKS
    for dtype in ("float32", "bfloat16"):
        sets = [(x, g) for x, g, _ in inputs(dtype, COUNT)]
        for threads, packs in itertools.product((128, 256, 512), (1, 2, 4)):
            code.THREADS, code.PACKS, op.THREADS = threads, packs, threads
            jax.clear_caches()
            t, moved = microseconds(ours(), sets), 3 * sets[0][0].nbytes
            print(f"{dtype:9} threads {threads:4} packs {packs}: {moved / rate / t:.3f}")
        del sets
    code.THREADS, code.PACKS = kept
    op.THREADS = kept[0]


def compile_times() -> None:
    """What a first call takes, and how many compilations the next process needs."""
    program = """
import time, jax, jax.numpy as jnp, normfuse
from normfuse.native import compiler
jax.block_until_ready(jnp.ones(4) + 1)
began = time.perf_counter()
from normfuse.layers.elementwise import op
print(f"  import {time.perf_counter() - began:.3f} s", end="")
sources = {
    "float32": "template <class T> T first(T x, T y) { return x * tanh(y); }",
    "bfloat16": "template <class T> T second(T x, T y) { return x * tanh(y); }",
    "complex64": "template <class T> T third(T x, T y) { return x * tanh(y); }",
}
for dtype, source in sources.items():
    op, x = normfuse.elementwise(source), jnp.ones(1000, dtype)
    began = time.perf_counter()
    jax.block_until_ready(op(x, x))
    print(f", {dtype} {time.perf_counter() - began:.3f} s", end="")
print(f"; {compiler.compilations()} compilations", flush=True)
"""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        for name in ("first process", "second process"):
            print(name, end="", flush=True)
            subprocess.run(
                [sys.executable, "-c", program],
                env={
                    **os.environ,
                    "NORMFUSE_CACHE_DIR": folder,
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                },
                check=True,
            )


def torch_times(counts) -> dict[str, float]:
    """Median device microseconds of torch.cuda.jiterator's kernel; empty without torch."""
    command = [sys.executable, __file__, "--torch", *map(str, counts)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print("torch:", done.stderr.strip().splitlines()[-1:])
        return {}
    *said, numbers = done.stdout.strip().splitlines()
    print(*said, sep="\n")
    return json.loads(numbers)


def run_torch(counts) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    op = torch.cuda.jiterator._create_jit_fn(TORCH, limit=LIMIT)
    found = {}
    small = torch.ones(1000, device="cuda")
    began = time.perf_counter()
    op(small, small)
    torch.cuda.synchronize()
    print(f"torch {torch.__version__}: first call {time.perf_counter() - began:.3f} s")
    for dtype in ("float32", "bfloat16"):
        for count in counts:
            x, g = (torch.randn(count, device="cuda", dtype=getattr(torch, dtype)) for _ in "xg")
            for _ in range(3):
                op(x, g)
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
                for _ in range(20):
                    op(x, g)
                torch.cuda.synchronize()
            times = [
                event.device_time_total
                for event in profiled.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
            found[f"{dtype} {count}"] = statistics.median(t for t in times if t > 0)
            del x, g
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time other layouts")
    parser.add_argument("--torch", nargs="*", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.torch:
        return run_torch(arguments.torch)
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    import jax
    from device_time import Copies

    from normfuse.native import compiler

    rate = Copies().rate
    print(f"{jax.devices()[0].device_kind}, copy {rate / 1e6:.2f} TB/s, JAX {jax.__version__}")
    print("NVRTC {}.{}".format(*compiler.version()))
    if arguments.sweep:
        sweep(rate)
    else:
        compile_times()
        table(rate, [1 << 24, COUNT])


if __name__ == "__main__":
    main()
