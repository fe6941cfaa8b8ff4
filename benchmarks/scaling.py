"""Tokens a second on 1, 2, 4, ... GPUs of one host, and how much of the communication is hidden.

    python -m benchmarks.scaling --part links apart stack-fsdp stack-tensor
    python -m benchmarks.scaling --part 1b-fsdp 1b-tensor losses
    python -m benchmarks.scaling --part 1b-fsdp --gpus 8 --versions "normfuse, fp8" \
        --preset 8b --length 8192 --batch 1 --remat none
    python -m benchmarks.scaling --plot FILE.csv ...        # draws what was measured

`stack` is eight SwiGLU blocks of 4096 / 14336, each computed again in the backward, with plain
gradient descent, beside the same in plain jnp; `1b` the trainer's own step of that preset. Their
meshes are all "fsdp", or all "tensor" with the tokens between blocks split too: jnp's along the
sequence, ours by rows. "2 parts" of a batch are computed side by side, so that one's products hide
what the other communicates.

`links` measures plain collectives; `apart` each GPU by itself, and all of them with nothing to say
to each other: what GPUs that differ, and share a host's power, can reach. `losses` are those of the
preset's first steps, of one state and batch on every mesh.

Weakly scaled, each GPU has as many tokens as one alone (8192, for 1b its recipe's 16384); strongly,
the sum stays (32768, or the recipe's). Efficiency is tokens a second and GPU over those of one GPU
by the same library. Versions take turns; a time is the median of groups of steps.

The last columns are of traced steps: milliseconds in which a device communicates, multiplies, does
anything else, or nothing, and how much of the first products, or any kernels, run beside. Rows are
added to --out as they are measured.
"""

import argparse
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from benchmarks.host_limits import apart, links
from benchmarks.overlap import traced
from benchmarks.scaling_table import Table, plot
from benchmarks.sharded_steps import (
    PARTS,
    VERSIONS,
    WORKLOADS,
    Case,
    Workload,
    batches_of,
    losses,
    mesh_of,
    milliseconds,
)
from normfuse.train import UsageError, distributed
from normfuse.train.checks import require
from normfuse.train.config import Preset

# XLA's options, by the name they have in the tables.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "two at once": {"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
    # With NCCL_CTA_POLICY=2, NCCL then gathers by copy engines, and GEMMs keep all multiprocessors.
    "symmetric": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True},
    "combined": {  # a layer's kernels and gradients move together
        "xla_gpu_all_gather_combine_threshold_bytes": 200_000_000,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 400_000_000,
    },
    # A gather for each product.
    "uncombined": {"xla_gpu_all_gather_combine_threshold_bytes": 4 << 20},
    "early": {"xla_gpu_experimental_collective_start_as_early_as_possible": True},
    "collective kernels": {"xla_gpu_experimental_use_collective_kernels": "ALL_REDUCE"},
    "one shot": {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True},
    "one-sided": {"xla_gpu_all_gather_mode": "COLLECTIVES_SYMMETRIC_MEMORY"},
    "windowed": {
        "xla_gpu_threshold_for_windowed_einsum_mib": 0,
        "xla_gpu_multi_streamed_windowed_einsum": False,  # fails in XLA's own verifier
        "xla_gpu_use_memcpy_local_p2p": True,
    },
}
LIMITS = {"links": links, "apart": apart, "losses": losses}


def measure(
    part: str, work: Workload, counts: list[int], arguments, alone: dict[tuple, float]
) -> Iterator[dict]:
    """Every version on every number of GPUs; one number after the other, versions by turns.

    `alone` has the rates of one GPU, measured once for every mesh.
    """
    make, axis = PARTS[part]
    for count in counts:
        if count == 1 and make in {known for known, *_ in alone}:
            continue
        seq, wanted = batches_of(part, work, count)
        for batch in sorted({wanted[mode] for mode in arguments.scaling}):
            for row, case in run(part, work, mesh_of(axis, count), batch, arguments):
                base = VERSIONS[row["version"]].alone
                ms = milliseconds(case.seconds)
                rate = batch * seq / ms * 1e3
                times = {} if arguments.no_trace else traced(case.take)
                for mode in arguments.scaling:
                    if wanted[mode] != batch:
                        continue
                    if count == 1 and row["version"] == base:
                        alone[make, base, mode] = rate
                    one = alone.get((make, base, mode))
                    yield {
                        "part": part,
                        "scaling": mode,
                        "gpus": count,
                        "tokens": batch * seq,
                        **row,
                        "ms": round(ms, 3),
                        "tokens_per_s": round(rate),
                        "efficiency": round(rate / one / count, 4) if one else "",
                        **times,
                    }
                case.state = case.batch = None


