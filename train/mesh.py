"""The device mesh: how it is made, how the model is laid out on it, and whether that fits."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.sharding import AXES, BATCH, Sharding, validate
from . import UsageError
from .checks import near, require, with_flags
from .config import MeshConfig, TrainConfig


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh over all devices, of Auto axes: XLA places what the model does not constrain.

    `devices` are those of this machine unless given.

    Raises:
      UsageError: the product of the axes is not the number of devices, or there is no device.
    """
    try:
        devices = devices or jax.devices()
    except (RuntimeError, AssertionError) as error:  # the type depends on the platform
        raise UsageError(
            f"JAX finds no device with JAX_PLATFORMS={jax.config.jax_platforms}: {error}. Unset it "
            "or install JAX for that platform, for example jax[cuda13]."
        ) from None
    axes = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(_shape(config, devices), AXES, axis_types=axes, devices=devices)


def make_sharding(config: MeshConfig, mesh: Mesh, rows: int) -> Sharding:
    """Returns how the model's arrays lie on the mesh.

    `rows` sequences, of a microbatch, are computed at once. A mesh of "tensor" alone that divides
    them gets whole sequences; any other splits each sequence.
    """
    if not config.sequence:
        return Sharding()
    alone = mesh.size == mesh.shape["tensor"]
    return Sharding.sequence_parallel(by_rows=alone and rows % mesh.size == 0)


def check_model(config: TrainConfig, mesh: Mesh) -> None:
    """Checks that the model's dimensions, the batch and its sequences divide over the mesh.

    Raises:
      UsageError: one does not; the message names it, the axis, and sizes that would fit.
    """
    sharding = make_sharding(config.mesh, mesh, config.batch_size // config.microbatches)
    try:
        validate(config.transformer(), mesh.shape, sharding, seq_len=config.seq_len)
    except ValueError as error:
        raise UsageError(f"the model does not fit the mesh: {with_flags(str(error))}") from None
    replicas = math.prod(mesh.shape[axis] for axis in BATCH)
    unit = replicas * config.microbatches
    rule = (
        f"must be a multiple of {unit}: mesh data x fsdp = {replicas}, times --microbatches "
        f"{config.microbatches}. Take {near(config.batch_size, unit)}."
    )
    require(config.batch_size % unit == 0, "batch-size", config.batch_size, rule)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of `(batch, seq)` tokens: rows over "data" and "fsdp"."""
    return NamedSharding(mesh, P(BATCH, None))


def on_devices(batch: np.ndarray, sharding: NamedSharding) -> Array:
    """Starts moving a batch to the mesh; each process sends only the rows its devices hold."""
    return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])


def _shape(config: MeshConfig, devices: Sequence[jax.Device]) -> tuple[int, ...]:
    count, kind = len(devices), f"{devices[0].platform}: {devices[0].device_kind}"
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    filled = [axis for axis, size in sizes.items() if size == -1]  # the devices that are left
    if len(filled) > 1 or (count % fixed if filled else fixed != count):
        wanted = " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())
        raise UsageError(
            f"{wanted} take {'a multiple of ' * bool(filled)}{fixed} devices, but there are "
            f"{count} ({kind}). Change the sizes; one may be -1, as --mesh.data is, for all left."
        )
    return tuple(count // fixed if size == -1 else size for size in sizes.values())
