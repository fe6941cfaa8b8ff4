"""What the GPUs of one host can reach: in plain collectives, and with nothing to say."""

import concurrent.futures
import functools
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.sharded_steps import VERSIONS, Case, Workload, mesh_of, milliseconds, stack


def links(work: Workload, counts: list[int], arguments) -> Iterator[dict]:
    """Bus rates of a plain all-gather and reduce-scatter, as nccl-tests count them."""
    size = work.link_bytes // 2
    for count in [n for n in counts if n > 1]:
        mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
        split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
        share = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        gather = functools.partial(jax.lax.all_gather, axis_name="x", tiled=True)
        scatter = functools.partial(jax.lax.psum_scatter, axis_name="x", tiled=True)
        calls = {
            "all-gather": (gather, P("x"), P(), split),
            "reduce-scatter": (scatter, P(), P("x"), whole),
        }
        for kind, (function, into, out, place) in calls.items():
            x = jax.jit(lambda: jnp.ones(size, jnp.bfloat16), out_shardings=place)()
            call = jax.jit(share(function, in_specs=into, out_specs=out))
            jax.block_until_ready([call(x) for _ in range(3)])
            seconds = []
            for _ in range(5):
                began = time.perf_counter()
                jax.block_until_ready([call(x) for _ in range(8)])
                seconds.append((time.perf_counter() - began) / 8)
            ms = milliseconds(seconds)
            rate = 2 * size * (count - 1) / count / ms / 1e6
            row = {"part": "links", "gpus": count, "version": kind, "ms": round(ms, 3)}
            yield row | {"gb_per_s": round(rate, 1)}


def apart(work: Workload, counts: list[int], arguments) -> Iterator[dict]:
    """The stack on each GPU, one after the other and then all at once, with no communication.

    GPUs differ, and those of one host share its power and its air: what they lose here no program
    can gain back, and the slowest holds up the others wherever they communicate.
    """
    row = {"part": "apart", "tokens": work.rows * work.seq, "options": "default"}
    cases: list[Case] = []
    for i in range(max(counts)):
        lowered, arrays = stack(work, VERSIONS["normfuse"], mesh_of("fsdp", 1, i), work.rows)
        cases.append(Case(lowered.compile(), *arrays()))
        cases[i].take(arguments.warmup)
        ms = milliseconds([cases[i].take(arguments.steps) for _ in range(arguments.groups)])
        yield row | {"gpus": 1, "version": f"GPU {i} alone", "ms": round(ms, 3)}
    for i, seconds in enumerate(together(cases, arguments)):
        ms = milliseconds(seconds)
        yield row | {"gpus": len(cases), "version": f"GPU {i} of all", "ms": round(ms, 3)}


def together(cases: list[Case], arguments) -> list[list[float]]:
    """Seconds of a step of each case while all run, a thread each."""
    start = threading.Barrier(len(cases))

    def run(case: Case) -> list[float]:
        start.wait()
        return [case.take(arguments.steps) for _ in range(arguments.groups)]

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(run, cases))
