"""Compares two installed copies of the package on one GPU: does a change slow anything down?

    pip install --no-build-isolation --no-deps --target DIR .    # in the checkout of each copy
    python benchmarks/before_after.py --before DIR --after DIR
    python benchmarks/before_after.py --before DIR --after DIR --part norms dense

Each copy is measured in processes of its own, with DIR first on PYTHONPATH: before, after, before,
after. Only public names are used, so the copies may differ inside. The parts:

  norms   rms_norm, alone and with a residual, and layer_norm on bfloat16 rows, forward and
          backward, four shapes
  dense   a norm and a dense layer, a gelu MLP and SwiGLU MLPs, forward and backward
  1b      a step of `normfuse train --preset 1b`, bfloat16, nothing recomputed

Times are of the device, from CUPTI: the sum over a call's kernels; for the 1b step, those that the
trainer reports. Both copies share JAX's compilation cache, which also keeps what XLA's autotuning
chose: a GEMM that both programs have is the same in both.

Prints the median over all calls of each case. Exits with 1 if one is more than --limit slower, with
2 if something could not be measured.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

SIDES = ("before", "after")
PARTS = ("norms", "dense", "1b")
Samples = dict[str, list[float]]  # case -> microseconds of each call


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured.

    Attributes:
      rows: (rows, features) of the norms.
      layer: tokens, dim and hidden size of the dense layers.
      calls: of each norm; of each dense layer half as many.
      warm: seconds that a dense layer runs before it is timed: products at the limit of power are
        slower on a warm GPU.
      train: flags of the training run.
      steps: that are timed, and those before them, which are not.
    """

    rows: Sequence[tuple[int, int]]
    layer: tuple[int, int, int]
    calls: int
    warm: float
    train: Sequence[str]
    steps: tuple[int, int]


SIZES = {
    "full": Size(
        rows=[(65536, 1024), (32768, 4096), (16384, 8192), (4096, 32768)],
        layer=(16384, 4096, 14336),
        calls=22,
        warm=1.0,
        train="--preset 1b --precision bfloat16 --model.remat none".split(),
        steps=(20, 10),
    ),
    "tiny": Size(  # to try this script on a CPU, where times are the host's
        rows=[(8, 128)],
        layer=(8, 32, 64),
        calls=4,
        warm=0.0,
        train="--preset tiny --model.num-layers 1 --batch-size 2 --seq-len 16".split(),
        steps=(2, 1),
    ),
}


# ---------------------------------------------------------------- in a process that measures

Cases = Iterator[tuple[str, Callable, list[tuple]]]  # name, function, operands to take in turn


def norms(size: Size) -> Cases:
    """The norms, forward, and backward from the forward's residuals."""
    import jax
    import jax.numpy as jnp
    from device_time import sets_for

    import normfuse

    added_norm = lambda x, residual, scale: normfuse.rms_norm(x, scale, residual=residual)
    ops = {"rms_norm": normfuse.rms_norm, "residual_rms_norm": added_norm}
    ops |= {"layer_norm": normfuse.layer_norm}
    for op, (rows, n) in itertools.product(ops, size.rows):
        norm, added = ops[op], op.startswith("residual_")

        def operands(seed, added=added, rows=rows, n=n):
            *keys, last = jax.random.split(jax.random.key(seed), 5)
            arrays = [jax.random.normal(key, (rows, n), jnp.bfloat16) for key in keys]
            x, cotangents = arrays[: 1 + added], arrays[2 : 3 + added]
            scale = 1 + 0.1 * jax.random.normal(last, (n,))
            return (*x, scale), tuple(cotangents) if added else cotangents[0]

        count = sets_for(3 * 2 * rows * n) if size.calls > 4 else 1
        drawn = [jax.jit(operands)(seed) for seed in range(count)]
        name = f"{op} {rows} x {n}"
        yield f"{name} forward", norm, [arrays for arrays, _ in drawn]
        pull = jax.jit(lambda *arrays, norm=norm: jax.vjp(norm, *arrays)[1])
        saved = [(pull(*arrays), cotangents) for arrays, cotangents in drawn]
        yield f"{name} backward", lambda pull, cotangents: pull(cotangents), saved


