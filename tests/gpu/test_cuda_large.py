"""More than 2^31 elements for each op on a GPU: the last rows are those of a call of their own.

bfloat16, at most 70 GB at once; offsets of 32 bits would wrap in the middle.
"""

import functools
import math

import fp8_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normfuse
from normfuse import attention, elementwise, linear_cross_entropy
from normfuse.native.implementation import NATIVE

pytestmark = pytest.mark.gpu

bf16, f32 = jnp.bfloat16, jnp.float32
N = 1024
ROWS = 2**21 + 64  # times N: more than 2^31
LAST = 256
ATTENDED = 1025, 1024, 32, 64


@pytest.fixture(autouse=True)
def room():
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < 55e9:
        pytest.skip("needs a GPU with 70 GB of memory")
    yield
    jax.clear_caches()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def numbers(seed, shape, dtype=bf16):
    """Numbers that depend on the place, made without a second array of this size."""
    count = jax.lax.iota(jnp.uint32, math.prod(shape))
    count = (count * jnp.uint32(2654435761) + jnp.uint32(seed)) >> 16
    return ((count.astype(f32) / 32768) - 1).astype(dtype).reshape(shape)


def last(x):
    return x[-LAST:]


def equal(whole, part, rounding=0.0):
    """The last rows of a result, and the results of the last rows."""
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        a, b = (np.asarray(last(v).astype(f32)) for v in (a, b))
        assert np.isfinite(b).all() and np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding * np.abs(b).max())


NORMS = {
    "rms_norm": lambda x, w: normfuse.rms_norm(x, w, implementation="native"),
    "layer_norm": lambda x, w: normfuse.layer_norm(x, w, w, implementation="native"),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    op = NORMS[name]
    x, w = numbers(0, (ROWS, N)), 1 + numbers(1, (1, N), f32)[0]
    forward = jax.jit(lambda x: op(x, w))
    equal(forward(x), forward(last(x)), 2.0**-7)
    backward = jax.jit(lambda x: jax.vjp(lambda x: op(x, w), x)[1](x)[0])
    equal(backward(x), backward(last(x)), 2.0**-6)


def test_elementwise():
    square = "template <class T> T square(T x) { return x * x; }"
    op = elementwise(square, derivative={"x": "return x + x;"})
    x = numbers(0, (ROWS, N))
    equal(jax.jit(op)(x), jax.jit(op)(last(x)))
    slope = jax.jit(lambda x: jax.vjp(op, x)[1](x)[0])
    equal(slope(x), slope(last(x)))


def test_the_epilogue_of_a_dense_layer():
    """Gradients of gate and up are computed by a kernel of our own over all of them."""
    gate, up = numbers(0, (ROWS, N)), numbers(1, (ROWS, N))
    kernel = numbers(2, (N, 16)) * 0.1
    run = lambda gate, up: normfuse.gated_product(gate, up, kernel)

    @jax.jit
    def gradients(gate, up):
        y, pull = jax.vjp(run, gate, up)
        return pull(y)

    part = gradients(last(gate), last(up))
    whole = gradients(gate, up)
    equal(whole, part, 2.0**-6)


def test_quantize():
    x = numbers(0, (ROWS, N))
    bound = jnp.float32(1)
    run = jax.jit(lambda x: fp8_layers.quantize(x, "float8_e4m3fn", bound=bound, order=NATIVE))
    whole, part = run(x), run(last(x))
    assert whole.scale == part.scale
    equal(whole.q, part.q)
    columns = np.asarray(whole.qt[:, -LAST:].astype(f32)), np.asarray(part.qt.astype(f32))
    np.testing.assert_array_equal(*columns)
    assert float(jax.jit(lambda x: fp8_layers.amax(x, order=NATIVE))(x)) == float(
        jnp.max(jnp.abs(x)).astype(f32)
    )


def test_cross_entropy():
    """x of more than 2^31 elements; logits are made in chunks."""
    x, kernel = numbers(0, (ROWS, N)), numbers(1, (N, 2048), f32).astype(bf16)
    labels = jnp.arange(ROWS, dtype=jnp.int32) % 2048

    def run(x, labels):
        weights = jnp.ones(len(x))
        losses = lambda x: linear_cross_entropy(x, kernel, labels, reduction="none")
        y, pull = jax.vjp(losses, x)
        return y, pull(weights.astype(y.dtype))[0]

    run = jax.jit(run)
    part = run(last(x), last(labels))
    equal(run(x, labels), part, 2.0**-6)


def test_attention():
    """(batch, length, heads, width) of more than 2^31 elements, forward; cuDNN refuses them.

    Gradients are summed in float32, three more arrays.
    """
    q = numbers(0, ATTENDED)
    call = lambda implementation: jax.jit(
        lambda q: attention(q, q, q, causal=True, implementation=implementation)
    )
    with pytest.raises(NotImplementedError, match="2[*][*]31 elements: cuDNN takes fewer"):
        call("cudnn")(q)
    part = np.asarray(call(None)(q[-2:])).astype(np.float32)
    whole = np.asarray(call(None)(q)[-2:]).astype(np.float32)
    assert np.abs(part).max() > 0
    np.testing.assert_allclose(whole, part, atol=2.0**-6 * np.abs(part).max())