def run(
    part: str, work: Workload, mesh: Mesh, batch: int, arguments
) -> list[tuple[dict[str, Any], Case]]:
    """Compiles, and then times by turns, every version and option on one mesh.

    Returns: of each that works, what is known of its row, and the case.
    """
    done = []
    for version, options in itertools.product(versions_of(part, arguments), arguments.options):
        plain = version == VERSIONS[version].alone and options == arguments.options[0]
        if mesh.size == 1 and not plain:
            continue  # nothing is communicated: what is compared with is the one without
        row, began = {"version": version, "options": options}, time.perf_counter()
        try:
            lowered, arrays = PARTS[part][0](work, VERSIONS[version], mesh, batch)
            step = lowered.compile(compiler_options=OPTIONS[options] if mesh.size > 1 else {})
            row["compile_s"] = round(time.perf_counter() - began, 1)
            row["temporaries_mib"] = round(step.memory_analysis().temp_size_in_bytes / 2**20)
            case = Case(step, *arrays())
            case.take(arguments.warmup)
        except Exception as error:  # an option that this XLA cannot serve: said, not hidden
            print(f"  {row}: {(str(error) or repr(error)).splitlines()[0][:160]}", flush=True)
            continue
        done.append((row, case))
    for _, (_, case) in itertools.product(range(arguments.groups), done):
        case.seconds.append(case.take(arguments.steps))
    return done


def versions_of(part: str, arguments) -> list[str]:
    """Those asked for; else plain jnp for the stack, ours, and parts where activations move."""
    if arguments.versions:
        return arguments.versions
    more = ["normfuse, 2 parts"] if part.endswith("tensor") else []
    return ["jnp"] * part.startswith("stack") + ["normfuse", *more]


def parse() -> argparse.Namespace:
    """Returns the flags; a usage error for numbers that nothing can be measured with."""
    whole = [*LIMITS, *PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--part", nargs="+", choices=whole, default=whole)
    parser.add_argument("--scaling", nargs="+", choices=["weak", "strong"], default=["weak"])
    parser.add_argument(
        "--versions", nargs="+", choices=VERSIONS, help="`jnp` of 1b is xla's norms"
    )
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=["default"])
    parser.add_argument("--gpus", nargs="+", type=int, help="numbers of GPUs, ascending")
    dtypes = ["bfloat16", "float32"]
    parser.add_argument(
        "--dtype", choices=dtypes, default=dtypes[0], help="of the stack's parameters"
    )
    parser.add_argument("--remat", choices=["none", "dots", "block"], help="of 1b, if not its own")
    parser.add_argument("--preset", choices=get_args(Preset), help="in the place of 1b")
    parser.add_argument("--length", type=int, help="of its sequences, if not its own")
    parser.add_argument("--batch", type=int, help="sequences of a GPU, likewise")
    parser.add_argument("--steps", type=int, default=12, help="of a group that is timed")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--size", choices=WORKLOADS, default="full")
    parser.add_argument("--plot", nargs="+", type=pathlib.Path, metavar="FILE.csv")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    try:
        for name in "length", "batch", "steps", "groups", "warmup":
            value = getattr(arguments, name)
            require(value is None or value >= 1, name, value, "must be at least 1.")
        for count in [] if arguments.plot else arguments.gpus or []:
            there = jax.device_count()
            rule = f"must be from 1 to {there}, the devices there are."
            require(1 <= count <= there, "gpus", count, rule)
    except UsageError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    distributed.order_kernels()  # before JAX looks for devices, as the trainer does
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.plot:
        return plot(arguments.plot, arguments.out / "scaling.png")
    sizes = WORKLOADS[arguments.size]
    given = {k: getattr(arguments, k) for k in ("preset", "length", "batch", "remat", "steps")}
    settings = {k: value for k, value in given.items() if value}
    changes = {k: v for k, v in settings.items() if k != "steps"} | {"dtype": arguments.dtype}
    work = dataclasses.replace(sizes, **changes)
    table = Table(arguments.out / "scaling.csv", settings)
    counts = arguments.gpus or [2**i for i in range(jax.device_count().bit_length())]
    alone: dict[tuple, float] = {}
    for part in arguments.part:
        if part in LIMITS:
            rows = LIMITS[part](work, counts, arguments)
        else:
            rows = measure(part, work, counts, arguments, alone)
        for row in rows:
            table.write(row)


if __name__ == "__main__":
    main()
