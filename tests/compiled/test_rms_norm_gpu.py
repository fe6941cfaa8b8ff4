"""Programs compiled for H200s that normalise on every kind of mesh."""

import functools

import gpu_compiler
import hlo
import jax
import jax.numpy as jnp
import pytest
from hlo import Collective
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import rms_norm

ROWS, FEATURES = 16384, 4096
KINDS = {"auto": (AxisType.Auto,) * 2, "explicit": (AxisType.Explicit,) * 2}


def gradient(x, scale):
    def loss(x, scale):
        return jnp.sum(rms_norm(x, scale, implementation="native").astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1))(x, scale)


def compiled(mesh, spec, scale_spec):
    x = jax.ShapeDtypeStruct((ROWS, FEATURES), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    scale = jax.ShapeDtypeStruct((FEATURES,), jnp.float32, sharding=NamedSharding(mesh, scale_spec))
    with jax.set_mesh(mesh):
        return gpu_compiler.compile(jax.jit(gradient), x, scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("a"), P("b"), P(("a", "b"))], ids=str)
def test_split_rows_cost_one_sum_of_dscale(kind, spec):
    mesh = gpu_compiler.mesh((4, 2), ("a", "b"), axis_types=KINDS[kind])
    program = compiled(mesh, spec, P())
    assert hlo.calls(program) == {"backward": 1, "forward": 1}
    assert hlo.collectives(program) == [Collective("all-reduce", 4 * FEATURES)]


@pytest.mark.parametrize("kind", KINDS)
def test_split_features_cost_one_float_a_row_each_way(kind):
    mesh = gpu_compiler.mesh((4, 2), ("a", "b"), axis_types=KINDS[kind])
    program = compiled(mesh, P("a", "b"), P("b"))
    names = hlo.calls(program)
    assert "forward" not in names and "backward" not in names and sum(names.values()) == 4
    # dscale is summed over the rows' axis; the other two carry a float for each row.
    rows = [Collective("all-reduce", 4 * ROWS // 4)] * 2
    assert hlo.collectives(program) == sorted(
        [Collective("all-reduce", 4 * FEATURES // 2), *rows], key=lambda c: c.bytes
    )


def test_stored_split_scale_is_gathered_and_its_gradient_scattered():
    mesh = gpu_compiler.mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    program = compiled(mesh, P("a"), P("a"))
    assert [c.kind for c in hlo.collectives(program)] == ["all-gather", "reduce-scatter"]


@pytest.mark.parametrize(("rows", "n", "launches"), [(64, 1024, 0), (1, 1024, 1), (512, 4096, 1)])
def test_forward_of_a_few_short_rows_is_left_to_xla(rows, n, launches):
    mesh = gpu_compiler.mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((rows, n), jnp.bfloat16, sharding=whole)
    scale = jax.ShapeDtypeStruct((n,), jnp.float32, sharding=whole)
    count = lambda **how: sum(
        hlo.calls(
            gpu_compiler.compile(jax.jit(functools.partial(rms_norm, **how)), x, scale)
        ).values()
    )
    assert count() == launches and count(implementation="native") == 1
