"""Attention forward and backward on one GPU, compared with einsum and jax.nn.

    python benchmarks/attention.py           # the table, two minutes at most
    python benchmarks/attention.py --tiny    # small shapes, to see on a CPU that it runs

Each row has two times of a call, which returns out and the gradients of q, k and v: "device" is the
sum of its kernels (CUPTI, the median of calls by turns), and "wall" the time of many calls back to
back, by the clock, divided by their number, the least of turns; this has what the device waits for.
Errors are relative distances (of norms)
from einsum in float32, of out, dq, dk and dv. Temporaries are what a program needs beyond inputs
and results.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

NOISE = 3  # seconds kept for printing
TURNS = 3  # rounds of consecutive calls
DOCUMENTS = 512, 640, 768, 896, 1152, 1280, 1408, 1536


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention, causal unless `whole`. `mask`: the mask is an operand.

    Queries see the first `prefix` keys. The last `padding` of the keys are hidden from all, unless
    `ragged`: from half of the examples. One mask drops probabilities of all heads and examples.
    """

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    dtype: str = "bfloat16"
    mask: bool = False
    prefix: int = 0
    padding: float = 0.0
    documents: tuple[int, ...] = ()
    window: int | None = None
    softcap: float | None = None
    whole: bool = False
    ragged: bool = False
    dropout: float = 0.0

    def tiny(self) -> "Case":
        documents = tuple(n // 32 for n in self.documents)
        window = None if self.window is None else self.window // 32
        heads = max(self.heads // 4, 2), max(self.kv_heads // 4, 1)
        return dataclasses.replace(
            self,
            length=self.length // 32,
            heads=heads[0],
            kv_heads=heads[1],
            width=16,
            documents=documents,
            window=window,
            prefix=self.prefix // 32,
        )


RAGGED = {"mask": True, "whole": True, "padding": 0.25, "ragged": True}
CASES = (
    Case("4 x 2048, 32/8 x 64", 4, 2048, 32, 8, 64),
    Case("4 x 2048, 32/8 x 64, mask operand", 4, 2048, 32, 8, 64, mask=True),
    Case("1 x 8192, 16/8 x 128", 1, 8192, 16, 8, 128),
    Case("8192 in 8 documents, 32/8 x 128", 1, 8192, 32, 8, 128, documents=DOCUMENTS),
    Case("2 x 2048, 8/1 x 256", 2, 2048, 8, 1, 256),
    Case("2 x 2048, 8/1 x 256, softcap 50", 2, 2048, 8, 1, 256, softcap=50.0),
    Case("1 x 8192, 16/8 x 128, window 1024", 1, 8192, 16, 8, 128, window=1024),
    Case("8 x 867, 8/1 x 256, mask with a prefix", 8, 867, 8, 1, 256, mask=True, prefix=816),
    Case("8 x 2048, 16/16 x 128, half padding", 8, 2048, 16, 16, 128, mask=True, padding=0.5),
    Case("4 x 2048, 32/8 x 64, float32", 4, 2048, 32, 8, 64, dtype="float32"),
    Case("64 x 197, 16 x 64, no mask", 64, 197, 16, 16, 64, whole=True),
    Case("32 x 577, 16 x 64, no mask", 32, 577, 16, 16, 64, whole=True),
    Case("64 x 257, 16 x 80, no mask", 64, 257, 16, 16, 80, whole=True),
    Case("32 x 512, 16 x 64, ragged", 32, 512, 16, 16, 64, **RAGGED),
    Case("32 x 512, 16 x 64, ragged, dropout", 32, 512, 16, 16, 64, dropout=0.1, **RAGGED),
    Case("8 x 2048, 16 x 128, ragged", 8, 2048, 16, 16, 128, **RAGGED),
    Case("8 x 1024, 20 x 64, dropout", 8, 1024, 20, 20, 64, dropout=0.1),
)


# ---------------------------------------------------------------- JAX


def operands(case: Case) -> tuple[list[Any], list[Any]]:
    """Returns q, k, v and out's gradient, and a mask or segment ids if the case has them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    keys = jax.random.split(jax.random.key(0), 4)
    heads = case.heads, case.kv_heads, case.kv_heads, case.heads
    shapes = [(case.batch, case.length, n, case.width) for n in heads]
    arrays = [jax.random.normal(k, s, jnp.dtype(case.dtype)) for k, s in zip(keys, shapes)]
    if case.mask:
        shape = (1, 1, case.length, case.length)
        causal = jnp.ones(shape, bool) if case.whole else jnp.tril(jnp.ones(shape, bool))
        place = jnp.arange(case.length)
        near = (causal[:, :, :1] if case.whole else causal) | (place < case.prefix)
        full = (jnp.arange(case.batch) % 2 == 0)[:, None, None, None] & case.ragged
        return arrays, [near & (full | (place < case.length * (1 - case.padding)))]
    if case.documents:
        ids = np.repeat(np.arange(len(case.documents)), case.documents)
        return arrays, [jnp.asarray(ids, jnp.int32)[None]]
    return arrays, []


def seen(case: Case, *extras: Any) -> Any:
    """Returns which keys each query sees, as models make it: `(1, 1, length, length)`."""
    import jax.numpy as jnp

    if case.mask:
        return extras[0]
    behind = jnp.arange(case.length)[:, None] - jnp.arange(case.length)
    found = (behind >= 0) | case.whole
    if case.window is not None:
        found &= behind < case.window
    if case.documents:
        found &= extras[0][0, :, None] == extras[0][0]
    return found[None, None]


def einsum(case: Case, q: Any, k: Any, v: Any, *extras: Any, precision: Any = None) -> Any:
    """Attention as models write it, with the scores in memory."""
    import jax
    import jax.numpy as jnp

    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    s = jnp.einsum("bthw,bshw->bhts", q, k, precision=precision).astype(jnp.float32)
    s = s * case.width**-0.5
    if case.softcap is not None:
        s = case.softcap * jnp.tanh(s / case.softcap)
    s = jnp.where(seen(case, *extras), s, jnp.finfo(jnp.float32).min)
    p = jax.nn.softmax(s, axis=-1).astype(q.dtype)
    if case.dropout:
        p = jnp.where(kept(case), p / jnp.asarray(1 - case.dropout, p.dtype), 0)
    return jnp.einsum("bhts,bshw->bthw", p, v, precision=precision)


def kept(case: Case) -> Any:
    import jax

    shape = (1, 1, case.length, case.length)
    return jax.random.bernoulli(jax.random.key(1), 1 - case.dropout, shape)


def jax_nn(name: str, case: Case, q: Any, k: Any, v: Any, *extras: Any) -> Any:
    import jax

    if case.softcap is not None:
        raise NotImplementedError("jax.nn has no softcap")
    if case.dropout:
        raise NotImplementedError("jax.nn has no dropout")
    causal = not (case.mask or case.whole)
    options: dict[str, Any] = {"implementation": name, "is_causal": causal}
    if extras:
        options["mask"] = seen(case, *extras)
    if case.window is not None:
        options["local_window_size"] = (case.window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, **options)


def ours(case: Case, q: Any, k: Any, v: Any, *extras: Any) -> Any:
    from normfuse import attention

    options: dict[str, Any] = {"causal": not (case.mask or case.whole)}
    if case.dropout:
        options |= {"dropout_mask": kept(case), "dropout_rate": case.dropout}
    if extras:
        options["mask" if case.mask else "segment_ids"] = extras[0]
    return attention(q, k, v, window=case.window, softcap=case.softcap, **options)


def derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns out and the gradients of q, k and v as a function of (arrays, extras)."""
    import jax

    def run(arrays: Any, extras: Any) -> Any:
        *qkv, dout = arrays
        out, pull = jax.vjp(lambda *qkv: function(*qkv, *extras), *qkv)
        return out, *pull(dout)

    return run


def reference(case: Case, arrays: Any, extras: Any) -> Any:
    """Out and gradients by einsum in float32, a head of keys at a time."""
    import jax
    import jax.numpy as jnp

    function = derivative(functools.partial(einsum, case, precision=jax.lax.Precision.HIGHEST))

    def one(arrays: Any) -> Any:
        return function([a.astype(jnp.float32) for a in arrays], extras)

    by_head = lambda a: jnp.moveaxis(a.reshape(*a.shape[:2], case.kv_heads, -1, case.width), 2, 0)
    whole = lambda a: jnp.moveaxis(a, 0, 2).reshape(case.batch, case.length, -1, case.width)
    return [whole(a) for a in jax.lax.map(one, [by_head(a) for a in arrays])]


def distance(found: Any, expected: Any) -> Any:
    import jax.numpy as jnp

    difference = found.astype(jnp.float32) - expected
    return jnp.sqrt(jnp.sum(difference**2) / jnp.sum(expected**2))


def versions(case: Case) -> dict[str, Callable[..., Any]]:
    found = {
        "einsum": einsum,
        "jax.nn, xla": functools.partial(jax_nn, "xla"),
        "jax.nn, cudnn": functools.partial(jax_nn, "cudnn"),
        "normfuse": ours,
    }
    return {name: derivative(functools.partial(f, case)) for name, f in found.items()}


def compiled(cases: list[Case]) -> dict[tuple[Case, str], Any]:
    """Returns every program, or why there is none; XLA compiles several at a time."""
    import jax

    lowered: dict[tuple[Case, str], Any] = {}
    for case in cases:
        shapes = jax.eval_shape(functools.partial(operands, case))
        lowered[case, "operands"] = jax.jit(functools.partial(operands, case)).lower()
        functions = versions(case) | {"reference": functools.partial(reference, case)}
        for name, function in functions.items():
            try:
                lowered[case, name] = jax.jit(function).lower(*shapes)
            except Exception as error:
                lowered[case, name] = error

    def compile_one(program: Any) -> Any:
        try:
            return program if isinstance(program, Exception) else program.compile()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(lowered, pool.map(compile_one, lowered.values())))


def walls(runs: dict[str, tuple[Any, Any]], seconds: float) -> dict[str, float]:
    """Milliseconds a call of each program, of many back to back: the least of turns."""
    import jax

    def run(name: str, count: int) -> float:
        program, arguments = runs[name]
        result = None
        began = time.perf_counter()
        for _ in range(count):
            result = program(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / count

    once = {name: min(run(name, 1) for _ in range(3)) for name in runs}
    each = seconds / len(runs) / TURNS
    counts = {name: max(3, min(50, int(each / max(t, 1e-6)))) for name, t in once.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            times[name].append(1e3 * run(name, counts[name]))
    return {name: min(found) for name, found in times.items()}


@dataclasses.dataclass
class Measured:
    """Measurements of a case, by the names of its versions."""

    runs: dict[str, tuple[Any, Any]]  # programs, and what they are called with
    errors: dict[str, list[float]]
    failed: dict[str, str]
    wall: dict[str, float]


def measured(case: Case, programs: dict[tuple[Case, str], Any], seconds: float) -> Measured:
    """Runs a case's versions: their errors, and their times by the clock."""
    import jax

    measure, arguments = jax.jit(distance), programs[case, "operands"]()
    expected = programs[case, "reference"]
    found = Measured({}, {}, {}, {})
    if isinstance(expected, Exception):
        found.failed["reference"] = str(expected)[:120]
    else:
        expected = expected(*arguments)
    for name in versions(case):
        program = programs[case, name]
        try:
            if isinstance(program, Exception):
                raise program
            results = jax.block_until_ready(program(*arguments))
            found.runs[name] = program, arguments
            if not isinstance(expected, Exception):
                found.errors[name] = [float(measure(*pair)) for pair in zip(results, expected)]
        except Exception as error:
            found.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    found.wall = walls(found.runs, seconds)
    return found


def table(cases: list[Case], iterations: int, until: float) -> None:
    """Prints each version's times, temporaries and errors.

    All times by the clock come first: a profiler that has been there slows down what waits for the
    host, as a mask that is looked at when the program runs does.
    """
    from device_time import by_turns

    programs, found = compiled(cases), {}
    print(
        f"compiled {len(programs)} programs; {until - time.perf_counter():.0f} s left", flush=True
    )
    left = max(1.0, until - NOISE - time.perf_counter())
    for case in cases:
        found[case] = measured(case, programs, 0.2 * left / len(cases))
        print(json.dumps({"case": case.name, "wall_ms": found[case].wall}), flush=True)
    for at, case in enumerate(cases):
        each = max(1.0, (until - NOISE - time.perf_counter()) / (len(cases) - at))
        its = found[case]
        print(f"\n{case.name}", flush=True)
        samples = by_turns(its.runs, iterations, warm=0.1, until=time.perf_counter() + 0.8 * each)
        base, devices = its.wall.get("einsum"), {}
        for name, (program, _) in its.runs.items():
            totals = [sum(us for _, us in sample) for sample in samples[name]]
            devices[name] = device = statistics.median(totals) / 1e3 if totals else float("nan")
            temporary = program.memory_analysis().temp_size_in_bytes / 2**20
            ratio = f"{base / its.wall[name]:6.2f} x" if base else " " * 8
            far = " ".join(f"{e:.1e}" for e in its.errors.get(name, ()))
            print(
                f"  {name:22} device {device:8.3f} ms  wall {its.wall[name]:8.3f} ms  {ratio}  "
                f"temporaries {temporary:7.0f} MiB  errors {far}",
                flush=True,
            )
        for name, why in its.failed.items():
            print(f"  {name:22} {why}", flush=True)
        print(json.dumps({"case": case.name, "device_ms": devices}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--seconds", type=float, default=110, help="of the whole")
    parser.add_argument("--iterations", type=int, default=11)
    arguments = parser.parse_args()
    until = time.perf_counter() + arguments.seconds
    chosen = [case for case in CASES if arguments.only in case.name]
    cases = [case.tiny() if arguments.tiny else case for case in chosen]
    import jax

    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    table(cases, arguments.iterations, until)


if __name__ == "__main__":
    main()