def dense(size: Size) -> Cases:
    """Dense layers with a norm before them, forward and backward."""
    import jax
    import jax.numpy as jnp

    from normfuse import dense, gated_dense, gated_product, rms_norm

    def norm_dense(x, scale, up):
        return dense(rms_norm(x, scale), up)

    def gelu_mlp(x, scale, up, down):
        return gated_product(norm_dense(x, scale, up), None, down, activation="gelu_tanh")

    def swiglu_mlp(x, scale, gate, up, down):
        n = rms_norm(x, scale)
        return gated_product(dense(n, gate), dense(n, up), down)

    def swiglu_mlp_kept(x, scale, gate, up, down):
        return dense(gated_dense(rms_norm(x, scale), gate, up), down)

    def both_ways(layer):
        def run(arrays, dy):
            y, pull = jax.vjp(layer, *arrays)
            y, dy = jax.lax.optimization_barrier((y, dy))  # y exists before dy, as in training
            return y, pull(dy)

        return run

    tokens, dim, hidden = size.layer
    up, down = (dim, hidden), (hidden, dim)
    layers = {
        "norm + dense": (norm_dense, [up]),
        "norm + gelu MLP": (gelu_mlp, [up, down]),
        "norm + SwiGLU MLP": (swiglu_mlp, [up, up, down]),
        "norm + SwiGLU MLP, hidden kept": (swiglu_mlp_kept, [up, up, down]),
    }
    for name, (layer, shapes) in layers.items():
        keys = iter(jax.random.split(jax.random.key(0), 3 + len(shapes)))
        draw = lambda *shape, keys=keys: jax.random.normal(next(keys), shape, jnp.bfloat16)
        kernels = [0.02 * draw(*shape) for shape in shapes]
        x, dy = draw(tokens, dim), draw(tokens, shapes[-1][1])
        scale = 1 + 0.1 * jax.random.normal(next(keys), (dim,))
        run = jax.jit(both_ways(layer))
        operands = (x, scale, *kernels), dy
        began = time.perf_counter()
        while time.perf_counter() - began < size.warm:
            jax.block_until_ready(run(*operands))
        yield f"{name}, {tokens} tokens", run, [operands]


