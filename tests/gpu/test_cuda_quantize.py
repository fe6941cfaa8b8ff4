"""FP8 codes and products as XLA runs them on an NVIDIA GPU."""

import fp8_reference
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from normfuse.layers import quantization
from normfuse.layers.norm.spec import Norm
from normfuse.layers.quantization import norm
from normfuse.layers.quantization.norm import NormCodes
from normfuse.native.implementation import NATIVE

pytestmark = pytest.mark.gpu

FORMATS = [fp8_reference.E4M3, fp8_reference.E5M2]


def check(x, dtype, bound=None):
    q, scale = fp8_reference.quantize(x, dtype, bound)
    given = None if bound is None else jnp.float32(bound)
    found = quantization.quantize(jnp.asarray(x), dtype, bound=given, order=NATIVE)
    assert np.asarray(found.scale).tobytes() == np.float32(scale).tobytes()
    for codes, want in ((found.q, q), (found.qt, q.T)):
        np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("given", ["float32", ml_dtypes.bfloat16, "float16"], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (131, 77), (272, 4112), (2048, 2048)], ids=str)
def test_cuda_codes_are_those_of_the_reference(given, dtype, shape, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    if x.size > 1:
        x.reshape(-1)[:5] = [np.nan, np.inf, -np.inf, 1e-42, -0.0]
        x[:, 6] *= 1000
    check(x.astype(np.dtype(given)), dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("bound", [448.0, 57344.0, 1.0, 1e-30])
def test_cuda_rounds_every_number_as_the_reference(dtype, bound):
    """By the hardware's instruction, where there is one."""
    tops = np.arange(1 << 14, dtype=np.uint32) << 18
    ends = np.array([0, 1, 0x1FFFF, 0x20000, 0x20001, 0x3FFFF], np.uint32)
    check((tops[:, None] | ends).view(np.float32), dtype, bound)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(33, 77), (160, 512), (48, 2048), (131, 4096), (272, 14336)])
def test_cuda_norms_are_quantized_as_they_are_made(shape, dtype, has_residual, rng):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    x, scale = draw(*shape), draw(shape[1]).astype(jnp.float32)
    args = [x, *[draw(*shape)] * has_residual, scale]
    of = Norm(eps=1e-6, axes=(1,), has_scale=True, has_residual=has_residual, with_rstd=True)
    found = jax.jit(lambda *a: norm.quantize(NormCodes(of), *a, order=NATIVE))(*args)
    np.testing.assert_array_equal(found.h, x + args[1] if has_residual else x)
    wide = np.asarray(found.h, "f8")
    rstd = 1 / np.sqrt(np.mean(wide * wide, 1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found.rstd, rstd[:, 0], rtol=1e-5)
    y, bound = wide * rstd * np.asarray(scale, "f8"), np.sqrt(shape[1]) * np.abs(scale).max()
    codes = np.asarray(found.q).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(found.qt).T, np.asarray(found.q))
    ends = [fp8_reference.quantize(y * (1 + e), bound=bound)[0].astype("f8") for e in (-1e-5, 1e-5)]
    value = codes.astype("f8")
    assert np.all((np.minimum(*ends) <= value) & (value <= np.maximum(*ends)))


def test_cuda_norms_without_eps_of_tiny_rows(rng):
    """Squares that underflow leave no bound: NaN, where rounding would write the largest number."""
    x = jnp.asarray(rng.standard_normal((32, 512)), jnp.float32)
    x = x.at[1].mul(1e-15).at[2].set(1e-30).at[3].set(-1e-21)
    of = Norm(eps=0.0, axes=(1,), with_rstd=True)
    found = jax.jit(lambda a: norm.quantize(NormCodes(of), a, order=NATIVE))(x)
    codes = np.asarray(found.q).view(ml_dtypes.float8_e4m3fn).astype("f8")
    assert np.isnan(codes[2]).all() and np.isfinite(codes[[0, 1, *range(4, 32)]]).all()
    # 1e-42 has few bits, so that the mean is about right, or the bound does not hold.
    decoded = codes[3] * float(found.scale)
    assert np.isnan(decoded).all() or np.allclose(decoded, -1, rtol=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cuda_products_are_those_of_the_codes(dtype, rng):
    x, y = (rng.standard_normal((n, 1024)).astype(np.float32) for n in (256, 512))
    a, b = (quantization.quantize(jnp.asarray(z)) for z in (x, y))
    if int(10 * float(jax.devices()[0].compute_capability)) < 89:
        pytest.skip("needs a GPU with FP8")
    exact = fp8_reference.product(a.q, a.scale, b.q, b.scale)
    run = jax.jit(quantization.product, static_argnums=4)
    found = np.asarray(run(a.q, a.scale, b.q, b.scale, dtype), "f8")
    # Fast accumulation keeps 14 bits or so of each partial sum.
    assert np.linalg.norm(found - exact) <= 5e-3 * np.linalg.norm(exact)
