"""Dense layers on an NVIDIA GPU: kernels against plain HLO, and gradients summed in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import (
    accumulate_gradients,
    dense,
    gated_dense,
    gated_product,
    rms_norm,
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


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_sums_of_gradients_are_part_of_their_gemms(dtype):
    """XLA adds with beta = 1, in place, for each of three kernels."""
    gate, up, down = draw((2048, 8192), (2048, 8192), (8192, 2048), dtype=dtype)
    xs = jax.random.normal(jax.random.key(0), (4, 1024, 2048), bf16)
    scale = jnp.ones(2048)

    def loss(params, x):
        n = rms_norm(x, scale)
        y = gated_product(*(dense(n, k) for k in params[:2]), params[2])
        return jnp.sum(y.astype(f32) ** 2) * 1e-4

    run = jax.jit(lambda p, xs: accumulate_gradients(loss, p, xs)[1])
    compiled = run.lower((gate, up, down), xs).compile()
    betas = re.findall(r'"beta":([0-9.]+)', compiled.as_text())
    assert betas.count("1") >= 3, betas
    got, each = compiled((gate, up, down), xs), []
    for i in range(4):  # zeros add nothing, and one program computes the same activations
        each.append(
            compiled((gate, up, down), xs * (jnp.arange(4) == i).astype(bf16)[:, None, None])
        )
    for g, *one in zip(got, *each):
        total = sum(one[1:], one[0])
        assert float(jnp.linalg.norm(g - total) / jnp.linalg.norm(total)) < 1e-6
