"""`normfuse plan`: memory and collectives of a training step, on GPUs that need not be here.

The step is compiled for devices that are only described; the numbers are XLA's own.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from ..models.config import TransformerConfig, num_parameters
from ..native.implementation import fallbacks
from . import UsageError
from .arguments import expanded, named, one_line, read_bytes, shown
from .checks import COMPUTED, check, near, require
from .config import ModelConfig, TrainConfig, preset_config
from .display import short
from .topology import MEMORY, compile_for, needs

HOST = 8  # GPUs of one host
_USABLE = 0.75  # part of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION)


def plan(kind: str, count: int, folder: Path | None, config: TrainConfig) -> None:
    """Compiles the step of a configuration for `count` GPUs, and prints what it needs.

    `folder` is that of a Hugging Face model, whose shape then takes the place of the preset's.

    Raises:
      UsageError: an unknown GPU, a count that is no whole number of hosts, a configuration that
        does not fit the mesh, or no compiler.
    """
    require(kind in MEMORY, "gpu", shown(kind), f"must be one of {', '.join(MEMORY)}.")
    require(1 <= count <= 1024, "gpus", shown(count), "must be from 1 to 1024.")
    rule = f"must be at most {HOST}, or whole hosts of {HOST}: take {near(count, HOST)}."
    require(count <= HOST or count % HOST == 0, "gpus", count, rule)
    model = None if folder is None else _huggingface(folder, config)
    if model is not None:
        shape = ModelConfig(**{name: getattr(model, name) for name in vars(config.model)})
        config = dataclasses.replace(config, model=shape)
    check(config)
    model = model or config.transformer()
    jax.config.update("jax_platforms", "cpu")  # a GPU here is not needed, nor is its memory
    try:
        mesh, program = compile_for(kind, count, HOST, config, model)
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"XLA cannot compile the step: {one_line(error)}") from None
    found, usable = needs(program), _USABLE * MEMORY[kind][0]
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(
        f"{short(num_parameters(model))} parameters on {count} {kind}, {axes}, "
        f"{config.batch_size} sequences of {config.seq_len} a step\n"
        f"memory of a device: {found.bytes / 2**30:.1f} GiB, of {usable / 2**30:.1f} that JAX takes"
    )
    if found.bytes > usable:
        print(
            "  does not fit: spread it with --mesh.fsdp or --mesh.tensor, recompute with "
            "--model.remat dots or block, split it by --microbatches, or lower --batch-size"
        )
    for kind_of, (number, size) in found.collectives.items():
        print(f"{number:6} {kind_of}, {size / 1e9:.2f} GB into a device")
    for op, reason in fallbacks():
        print(f"no kernel for {op}: {reason}")


def _huggingface(folder: Path, config: TrainConfig) -> TransformerConfig:
    """Reads a model's shape; only the flags that say how it is computed change it."""
    from ..models.huggingface import from_huggingface

    usual: Any = preset_config(config.preset).model
    for name, value in vars(config.model).items():
        if value != getattr(usual, name) and name not in COMPUTED:
            raise UsageError(
                f"--model.{name.replace('_', '-')} {value} does not change the model of "
                "--huggingface: leave it out, or edit a copy of the model's config.json."
            )
    folder = expanded(folder, "--huggingface")
    with named("--huggingface", folder):
        content = read_bytes(folder / "config.json")
    computed = {name: getattr(config.transformer(), name) for name in (*COMPUTED, "dtype")}
    try:
        settings = json.loads(content)
        if not isinstance(settings, dict):
            raise ValueError("config.json must hold a JSON object.")
        return from_huggingface(settings, **computed)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--huggingface {folder} cannot be read: {error}") from None
