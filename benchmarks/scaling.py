"""Tokens a second on 1, 2, 4, ... GPUs of one host, and how much of the communication is hidden.

    python -m benchmarks.scaling --part links apart stack-fsdp stack-tensor
    python -m benchmarks.scaling --part 1b-fsdp 1b-tensor
    python -m benchmarks.scaling --plot FILE.csv ...        # draws what was measured

`stack` is eight SwiGLU blocks of 4096 / 14336, each computed again in the backward, with plain
gradient descent, beside the same in plain jnp; `1b` the trainer's own step of that preset. Their
meshes are all "fsdp", or all "tensor" with the tokens between blocks split too: jnp's along the
sequence, ours by rows. "2 parts" of a batch are computed side by side, so that one's products hide
what the other communicates.

`links` measures plain collectives; `apart` each GPU by itself, and all of them with nothing to say
to each other: what GPUs that differ, and share a host's power, can reach.

Weakly scaled, each GPU has as many tokens as one alone (8192, for 1b its recipe's 16384); strongly,
the sum stays (32768, or the recipe's). Efficiency is tokens a second and GPU over those of one GPU
by the same library. Versions take turns; a time is the median of groups of steps.

The last columns are of traced steps: milliseconds in which a device communicates, multiplies, does
anything else, or nothing, and how much of the first products, or any kernels, run beside. Rows are
added to --out as they are measured.
"""

import argparse
import collections
import concurrent.futures
import csv
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import os
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, gated_product, rms_norm
from normfuse.models.functional import build
from normfuse.models.sharding import Sharding, constrain, in_context, on_mesh, stored
from normfuse.train import distributed, profiling
from normfuse.train.config import Preset
from normfuse.train.gradients import interleaved
from normfuse.train.mesh import AXES, batch_sharding
from normfuse.train.optimizer import make_optimizer, schedule
from normfuse.train.recipes import recipe
from normfuse.train.step import Program

f32 = jnp.float32

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
    "one-sided": {"xla_gpu_all_gather_mode": "COLLECTIVES_SYMMETRIC_MEMORY"},
    "windowed": {
        "xla_gpu_threshold_for_windowed_einsum_mib": 0,
        "xla_gpu_multi_streamed_windowed_einsum": False,  # fails in XLA's own verifier
        "xla_gpu_use_memcpy_local_p2p": True,
    },
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the stack, and of the batches; a smaller one is for trying this out."""

    layers: int = 8
    dim: int = 4096
    hidden: int = 14336
    seq: int = 2048
    rows: int = 4  # sequences of a GPU, weakly scaled
    total: int = 16  # sequences of all GPUs, strongly scaled
    preset: Preset = "1b"
    link_bytes: int = 1 << 30


SIZES = {"full": Size(), "tiny": Size(2, 64, 128, 32, 4, 16, "tiny", 1 << 16)}


@dataclasses.dataclass
class Case:
    """One program: its row of the table so far, the compiled step, and its times."""

    row: dict[str, Any]
    step: Any
    state: Any
    batch: Any
    seconds: list[float] = dataclasses.field(default_factory=list)

    def take(self, steps: int) -> float:
        """Seconds of a step, the mean of `steps` in a row."""
        began = time.perf_counter()
        for _ in range(steps):
            self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began) / steps


# ---------------------------------------------------------------- the stack


def jnp_block(x, p, s: Sharding):
    wide = x.astype(f32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    n = constrain((wide * rstd * p["scale"]).astype(x.dtype), s.block_input)
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    hidden = constrain(jax.nn.silu(n @ gate) * (n @ up), s.hidden)
    return x + constrain(hidden @ down, s.residual)


def block(x, p, s: Sharding):
    n = checkpoint_name(constrain(rms_norm(x, p["scale"], eps=1e-6), s.block_input), "gathered")
    gate, up = dense(n, p["gate"]), dense(n, p["up"])
    y = gated_product(gate, up, p["down"], hidden_sharding=in_context(s.hidden))
    return x + constrain(y, s.residual)


@dataclasses.dataclass(frozen=True)
class Version:
    """What is compared: whose layers, in how many parts, and what the backward gathers again.

    jnp's sharding is as one would write it, ours as it lies best.

    Attributes:
      kept: the gathered and normalised input of a block is kept for the backward.
      gathered: so are the kernels that "fsdp" devices gather, which is ZeRO's second stage.
    """

    library: str = "normfuse"
    parts: int = 1
    kept: bool = False
    gathered: bool = False

    @property
    def sharding(self) -> Sharding:
        sharding = Sharding.sequence_parallel(by_rows=self.library == "normfuse")
        return dataclasses.replace(sharding, keep_gathered=self.gathered)


VERSIONS = {
    "jnp": Version("jnp"),
    "jnp, 2 parts": Version("jnp", 2),
    "normfuse": Version(),
    "normfuse, 2 parts": Version(parts=2),
    "normfuse, 4 parts": Version(parts=4),
    "normfuse, kept": Version(kept=True),
    "normfuse, 2 parts, kept": Version(parts=2, kept=True),
    "normfuse, gathered once": Version(gathered=True),
    "normfuse, kept, gathered once": Version(kept=True, gathered=True),
}


def stack_step(version: Version, sharding: Sharding):
    """`(parameters, x) -> (new parameters, loss)`, of independent parts of x's rows."""
    parts = version.parts
    names = ("gathered",) if version.kept else ()
    over_tensor = lambda spec: on_mesh(spec, ("tensor",))
    column, row = over_tensor(sharding.column), over_tensor(sharding.row)
    whole = {"scale": sharding.scale, "gate": column, "up": column, "down": row}
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def loss(params, x):
        apply = {"jnp": jnp_block, "normfuse": block}[version.library]
        run = jax.checkpoint(functools.partial(apply, s=sharding), policy=policy)
        xs = interleaved(x, parts)
        for p in params:
            if version.gathered:
                p = {name: constrain(value, whole[name]) for name, value in p.items()}
            xs = [run(x, p) for x in xs]
        return sum(jnp.mean(jnp.square(x.astype(f32))) for x in xs) / parts

    def step(params, x):
        value, gradient = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - (1e-3 * g).astype(p.dtype), params, gradient), value

    return step


