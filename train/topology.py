"""XLA's compiler for NVIDIA GPUs that are only described: a step's program, without a GPU.

JAX's CUDA plugin compiles ahead of time for a topology of devices. Memory and collectives of the
program are then XLA's own; only its time needs a GPU.
"""

import collections
import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Compiled

from ..models.config import TransformerConfig
from ..models.functional import build
from ..native.jax_private import described_cudnn
from . import UsageError
from .config import TrainConfig
from .mesh import check_model, make_mesh, make_sharding
from .step import Program, State, make_optimizer, schedule

# No GPU is there to time products on, and without a time XLA would guess Triton where cuBLAS wins.
# What LLVM makes of the kernels is not read: they are compiled without its optimizations.
OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
    "xla_gpu_ptx_compiler_extra_flags": "-O0",
}
# Bytes of memory, and of it that a second moves. In all else an H100 is described as an H200 is.
MEMORY = {
    "H200": (150_000_000_000, 4_814_400_000_000),
    "H100": (85_000_000_000, 3_352_320_000_000),
}
_CUDNN = 91_000  # cuDNN's version in the description of the devices
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "f32": 4}
_BYTES |= {"f8e4m3fn": 1, "f8e5m2": 1}


@functools.cache
def devices(kind: str, hosts: int, each: int) -> list[jax.Device]:
    """Returns the GPUs of `hosts` hosts with `each`, "H100" or "H200", as the compiler knows them.

    Raises:
      RuntimeError: JAX's CUDA plugin is not installed.
    """
    text = Path(__file__).with_name("h200.txtpb").read_text().replace("H200", kind)
    for name, value in zip(("device_memory_size", "memory_bandwidth"), MEMORY[kind], strict=True):
        text, found = re.subn(rf"{name}: \d+", f"{name}: {value}", text)
        assert found == 1, name
    shape = f"1x{hosts}x{each}"
    name = kind.lower()
    return topologies.get_topology_desc(name, "cuda", target_config=text, topology=shape).devices


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a compiled program takes on each device.

    Attributes:
      bytes: its arguments, updated in place, and all temporaries.
      collectives: of each kind, how many it runs, and the bytes of their results.
    """

    bytes: int
    collectives: dict[str, tuple[int, int]]


def needs(program: Compiled) -> Needs:
    """Returns what XLA's analyses say of a program."""
    memory = program.memory_analysis()
    text = program.as_text()
    assert memory is not None and text is not None
    size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Needs(size, _collectives(text))


_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def _collectives(text: str) -> dict[str, tuple[int, int]]:
    """Counts the collectives that a program runs, those of a loop at each of its turns."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{") and (found := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            lines = bodies.setdefault("ENTRY" if found[1] else found[2], [])
        elif line.startswith(" "):
            lines.append(line)

    @functools.cache
    def count(name: str) -> collections.Counter:
        total: collections.Counter = collections.Counter()
        for line in bodies.get(name, ()):
            if found := _COLLECTIVE.search(line):
                shapes, kind, started = found.groups()
                arrays = _ARRAY.findall(shapes)
                # A start has (operands, results); an older all-reduce's only results.
                if started and (kind != "all-reduce" or shapes.startswith("((")):
                    arrays = arrays[len(arrays) // 2 :]
                total[kind, "number"] += 1
                total[kind, "bytes"] += sum(
                    _BYTES[dtype] * math.prod(map(int, filter(None, shape.split(","))))
                    for dtype, shape in arrays
                )
            times = _TIMES.search(line)
            for called in _CALLED.findall(line):
                for key, value in count(called).items():
                    total[key] += value * (int(times[1]) if times and " while(" in line else 1)
        return total

    total = count("ENTRY")
    kinds = sorted({kind for kind, _ in total})
    return {kind: (total[kind, "number"], total[kind, "bytes"]) for kind in kinds}


def compile_for(
    kind: str, count: int, host: int, config: TrainConfig, model: TransformerConfig
) -> tuple[Mesh, Compiled]:
    """Compiles the training step of a configuration for described GPUs.

    Args:
      kind: "H200" or "H100".
      count: how many there are.
      host: GPUs of one host.
      config: the run.
      model: its transformer.
    Returns: the mesh and the program.

    Raises:
      UsageError: JAX's CUDA plugin is not installed, or the run does not fit the mesh.
    """
    try:
        found = devices(kind, -(-count // host), min(count, host))
    except RuntimeError as error:
        raise UsageError(
            "plan needs JAX's CUDA plugin, though no GPU: pip install 'normfuse[cuda13]' "
            f"({error})."
        ) from None
    mesh = make_mesh(config.mesh, found)
    check_model(config, mesh, make_sharding(config.mesh, mesh, config.batch_size // config.pieces))
    return mesh, step_on(mesh, config, model)[0]


def step_on(mesh: Mesh, config: TrainConfig, model: TransformerConfig) -> tuple[Compiled, State]:
    """Compiles the step for a mesh of described GPUs; returns its abstract state too."""
    rows = config.batch_size // config.pieces
    program = Program(
        build(config.framework, model, make_sharding(config.mesh, mesh, rows)),
        make_optimizer(config.optim, config.steps),
        schedule(config.optim, config.steps),
        mesh,
        config.microbatches,
        0,
        config.spike,
        config.mesh.parts,
        documents=config.data.documents,
    )
    with jax.set_mesh(mesh), described_cudnn(_CUDNN):
        lowered = program.lower(config.batch_size, config.seq_len)
        return lowered.compile(compiler_options=OPTIONS), program.abstract()
