"""`normfuse plan`: the meshes for a model on some GPUs, each with its step time and its memory.

A step's time is a sum: products and attention at their rates, all other bytes at the rate of a
copy, and the part of the communication that nothing hides. Rates are measurements, named with their
reports in benchmarks/results. Three numbers are fitted, on steps of one and two GPUs: `_SUSTAINED`
and the two of `_EXPOSED`. tests/train/test_plan.py compares the model with every recorded step.
"""

import dataclasses
import functools
import itertools
import json
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from ..layers.attention import cudnn
from ..layers.attention.spec import Spec
from ..layers.quantization import fits
from ..models.config import (
    PRESETS,
    Quantization,
    Remat,
    TransformerConfig,
    flops_per_token,
    num_parameters,
)
from ..models.sharding import Sharding, validate
from ..native.implementation import fallbacks
from . import UsageError
from .arguments import expanded, named, one_line, read_bytes, shown
from .checks import LAYERS, near, require
from .config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    MuDtype,
    Preset,
    preset_config,
    state_bytes,
)
from .display import shell_command, short

if TYPE_CHECKING:
    from .topology import Needs

HOST = 8  # GPUs of one host
_SHOWN = 6  # meshes of each precision
_STEP_TOKENS = 16_384  # tokens a GPU computes in a step by default, as in the reports
_USABLE = 0.75  # part of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION)
# Rate of products in a training step, relative to their rate alone: GPUs that run for seconds reach
# their power limit, and wait between kernels. Fitted on steps of one GPU (scaling.csv).
_SUSTAINED = 0.857
# A step's extra time, per second that its collectives would take alone: fitted on steps of two
# GPUs. Collectives over "fsdp" overlap with products, but slow these down; a step waits for those
# over "tensor", which run slower than alone.
_EXPOSED = {"fsdp": 0.75, "tensor": 1.26}
# Reads and writes of the logits beyond the products: 40.5 ms and 35.7 (loss_and_attention.md).
_LOSS_PASSES = 4.8


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Measured rates of a kind of GPU, a second.

    Attributes:
      memory: bytes of its memory.
      bf16: FLOP of products alone.
      fp8: the same in FP8.
      attention: FLOP of cuDNN's attention, causal, counted as by `flops_per_token`.
      copy: bytes read and written.
      links: of so many GPUs of one host, bytes that each sends in a collective over all of them.
      assumed: the rates that were not measured on it.
    """

    memory: float
    bf16: float
    fp8: float
    attention: float
    copy: float
    links: dict[int, float]
    assumed: str = ""


# Products: fp8.md (jnp, and "as one function"). Attention: 13.2 TFLOP in 25.7 ms
# (steps.md). Copy: fp8.md. Links: the mean of gathers and scatters of
# 1 GiB, scaling.csv.
_H200 = Gpu(139 * 2**30, 789e12, 1.54e15, 513e12, 4.18e12, {2: 253e9, 4: 309e9})
GPUS = {
    "H200": _H200,
    # norms.md, an H100: its copy rate; its products take as long as the H200's.
    "H100": dataclasses.replace(
        _H200,
        memory=78 * 2**30,
        copy=2.98e12,
        assumed="H100: FP8 products, attention and links at the H200's rates",
    ),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one step; sums and multiples are field by field.

    Attributes:
      flops: of products in bfloat16.
      fp8: of products in FP8.
      attention: of attention, as `flops_per_token` counts.
      moved: bytes that kernels other than products and attention read and write.
      fsdp: bytes of whole arrays that are gathered or scattered over "fsdp".
      tensor: the same over "tensor".
      data: the same over "data"; an all-reduce counts twice.
    """

    flops: float = 0
    fp8: float = 0
    attention: float = 0
    moved: float = 0
    fsdp: float = 0
    tensor: float = 0
    data: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __mul__(self, factor: float) -> "Work":
        return Work(*(factor * value for value in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Mesh:
    data: int = 1
    fsdp: int = 1
    tensor: int = 1  # with sequence parallelism


# ---------------------------------------------------------------- the work of a step
#
# All rows of one replica, over its "tensor" devices. Activations have 2 bytes an element.


def mlp(
    dim: int, hidden: int, rows: float, remat: Remat, *, gated: bool = True, fp8: bool = False
) -> Work:
    """Returns the work of a norm and an MLP, forward and backward."""
    kernels = (3 if gated else 2) * dim * hidden
    # gate, up, hidden; and backward gate, up and three gradients, with hidden once more.
    passes = (3, 6) if gated else (2, 3)
    if fp8:  # maxima are found first, and codes of one byte are written in both layouts
        passes = (passes[0] + 2, passes[1] + 2)
    again = remat != "none"
    moved = 2 * hidden * rows * (passes[0] * (1 + again) + passes[1])
    moved += _norm(dim, rows, again) + (_quantized(2 * dim, rows) if fp8 else 0)
    # A recomputed block does not repeat its last product: nothing in the backward reads the result.
    flops = 6 * kernels * rows + (2 * (kernels - dim * hidden) * rows if remat == "block" else 0)
    return _half(dim, rows, again, flops, moved, fp8, codes=fp8 and gated)


def attention(c: TransformerConfig, rows: float) -> Work:
    """Returns the work of a norm and attention, without the scores and their sums of values."""
    again = c.remat != "none"
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    kernels = 2 * c.dim * (heads + kv)
    rope = 4 * (heads + kv) * rows
    moved = rope * (2 + again) + _norm(c.dim, rows, again)
    codes = (fp8 := c.quantization == "fp8") and c.norms != "post"  # written by the norm itself
    if fp8:
        moved += _quantized((1 if codes else 2) * c.dim + 2 * heads + 2 * kv, rows)
    flops = (8 if c.remat == "block" else 6) * kernels * rows
    return _half(c.dim, rows, again, flops, moved, fp8, codes)


def _half(
    dim: int, rows: float, again: bool, flops: float, moved: float, fp8: bool, codes: bool = False
) -> Work:
    # Its input and its output's gradient are gathered, its output and its input's gradient summed.
    # FP8 gathers the output's gradient as codes, one byte an element, and with `codes` its input.
    sent = dim * rows * ((1 if codes else 2) * (1 + again) + (1 if fp8 else 2) + 2 * 2)
    return Work(0 if fp8 else flops, flops if fp8 else 0, moved=moved, tensor=sent)


def _norm(dim: int, rows: float, again: bool) -> float:
    """Four arrays each way: with the residual in and out."""
    return 2 * dim * rows * 4 * (2 + again)


def _quantized(features: int, rows: float) -> float:
    """Activations and gradients in bfloat16 are read twice, and two layouts of codes written."""
    return 6 * features * rows


def step_work(c: TransformerConfig, rows: float, seq_len: int, keep: bool = False) -> Work:
    """Returns the work of the trainer's step for all rows of a replica.

    `keep` is --mesh.keep-gathered. Bytes of parameters are whole: "fsdp" and "tensor" divide them.
    """
    fp8 = c.quantization == "fp8"
    block = attention(c, rows)
    block += mlp(c.dim, c.mlp_dim, rows, c.remat, gated=c.gated, fp8=fp8)
    table, parameters = c.vocab_size * c.dim, num_parameters(c)
    blocks = parameters - table * (1 if c.tie_embeddings else 2)
    products = 6 * (c.num_layers * _kernels(c) + table)
    # A recomputed block repeats two of attention's seven products (forward and backward).
    scores = (_flops_per_token(c, seq_len) - products) * rows * (1 if c.remat == "none" else 9 / 7)
    gathers = 1 if c.remat == "none" or keep else 2
    # Codes are gathered in one layout, one byte an element, else bfloat16. Gradients are float32.
    sent = (1 if fp8 else 2) * blocks * gathers + 2 * 2 * table + 4 * parameters
    gradient = 4 * table * rows  # of the loss
    whole = Work(
        flops=2 * table * rows + (0 if fp8 else gradient),
        fp8=gradient if fp8 else 0,
        attention=scores,
        moved=_LOSS_PASSES * 2 * c.vocab_size * rows,
        fsdp=sent,
        tensor=4 * 2 * c.dim * rows,
        data=2 * 4 * parameters,
    )
    return block * c.num_layers + whole


_flops_per_token = functools.cache(flops_per_token)  # it asks every layer, here for every mesh


def _kernels(c: TransformerConfig) -> int:
    heads = 2 * c.dim * c.head_dim * (c.num_heads + c.num_kv_heads)
    return heads + (3 if c.gated else 2) * c.dim * c.mlp_dim


# ---------------------------------------------------------------- time and memory


def seconds(
    work: Work,
    state: float,
    mesh: Mesh,
    gpu: Gpu,
    between: float = 50e9,
    *,
    alone: bool = False,
) -> float:
    """Returns the time of a step.

    Args:
      work: of one replica: `data * fsdp` of them share the batch.
      state: bytes that the update reads and writes, over all parameters.
      mesh: the devices.
      gpu: their rates.
      between: bytes a second that a GPU sends to another host.
      alone: the work is a layer measured by itself, with products at their full rate.
    """
    products = (work.flops / gpu.bf16 + work.fp8 / gpu.fp8) / (1 if alone else _SUSTAINED)
    time = (products + work.attention / gpu.attention + work.moved / gpu.copy) / mesh.tensor
    time += state / (mesh.fsdp * mesh.tensor) / gpu.copy
    inner = 1
    for axis, sent, held in (
        ("tensor", work.tensor, 1),
        ("fsdp", work.fsdp, mesh.tensor),
        ("data", work.data, mesh.tensor * mesh.fsdp),
    ):
        size = getattr(mesh, axis)
        if size > 1:
            link = _link(gpu, size, inner, mesh.data * mesh.fsdp * mesh.tensor, between)
            wire = sent / held * (size - 1) / size / link
            time += wire * _EXPOSED["tensor" if axis == "tensor" else "fsdp"]
        inner *= size
    return time


def _link(gpu: Gpu, size: int, inner: int, count: int, between: float) -> float:
    """The rate of an axis whose neighbours are `inner` devices apart.

    A group that spans hosts has a ring through each of its GPUs of a host, so that these send to
    the next host together.
    """
    measured = max((n for n in gpu.links if n <= size), default=min(gpu.links))
    if count <= HOST or HOST % (size * inner) == 0:
        return gpu.links[measured]
    return min(gpu.links[measured], min(size, max(HOST // inner, 1)) * between)


def update_bytes(c: TransformerConfig, mu_dtype: MuDtype = "float32") -> float:
    """AdamW's parameter and two moments read and written, and its float32 gradient read; the
    gradient's norm; and the cast to bfloat16, of which FP8 has two reads and two layouts of
    codes."""
    quantized = c.num_layers * _kernels(c) if c.quantization == "fp8" else 0
    return (2 * state_bytes(mu_dtype) + 4 + 4 + 6) * num_parameters(c) + (10 - 6) * quantized


def memory(
    c: TransformerConfig,
    rows: float,
    mesh: Mesh,
    keep: bool = False,
    mu_dtype: MuDtype = "float32",
) -> float:
    """Returns the bytes that a device needs, counted by hand: XLA decides about temporaries.

    Parameters and moments; what the blocks keep for the backward; and the larger of all gradients
    or, at the loss, a chunk's logits with the table's gradient. Kernels gathered over "fsdp" are
    those of one block, or of all where they are kept.
    """
    parameters, table = num_parameters(c), c.vocab_size * c.dim
    pieces, fp8 = mesh.fsdp * mesh.tensor, c.quantization == "fp8"
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    arrays = (2 if c.gated else 1) * c.mlp_dim  # before the activation
    # Bytes of a row. FP8 keeps these arrays, and what q, k, v, o, gate and up read, as codes.
    hidden = arrays if fp8 else 2 * arrays
    read = 2 * c.dim + heads if fp8 else 2 * c.mlp_dim
    everything = 2 * (2 * c.dim + 2 * heads + 2 * kv) + hidden + read
    kept = {
        "none": everything,
        "dots": 2 * (2 * c.dim + heads + 2 * kv) + hidden,
        "block": 2 * c.dim,
    }[c.remat]
    activations = rows * kept * c.num_layers
    if c.remat != "none":  # the block that is being recomputed
        activations += rows * everything
    at_once = c.num_layers if c.remat == "none" or keep else 1
    gathered = (1 if fp8 else 2) * _kernels(c) * at_once if fp8 or mesh.fsdp > 1 else 0
    if fp8 and c.remat != "none":  # codes of all kernels, in both layouts
        gathered += 2 * _kernels(c) * c.num_layers / mesh.fsdp
    loss = 2 * min(2 * 2048, rows) * c.vocab_size + 4 * table
    return (
        state_bytes(mu_dtype) * parameters / pieces
        + max(activations + gathered + loss, 4 * parameters / mesh.fsdp) / mesh.tensor
    )


# ---------------------------------------------------------------- the plans


@dataclasses.dataclass(frozen=True)
class Request:
    """The model to train, and the GPUs: `batch` sequences a step over all of them."""

    model: TransformerConfig
    kind: str
    count: int
    batch: int
    seq_len: int
    between: float  # GB/s
    documents: bool = False  # sequences are packed with documents
    mu_dtype: MuDtype = "float32"

    @property
    def usable(self) -> float:
        return _USABLE * GPUS[self.kind].memory


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train: how it is split, what it recomputes, its seconds and bytes a device."""

    mesh: Mesh
    model: TransformerConfig
    keep: bool
    seconds: float
    bytes: float


def candidates(r: Request) -> Iterator[Candidate]:
    """Yields every way to divide the model, whether or not it fits."""
    models = [
        dataclasses.replace(r.model, remat=remat, quantization=fp8, dtype="bfloat16")
        for remat, fp8 in itertools.product(get_args(Remat), _precisions(r.model))
    ]
    for mesh in _meshes(r.count):
        if not _divides(r, mesh, r.batch):
            continue
        rows = r.batch * r.seq_len / (mesh.data * mesh.fsdp)
        for c, keep in itertools.product(models, (False, True)):
            if keep and (c.remat == "none" or mesh.fsdp == 1 or c.quantization):
                continue
            work = step_work(c, rows, r.seq_len, keep)
            update = update_bytes(c, r.mu_dtype)
            time = seconds(work, update, mesh, GPUS[r.kind], r.between * 1e9)
            yield Candidate(mesh, c, keep, time, memory(c, rows, mesh, keep, r.mu_dtype))


def _precisions(c: TransformerConfig) -> tuple[Quantization | None, ...]:
    """FP8 too, where every product of a block can run in it."""
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return (None, "fp8") if fits(c.dim, c.mlp_dim, heads, kv) else (None,)


def _meshes(count: int) -> Iterator[Mesh]:
    for tensor in (n for n in range(1, min(count, HOST) + 1) if count % n == HOST % n == 0):
        for fsdp in (n for n in range(1, count // tensor + 1) if count // tensor % n == 0):
            yield Mesh(count // tensor // fsdp, fsdp, tensor)


def _divides(r: Request, mesh: Mesh, batch: int | None) -> bool:
    sharding = Sharding.sequence_parallel() if mesh.tensor > 1 else Sharding()
    shape = dataclasses.asdict(mesh)
    try:
        validate(r.model, shape, sharding, batch_size=batch, seq_len=r.seq_len)
    except ValueError:
        return False
    return True


def best(r: Request) -> list[Candidate]:
    """Returns the fastest candidate that fits of each mesh and precision, in order of time."""
    fitting = [x for x in candidates(r) if x.bytes <= r.usable]
    first: dict[tuple, Candidate] = {}
    for x in sorted(fitting, key=lambda x: (x.seconds, x.bytes)):
        first.setdefault((x.mesh, x.model.quantization), x)
    return list(first.values())


def plan(
    kind: str,
    count: int,
    model: ModelConfig,
    *,
    preset: Preset,
    folder: Path | None,
    batch_size: int | None,
    seq_len: int,
    between_hosts: float,
    documents: bool = False,
    mu_dtype: MuDtype = "float32",
    compile: int = 0,
) -> None:
    """Prints the fastest meshes that fit, and the commands that train on them.

    The first `compile` of them are compiled for GPUs that are only described: XLA then says what
    memory they need and what they communicate.

    Raises:
      UsageError: an unknown GPU, a count that is no whole number of hosts, a batch that does not
        divide, a model that does not fit, or no compiler for `compile`.
    """
    require(kind in GPUS, "gpu", shown(kind), f"must be one of {', '.join(GPUS)}.")
    require(1 <= count <= 1024, "gpus", shown(count), "must be from 1 to 1024.")
    rule = f"must be at most {HOST}, or whole hosts of {HOST}: take {near(count, HOST)}."
    require(count <= HOST or count % HOST == 0, "gpus", count, rule)
    require(0 < between_hosts < 1e6, "between-hosts", between_hosts, "must be GB/s above 0.")
    require(compile >= 0, "compile", compile, "must be the number of meshes to compile, or 0.")
    try:
        config = TransformerConfig(**dataclasses.asdict(model))
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        raise UsageError(f"--model.{field.replace('_', '-')}={rest}") from None
    if folder is not None:
        usual = preset_config(preset).model
        for name, value in dataclasses.asdict(model).items():
            if value != getattr(usual, name):
                raise UsageError(
                    f"--model.{name.replace('_', '-')} {value} does not change the model of "
                    "--huggingface: leave it out, or edit a copy of the model's config.json."
                )
        config = _huggingface(folder)
        size = lambda name: abs(math.log(num_parameters(PRESETS[name]) / num_parameters(config)))
        preset = min(get_args(Preset), key=size)
    flag = "model.num-layers" if folder is None else "huggingface: num_hidden_layers"
    require(config.num_layers <= LAYERS, flag, config.num_layers, f"must be at most {LAYERS}.")
    rule = f"must be from 1 to the model's max_seq_len, {config.max_seq_len}."
    require(1 <= seq_len <= config.max_seq_len, "seq-len", shown(seq_len), rule)
    scaled = max(_STEP_TOKENS // seq_len, 1)  # sequences a GPU
    batch = count * scaled if batch_size is None else batch_size
    rule = "must be at least 1 and below 2**31."
    require(1 <= batch < 2**31, "batch-size", shown(batch), rule)
    request = Request(config, kind, count, batch, seq_len, between_hosts, documents, mu_dtype)
    ranked = best(request)
    if not ranked:
        raise UsageError(_refusal(request, None if batch_size else scaled))
    of = {"bf16": [x for x in ranked if not x.model.quantization]}
    of["fp8"] = [x for x in ranked if x.model.quantization]
    found = sorted(sum((x[:_SHOWN] for x in of.values()), []), key=lambda x: x.seconds)
    compiled = _compiled(request, found[:compile], preset) if compile else {}
    _print(request, found, compiled)
    fits = lambda x: x not in compiled or compiled[x].bytes <= request.usable
    for name, those in of.items():
        for x in [x for x in those if fits(x)][:1]:
            print(f"\nfastest in {name}:\n{_command(x, preset, request)}")
    for name in ("rope_scaling", "attention_bias"):
        if getattr(config, name):
            print(f"\nno flag of the trainer sets the model's {name}")


def _huggingface(folder: Path) -> TransformerConfig:
    from ..models.huggingface import from_huggingface

    folder = expanded(folder, "--huggingface")
    with named("--huggingface", folder):
        content = read_bytes(folder / "config.json")
    try:
        settings = json.loads(content)
        if not isinstance(settings, dict):
            raise ValueError("config.json must hold a JSON object.")
        return from_huggingface(settings)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--huggingface {folder} cannot be read: {error}") from None


def _refusal(r: Request, scaled: int | None) -> str:
    """Says why there is no plan: a batch that divides, or a number of GPUs that is enough.

    `scaled` is the number of sequences a GPU, where the batch grows with the number of GPUs.
    """
    found = list(candidates(r))
    if not found:  # "data" alone divides any model
        unit = min(x.data * x.fsdp for x in _meshes(r.count) if _divides(r, x, None))
        return (
            f"--batch-size {r.batch} divides over no mesh of {r.count} GPUs: it must be a multiple "
            f"of {unit}. Take {near(r.batch, unit)}."
        )
    enough = "no number up to 1024 fits: lower --batch-size or --seq-len."
    for n in (*range(r.count + 1, HOST), *range((r.count // HOST + 1) * HOST, 1025, HOST)):
        if best(dataclasses.replace(r, count=n, batch=n * scaled if scaled else r.batch)):
            enough = f"the next number that fits is --gpus {n}."
            break
    return (
        f"the model does not fit on {r.count} {r.kind}: it needs "
        f"{min(x.bytes for x in found) / 2**30:,.1f} GiB on each device, of "
        f"{r.usable / 2**30:,.1f} that JAX takes; {enough}"
    )


def _compiled(r: Request, found: list[Candidate], preset: Preset) -> "dict[Candidate, Needs]":
    """Returns each one's needs by XLA, compiled for devices that are only described."""
    from . import topology

    jax.config.update("jax_platforms", "cpu")  # a GPU here is not needed, nor is its memory
    needs = {}
    for i, x in enumerate(found):
        print(f"compiling {i + 1} of {len(found)}: {_named(x)}", file=sys.stderr, flush=True)
        usual = preset_config(preset)
        config = dataclasses.replace(
            usual,
            optim=dataclasses.replace(usual.optim, mu_dtype=r.mu_dtype),
            batch_size=r.batch,
            seq_len=r.seq_len,
            data=DataConfig(documents=r.documents),
            mesh=MeshConfig(
                **dataclasses.asdict(x.mesh), sequence=x.mesh.tensor > 1, keep_gathered=x.keep
            ),
        )
        try:
            needs[x] = topology.needs(topology.step(config, x.model, r.kind, HOST))
        except jax.errors.JaxRuntimeError as error:
            print(f"XLA cannot compile it: {one_line(error)}", file=sys.stderr, flush=True)
    return needs


def _named(x: Candidate) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in dataclasses.asdict(x.mesh).items())
    return f"{axes}, {x.model.quantization or 'bf16'}, remat {x.model.remat}"


def _print(r: Request, found: list[Candidate], compiled: "dict[Candidate, Needs]") -> None:
    table = Table(box=box.SIMPLE_HEAD)
    columns = ["data", "fsdp", "tensor", "precision", "remat", "ms", "tokens/s", "GiB"]
    for name in columns + (["by XLA"] if compiled else []):
        table.add_column(name, justify="left" if name in ("precision", "remat") else "right")
    for x in found:
        xla = compiled.get(x)
        table.add_row(
            *map(str, dataclasses.astuple(x.mesh)),
            x.model.quantization or "bf16",
            x.model.remat + (", kept" if x.keep else ""),
            f"{1e3 * x.seconds:.1f}",
            short(r.batch * r.seq_len / x.seconds),
            f"{x.bytes / 2**30:.1f}",
            *([] if xla is None else [f"{xla.bytes / 2**30:.1f}"]),
        )
    console = Console()
    if not console.is_terminal:  # files and pipes have no width
        console.width = max(console.width, console.measure(table).maximum)
    parameters = short(num_parameters(r.model))
    print(f"{parameters} parameters, {r.count} {r.kind}, {r.batch} sequences of {r.seq_len} a step")
    console.print(table)
    for note in _notes(r, found, compiled):
        print(f"  {note}")
    if compiled and r.count > 1:
        print("\nGB that a device's collectives give it in a step, by XLA:")
    for x, needs in compiled.items() if r.count > 1 else ():
        kinds = needs.collectives.items()
        listed = (f"{size / 1e9:.2f} by {number} {kind}" for kind, (number, size) in kinds)
        print(f"  {_named(x)}: {', '.join(listed) or 'none'}")


def _notes(r: Request, found: list[Candidate], compiled: "dict[Candidate, Needs]") -> Iterator[str]:
    """Notes about numbers that were not measured."""
    steps = "of 1b, on 1, 2 and 4 H200s and H100s"
    yield f"Times are a model's, within 10 % of the steps measured: {steps}."
    gpu, dim, measured = GPUS[r.kind], r.model.dim, PRESETS["1b"].dim
    if dim != measured:
        slow = "; narrower layers are slower than this" if dim < measured else ""
        yield f"Extrapolated: a width of {dim}, from steps of width {measured}{slow}."
    if r.count > max(gpu.links):
        yield f"Extrapolated: {r.count} GPUs, at the link rate of {max(gpu.links)}."
    if r.count > HOST:
        rate = f"{r.between:g} GB/s"
        yield f"Assumed: {rate} from a GPU to other hosts, no latency (--between-hosts)."
    if any(x.mesh.data > 1 for x in found):
        yield 'Assumed: sums over "data" overlap as those over "fsdp" do.'
    if len(_precisions(r.model)) == 1:
        yield "No FP8: a width of the model is not a multiple of 16."
    if any(sorted(dataclasses.astuple(x.mesh))[1] > 1 for x in found):
        yield "Extrapolated: meshes of several axes, from those of one."
    if why := _no_cudnn(r.model):
        yield f"Not measured: attention in blocks by XLA, slower than cuDNN's as counted ({why})."
    if r.documents:
        yield "Counted: attention over whole rows; documents take less time, up to 4 GiB more."
    if gpu.assumed:
        yield f"Assumed: {gpu.assumed}."
    for x, needs in compiled.items():
        if needs.bytes > r.usable:
            yield f"Does not fit, by XLA: {_named(x)}."
    for op, reason in fallbacks() if compiled else ():
        yield f"Compiled without a kernel for {op}: {reason}"
    if len(compiled) < len(found):
        yield "GiB is counted by hand; XLA may need more or less (--compile asks it)."


def _no_cudnn(c: TransformerConfig) -> str:
    """The reason why cuDNN does not compute the model's attention on Hopper GPUs, or ""."""
    if c.attention == "xla":
        return "--model.attention xla"
    q, k = (jax.ShapeDtypeStruct((1, 2, *n, c.head_dim), "bfloat16") for n in ((1, 1), (1,)))
    return cudnn.refusal(90, Spec(scale=1.0, causal=True, softcap=c.attention_softcap), q, k)


def _command(x: Candidate, preset: Preset, r: Request) -> str:
    """The command that trains so, with the flags that differ from the preset's."""
    usual, flags = preset_config(preset).model, ["--preset", preset, "--precision", "bfloat16"]
    settings: dict[str, Any] = {"batch-size": r.batch, "seq-len": r.seq_len}
    settings |= {"data.documents": True} if r.documents else {}
    settings |= {"optim.mu-dtype": r.mu_dtype} if r.mu_dtype != "float32" else {}
    settings |= {f"mesh.{axis}": size for axis, size in dataclasses.asdict(x.mesh).items()}
    settings |= {"mesh.sequence": True} if x.mesh.tensor > 1 else {}
    settings |= {"mesh.keep-gathered": True} if x.keep else {}
    for field in dataclasses.fields(ModelConfig):
        if (value := getattr(x.model, field.name)) != getattr(usual, field.name):
            settings[f"model.{field.name.replace('_', '-')}"] = value
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--{name.replace('.', '.no-')}")
        else:
            flags += [f"--{name}", str(value)]
    return f"{shell_command('train')} {shlex.join(flags)}"