def measure(parts: Sequence[str], size: Size) -> Samples:
    """Microseconds of the calls of every case."""
    found = {}
    for part, cases, calls in (("norms", norms, size.calls), ("dense", dense, size.calls // 2)):
        if part in parts:
            found |= {name: times(fn, sets, calls) for name, fn, sets in cases(size)}
    return found


def times(fn: Callable, sets: list[tuple], calls: int) -> list[float]:
    """Microseconds of the device, or of the host where the device is the CPU."""
    import jax
    from device_time import kernels

    if jax.default_backend() != "cpu":
        return [sum(us for _, us in call) for call in kernels(fn, sets, calls)]
    run, found = jax.jit(fn), []
    for operands in [sets[0], *itertools.islice(itertools.cycle(sets), calls)]:
        began = time.perf_counter()
        jax.block_until_ready(run(*operands))
        found.append(1e6 * (time.perf_counter() - began))
    return found[1:]  # the first call compiled


# ---------------------------------------------------------------- in the process that compares


class Failed(Exception):
    """A copy could not be measured; the message says why."""


def environment(copy: pathlib.Path, work: pathlib.Path) -> dict[str, str]:
    """Of a process that imports the package from the folder `copy`."""
    path = [str(copy), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "NORMFUSE_CACHE_DIR": str(work / "kernels"),
        "JAX_COMPILATION_CACHE_DIR": str(work / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def python(copy: pathlib.Path, work: pathlib.Path, *arguments: str) -> str:
    """Returns the output of a process that imports the package from the folder `copy`."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=work,
        env=environment(copy, work),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(f"the copy in {copy} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def check(copy: pathlib.Path, work: pathlib.Path) -> None:
    """Raises Failed unless processes import the package from the folder `copy`."""
    printed = python(copy, work, "-c", "import normfuse; print(normfuse.__file__)").strip()
    if not pathlib.Path(printed).resolve().is_relative_to(copy):
        raise Failed(
            f"normfuse is imported from {printed}, not from {copy}: install it there by "
            f"`pip install --target {copy} .` (an editable install comes before PYTHONPATH: remove "
            "it)"
        )


def turn(copy: pathlib.Path, parts: Sequence[str], size: str, work: pathlib.Path) -> Samples:
    """Measures a copy once."""
    found: Samples = {}
    kernels = [part for part in parts if part != "1b"]
    if kernels:
        printed = python(copy, work, __file__, "--measure", *kernels, "--size", size)
        found |= json.loads(printed.splitlines()[-1])
    if "1b" in parts:
        found["1b step"] = step_times(copy, SIZES[size], work)
    return found


def step_times(copy: pathlib.Path, size: Size, work: pathlib.Path) -> list[float]:
    """Microseconds of steps of a training run.

    The run is killed after the last of them, so that it writes no checkpoint: that of the 1b preset
    has 15 GB.
    """
    out, (timed, before) = work / "run", size.steps
    flags = "--sample.tokens 0 --eval.every 0 --checkpoint.every 0 --steps 100000 --out-dir".split()
    with open(work / "train.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "normfuse.train", *size.train, *flags, str(out)],
            cwd=work,
            env=environment(copy, work),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it may have children, which end with it
        )
    try:
        found: list[float] = []
        while len(found) < before + timed:
            ended = process.poll() is not None
            found = logged(out / "metrics.jsonl")
            if ended:
                raise Failed(f"the copy in {copy}:\n{(work / 'train.log').read_text()[-4000:]}")
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(out, ignore_errors=True)
    return found[before : before + timed]


def logged(metrics: pathlib.Path) -> list[float]:
    """Microseconds of the steps that a running trainer has logged."""
    if not metrics.exists():
        return []
    whole = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    records = [json.loads(line) for line in whole]
    return [1e6 * record["step_time_s"] for record in records if "loss" in record]


def compare(
    before: Mapping[str, list[float]], after: Mapping[str, list[float]], limit: float
) -> tuple[str, list[str]]:
    """Returns a table of medians, and the cases that are slower after by more than `limit`."""
    width = max(map(len, before))
    lines = [f"{'case':{width}} {'before':>13} {'after':>13}  ratio"]
    slower = []
    for case, calls in before.items():
        old, new = statistics.median(calls), statistics.median(after[case])
        line = f"{case:{width}} {old:10.1f} us {new:10.1f} us  {new / old:.3f}"
        if new > (1 + limit) * old:
            slower.append(case)
            line += "  slower"
        lines.append(line)
    return "\n".join(lines), slower


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--before", type=pathlib.Path, metavar="DIR", help="one installed copy")
    parser.add_argument("--after", type=pathlib.Path, metavar="DIR", help="the other")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each copy")
    parser.add_argument("--limit", type=float, default=0.02, help="0.02 allows 2 %% more time")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--measure", nargs="+", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, SIZES[arguments.size])))
        return
    if not (arguments.before and arguments.after):
        parser.error("--before and --after are required")
    copies = {side: getattr(arguments, side).resolve() for side in SIDES}
    found: dict[str, Samples] = {side: collections.defaultdict(list) for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        (work / "kernels").mkdir(mode=0o700)
        try:
            for copy in copies.values():
                check(copy, work)
            for number, side in itertools.product(range(arguments.rounds), SIDES):
                began = time.perf_counter()
                for case, calls in turn(copies[side], arguments.part, arguments.size, work).items():
                    found[side][case] += calls
                seconds = time.perf_counter() - began
                print(f"{side}, round {number + 1}: {seconds:.0f} s", file=sys.stderr, flush=True)
        except Failed as error:
            print(f"before_after.py: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    table, slower = compare(*(found[side] for side in SIDES), arguments.limit)
    print(table)
    if slower:
        allowed = f"{100 * arguments.limit:g} %"
        raise SystemExit(f"more than {allowed} slower: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
