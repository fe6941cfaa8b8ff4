"""Gated dense layers: what they keep, and implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import dense, gated_dense, gated_product
from normfuse.layers.core.activations import SCALARS

bf16 = jnp.bfloat16
ROWS, IN, OUT = (3, 5), 16, 24

# ---------------------------------------------------------------- what is kept


def kept(op, args):
    _, pull = jax.vjp(op, *args)
    once = {id(a): a.shape for a in jax.tree.leaves(pull) if a.shape[:2] == ROWS}
    return sorted(once.values())


def test_what_can_be_made_again_is_not_kept():
    hidden = (*ROWS, OUT)
    gate = jnp.ones(hidden, bf16)
    assert kept(gated_product, (gate, gate, jnp.ones((OUT, IN), bf16))) == [hidden, hidden]
    assert kept(gated_product, (gate, None, jnp.ones((OUT, IN), bf16))) == [hidden]


def test_a_frozen_kernel_costs_no_product_and_no_recomputation():
    gate, kernel = jnp.ones((*ROWS, OUT)), jnp.ones((OUT, IN))
    loss = lambda gate, kernel: jnp.sum(jnp.sin(gated_product(gate, None, kernel)))
    program = lambda argument: str(jax.make_jaxpr(jax.grad(loss, argument))(gate, kernel))
    assert program(0).count("dot_general[") == program(1).count("dot_general[") == 2
    # The activation, of which the gradient is one pass; and once more, for the kernel's gradient.
    assert [program(i).count("normfuse_epilogue[") for i in (0, 1)] == [1, 2]


# ---------------------------------------------------------------- implementations, bad input


def operands(rng):
    """x, and the kernels of gate and up."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)
    return draw(*ROWS, IN), draw(IN, OUT), draw(IN, OUT)


def test_native_never_falls_back_silently(rng):
    args = operands(rng)
    with pytest.raises(NotImplementedError, match="gated_dense: .*'native' cannot serve.*one loop"):
        gated_dense(*args, implementation="native")
    with pytest.raises(NotImplementedError, match="gated_dense has no 'native' implementation"):
        gated_dense(*args, activation=jnp.square, implementation="native")


def test_activations_that_kernels_do_not_know(rng):
    x, gate, up = operands(rng)
    square = gated_dense(x, gate, up, activation=jnp.square)
    want = (np.float64(x) @ np.float64(gate)) ** 2 * (np.float64(x) @ np.float64(up))
    limit = 64 * 2.0**-23  # three products of 16 terms, and one of 24
    np.testing.assert_allclose(square, want, rtol=0, atol=limit * np.abs(want).max())
    scalar = gated_dense(x, gate, up, activation=SCALARS["silu"])
    np.testing.assert_array_equal(scalar, gated_dense(x, gate, up))
    y = gated_product(dense(x, gate), dense(x, up), gate.T, activation=jnp.square)
    want = want @ np.float64(gate).T
    np.testing.assert_allclose(y, want, rtol=0, atol=limit * np.abs(want).max())
