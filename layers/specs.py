"""PartitionSpecs: read entry by entry, and checked where a caller gives one."""

import math
from collections.abc import Sequence, Set
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def whole(spec: Any, ndim: int) -> tuple[Any, ...]:
    """An entry for each of `ndim` dimensions."""
    return (*spec, *[None] * (ndim - len(spec)))


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def without(entry: Any, taken: Set[str]) -> Any:
    """The entry less the axes in `taken`."""
    kept = tuple(axis for axis in axes_of(entry) if axis not in taken)
    return kept[0] if len(kept) == 1 else kept or None


def check(op: str, argument: str, sharding: Any, shape: Sequence[int], kind: AxisType) -> None:
    """Checks that `sharding`, an argument or None, can place an array of `shape` on axes of `kind`.

    Raises:
      TypeError: if it is no sharding.
      ValueError: for a spec without a mesh, with more entries than the array has dimensions, with
        axes that the mesh does not have or has as another kind, or that do not divide a dimension.
    """
    if sharding is None:
        return
    if not isinstance(sharding, P | NamedSharding):
        raise TypeError(
            f"{op}: {argument} must be a PartitionSpec or a NamedSharding, got {sharding!r}"
        )
    named = isinstance(sharding, NamedSharding)
    spec = sharding.spec if named else sharding
    mesh: Any = sharding.mesh if named else jax.sharding.get_abstract_mesh()
    given = f"{op}: {argument}={spec}"
    if not mesh.axis_names:
        if kind == AxisType.Auto:
            return  # there may be one that only JAX's constraint sees, and it says if not
        raise ValueError(f"{given} needs a mesh in context; call it under jax.set_mesh(mesh)")
    if len(spec) > len(shape):
        raise ValueError(
            f"{given} has more entries than {tuple(shape)} has dimensions; leave out "
            f"{len(spec) - len(shape)}"
        )
    sizes, kinds = dict(mesh.shape), dict(zip(mesh.axis_names, mesh.axis_types))
    for dim, entry in enumerate(spec):
        axes = () if entry is P.UNCONSTRAINED else axes_of(entry)
        for axis in axes:
            if axis not in sizes:
                raise ValueError(
                    f"{given} names the axis {axis!r}; name one that the mesh has, of {sizes}"
                )
            if kinds[axis] != kind:
                raise ValueError(
                    f"{given} is for {kind.name} axes, and {axis!r} is {kinds[axis].name}; "
                    f"{_REMEDIES[kind]}"
                )
        parts = math.prod(sizes[axis] for axis in axes)
        if shape[dim] % parts:
            raise ValueError(
                f"{given} splits dimension {dim} of {tuple(shape)} over {parts} devices, which do "
                f"not divide {shape[dim]}; leave {', '.join(map(repr, axes))} out of it, or pad to "
                f"{-(-shape[dim] // parts) * parts}"
            )


_REMEDIES = {
    AxisType.Explicit: "leave it out: XLA places the result (jax.lax.with_sharding_constraint)",
    AxisType.Auto: "there place the operands (jax.sharding.reshard)",
}