def stack_case(size: Size, version: Version, mesh: Mesh, rows: int, given):
    sharding = version.sharding
    kinds = {
        "scale": ((size.dim,), f32, sharding.scale),
        "gate": ((size.dim, size.hidden), given.dtype, sharding.column),
        "up": ((size.dim, size.hidden), given.dtype, sharding.column),
        "down": ((size.hidden, size.dim), given.dtype, sharding.row),
    }
    place = on_mesh if version.library == "jnp" else stored
    abstract = lambda shape, dtype, spec: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, place(spec, mesh.shape))
    )
    params = [{name: abstract(*kind) for name, kind in kinds.items()} for _ in range(size.layers)]
    x = abstract((rows, size.seq, size.dim), jnp.bfloat16, sharding.residual)
    out = jax.tree.map(lambda p: p.sharding, params), NamedSharding(mesh, P())
    step = jax.jit(stack_step(version, sharding), donate_argnums=0, out_shardings=out)
    with jax.set_mesh(mesh):
        lowered = step.lower(params, x)
    return lowered, lambda: (filled(params), filled(x, 1.0))


# ---------------------------------------------------------------- the trainer's step


def preset_case(size: Size, version: Version, mesh: Mesh, rows: int, given):
    config = recipe(size.preset)
    implementation = {"jnp": "xla", "normfuse": None}[version.library]
    model = dataclasses.replace(config.transformer(), implementation=implementation)
    model = dataclasses.replace(model, remat=given.remat or model.remat)
    program = Program(
        build(config.framework, model, version.sharding),
        make_optimizer(config.optim, config.steps),
        schedule(config.optim, config.steps),
        mesh,
        microbatches=1,
        skip_limit=0,
        spike=config.spike,
        parts=version.parts,
    )
    with jax.set_mesh(mesh):
        lowered = program.lower(rows, config.seq_len)

    def arguments():
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), program.abstract())
        state = jax.jit(zeros, out_shardings=program.shardings())()
        params = filled(program.abstract().params)
        shape = rows, config.seq_len + 1
        tokens = jax.random.randint(jax.random.key(0), shape, 0, model.vocab_size)
        return state._replace(params=params), jax.device_put(tokens, batch_sharding(mesh))

    return lowered, arguments


