"""The Pallas kernels through the TPU compiler, which needs no TPU: `pip install libtpu` to run."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, rms_norm

pytest.importorskip("libtpu", reason="the TPU's compiler")
S, PALLAS = jax.ShapeDtypeStruct, {"implementation": "pallas"}


@pytest.fixture(scope="module")
def devices():
    """Four devices of a TPU v5e that is not there."""
    said = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    os.environ.update(said | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"})
    return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text().count('target="tpu_custom_call"')


def on(devices, shape, dtype, spec=None, names=("data",)):
    sizes = (len(devices),) if len(names) == 1 else (2, len(devices) // 2)
    types = (AxisType.Explicit,) * len(names)  # Auto axes ask a callback that only a client has
    mesh = Mesh(np.array(devices).reshape(sizes), names, axis_types=types)
    return S(shape, dtype, sharding=NamedSharding(mesh, spec or P()))


SHAPES = [(7, 100), (1000, 8191), (4096, 4096), (512, 8192), (300, 1)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_compile(devices, shape, dtype):
    def loss(x, r, scale):
        y, h = rms_norm(x, scale, residual=r, **PALLAS)
        return jnp.sum(jnp.sin(y.astype("float32"))) + jnp.sum(h.astype("float32"))

    one = functools.partial(on, devices[:1])
    x, scale = one(shape, dtype), one(shape[1:], "float32")
    assert compiled(jax.grad(loss, (0, 1, 2)), x, x, scale) == 2


def test_a_mesh_compiles(devices):
    def loss(x, scale, kernel):
        h = rms_norm(x, scale, **PALLAS)
        return jnp.sum(dense(h, kernel, activation="silu").astype("float32") ** 2)

    four = functools.partial(on, devices, names=("data", "model"))
    x = four((256, 512), "bfloat16", P("data"))
    kernel = four((512, 1024), "bfloat16", P(None, "model"))
    with jax.set_mesh(x.sharding.mesh):
        assert compiled(jax.grad(loss, (0, 1, 2)), x, four((512,), "float32"), kernel) == 2
