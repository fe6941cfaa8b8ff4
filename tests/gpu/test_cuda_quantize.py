"""FP8 codes and products as XLA runs them on an NVIDIA GPU."""

import dataclasses

import fp8_layers
import fp8_reference
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from normfuse.layers.core.activations import SCALARS
from normfuse.layers.norm.spec import Norm
from normfuse.layers.quantization import gated, norm
from normfuse.layers.quantization.norm import NormCodes
from normfuse.native.implementation import NATIVE

pytestmark = pytest.mark.gpu

FORMATS = [fp8_reference.E4M3, fp8_reference.E5M2]


def check(x, dtype, bound=None):
    q, scale = fp8_reference.quantize(x, dtype, bound)
    given = None if bound is None else jnp.float32(bound)
    found = fp8_layers.quantize(jnp.asarray(x), dtype, bound=given, order=NATIVE)
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


@pytest.mark.parametrize("has_up", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cuda_gradients_of_activations_read_every_code(has_up, dtype, rng):
    """By the hardware's instruction, where there is one."""
    spec = gated.Gated(SCALARS["silu"], has_up=has_up)
    codes = [jnp.arange(256 * 144, dtype=jnp.uint8).reshape(256, 144) for _ in range(1 + has_up)]
    codes[0] = codes[0][:, ::-1]
    scales = jnp.asarray([2.0**-6, 2.0**-5][: 1 + has_up], jnp.float32)
    dh = jnp.asarray(rng.standard_normal((256, 144)), dtype)
    # Of da and dup bounds that hold; h exceeds its own, or is within it.
    bounds = jnp.asarray([100, 100, 8][1 - has_up :], jnp.float32)
    args = dh, *codes, scales, bounds
    found = jax.jit(lambda *a: gated.gradient_kernel(spec, *a, order=NATIVE))(*args)
    for got, want in zip(found, gated.gradient_kernel.definition(spec, *args), strict=True):
        wide = lambda a: np.asarray(a).astype("f4")
        np.testing.assert_allclose(wide(got), wide(want), rtol=0.126, atol=2**-9)  # one step apart
        assert np.mean(np.asarray(got).view("u1") != np.asarray(want).view("u1")) < 0.01


FAMILY = {  # centred, with a bias, with parameters of each example
    "rms_norm": (False, False, False),
    "layer_norm": (True, True, False),
    "layer_norm of examples": (True, True, True),
    "rms_norm of examples": (False, True, True),
}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "shape", [(33, 77), (160, 512), (48, 1152), (48, 2048), (131, 4096), (272, 14336), (64, 40960)]
)
def test_cuda_norms_are_quantized_as_they_are_made(shape, dtype, has_residual, name, rng):
    """Also examples of 33 and 131 rows, by two kernels, and rows that no block holds."""
    centred, has_bias, examples = FAMILY[name]
    lead = (2,) if examples else ()
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    x, scale, bias = (draw(*lead, *s) for s in (shape, shape[1:], shape[1:]))
    x, parameters = x + centred * 3, [scale, bias][: 1 + has_bias]
    args = [x, *[draw(*x.shape)] * has_residual, *parameters]
    of = Norm(eps=1e-6, axes=(x.ndim - 1,), has_scale=True, has_residual=has_residual)
    heads = (0,) if examples else ()
    of = dataclasses.replace(of, centred=centred, has_bias=has_bias, heads=heads)
    found = jax.jit(lambda *a: norm.quantize(NormCodes(of), *a, order=NATIVE))(*args)
    np.testing.assert_array_equal(found.h, x + args[1] if has_residual else x)
    wide = np.asarray(found.h, "f8")
    mean = np.mean(wide, -1, keepdims=True) * centred
    rstd = 1 / np.sqrt(np.mean((wide - mean) ** 2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found.statistics[-1], rstd[..., 0], rtol=1e-5)
    if centred:
        np.testing.assert_allclose(found.statistics[0], mean[..., 0], rtol=1e-5, atol=1e-6)
    w, b = (np.asarray(a, "f8").reshape(*lead, 1, -1) for a in (scale, bias))
    y, b = (wide - mean) * rstd * w, b * has_bias
    root = np.sqrt(np.float32(shape[1]))
    bounds = root * np.abs(np.asarray(scale, "f4")) + np.abs(np.asarray(bias, "f4")) * has_bias
    q, qt = np.asarray(found.q), np.asarray(found.qt)
    np.testing.assert_array_equal(np.moveaxis(qt, 0, -1), q)
    # Each part is off by as much of itself, and the mean by its own rounding.
    slack = 1e-5 * (np.abs(y) + np.abs(b)) + 2e-7 * np.abs(mean * rstd * w)
    flat = lambda a: np.reshape(a, (-1, shape[1]))
    ends = [flat(y + b + e * slack) for e in (-1, 1)]
    ends = [fp8_reference.quantize(end, bound=bounds.max())[0].astype("f8") for end in ends]
    value = flat(q).view(ml_dtypes.float8_e4m3fn).astype("f8")
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
    a, b = (fp8_layers.quantize(jnp.asarray(z)) for z in (x, y))
    if int(10 * float(jax.devices()[0].compute_capability)) < 89:
        pytest.skip("needs a GPU with FP8")
    exact = fp8_reference.product(a.q, a.scale, b.q, b.scale)
    run = jax.jit(fp8_layers.product, static_argnums=4)
    found = np.asarray(run(a.q, a.scale, b.q, b.scale, dtype), "f8")
    # Fast accumulation keeps 14 bits or so of each partial sum.
    assert np.linalg.norm(found - exact) <= 5e-3 * np.linalg.norm(exact)
