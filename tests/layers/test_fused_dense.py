"""Gated dense layers: values and what they keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import dense, gated_dense, gated_product
from normfuse.layers.core.activations import SCALARS

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, IN, OUT = (3, 5), 16, 24


def f64(array):
    return np.asarray(array).astype(np.float64)


def silu(z):
    return z / (1 + np.exp(-z))


# name -> (op, shapes of what follows x, the same in NumPy)
OPS = {
    "gated_dense": (
        gated_dense,
        [(IN, OUT), (IN, OUT)],
        lambda x, g, u: silu(x @ g) * (x @ u),
    ),
    "gated_product": (
        lambda x, g, u, d, **o: gated_product(dense(x, g), dense(x, u), d, **o),
        [(IN, OUT), (IN, OUT), (OUT, IN)],
        lambda x, g, u, d: (silu(x @ g) * (x @ u)) @ d,
    ),
}
op_names = pytest.mark.parametrize("name", OPS)


def operands(rng, name, rows=ROWS, x=f32, params=f32):
    """x, then the parameters."""
    arrays = [jnp.asarray(rng.standard_normal((*rows, IN)), x)]
    for shape in OPS[name][1]:
        arrays.append(jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]), params))
    return arrays


def loss(op):
    return lambda *args: jnp.sum(jnp.sin(op(*args).astype(f32)))


def every(args):
    return tuple(range(len(args)))


def assert_close(got, want, tolerance):
    """Relative to the largest of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = f64(a), f64(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-30, np.abs(b).max()))


# A chain of two products, of 16 to 24 terms: some tens of float32 roundings.
TIGHT = 64 * 2.0**-23
# bfloat16 results are rounded at the product, the activation and the next product.
COARSE = 8 * 2.0**-8


# ---------------------------------------------------------------- values


@op_names
def test_values_match_float64(rng, name):
    op, _, reference = OPS[name]
    for x, tolerance in ((f32, TIGHT), (bf16, COARSE)):
        args = operands(rng, name, x=x)
        y = op(*args)
        assert y.dtype == x
        assert_close(y, reference(*map(f64, args)), tolerance)


@op_names
def test_parameters_in_float32_get_unrounded_gradients(rng, name):
    args = operands(rng, name, x=bf16)
    op, plain = OPS[name][0], functools.partial(OPS[name][0], implementation="xla")
    got, want = (jax.jit(jax.grad(loss(f), every(args)))(*args) for f in (op, plain))
    assert [g.dtype for g in got] == [a.dtype for a in args]
    assert_close(got, want, COARSE)
    assert np.any(f64(got[-1]) != f64(got[-1].astype(bf16)))


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
    program = lambda argument: str(jax.make_jaxpr(jax.grad(loss(of), argument))(gate, kernel))
    of = lambda gate, kernel: gated_product(gate, None, kernel)
    assert program(0).count("dot_general[") == program(1).count("dot_general[") == 2
    # The activation, of which the gradient is one pass; and once more, for the kernel's gradient.
    assert [program(i).count("normfuse_epilogue[") for i in (0, 1)] == [1, 2]


# ---------------------------------------------------------------- implementations, bad input


def test_native_never_falls_back_silently(rng):
    args = operands(rng, "gated_dense")
    with pytest.raises(NotImplementedError, match="gated_dense: .*'native' cannot serve.*one loop"):
        gated_dense(*args, implementation="native")
    with pytest.raises(NotImplementedError, match="gated_dense has no 'native' implementation"):
        gated_dense(*args, activation=jnp.square, implementation="native")


def test_activations_that_kernels_do_not_know(rng):
    x, gate, up = operands(rng, "gated_dense")
    square = gated_dense(x, gate, up, activation=jnp.square)
    assert_close(square, (f64(x) @ f64(gate)) ** 2 * (f64(x) @ f64(up)), TIGHT)
    scalar = gated_dense(x, gate, up, activation=SCALARS["silu"])
    np.testing.assert_array_equal(scalar, gated_dense(x, gate, up))
    product = lambda a: gated_product(dense(x, gate), dense(x, up), gate.T, activation=a)
    assert_close(product(jnp.square), f64(square) @ f64(gate).T, TIGHT)
