"""Shardings: PartitionSpecs, the mesh behind XLA's tiles, and Auto axes."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...native import fingerprint, jax_private
from ...native.kernel import without_mesh

Results = list[Array]
Dimensions = tuple[int, ...]
Dims = tuple[Sequence[Any], Sequence[Any]]


def whole(spec: Any, ndim: int) -> tuple[Any, ...]:
    """Returns an entry for each of `ndim` dimensions."""
    return (*spec, *[None] * (ndim - len(spec)))


@functools.cache
def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that an entry names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def without(entry: Any, taken: Set[str]) -> Any:
    """Returns the entry less the axes in `taken`."""
    kept = tuple(axis for axis in axes_of(entry) if axis not in taken)
    return kept[0] if len(kept) == 1 else kept or None


# ---------------------------------------------------------------- the mesh behind XLA's tiles


def mesh_and_spec(sharding: Any, ndim: int, devices: Sequence[jax.Device]) -> tuple[Mesh, P]:
    """Returns a mesh over `devices` on which `sharding` is a PartitionSpec, and that spec.

    The user's own mesh would not do: JAX hands it over only where the program's arguments are on
    it, and a reshape that splits one of its axes in two leaves no spec on it. A sharding that
    cannot be read becomes replication: correct, but it gathers.
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


