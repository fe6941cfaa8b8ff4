"""`normfuse plan`: memory and collectives of a training step, on GPUs that need not be here.

The step is compiled for devices that are only described; the numbers are XLA's own.
"""

import collections
import math
import re
from typing import Any

import jax

from ..models.config import num_parameters
from ..native.implementation import fallbacks
from . import UsageError
from .arguments import one_line
from .checks import check, check_range, near, require
from .config import TrainConfig
from .display import short
from .mesh import check_model, make_mesh
from .topology import MEMORY, devices, step_on

_HOST = 8  # GPUs of one host
_USABLE = 0.75  # part of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION)
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]*)\]")  # bits, and a shape


def plan(kind: str, count: int, config: TrainConfig) -> None:
    """Compiles the step of a configuration for `count` GPUs, and prints what it needs.

    Raises:
      UsageError: an unknown GPU, a count that is no whole number of hosts, a configuration that
        does not fit the mesh, or no compiler.
    """
    require(kind in MEMORY, "gpu", kind, f"must be one of {', '.join(MEMORY)}.")
    check_range("gpus", count, 1, 1024)
    rule = f"must be at most {_HOST}, or whole hosts of {_HOST}: take {near(count, _HOST)}."
    require(count <= _HOST or count % _HOST == 0, "gpus", count, rule)
    check(config)
    model = config.transformer()
    jax.config.update("jax_platforms", "cpu")  # a GPU here is not needed, nor is its memory
    try:
        described = devices(kind, -(-count // _HOST), min(count, _HOST))
    except RuntimeError as error:
        raise UsageError(
            "plan needs JAX's CUDA plugin, though no GPU: pip install 'normfuse[cuda13]' "
            f"({error})."
        ) from None
    mesh = make_mesh(config.mesh, described)
    check_model(config, mesh)
    try:
        program = step_on(mesh, config, model)[0]
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"XLA cannot compile the step: {one_line(error)}") from None
    memory: Any = program.memory_analysis()
    needed, usable = memory.argument_size_in_bytes + memory.temp_size_in_bytes, MEMORY[kind][0]
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(
        f"{short(num_parameters(model))} parameters on {count} {kind}, {axes}, "
        f"{config.batch_size} sequences of {config.seq_len} a step\n"
        f"memory of a device: {needed / 2**30:.1f} GiB, of {_USABLE * usable / 2**30:.1f} that JAX "
        "takes"
    )
    if needed > _USABLE * usable:
        print(
            "  does not fit: spread it with --mesh.fsdp or --mesh.tensor, recompute with "
            "--model.remat dots or block, split it by --microbatches, or lower --batch-size"
        )
    for collective, sizes in collectives(program.as_text() or "").items():
        print(f"{len(sizes):6} {collective}, {sum(sizes) / 1e9:.2f} GB into a device")
    for op, reason in fallbacks():
        print(f"no kernel for {op}: {reason}")


def collectives(text: str) -> dict[str, list[int]]:
    """Returns the bytes of the results of a program's collectives, by their kind.

    One in a loop counts once, as in the program's text.
    """
    sizes: dict[str, list[int]] = collections.defaultdict(list)
    for shapes, kind, started in _COLLECTIVE.findall(text):
        arrays = _ARRAY.findall(shapes)
        # A start has (operands, results); an older all-reduce's only results.
        if started and (kind != "all-reduce" or shapes.startswith("((")):
            arrays = arrays[len(arrays) // 2 :]
        count = lambda shape: math.prod(map(int, filter(None, shape.split(","))))
        sizes[kind].append(sum(int(bits) * count(shape) // 8 for bits, shape in arrays))
    return dict(sorted(sizes.items()))
