"""The CUDA handlers, called as no lowering of ours calls them: an error with our name, no crash.

`tests/native/test_hostile_calls.py` does so on CPUs, under sanitizers, with a driver of its own;
here are the real driver, XLA and a kernel that would write where the call says.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse.native import cache, launch

pytestmark = pytest.mark.gpu

SOURCE = launch.Source(
    "hostile.cu",
    'extern "C" __global__ void twice(const float* x, float* y) '
    "{ y[threadIdx.x] = 2 * x[threadIdx.x]; }",
)
X = np.arange(32, dtype=np.float32)
NOTHING = object()  # the attribute is not given


def three(*sizes):
    return np.array(sizes, np.int64)


def call(operands=(X,), results=((32, jnp.float32),), **changed):
    """Runs the kernel with attributes that are right but for those that are `changed`."""
    capability = launch.compute_capability(jax.devices()[0])
    image = cache.get(SOURCE, {}, launch.Target(f"sm_{capability}", 1).arch)
    attributes = dict(
        image=np.frombuffer(image.data, np.uint8),
        digest=image.digest,
        dtypes="float32 -> float32",
        elements=three(32, 32),
        kernel="twice",
        grid=three(1, 1, 1),
        block=three(32, 1, 1),
        cluster=three(1, 1, 1),
        shared=np.int64(0),
        ints=np.array([], np.int64),
        floats=np.array([], np.float32),
        doubles=np.array([], np.float64),
    )
    attributes = {n: v for n, v in (attributes | changed).items() if v is not NOTHING}
    shapes = [jax.ShapeDtypeStruct((n,), dtype) for n, dtype in results]
    run = jax.jit(lambda *x: launch.call_host("normfuse_launch", x, shapes, **attributes))
    return jax.block_until_ready(run(*map(jnp.asarray, operands)))


CALLS = {
    "no operand": {"operands": ()},
    "an operand more": {"operands": (X, X)},
    "a result more": {"results": ((32, jnp.float32),) * 2},
    "an operand of bfloat16": {"operands": (X.astype(jnp.bfloat16),)},
    "a result of int8": {"results": ((32, jnp.int8),)},
    "a short operand": {"operands": (X[:16],)},
    "an empty operand": {"operands": (X[:0],)},
    "a short result": {"results": ((16, jnp.float32),)},
    "elements of one array": {"elements": three(32)},
    "no elements": {"elements": three()},
    "negative elements": {"elements": three(-32, 32)},
    "elements beyond int64": {"elements": three(2**62, 2**62)},
    "dtypes of nothing": {"dtypes": ""},
    "dtypes without an arrow": {"dtypes": "float32 float32"},
    "dtypes that are not": {"dtypes": "float33 -> float32"},
    "dtypes of others": {"dtypes": "float64 -> float32"},
    "an empty image": {"image": np.array([], np.uint8), "digest": "1" * 64},
    "another image": {"image": np.arange(4096, dtype=np.uint8), "digest": "0" * 64},
    "no digest": {"digest": ""},
    "another kernel": {"kernel": "thrice"},
    "a kernel without a name": {"kernel": ""},
    "a kernel of a name with a NUL": {"kernel": "twice\0"},
    "a grid of two sizes": {"grid": three(1, 1)},
    "a grid of no sizes": {"grid": three()},
    "a negative grid": {"grid": three(-1, 1, 1)},
    "a grid beyond 32 bits": {"grid": three(2**32, 1, 1)},
    "a grid that is too high": {"grid": three(1, 2**20, 1)},
    "a block of no thread": {"block": three(0, 1, 1)},
    "a negative block": {"block": three(-32, 1, 1)},
    "a block that is too large": {"block": three(2048, 1, 1)},
    "a block beyond 32 bits": {"block": three(2**40, 1, 1)},
    "a cluster that does not divide": {"cluster": three(3, 1, 1)},
    "a cluster that is too large": {"cluster": three(64, 1, 1), "grid": three(64, 1, 1)},
    "a negative cluster": {"cluster": three(-1, 1, 1)},
    "too much shared memory": {"shared": np.int64(1 << 20)},
    "negative shared memory": {"shared": np.int64(-1)},
    "shared memory beyond 32 bits": {"shared": np.int64(1 << 40)},
    "an int more": {"ints": three(7)},
    "a hundred ints": {"ints": np.arange(100)},
    "a float more": {"floats": np.ones(1, np.float32)},
    "a double more": {"doubles": np.ones(1)},
    "shared of 32 bits": {"shared": np.int32(0)},
    "a grid of floats": {"grid": np.ones(3, np.float32)},
    "ints of floats": {"ints": np.ones(1, np.float32)},
    "a kernel that is a number": {"kernel": np.int64(3)},
    "no kernel": {"kernel": NOTHING},
    "no image": {"image": NOTHING},
    "no grid": {"grid": NOTHING},
    "an attribute more": {"colour": "red"},
}
MAY_RUN = (
    *("an attribute more", "an int more", "a float more", "a double more"),
    "a kernel of a name with a NUL",
)
"""XLA may ignore an attribute, old drivers do not tell a kernel's number of parameters, and a name
ends at its NUL."""


@pytest.mark.parametrize("name", CALLS)
def test_hostile_calls_are_errors(name):
    try:
        (got, *_) = call(**CALLS[name])
    except jax.errors.JaxRuntimeError as error:
        assert "CUDA_ERROR_ILLEGAL" not in str(error)
    else:
        assert name in MAY_RUN, got
    np.testing.assert_array_equal(call()[0], 2 * X)  # the device is as it was


def test_an_empty_grid_runs_nothing():
    call(grid=three(0, 1, 1))
    np.testing.assert_array_equal(call()[0], 2 * X)
