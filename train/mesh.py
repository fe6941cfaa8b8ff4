"""The device mesh: how it is made, how the model is laid out on it, and whether that fits."""

import dataclasses
import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.config import num_parameters
from ..models.sharding import AXES, BATCH, Sharding, validate
from . import UsageError
from .checks import near, with_flags
from .config import MeshConfig, TrainConfig, state_bytes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh over all devices, of Auto axes: XLA places what the model does not constrain.

    `devices` are those of this machine unless given.

    Raises:
      UsageError: the product of the axes is not the number of devices, or there is no device.
    """
    try:
        devices = devices or jax.devices()
    except (RuntimeError, AssertionError) as error:  # the type depends on the platform
        cause = "".join(f": {line}" for line in str(error).splitlines()[:1])  # may be empty
        raise UsageError(
            f"JAX finds no device with JAX_PLATFORMS={jax.config.jax_platforms}{cause}. Unset it "
            "or install JAX for that platform, for example jax[cuda13]."
        ) from None
    axes = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(_shape(config, devices), AXES, axis_types=axes, devices=devices)


def make_sharding(config: MeshConfig, mesh: Mesh, rows: int) -> Sharding:
    """Returns how the model's arrays lie on the mesh.

    `rows` sequences are computed at once, of a microbatch or a part of one. A mesh of "tensor"
    alone that divides them gets whole sequences; any other splits each sequence.
    """
    sharding = Sharding()
    if config.sequence:
        alone = mesh.size == mesh.shape["tensor"]
        sharding = Sharding.sequence_parallel(by_rows=alone and rows % mesh.size == 0)
    return dataclasses.replace(sharding, keep_gathered=config.keep_gathered)


def check_model(config: TrainConfig, mesh: Mesh, sharding: Sharding) -> None:
    """Checks that the model's dimensions, the batch and its sequences divide over the mesh.

    Raises:
      UsageError: one does not; the message names it, the axis, and sizes that would fit.
    """
    try:
        validate(config.transformer(), mesh.shape, sharding, seq_len=config.seq_len)
    except ValueError as error:
        raise UsageError(f"the model does not fit the mesh: {with_flags(str(error))}") from None
    replicas = math.prod(mesh.shape[axis] for axis in BATCH)
    unit = replicas * config.pieces
    if config.batch_size % unit:
        times = f"times --microbatches {config.microbatches}"
        if config.mesh.parts > 1:
            times += f", times --mesh.parts {config.mesh.parts}"
        raise UsageError(
            f"--batch-size {config.batch_size} must be a multiple of {unit}: mesh data x fsdp = "
            f"{replicas}, {times}. Take {near(config.batch_size, unit)}."
        )


def check_memory(config: TrainConfig, mesh: Mesh) -> None:
    """Checks that the memory can hold the least that a run needs.

    That is each parameter with its two moments, and the input of every block; the
    compiler decides what else to keep.
    """
    model = config.transformer()
    each = state_bytes(config.optim.mu_dtype)
    state = each * num_parameters(model) // (mesh.shape["fsdp"] * mesh.shape["tensor"])
    replicas = math.prod(mesh.shape[axis] for axis in BATCH)
    tokens = config.batch_size // (replicas * config.pieces) * config.seq_len
    inputs = tokens * model.dim * model.num_layers * np.dtype(model.dtype).itemsize
    needed, device = state + inputs // mesh.shape["tensor"], mesh.local_devices[0]
    here = memory(device)
    if device.platform == "cpu":  # emulated devices share it
        here //= len(mesh.local_devices)
    if needed > here:
        raise UsageError(
            f"the run does not fit: parameters with their moments need {state / 1e9:,.1f} "
            f"GB on each device, the inputs of the blocks {(needed - state) / 1e9:,.1f}, and a "
            f"device has {here / 1e9:,.1f}. Take a smaller --preset, --batch-size or --seq-len, or "
            "spread the parameters over more devices with --mesh.fsdp."
        )


def memory(device: jax.Device) -> int:
    """Returns the bytes of a device's memory; of a CPU's, this machine's."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of `(batch, seq)` tokens: rows over "data" and "fsdp"."""
    return NamedSharding(mesh, P(BATCH, None))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def on_devices(batch: np.ndarray, sharding: NamedSharding) -> Array:
    """Starts moving a batch to the mesh; each process sends only the rows its devices hold."""
    return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])


def _shape(config: MeshConfig, found: Sequence[jax.Device]) -> tuple[int, ...]:
    devices, kinds = len(found), ", ".join(sorted({device.device_kind for device in found}))
    listed = f"{found[0].platform}: {kinds}"
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    filled = next((axis for axis, size in sizes.items() if size == -1), None)
    wanted = " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())
    if filled and devices % fixed:
        raise UsageError(
            f"{wanted} cannot use all {devices} devices ({listed}): {fixed} does not "
            f"divide {devices}. Change the sizes so that their product divides {devices}."
        )
    if filled:
        sizes[filled] = devices // fixed
    elif fixed != devices:
        raise UsageError(
            f"{wanted} take {fixed} devices, but there are {devices} ({listed}). Change the "
            "sizes, or leave --mesh.data at -1 for all devices that are left."
        )
    return tuple(sizes.values())
