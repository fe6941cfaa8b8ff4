"""The softmax of linear_cross_entropy as XLA runs it on an NVIDIA GPU."""

import functools

import cross_entropy_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_close, wide

from normfuse import linear_cross_entropy
from normfuse.layers.cross_entropy import softmax
from normfuse.layers.cross_entropy.softmax import Softmax
from normfuse.native.implementation import NATIVE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("z_dtype, dtype", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
@pytest.mark.parametrize("vocabulary", [128256, 32000, 50257, 1000, 7])
def test_kernels_match_float64(rng, vocabulary, z_dtype, dtype, softcap):
    z = jnp.asarray(3 * rng.standard_normal((33, vocabulary), np.float32), z_dtype)
    labels = rng.integers(-1, vocabulary + 1, 33).astype(np.int32)  # some are elsewhere
    weights = rng.standard_normal(33).astype(np.float32)
    weights[4] = 0
    spec = Softmax(softcap=softcap, dtype=dtype)
    exact = reference.Softmax(wide(z), labels, softcap)
    binary = z.dtype.itemsize == 2  # powers of two
    most, total, picked = softmax.statistics(spec, z, labels, order=NATIVE)
    every = zip((most, total, picked), reference.statistics(exact, binary), strict=True)
    for found, expected in every:
        assert_close(found, expected)
    gradient = functools.partial(reference.gradient, exact, n=vocabulary, binary=binary)
    g, *_ = softmax.both(spec, z, labels, weights, order=NATIVE)
    assert_close(g, gradient(weights, weights))
    (g,) = softmax.gradient(spec, z, labels, most, weights / total, weights, order=NATIVE)
    assert_close(g, gradient(weights, weights))


@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize("shape", [(3008, 256, 5008), (4096, 256, 128256)], ids=str)
def test_a_gradient_in_fp8_is_that_of_plain_hlo(rng, shape, contract):
    """To the error of two roundings at random; the loss has the bits of the unquantized one."""
    rows, n, vocabulary = shape
    x = jnp.asarray(rng.standard_normal((rows, n)), jnp.bfloat16)
    stored = (n, vocabulary) if contract == 0 else (vocabulary, n)
    kernel = jnp.asarray(rng.standard_normal(stored, np.float32) / 8)
    labels = jnp.asarray(rng.integers(0, vocabulary, rows)).at[:9].set(-100)

    def run(**options):
        options |= {"contract": contract, "ignore": -100, "chunk_rows": rows // 2}
        loss = lambda x, kernel: linear_cross_entropy(x, kernel, labels, **options)
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, kernel)

    native, plain = (run(quantization="fp8", implementation=i) for i in ("native", "xla"))
    value, exact = run(implementation="native")
    assert native[0] == value
    for found, same, wanted in zip(native[1], plain[1], exact, strict=True):
        found, same, wanted = map(wide, (found, same, wanted))
        size = np.linalg.norm(wanted)
        assert np.linalg.norm(found - same) < 0.11 * size
        assert 0.01 * size < np.linalg.norm(found - wanted) < 0.09 * size
