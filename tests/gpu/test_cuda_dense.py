"""Dense layers on an NVIDIA GPU: kernels against plain HLO, and gradients summed in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import (
    dense,
    gated_dense,
    gated_product,
)

pytestmark = pytest.mark.gpu
f32, bf16 = jnp.float32, jnp.bfloat16


def draw(*shapes, dtype=bf16):
    keys = jax.random.split(jax.random.key(len(shapes)), len(shapes))
    return [jax.random.normal(key, s, dtype) * s[0] ** -0.5 for key, s in zip(keys, shapes)]


LAYERS = {
    "dense": (functools.partial(dense, activation="gelu"), [(96, 40), (40,)]),
    "dense, wide": (functools.partial(dense, activation="gelu_tanh"), [(96, 264), (264,)]),
    "dense, odd": (functools.partial(dense, activation="silu"), [(96, 41), (41,)]),
    "gated_dense": (gated_dense, [(96, 520), (96, 520)]),
    "gated_product": (
        lambda x, g, u, d, **o: gated_product(dense(x, g), dense(x, u), d, activation="gelu", **o),
        [(96, 64), (96, 64), (64, 96)],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_kernels_give_what_plain_hlo_does(name, dtype):
    layer, shapes = LAYERS[name]
    x = jax.random.normal(jax.random.key(9), (1000, 96), dtype)
    args = [x, *draw(*shapes, dtype=dtype)]

    def both(implementation):
        def loss(*args):
            y = layer(*args, implementation=implementation)
            return jnp.sum(jnp.sin(y.astype(f32))), y

        with jax.default_matmul_precision("highest"):
            compiled = (
                jax.jit(jax.grad(loss, range(len(args)), has_aux=True)).lower(*args).compile()
            )
        return compiled.as_text(), compiled(*args)

    text, got = both("native")
    plain, want = both("xla")
    assert "epilogue_backward" in text and "normfuse_launch" not in plain
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v.astype(f32)) for v in (a, b))
        # Intermediates are rounded at the same places; a sum over 1000 rows hides no error of one.
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < (2e-6 if dtype == f32 else 6e-3)


def test_gradients_in_place_leave_what_is_still_needed():
    gate, up, kernel = draw((64, 32), (64, 32), (32, 16))
    y, pull = jax.vjp(gated_product, gate, up, kernel)
    first, again = pull(y), pull(y)  # a second time, of the same residuals
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(gated_product(gate, up, kernel), y)