def on_one_mesh(placements: Sequence[tuple[Mesh, P]]) -> tuple[Mesh, list[P]]:
    """Returns a mesh on which all have specs, from `mesh_and_spec` of each.

    Axes are split where those of another mesh end; if that cannot be, all but the first sharded one
    are replicated.
    """
    meshes = [mesh for mesh, _ in placements]
    devices = meshes[0].devices.ravel()
    # How far apart, in order of position, the devices along each axis are.
    distances = {1, len(devices)}
    for mesh in meshes:
        distances |= {math.prod(mesh.axis_sizes[i:]) for i in range(len(mesh.axis_sizes))}
    ends = sorted(distances, reverse=True)
    if any(far % near for far, near in itertools.pairwise(ends)):
        first = next((i for i, (_, spec) in enumerate(placements) if any(spec)), 0)
        return meshes[first], [
            spec if i == first else P() for i, (_, spec) in enumerate(placements)
        ]
    names = [f"normfuse{i}" for i in range(len(ends) - 1)]
    sizes = [far // near for far, near in itertools.pairwise(ends)]

    def refined(mesh: Mesh, spec: P) -> P:
        far = {a: math.prod(mesh.axis_sizes[i:]) for i, a in enumerate(mesh.axis_names)}
        parts = {
            a: [n for n, end in zip(names, ends) if far[a] // mesh.shape[a] < end <= far[a]]
            for a in mesh.axis_names
        }
        return P(*[tuple(n for a in axes_of(entry) for n in parts[a]) or None for entry in spec])

    return Mesh(devices.reshape(sizes), names), [refined(*one) for one in placements]


@dataclasses.dataclass(frozen=True)
class _Axis:
    """A mesh axis: `size` devices, each `distance` after the last, along one dimension of tiles."""

    distance: int
    size: int


def factor(tiles: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """Returns the mesh sizes, and for each dimension of `tiles` the mesh axes it is the product of.

    `tiles` has at each place the position of the device that holds the tile; on the mesh, devices
    are in order of position. Raises ValueError if no mesh has these tiles.
    """
    lines = [np.moveaxis(tiles, d, -1).ravel()[:n] for d, n in enumerate(tiles.shape)]
    by_dimension = [_axes_of(line) for line in lines]
    axes = sorted((a for dim in by_dimension for a in dim), key=lambda a: -a.distance)
    sizes = [axis.size for axis in axes]
    entries = [[axes.index(a) for a in dim] for dim in by_dimension]
    order = [i for entry in entries for i in entry]
    again = np.arange(np.prod(sizes, dtype=int)).reshape(sizes).transpose(order)
    if not np.array_equal(again.ravel(), tiles.ravel()):
        raise ValueError(f"no mesh has the tiles {tiles.tolist()}")
    return sizes, entries


def _axes_of(line: np.ndarray) -> list[_Axis]:
    """Returns the mesh axes along a line of tiles, major first: runs of runs of steps."""
    axes = []
    while len(line) > 1:
        steps = np.diff(line)
        other = np.flatnonzero(steps != steps[0])
        size = int(other[0]) + 1 if other.size else len(line)
        axes.append(_Axis(int(steps[0]), size))
        line = line[::size]
    return axes[::-1]


# ---------------------------------------------------------------- operations on Auto axes


class Loose(tuple):
    """Dimensions of a parameter, such as scale: its stored sharding neither follows the rows nor
    drives them. It is gathered (FSDP) or sliced to what a device needs."""


def shared_by(
    whole: Callable[..., Results],
    share: Callable[..., tuple[list[P], Callable[..., Results]]],
    deciding: Sequence[int],
    dims: Dims,
    devices: Sequence[jax.Device],
) -> Callable[..., Results]:
    """Returns `whole` as a function of global arrays on Auto axes, shared as `share` says.

    That is given the shardings of the arrays numbered `deciding`, first operands, then results.
    """
    x64, count = jax.config.jax_enable_x64, len(dims[0])

    @custom_partitioning
    def call(*operands):  # JAX 0.10 takes only the types from this, with an Explicit axis
        return tuple(without_mesh(whole, x64)(*operands))

    def parts(arrays: Sequence[Any]) -> Any:
        deciders = [arrays[i] for i in deciding]
        mesh, specs = on_one_mesh(
            [mesh_and_spec(a.sharding, len(a.shape), devices) for a in deciders]
        )
        specs, function = share(dict(mesh.shape), [a.shape for a in arrays], specs)
        return mesh, tuple(NamedSharding(mesh, spec) for spec in specs), function

    def partition(_mesh, operands, results):
        mesh, shardings, function = parts([*operands, *results])
        local = without_mesh(function, x64)
        fn = lambda *values: tuple(local(*values))
        return mesh, fn, shardings[count:], shardings[:count]

    def infer(_mesh, operands, results):  # for GSPMD alone; JAX 0.10 aborts without it
        return parts([*operands, *results])[1][count:]

    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=shardy_rule(*dims),
        decode_shardings=False,  # mesh_and_spec does: JAX fails where a reshape split an axis
    )
    return lambda *operands: list(call(*operands))


def shardy_rule(inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> str:
    """Returns the propagation rule of an operation, in custom_partitioning's notation.

    A dimension has one factor wherever it occurs, except in parameters (`Loose`), which have their
    own: an FSDP-sharded scale must not drag the activations onto its axes.
    """

    def mapping(dims):
        kind = "s" if isinstance(dims, Loose) else "d"
        return " ".join(f"{kind}{d}" for d in dims)

    return f"{', '.join(map(mapping, inputs))} -> {', '.join(map(mapping, outputs))}"


_callbacks: dict[str, Any] = {}  # the callbacks behind our keys, kept alive for JAX's weak table


def name_callback(results: Sequence[Any], name: str) -> None:
    """Gives a custom_partitioning call the same key in every process: `name`, and our version.

    JAX names the callback by its address, so that the persistent compilation cache misses in every
    new process (jax-ml/jax#21159). Where JAX's table is not as expected its own key stays.
    """
    try:
        op = results[0].owner
        op = getattr(op, "operation", op)
        callbacks = jax_private.sharding_callbacks
        info = callbacks[op.attributes["backend_config"].value.encode()]
        key = f"normfuse:{fingerprint()}:{name}"
        _callbacks[key] = callbacks[key.encode()] = info
        with op.context:
            op.attributes["backend_config"] = mlir.ir.StringAttr.get(key)
    except (AttributeError, IndexError, KeyError, TypeError):
        return
