"""FP8 codes and products as XLA runs them on an NVIDIA GPU."""

import fp8_layers
import fp8_reference
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from normfuse.layers.dense.fp8 import Contraction, product
from normfuse.layers.norm.spec import Norm
from normfuse.layers.quantization import norm
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
@pytest.mark.parametrize("bound", [448.0, 57344.0, 1.0, 1e-30])
def test_cuda_rounds_every_number_as_the_reference(dtype, bound):
    """By the hardware's instruction, where there is one."""
    tops = np.arange(1 << 14, dtype=np.uint32) << 18
    ends = np.array([0, 1, 0x1FFFF, 0x20000, 0x20001, 0x3FFFF], np.uint32)
    check((tops[:, None] | ends).view(np.float32), dtype, bound)


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
    spec = Contraction("dense", "mk", "nk", "mn", jnp.dtype(dtype).name, "bfloat16")
    run = jax.jit(lambda *operands: product(spec, *operands)[0])
    found = np.asarray(run(a.q, b.q, a.scale, b.scale), "f8")
    # Fast accumulation keeps 14 bits or so of each partial sum.
    assert np.linalg.norm(found - exact) <= 5e-3 * np.linalg.norm(exact)
