"""Element-wise ops from C++ as XLA runs them on an NVIDIA GPU."""

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elementwise_cases import gated, gcd, reference, twin

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("n", [1, 1023, 2048, 1_000_003])
def test_cuda_values_match_reference(dtype, n, rng):
    x, g = (jnp.asarray(rng.normal(size=n), dtype) for _ in range(2))
    info = jnp.finfo(dtype)
    eps, atol = float(info.eps), float(info.eps) * float(info.tiny)  # a product and a rounding
    expected = reference(x, g, 0.25)
    np.testing.assert_allclose(np.float64(gated(x, g, limit=0.25)), expected, rtol=eps, atol=atol)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_cuda_integers(dtype, rng):
    a, b = rng.integers(0, 120, (2, 10_001)).astype(dtype)
    np.testing.assert_array_equal(gcd(a, b), np.gcd(a, b))


def test_cuda_derivatives(rng):
    x, g = (jnp.asarray(rng.normal(size=(64, 256)), jnp.float32) for _ in range(2))
    loss = lambda f: lambda x, g, limit: jnp.sum(f(x, g, limit=limit) ** 2)
    gradient = jax.jit(jax.grad(loss(gated), (0, 1, 2)))
    actual = gradient(x, g[0], 0.3)
    expected = jax.grad(loss(twin), (0, 1, 2))(x, g[0], 0.3)
    # sums of up to 16384 float32 products in other orders
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4), actual, expected
    )
    assert sum(hlo.calls(gradient.lower(x, g[0], 0.3).compile(), "").values()) == 2
