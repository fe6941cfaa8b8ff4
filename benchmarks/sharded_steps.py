"""The training steps whose scaling is measured: a stack of SwiGLU blocks, and the trainer's own."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, gated_product, rms_norm
from normfuse.models.config import Quantization, Remat
from normfuse.models.functional import build
from normfuse.models.sharding import Sharding, constrain, in_context, on_mesh, stored
from normfuse.train.config import Preset, TrainConfig, preset_config
from normfuse.train.mesh import AXES, batch_sharding
from normfuse.train.step import Program, interleaved, make_optimizer, schedule

f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step computes; a smaller one is for trying this out."""

    layers: int = 8
    dim: int = 4096
    hidden: int = 14336
    seq: int = 2048
    rows: int = 4  # sequences of a GPU, weakly scaled
    total: int = 16  # sequences of all GPUs, strongly scaled
    dtype: str = "bfloat16"  # the stack's parameters
    preset: Preset = "1b"
    remat: Remat | None = None  # replaces the preset's own
    length: int | None = None  # so do these: tokens of a sequence, and sequences of a GPU
    batch: int | None = None
    link_bytes: int = 1 << 30  # bytes that a plain collective moves


WORKLOADS = {
    "full": Workload(),
    "tiny": Workload(2, 64, 128, 32, preset="tiny", link_bytes=1 << 16),
}


@dataclasses.dataclass(frozen=True)
class Version:
    """A contestant: whose layers, in how many parts, and whether the backward gathers again.

    jnp's sharding is as one would write it, ours as it lies best.

    Attributes:
      kept: the gathered and normalised input of a block is kept for the backward.
      gathered: so are the kernels that "fsdp" devices gather, which is ZeRO's second stage.
      quantization: of the preset's products; the stack has none.
    """

    library: str = "normfuse"
    parts: int = 1
    kept: bool = False
    gathered: bool = False
    quantization: Quantization | None = None

    @property
    def alone(self) -> str:
        """The version whose rate on one GPU this one is compared with."""
        return self.library if self.quantization is None else f"{self.library}, fp8"

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
    "normfuse, fp8": Version(quantization="fp8"),
    "normfuse, fp8, 2 parts": Version(parts=2, quantization="fp8"),
}


@dataclasses.dataclass
class Case:
    """A compiled step, its arguments, and the seconds of a step in each group of steps."""

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


def milliseconds(seconds: list[float]) -> float:
    """The median."""
    return 1e3 * statistics.median(seconds)


def mesh_of(axis: str, count: int, first: int = 0) -> Mesh:
    """Some devices along one axis."""
    sizes = tuple(count if name == axis else 1 for name in AXES)
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=kinds, devices=jax.devices()[first:][:count])


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


def specs_of(sharding: Sharding) -> dict[str, P]:
    """Of a block's parameters."""
    column = {"gate": sharding.column, "up": sharding.column}
    return {"scale": sharding.scale, **column, "down": sharding.row}


def stack_step(version: Version, sharding: Sharding):
    """`(parameters, x) -> (new parameters, loss)`, of independent parts of x's rows."""
    parts = version.parts
    names = ("gathered",) if version.kept else ()
    whole = {name: on_mesh(spec, ("tensor",)) for name, spec in specs_of(sharding).items()}
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


def stack(work: Workload, version: Version, mesh: Mesh, rows: int):
    """The lowered step of the stack for so many sequences, and a function that draws arguments."""
    sharding = version.sharding
    column = (work.dim, work.hidden), work.dtype
    kinds = {"scale": ((work.dim,), f32), "gate": column, "up": column}
    kinds["down"] = (work.hidden, work.dim), work.dtype
    place = on_mesh if version.library == "jnp" else stored
    abstract = lambda shape, dtype, spec: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, place(spec, mesh.shape))
    )
    specs = specs_of(sharding)
    one = {name: abstract(*kind, specs[name]) for name, kind in kinds.items()}
    params = [dict(one) for _ in range(work.layers)]
    x = abstract((rows, work.seq, work.dim), jnp.bfloat16, sharding.residual)
    out = jax.tree.map(lambda p: p.sharding, params), NamedSharding(mesh, P())
    step = jax.jit(stack_step(version, sharding), donate_argnums=0, out_shardings=out)
    with jax.set_mesh(mesh):
        lowered = step.lower(params, x)
    return lowered, lambda: (filled(params), filled(x, 1.0))


def preset(work: Workload, version: Version, mesh: Mesh, rows: int):
    """The trainer's own step, likewise."""
    config = config_of(work)
    implementation = {"jnp": "xla", "normfuse": None}[version.library]
    model = dataclasses.replace(config.transformer(), implementation=implementation)
    model = dataclasses.replace(
        model, remat=work.remat or model.remat, quantization=version.quantization
    )
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


def config_of(work: Workload) -> TrainConfig:
    """The preset's, of so many tokens."""
    config = preset_config(work.preset)
    given = {"seq_len": work.length, "batch_size": work.batch}
    return dataclasses.replace(config, **{name: n for name, n in given.items() if n})


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


# A part of the table: how its step is made, and the mesh's axis.
PARTS = {
    "stack-fsdp": (stack, "fsdp"),
    "stack-tensor": (stack, "tensor"),
    "1b-fsdp": (preset, "fsdp"),
    "1b-tensor": (preset, "tensor"),
}


def batches_of(part: str, work: Workload, count: int) -> tuple[int, dict[str, int]]:
    """Tokens of a sequence, and how many sequences so many GPUs have, by the kind of scaling."""
    if PARTS[part][0] is stack:
        return work.seq, {"weak": work.rows * count, "strong": work.total}
    config = config_of(work)
    return config.seq_len, {"weak": config.batch_size * count, "strong": config.batch_size}


def losses(work: Workload, counts: list[int], arguments) -> Iterator[dict[str, Any]]:
    """The first losses of the preset's step on each mesh, from one state and one batch."""
    versions = arguments.versions or ["normfuse", "normfuse, fp8"]
    for version, count in itertools.product(versions, counts):
        for part in ("1b-fsdp", "1b-tensor")[:count]:  # on one GPU they are the same
            make, axis = PARTS[part]
            seq, rows = batches_of(part, work, count)
            lowered, draw = make(work, VERSIONS[version], mesh_of(axis, count), rows["strong"])
            step, (state, batch), found = lowered.compile(), draw(), []
            for _ in range(4):
                state, metrics = step(state, batch)
                found.append(f"{float(metrics.loss):.7g}")
            tokens = rows["strong"] * seq
            row = {"part": f"losses, {axis}", "scaling": "strong", "gpus": count, "tokens": tokens}
            yield row | {"version": version, "losses": " ".join(found)}
