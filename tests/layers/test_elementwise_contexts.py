"""Element-wise ops in every context of JAX: values, kernels and collectives."""

import pathlib
import subprocess
import sys

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elementwise_cases import gated, twin
from jax import export
from jax.sharding import AxisType, NamedSharding

ONE, BOTH = 1, 2  # kernels


def agree(actual, expected):
    # products and sums of at most 8 float32 numbers, in other orders
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected
    )


def kernels(compiled):
    return sum(hlo.calls(compiled, "").values())


def loss(f):
    return lambda x, g: jnp.sum(f(x, g) ** 2)


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(key, (8, 8)) for key in keys]


def run(fn, *args):
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled(*args), compiled


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request, eight_devices):
    types = (getattr(AxisType, request.param),) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("spec", [("data", "model"), (None, ("model", "data"))], ids=str)
def test_sharded_inputs_need_no_collective(mesh, arrays, spec):
    x, g = jax.device_put(arrays, NamedSharding(mesh, jax.P(*spec)))
    y, compiled = run(gated, x, g)
    agree(y, twin(*arrays))
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    assert kernels(compiled) == ONE and not hlo.collectives(compiled)
    gradients, compiled = run(jax.grad(loss(gated), (0, 1)), x, g)
    agree(gradients, jax.grad(loss(twin), (0, 1))(*arrays))
    assert kernels(compiled) == BOTH and not hlo.collectives(compiled)


def test_a_row_is_split_as_its_columns_and_its_gradient_is_one_sum(mesh, arrays):
    x = jax.device_put(arrays[0], NamedSharding(mesh, jax.P("data", "model")))
    row = jax.device_put(arrays[1][0], NamedSharding(mesh, jax.P("model")))
    y, compiled = run(gated, x, row)
    agree(y, twin(arrays[0], arrays[1][0]))
    assert not hlo.collectives(compiled)
    gradients, compiled = run(jax.grad(loss(gated), (0, 1)), x, row)
    agree(gradients, jax.grad(loss(twin), (0, 1))(arrays[0], arrays[1][0]))
    assert hlo.collectives(compiled) == [hlo.Collective("all-reduce", 4 * 4)]  # jnp's too


def test_a_row_stored_split_does_not_move_what_it_meets(mesh, arrays):
    x = jax.device_put(arrays[0], NamedSharding(mesh, jax.P("data", None)))
    row = jax.device_put(arrays[1][0], NamedSharding(mesh, jax.P("data")))  # FSDP stores it so
    y, compiled = run(gated, x, row)
    agree(y, twin(arrays[0], arrays[1][0]))
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    assert hlo.collectives(compiled) == [hlo.Collective("all-gather", 4 * 8)]


def test_vmap_expands_nothing(arrays):
    x, g = arrays
    several = jnp.stack([x, x + 1])
    y, compiled = run(jax.vmap(gated, (0, None)), several, g)  # one more dimension, which g lacks
    agree(y, jax.vmap(twin, (0, None))(several, g))
    assert kernels(compiled) == ONE and not hlo.count(compiled, "broadcast")
    y, compiled = run(jax.vmap(lambda limit: gated(x, g, limit=limit)), g[0])
    agree(y, jax.vmap(lambda limit: twin(x, g, limit))(g[0]))
    agree(run(jax.vmap(gated, (1, 0), 1), x, g)[0], jax.vmap(twin, (1, 0), 1)(x, g))
    agree(run(jax.vmap(gated, (None, 1)), x[0], g)[0], jax.vmap(twin, (None, 1))(x[0], g))


def test_export_holds_the_compiled_function(arrays, tmp_path):
    names = ("normfuse_elementwise", "normfuse_launch")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = export.export(jax.jit(jax.grad(loss(gated))), disabled_checks=checks)(*arrays)
    path = pathlib.Path(tmp_path, "exported")
    path.write_bytes(exported.serialize())
    program = f"""
import jax, pathlib
import normfuse
from normfuse.native import cache
run = jax.export.deserialize(bytearray(pathlib.Path({str(path)!r}).read_bytes())).call
keys = jax.random.split(jax.random.key(0))
print(float(run(*[jax.random.normal(key, (8, 8)) for key in keys]).sum()), cache.compilations())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total, compilations = done.stdout.split()
    agree(float(total), float(jax.grad(loss(twin))(*arrays).sum()))
    assert int(compilations) == 0