def filled(tree, size: float = 0.02):
    """Random arrays in the place of abstract ones, for power depends on values; vectors are 1."""

    @functools.cache
    def draw(shape, dtype, sharding):
        if len(shape) < 2:
            return jax.jit(lambda key: jnp.ones(shape, dtype), out_shardings=sharding)
        make = lambda key: (size * jax.random.normal(key, shape)).astype(dtype)
        return jax.jit(make, out_shardings=sharding)

    keys = (jax.random.key(i) for i in itertools.count())
    return jax.tree.map(lambda x: draw(x.shape, x.dtype, x.sharding)(next(keys)), tree)


# ---------------------------------------------------------------- measuring

# What is measured in one part of the table: how a case is made, and the mesh's axis.
PARTS = {
    "stack-fsdp": (stack_case, "fsdp"),
    "stack-tensor": (stack_case, "tensor"),
    "1b-fsdp": (preset_case, "fsdp"),
    "1b-tensor": (preset_case, "tensor"),
}


WHOLE = ["links", "apart", *PARTS]


def measure(part: str, arguments, counts: list[int], write: Callable[[dict], None], alone) -> None:
    """Every version on every number of GPUs; one number after the other, versions by turns.

    `alone` has the rates of one GPU, measured once for every mesh.
    """
    size = SIZES[arguments.size]
    make, axis = PARTS[part]
    seq = size.seq if part.startswith("stack") else recipe(size.preset).seq_len
    rows = size.rows if part.startswith("stack") else recipe(size.preset).batch_size
    total = size.total if part.startswith("stack") else rows
    for count in counts:
        wanted = {"weak": rows * count, "strong": total}
        batches = sorted({wanted[mode] for mode in arguments.scaling})
        if count == 1 and make in {known for known, *_ in alone}:
            continue
        for batch in batches:
            modes = [mode for mode in arguments.scaling if wanted[mode] == batch]
            mesh = mesh_of(axis, count)
            for case in run(make, mesh, batch, part, arguments):
                version = VERSIONS[case.row["version"]].library
                ms = 1e3 * statistics.median(case.seconds)
                rate = batch * seq / ms * 1e3
                times = {} if arguments.no_trace else traced(case)
                for mode in modes:
                    if count == 1 and case.row["version"] == version:
                        alone[make, version, mode] = rate
                    base = alone.get((make, version, mode))
                    write(
                        {
                            "part": part,
                            "scaling": mode,
                            "gpus": count,
                            "tokens": batch * seq,
                            **case.row,
                            "ms": round(ms, 3),
                            "tokens_per_s": round(rate),
                            "efficiency": round(rate / base / count, 4) if base else "",
                            **times,
                        }
                    )
                case.state = case.batch = None


def run(make, mesh: Mesh, batch: int, part: str, arguments) -> list[Case]:
    """Compiles, and then times by turns, every version and option on one mesh."""
    cases = []
    for version, options in itertools.product(versions_of(part, arguments), arguments.options):
        plain = version == VERSIONS[version].library and options == arguments.options[0]
        if mesh.size == 1 and not plain:
            continue  # nothing is communicated: what is compared with is the one without
        row, began = {"version": version, "options": options}, time.perf_counter()
        try:
            size = SIZES[arguments.size]
            lowered, arrays = make(size, VERSIONS[version], mesh, batch, arguments)
            step = lowered.compile(compiler_options=OPTIONS[options] if mesh.size > 1 else {})
        except Exception as error:  # an option that this XLA cannot serve: said, not hidden
            print(f"  {row}: {str(error).splitlines()[0][:160]}", flush=True)
            continue
        row["compile_s"] = round(time.perf_counter() - began, 1)
        row["temporaries_mib"] = round(step.memory_analysis().temp_size_in_bytes / 2**20)
        case = Case(row, step, *arrays())
        try:
            case.take(arguments.warmup)
        except Exception as error:
            print(f"  {row}: {str(error).splitlines()[0][:160]}", flush=True)
            continue
        cases.append(case)
    for _, case in itertools.product(range(arguments.groups), cases):
        case.seconds.append(case.take(arguments.steps))
    return cases


def versions_of(part: str, arguments) -> list[str]:
    """Those asked for; else plain jnp for the stack, ours, and parts where activations move."""
    if arguments.versions:
        return arguments.versions
    more = ["normfuse, 2 parts"] if part.endswith("tensor") else []
    return ["jnp"] * part.startswith("stack") + ["normfuse", *more]


