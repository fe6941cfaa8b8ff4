"""A layer of several dense ones on one set of random operands, and its expected gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from normfuse import gated_dense, gated_product, rms_norm

DIM, HIDDEN = 16, 32
# x, the scale, two kernels by columns, a kernel by rows
SPECS = P("data"), P(), P(None, "model"), P(None, "model"), P("model")
# Three products of 16 to 32 terms, a norm and two activations, there and back, in float32.
TOLERANCE = 256 * 2.0**-23


def draw():
    """x (8, 2, 16), a scale around 1, and three kernels."""
    rng = np.random.default_rng(0)
    shapes = [(8, 2, DIM), (DIM,), (DIM, HIDDEN), (DIM, HIDDEN), (HIDDEN, DIM)]
    values = [rng.standard_normal(shape) for shape in shapes]
    values[1] = 1 + values[1] / 8
    values[2:] = [v / np.sqrt(v.shape[0]) for v in values[2:]]
    return [v.astype(np.float32) for v in values]


def layer(x, scale, gate, up, down, out_sharding=None):
    hidden = gated_dense(rms_norm(x, scale), gate, up)
    options = {"activation": "gelu_tanh", "out_sharding": out_sharding}
    return x + gated_product(hidden, None, down, **options)


def plain(x, scale, gate, up, down):
    n = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
    return x + jax.nn.gelu(jax.nn.silu(n @ gate) * (n @ up)) @ down


def gradients(*args, layer=layer, **options):
    """The gradients by every operand."""
    loss = lambda *args: jnp.sum(jnp.sin(layer(*args, **options)))
    return jax.grad(loss, tuple(range(len(args))))(*args)


@functools.cache
def expected():
    """The gradients of the plain layer in float64, on one device."""
    with jax.enable_x64(True):
        wide = [np.float64(a) for a in draw()]
        return [np.asarray(g) for g in jax.jit(functools.partial(gradients, layer=plain))(*wide)]


def check(grads):
    """The gradients of the layer."""
    for grad, want in zip(grads, expected(), strict=True):
        assert grad.dtype == np.float32
        limit = TOLERANCE * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(grad), want, rtol=0, atol=limit)
