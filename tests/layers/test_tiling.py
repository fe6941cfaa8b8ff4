"""Meshes recovered from XLA's tiles."""

import itertools

import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.layers.core.sharding import factor, mesh_and_spec

MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8)]
ORDERS = [range(8), [5, 2, 7, 0, 1, 6, 3, 4]]


def specs(names):
    """Every way to give some of the axes, in any order, to two of three dimensions."""
    for n in range(len(names) + 1):
        for chosen in itertools.permutations(names, n):
            for cut in range(n + 1):
                yield P(chosen[:cut] or None, None, chosen[cut:] or None)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=["in order", "shuffled"])
def test_every_spec_on_every_mesh_is_recovered(eight_devices, sizes, order):
    devices = np.array(eight_devices)[list(order)]
    mesh = Mesh(devices.reshape(sizes), tuple("abc"[: len(sizes)]))
    for spec in specs(mesh.axis_names):
        sharding = NamedSharding(mesh, spec)
        again = NamedSharding(*mesh_and_spec(sharding, 3, list(devices)))
        assert again.is_equivalent_to(sharding, 3), spec
        assert list(again.mesh.devices.flat) == list(devices)


def test_part_of_an_axis():
    """A mesh of eight, of which a reshape has left four in one dimension and two in the next."""
    sizes, entries = factor(np.arange(8).reshape(4, 2, 1))
    assert (sizes, entries) == ([4, 2], [[0], [1], []])


def test_tiles_of_no_mesh():
    with pytest.raises(ValueError, match="no mesh"):
        factor(np.array([0, 1, 2, 3, 4, 5, 7, 6]))


def test_what_cannot_be_read_is_replicated(eight_devices):
    mesh, spec = mesh_and_spec(object(), 3, eight_devices)
    assert mesh.size == 8 and spec == P()

    class Shuffled:
        def _to_xla_hlo_sharding(self, ndim):
            return self

        is_replicated = lambda self: False
        subgroup_types = lambda self: []
        tile_assignment_dimensions = lambda self: [8, 1]
        tile_assignment_devices = lambda self: [0, 1, 2, 3, 4, 5, 7, 6]

    mesh, spec = mesh_and_spec(Shuffled(), 2, eight_devices)
    assert mesh.size == 8 and spec == P()
