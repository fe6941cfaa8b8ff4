"""Element-wise ops from C++ as XLA runs them on an NVIDIA GPU."""

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elementwise_cases import gated, gcd, phase, reference, sine_and_cosine, twin

from normfuse import elementwise
from normfuse.native import compiler

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


DERIVATIVES = {  # derivatives at z, given f(z)
    "exp": lambda z, f: f,
    "sin": lambda z, f: np.cos(z),
    "cos": lambda z, f: -np.sin(z),
    "tan": lambda z, f: 1 + f * f,
    "sinh": lambda z, f: np.cosh(z),
    "cosh": lambda z, f: np.sinh(z),
    "tanh": lambda z, f: 1 - f * f,
    "sqrt": lambda z, f: 0.5 / f,
    "log": lambda z, f: 1 / z,
}


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_cuda_complex_functions(dtype, rng):
    z = (rng.normal(size=3001) + 1j * rng.normal(size=3001)).astype(dtype)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(phase(z), np.angle(z), rtol=4 * eps)
    wide = z.astype(np.complex128)
    for name, derivative in DERIVATIVES.items():
        op = elementwise(f"template <class T> T f(T z) {{ return {name}(z); }}")
        expected = getattr(np, name)(wide)
        # CUDA's float functions are within 4 units, and these are made of two or three; near a pole
        # or a zero what a rounding of z does to f(z) is more
        units = 32 * np.maximum(1, np.abs(wide * derivative(wide, expected) / expected))
        error = np.abs(np.asarray(op(z)) - expected) / np.abs(expected)
        assert np.all(error <= units * eps), (name, np.max(error / units / eps))


def test_cuda_broadcasting(rng):
    shapes = [((6, 1, 512), (4, 512)), ((40, 1001), (1001,)), ((3, 5), (3, 1)), ((7, 1), (1, 9))]
    for one, other in shapes:
        x, g = (np.asarray(rng.normal(size=shape), np.float32) for shape in (one, other))
        np.testing.assert_allclose(gated(x, g), reference(x, g), rtol=2e-7)


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


def test_cuda_several_results_in_a_loop(rng):
    x = jnp.asarray(rng.normal(size=1000), jnp.float32)

    def step(carry, _):
        s, c = sine_and_cosine(carry)
        return s * c, None

    y = jax.jit(lambda x: jax.lax.scan(step, x, None, length=20)[0])(x)
    expected = np.float64(x)
    for _ in range(20):
        expected = np.sin(expected) * np.cos(expected)
    np.testing.assert_allclose(y, expected, rtol=2e-5)  # 40 float32 functions one after another


def test_cuda_scalars_change_without_compiling():
    x = jnp.linspace(-1, 1, 5000, dtype=jnp.float32)
    scaled = jax.jit(lambda limit: gated(x, x, limit=limit))
    scaled(1.0)
    before = compiler.compilations()
    for limit in (-0.5, 0.5):
        np.testing.assert_allclose(scaled(limit), reference(x, x, limit), rtol=2e-7)
    assert compiler.compilations() == before
