"""The Pallas product as XLA runs it, on an NVIDIA GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from normfuse.layers.core.activations import SCALARS
from normfuse.layers.dense import pallas
from normfuse.native import launch
from normfuse.native.implementation import Order

pytestmark = pytest.mark.gpu
PALLAS = Order(("pallas",), strict=True)


SIZES = [(1, 1, 1), (3, 5, 7), (64, 64, 64), (100, 1000, 72), (128, 256, 512), (257, 4096, 264)]
SIZES += [(1000, 72, 2056), (3000, 640, 1928), (8, 4096, 4096), (4096, 512, 64)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_match_reference(size, dtype):
    check_product(size, dtype, "relu", lambda z: np.maximum(z, 0))


def require_hopper():
    if launch.compute_capability(jax.devices()[0]) != 90:
        pytest.skip("the product's kernels are for Hopper")


def check_product(size, dtype, name, expected, *, bias=True, slack=1.0):
    require_hopper()
    m, k, n = size
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, dtype)
    x, w = jnp.asarray(rng.standard_normal((m, k)), dtype), draw(k, n)
    b = [draw(n)] * bias
    spec = pallas.Dense(function=SCALARS[name], has_bias=bias, keep=True, precision="highest")
    y, z = jax.jit(functools.partial(pallas.kernel, spec, order=PALLAS))(x, w, *b)
    wide = [reference.wide(a) for a in (x, w, *b)]
    exact = wide[0] @ wide[1] + (wide[2] if bias else 0)
    size = np.abs(wide[0]) @ np.abs(wide[1]) + (np.abs(wide[2]) if bias else 0)
    reference.assert_close(z, reference.Expected(exact, size, k), slack=slack)
    # every activation here changes by at most 1.2 times what its argument does
    limit = reference.Expected(expected(exact), 1.2 * size, k)
    reference.assert_close(y, limit, slack=slack)


@pytest.mark.parametrize("name", SCALARS)
def test_activations_match_reference(name):
    def exact(z):
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            return np.asarray(SCALARS[name](jnp.asarray(z)))

    # a squared relu changes by 2|z|, here up to 10; bfloat16's hardware tanh is off by 2^-11
    check_product((130, 96, 200), "bfloat16", name, exact, bias=False, slack=12.0)
