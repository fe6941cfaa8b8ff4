"""Derivatives of element-wise ops: as C++ text, as ops, in plain JAX; to every order given."""

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elementwise_cases import GATED, gated, gcd, twin

from normfuse import elementwise

CUBE = "template <class T> T cube(T x, T w) { return w * x * x * x; }"
cube = elementwise(
    CUBE, derivative={"x": "3 * w * x * x", "w": "x * x * x"}, definition=lambda x, w: w * x**3
)
SWISH = "template <class T> T swish(T x, T beta) { return x / (1 + exp(-beta * x)); }"


def plain_swish(x, beta=1.0):
    return x * jax.nn.sigmoid(beta * x)


def agree(actual, expected, rtol=1e-6):
    """Some ten float32 operations, in other orders; sums of up to 200 terms of one sign or so."""
    compare = lambda a, e: np.testing.assert_allclose(
        np.asarray(a, np.complex128), np.asarray(e, np.complex128), rtol=rtol, atol=rtol
    )
    jax.tree.map(compare, actual, expected)


@pytest.fixture
def arrays(rng):
    return [jnp.asarray(rng.normal(size=(6, 8)), jnp.float32) for _ in range(2)]


def test_reverse_and_forward_match_plain_jax(arrays):
    x, g = arrays
    loss = lambda f: lambda x, g, limit: jnp.sum(f(x, g, limit=limit) ** 2)
    for jit in (lambda f: f, jax.jit):
        actual = jit(jax.grad(loss(gated), (0, 1, 2)))(x, g, 0.3)
        agree(actual, jax.grad(loss(twin), (0, 1, 2))(x, g, 0.3), rtol=1e-5)
    agree(jax.jvp(gated, (x, g), (g, x)), jax.jvp(twin, (x, g), (g, x)))
    agree(jax.linearize(gated, x, g)[1](g, x), jax.jvp(twin, (x, g), (g, x))[1])


def test_a_gradient_that_is_a_sum_is_rounded_once():
    """3 · 1.5 · (1 + 2⁻⁷) = 4.535… is 4.53125 in bfloat16; the sum of rounded terms is 4.5625."""
    x, g, dy = (
        jnp.full(n, a, jnp.bfloat16) for n, a in (((3, 8), 1 + 2**-7), (8, 1), ((3, 8), 1.5))
    )
    (dg,) = jax.vjp(lambda g: gated(x, g, limit=2.0), g)[1](dy)
    np.testing.assert_array_equal(dg.astype(jnp.float32), np.full(8, 4.53125))


def test_a_gradient_is_one_kernel(arrays):
    x, g = arrays
    pull = lambda x, g, ct: jax.vjp(gated, x, g)[1](ct)
    text = jax.jit(pull).lower(x, g, x).compile().as_text()
    assert sum(hlo.calls(text, "").values()) == 1 and hlo.results(text) == [2]
    assert hlo.count(text, "multiply") == 0


def test_gradients_of_broadcast_inputs_are_sums(arrays):
    x, g = arrays
    loss = lambda f: lambda x, row, one: jnp.sum(f(x, row) * f(one, x))
    operands = (x, g[0], jnp.float32(0.7))
    actual = jax.grad(loss(gated), (0, 1, 2))(*operands)
    agree(actual, jax.grad(loss(twin), (0, 1, 2))(*operands), rtol=1e-5)


def test_gradients_have_the_dtypes_of_their_inputs(arrays):
    x, g = arrays[0].astype(jnp.bfloat16), arrays[1][0]
    dx, dg = jax.grad(lambda x, g: jnp.sum(gated(x, g)), (0, 1))(x, g)
    assert (dx.dtype, dg.dtype) == (jnp.bfloat16, jnp.float32)
    # summed in float32 over 6 rows of products of bfloat16 numbers
    agree(dg, np.minimum(np.float64(x), 1).sum(0))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (jax.jacfwd, jax.jacrev),
        (jax.jacrev, jax.jacrev),
        (jax.jacrev, jax.jacfwd),
        (jax.jacfwd, jax.jacfwd),
    ],
)
def test_second_derivatives_are_those_of_the_definition(outer, inner):
    second = lambda f: jax.jit(outer(inner(f, 0), (0, 1)))(2.0, 3.0)
    agree(second(cube), second(lambda x, w: w * x**3))


@pytest.mark.parametrize(
    "options",
    [
        {"derivative": plain_swish},
        {"definition": plain_swish},
    ],
    ids=["function", "definition"],
)  # fmt: skip
def test_derivatives_in_plain_jax(options, arrays):
    op = elementwise(SWISH, beta=1.0, **options)
    x = arrays[0]
    agree(
        jax.grad(lambda x: op(x, beta=2.0).sum())(x),
        jax.grad(lambda x: plain_swish(x, 2.0).sum())(x),
    )
    agree(jax.grad(jax.grad(op))(0.5), jax.grad(jax.grad(plain_swish))(0.5))


def test_integers_and_bools_have_no_gradient(arrays):
    x = arrays[0]
    scale = lambda x: gated(x, jnp.arange(8)).sum()
    agree(jax.grad(scale)(x), jax.grad(lambda x: twin(x, jnp.arange(8)).sum())(x))
    less = elementwise("template <class T> bool less(T a, T b) { return a < b; }")
    agree(jax.grad(lambda x: jnp.where(less(x, 0.0), x, 0.0).sum())(x), x < 0)
    tangent = jax.jvp(gcd, (6, 4), (np.zeros((), jax.dtypes.float0),) * 2)[1]
    assert tangent.dtype == jax.dtypes.float0


def test_without_a_derivative_one_clear_error():
    op = elementwise(GATED, limit=1.0)
    with pytest.raises(TypeError, match="has no derivative with respect to x. Pass .*derivative="):
        jax.grad(op)(1.0, 2.0)
    only_x = elementwise(GATED, limit=1.0, derivative={"x": "x < limit ? g : T(0)"})
    agree(jax.grad(only_x)(0.5, 2.0), 2.0)
    with pytest.raises(TypeError, match="respect to limit"):
        jax.grad(lambda limit: only_x(0.5, 2.0, limit=limit))(1.0)
    with pytest.raises(TypeError, match="first derivatives only, .* pass elementwise definition="):
        jax.grad(jax.grad(only_x))(0.5, 2.0)
