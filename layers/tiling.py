"""The mesh behind a sharding that XLA describes by tiles."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def mesh_and_spec(sharding: Any, ndim: int, devices: Sequence[jax.Device]) -> tuple[Mesh, P]:
    """A mesh over `devices`, made so that `sharding` is a PartitionSpec on it.

    The mesh of the user's own would not do: JAX hands it over only where the program's arguments
    are on it, and a reshape that splits one of its axes in two leaves no spec on it. A sharding
    that cannot be read becomes replication: right, but it gathers.
    """
    try:
        tiling = sharding._to_xla_hlo_sharding(ndim)
        if not tiling.is_replicated() and not tiling.subgroup_types():
            tiles = np.array(tiling.tile_assignment_devices(), int)
            tiles = tiles.reshape(tiling.tile_assignment_dimensions())
            sizes, entries = factor(tiles)
            names = [f"normfuse{i}" for i in range(len(sizes))]  # no name of the user's
            spec = P(*[tuple(names[i] for i in entry) or None for entry in entries[:ndim]])
            return Mesh(np.array(devices).reshape(sizes), names), spec
    except (AttributeError, ValueError):
        pass
    return Mesh(np.array(devices), ("normfuse0",)), P()


@dataclasses.dataclass(frozen=True)
class _Axis:
    """A mesh axis: `size` devices, each `distance` after the last, along one dimension of tiles."""

    distance: int
    size: int


def factor(tiles: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """The mesh sizes, and for each dimension of `tiles` the mesh axes it is the product of.

    `tiles` has at each place the position of the device that holds the tile; on the mesh, devices
    are in order of position.

    Raises:
      ValueError: if no mesh has these tiles.
    """
    by_dimension = []
    for d in range(tiles.ndim):
        line = tiles[(*[0] * d, slice(None), *[0] * (tiles.ndim - d - 1))]
        by_dimension.append(_axes_of(line))
    axes = sorted((a for dim in by_dimension for a in dim), key=lambda a: -a.distance)
    sizes = [axis.size for axis in axes]
    entries = [[axes.index(a) for a in dim] for dim in by_dimension]
    order = [i for entry in entries for i in entry]
    again = np.arange(np.prod(sizes, dtype=int)).reshape(sizes).transpose(order)
    if not np.array_equal(again.ravel(), tiles.ravel()):
        raise ValueError(f"no mesh has the tiles {tiles.tolist()}")
    return sizes, entries


def _axes_of(line: np.ndarray) -> list[_Axis]:
    """The mesh axes along a line of tiles, major first: runs of equal steps, and runs of those."""
    axes = []
    while len(line) > 1:
        steps = np.diff(line)
        other = np.flatnonzero(steps != steps[0])
        size = int(other[0]) + 1 if other.size else len(line)
        axes.append(_Axis(int(steps[0]), size))
        line = line[::size]
    return axes[::-1]