def mesh_of(axis: str, count: int, first: int = 0) -> Mesh:
    """Some devices along one axis."""
    sizes = tuple(count if name == axis else 1 for name in AXES)
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=kinds, devices=jax.devices()[first:][:count])


def apart(arguments, counts: list[int], write: Callable[[dict], None]) -> None:
    """The stack on each GPU, one after the other and then all at once, with no communication.

    GPUs differ, and those of one host share its power and its air: what they lose here no program
    can gain back, and the slowest holds up the others wherever they communicate.
    """
    size, cases = SIZES[arguments.size], []
    row = {"part": "apart", "tokens": size.rows * size.seq, "options": "default"}
    for i in range(max(counts)):
        mesh = mesh_of("fsdp", 1, i)
        lowered, arrays = stack_case(size, VERSIONS["normfuse"], mesh, size.rows, arguments)
        cases.append(Case({}, lowered.compile(), *arrays()))
        cases[i].take(arguments.warmup)
        seconds = [cases[i].take(arguments.steps) for _ in range(arguments.groups)]
        ms = round(1e3 * statistics.median(seconds), 3)
        write(row | {"gpus": 1, "version": f"GPU {i} alone", "ms": ms})
    for i, seconds in enumerate(together(cases, arguments)):
        ms = round(1e3 * statistics.median(seconds), 3)
        write(row | {"gpus": len(cases), "version": f"GPU {i} of all", "ms": ms})


def together(cases: list[Case], arguments) -> list[list[float]]:
    """Seconds of a step of each case while all run, a thread each."""
    start = threading.Barrier(len(cases))

    def run(case: Case) -> list[float]:
        start.wait()
        return [case.take(arguments.steps) for _ in range(arguments.groups)]

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(run, cases))


def links(arguments, counts: list[int], write: Callable[[dict], None]) -> None:
    """Bus rates of a plain all-gather and reduce-scatter, as nccl-tests count them."""
    size = SIZES[arguments.size].link_bytes // 2
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
            ms = 1e3 * statistics.median(seconds)
            rate = 2 * size * (count - 1) / count / ms / 1e6
            row = {"part": "links", "gpus": count, "version": kind, "ms": round(ms, 3)}
            write(row | {"gb_per_s": round(rate, 1)})


# ---------------------------------------------------------------- what a trace says


def traced(case: Case) -> dict[str, float]:
    """Milliseconds of a step by what a device does, the mean over devices."""
    steps = 2
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        case.take(steps)
        jax.profiler.stop_trace()
        devices, _ = profiling.operations(pathlib.Path(folder))
    found = [times_of(events) for events in devices]
    if not found:
        return {}
    mean = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    talk = mean["communication"]
    times = {f"{name}_ms": round(mean[name] / steps / 1e6, 3) for name in WORK}
    if talk:
        times |= {name: round(mean[name] / talk, 3) for name in ("behind_gemms", "behind_any")}
    return times


WORK = ("communication", "gemms", "others", "idle")


def times_of(events) -> dict[str, float]:
    """Nanoseconds of communication, products and other kernels, and in which none of these ran;
    and of the communication beside products, or beside any kernels."""
    kinds = collections.defaultdict(list)
    for name, start, end in events:
        kinds[profiling.kind_of(name)].append((start, end))
    talk, gemms = (union(kinds.pop(k, [])) for k in (profiling.COMMUNICATION, profiling.PRODUCTS))
    others = union(itertools.chain(*kinds.values()))
    any_ = union([*gemms, *others])
    whole = union([*talk, *any_])
    length = lambda intervals: sum(b - a for a, b in intervals)
    return {
        "communication": length(talk),
        "gemms": length(gemms),
        "others": length(others),
        "idle": whole[-1][1] - whole[0][0] - length(whole),
        "behind_gemms": common(talk, gemms),
        "behind_any": common(talk, any_),
    }


def union(intervals) -> list[tuple[float, float]]:
    """The same time in intervals that do not touch, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def common(first, second) -> float:
    """The time that two unions share."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        shared += max(end - start, 0.0)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


# ---------------------------------------------------------------- output

COLUMNS = (
    "date device jax normfuse settings part scaling gpus tokens version options ms tokens_per_s "
    "efficiency compile_s temporaries_mib communication_ms gemms_ms others_ms idle_ms behind_gemms "
    "behind_any gb_per_s"
).split()


