"""Layers to compare with the same in plain jnp, on a GPU and in programs compiled for one.

x is `(tokens, dim)`, the norm's scale float32, kernels `(dim, hidden)` and, for an MLP, back.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from normfuse import dense, gated_dense, gated_product, rms_norm


def rms(x, scale):
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def project(x, scale, *kernels):
    """The products of the normalised x."""
    n = rms_norm(x, scale)
    return [dense(n, kernel) for kernel in kernels]


LAYERS: dict[str, dict[str, Callable]] = {
    "norm + dense": {
        "jnp": lambda x, s, w: rms(x, s) @ w,
        "normfuse": lambda x, s, w: dense(rms_norm(x, s), w),
    },
    "norm + gelu MLP": {
        "jnp": lambda x, s, w, d: jax.nn.gelu(rms(x, s) @ w) @ d,
        "native": lambda x, s, w, d: gated_product(
            *project(x, s, w), None, d, activation="gelu_tanh", implementation="native"
        ),
        "native, hidden kept": lambda x, s, w, d: dense(
            dense(rms_norm(x, s), w, activation="gelu_tanh"), d
        ),
    },
    "norm + SwiGLU MLP": {
        "jnp": lambda x, s, w, u, d: (jax.nn.silu((n := rms(x, s)) @ w) * (n @ u)) @ d,
        "native": lambda x, s, w, u, d: gated_product(
            *project(x, s, w, u), d, implementation="native"
        ),
        "native, hidden kept": lambda x, s, w, u, d: dense(gated_dense(rms_norm(x, s), w, u), d),
    },
}

# Arrays of x's size, and of the hidden layer's, that kernels other than GEMMs move. The norm reads
# x and writes it normalised; its backward reads x and dy and writes dx. After the product each
# array is read and written once each way.
MOVED = {
    ("norm + dense", "normfuse"): (5, 0),
    ("norm + gelu MLP", "native"): (5, 6),
    ("norm + gelu MLP", "native, hidden kept"): (5, 5),
    ("norm + SwiGLU MLP", "native"): (5, 9),
    ("norm + SwiGLU MLP", "native, hidden kept"): (5, 8),
}


def kernel_shapes(layer: str, dim: int, hidden: int) -> list[tuple[int, int]]:
    """Returns the kernels' shapes, in the order in which the layer takes them."""
    ups = [(dim, hidden)] * (1 + ("SwiGLU" in layer))
    return ups + [(hidden, dim)] * ("MLP" in layer)


def both_ways(layer: Callable) -> Callable:
    """The result, and then every gradient: as in training, dy is not known before y is."""

    def run(args, dy):
        y, pull = jax.vjp(layer, *args)
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, pull(dy)

    return run
