"""Seconds from the start of a process to its first training step, cold and warm, by part.

    python benchmarks/warm_start.py                                     # `1b` on one GPU, in FP8
    python benchmarks/warm_start.py --versions normfuse "normfuse, fp8" --gpus 1 2 \
        --parts 1b-fsdp 1b-tensor                                       # each on one GPU and on two

Each row is a process: the cold one finds empty caches of programs and of kernels, the warm one what
the cold one has left there, and the benchmark fails where it compiles again. Kernels are NVRTC's
part, at the same time on all cores; XLA's includes the timing of products, which
`XLA_FLAGS=--xla_gpu_autotune_level=0` leaves out. The state is drawn on the devices; the first step
loads the program and connects the GPUs, the second is a usual one.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time

PARTS = ("imports", "devices", "tracing", "kernels", "XLA", "state", "first step", "total")


def child(part: str, version: str, count: int, size: str) -> None:
    began = float(os.environ["STARTED"])
    marks = [began]

    def seconds() -> float:
        """Since the last call."""
        marks.append(time.time())
        return marks[-1] - marks[-2]

    import jax
    import sharded_steps

    from normfuse.native import compiler
    from normfuse.train import distributed, step

    distributed.order_kernels()  # before JAX looks for devices, as the trainer does
    hits, kernels, compile_kernels = [], [0.0], step.compile_kernels

    def timed(*arguments) -> None:
        before = time.time()
        compile_kernels(*arguments)
        kernels[0] += time.time() - before

    step.compile_kernels = timed
    jax.monitoring.register_event_listener(
        lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None
    )
    times = [seconds()]
    kind = jax.devices()[0].device_kind
    times.append(seconds())
    work = sharded_steps.WORKLOADS[size]
    make, axis = sharded_steps.PARTS[part]
    rows = sharded_steps.batches_of(part, work, count)[1]["weak"]
    mesh, version = sharded_steps.mesh_of(axis, count), sharded_steps.VERSIONS[version]
    lowered, arguments = make(work, version, mesh, rows)
    times += [seconds() - kernels[0], kernels[0]]
    before = len(hits)
    case = sharded_steps.Case(lowered.compile(), None, None)
    found = len(hits) - before
    times.append(seconds())
    case.state, case.batch = jax.block_until_ready(arguments())
    times.append(seconds())
    case.take(1)
    times += [seconds(), time.time() - began]
    listed = "  ".join(f"{name} {value:.1f}" for name, value in zip(PARTS, times, strict=True))
    milliseconds = 1e3 * case.take(3)
    made = f"hits={found} kernels={compiler.compilations()}"
    print(f"{listed}  then {milliseconds:.0f} ms a step, {made}, {kind}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", default=["1b-fsdp"], help="of benchmarks.scaling")
    parser.add_argument("--versions", nargs="+", default=["normfuse, fp8"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1])
    parser.add_argument("--size", default="full")
    arguments = parser.parse_args()
    one = arguments.parts[:1]  # of one GPU all parts are the same
    again = []
    for count, version in itertools.product(arguments.gpus, arguments.versions):
        for part in arguments.parts if count > 1 else one:
            case = [part, version, str(count), arguments.size]
            with tempfile.TemporaryDirectory() as folder:
                print(f"{part}, {version}, {count} devices", flush=True)
                cold, warm = (start(name, case, folder) for name in ("cold", "warm"))
            if "hits=0" not in cold or "hits=1" not in warm or "kernels=0" not in warm:
                again.append(case)
    if again:
        raise SystemExit(f"the second process compiled again: {again}")


def start(name: str, case: list[str], folder: str) -> str:
    """Runs a process of a case with the caches in a folder; returns its line."""
    environment = {
        **os.environ,
        "NORMFUSE_CACHE_DIR": f"{folder}/kernels",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "STARTED": str(time.time()),
    }
    command = [sys.executable, __file__, "child", *case]
    line = subprocess.check_output(command, env=environment, text=True).strip().splitlines()[-1]
    print(f"  {name}: {line}", flush=True)
    return line


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        part, version, count, size = sys.argv[2:]
        child(part, version, int(count), size)
    else:
        main()