class Table:
    """Prints rows and adds them to a CSV file, each at once: a run may be cut off."""

    def __init__(self, path: pathlib.Path, arguments):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ("NCCL_", "XLA_FLAGS", "CUDA_DEVICE_MAX")
        given = {k: v for k, v in sorted(os.environ.items()) if k.startswith(names)}
        given |= {k: getattr(arguments, k) for k in ("steps", "remat") if getattr(arguments, k)}
        self.common = {
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "normfuse": importlib.metadata.version("normfuse"),
            "settings": " ".join(f"{name}={value}" for name, value in given.items()),
        }
        print(", ".join(map(str, self.common.values())), flush=True)

    def write(self, row: dict) -> None:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        new = not self.path.exists()
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(self.common | row)


def plot(paths: list[pathlib.Path], out: pathlib.Path) -> None:
    """Efficiency over the number of GPUs: a panel for each part and scaling, a line a version.

    Of XLA's own options only; where something was measured more than once, the last.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for path in paths for row in csv.DictReader(path.open()) if row["efficiency"]]
    rows = [row for row in rows if row["options"] == "default"]
    parts = [part for part in PARTS if any(row["part"] == part for row in rows)]
    modes = [mode for mode in ("weak", "strong") if any(row["scaling"] == mode for row in rows)]
    figure, axes = plt.subplots(
        len(modes),
        len(parts),
        figsize=(1 + 3.2 * len(parts), 0.8 + 2.7 * len(modes)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    lines: dict[str, Any] = {}
    versions = list(dict.fromkeys(row["version"] for row in rows))
    for (i, mode), (k, part) in itertools.product(enumerate(modes), enumerate(parts)):
        ax = axes[i, k]
        for n, version in enumerate(versions):
            here = {
                int(row["gpus"]): float(row["efficiency"])
                for row in rows
                if (row["part"], row["scaling"], row["version"]) == (part, mode, version)
            }
            if here:
                at = sorted({1: 1.0} | here)
                heights = [({1: 1.0} | here)[count] for count in at]
                colour = "0.5" if version.startswith("jnp") else f"C{n}"
                (lines[version],) = ax.plot(at, heights, "o-", color=colour, markersize=4)
        ax.axhline(0.95, color="black", linewidth=0.6, linestyle=(0, (4, 3)))
        ax.set_title(f"{part}, {mode}", fontsize=10, loc="left")
        counts = sorted({1} | {int(row["gpus"]) for row in rows if row["part"] == part})
        ax.set_xticks(counts)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(min(float(row["efficiency"]) for row in rows) - 0.02, 1.03)
    for ax in axes[-1]:
        ax.set_xlabel("GPUs")
    for ax in axes[:, 0]:
        ax.set_ylabel("efficiency")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"tokens a second and GPU, over those of one {rows[0]['device']}", fontsize=11)
    figure.savefig(out, dpi=150)


def main() -> None:
    distributed.order_kernels()  # as the trainer does
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--part", nargs="+", choices=WHOLE, default=WHOLE)
    parser.add_argument("--scaling", nargs="+", choices=["weak", "strong"], default=["weak"])
    parser.add_argument(
        "--versions", nargs="+", choices=VERSIONS, help="`jnp` of 1b is xla's norms"
    )
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=["default"])
    parser.add_argument("--gpus", nargs="+", type=int, help="numbers of GPUs, ascending")
    parser.add_argument("--dtype", default="bfloat16", help="of the stack's parameters")
    parser.add_argument("--remat", choices=["none", "dots", "block"], help="of 1b, if not its own")
    parser.add_argument("--steps", type=int, default=12, help="of a group that is timed")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--plot", nargs="+", type=pathlib.Path, metavar="FILE.csv")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    arguments = parser.parse_args()
    if arguments.plot:
        return plot(arguments.plot, arguments.out / "scaling.png")
    table = Table(arguments.out / "scaling.csv", arguments)
    present = jax.device_count()
    counts = arguments.gpus or [2**i for i in range(present.bit_length())]
    alone: dict[tuple, float] = {}
    for part in arguments.part:
        if part in ("links", "apart"):
            {"links": links, "apart": apart}[part](arguments, counts, table.write)
        else:
            measure(part, arguments, counts, table.write, alone)


if __name__ == "__main__":
    main()
