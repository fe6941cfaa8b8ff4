"""NumPy's results of a program are XLA's, for each primitive with a rule."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_interpreter
import pytest
from jax import lax

KINDS = {"float64": 1e-13, "bfloat16": 2.0**-6}  # a few roundings each


def elements(x, y):
    p, q = jnp.abs(x) + 0.5, x / (1 + jnp.abs(x))
    whole = (jnp.arange(x.size).reshape(x.shape) * 5 - 9, jnp.full(x.shape, 6))
    return [
        *(f(x) for f in (jnp.exp, jnp.exp2, jnp.expm1, jnp.sin, jnp.cos, jnp.sinh, jnp.cosh)),
        *(f(x) for f in (jnp.tanh, lax.erf, lax.erfc, lax.logistic, lax.square, lax.floor)),
        *(f(p) for f in (jnp.log, jnp.log1p, jnp.sqrt, lax.rsqrt, lax.cbrt)),
        *(f(q) for f in (jnp.tan, jnp.arcsin, jnp.arccos, jnp.arctan, jnp.arcsinh, jnp.arctanh)),
        *(jnp.arccosh(1 + p), lax.ceil(x), lax.sign(x), -x, abs(x), lax.is_finite(x / (x - x))),
        *(f(x, y) for f in (lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min)),
        *(lax.pow(p, y), lax.atan2(x, y), x**3, x**-2, jnp.round(x), lax.round(x)),
        *(f(x, y) for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge, jnp.logaddexp)),
        *(f(x > 0, y > 0) for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)),
        *(~(x > 0), jnp.where(x > 0, x, y), jnp.clip(x, -0.5, y), lax.nextafter(x, y)),
        *(lax.div(*whole), lax.rem(*whole), whole[0] + 1, (x * 3).astype(int), x.astype(bool)),
        *(lax.select_n(whole[0] % 3, x, y, p), (whole[0] > 3).astype(x.dtype)),
        *(x.astype(jnp.float16), x.astype(jnp.float8_e4m3fn), lax.optimization_barrier(x)),
    ]


def shapes(x, y):
    flat, i = x.ravel(), jnp.argmax(x)
    return [
        *(x.T, x[None].swapaxes(0, 2), x[::2, 1:], x[:, None] * jnp.ones(2, x.dtype)[:, None]),
        *(jnp.concatenate([x, y], 1), jnp.stack([x, y]), x[::-1], x[:, ::-1], jnp.squeeze(x[:1])),
        *jnp.split(x, [1, 3], 1),
        *(lax.pad(x, jnp.ones((), x.dtype), [(1, 2, 1), (0, 1, 0)]), jnp.pad(x, 2)),
        *(lax.pad(x, jnp.ones((), x.dtype), [(-1, 2, 0), (0, -1, 2)]), jnp.tile(x, (2, 3))),
        *(lax.dynamic_slice(x, (i, i - 99), (2, 3)), lax.dynamic_update_slice(x, y[:2], (i, 0))),
        *(flat[i], flat[jnp.argsort(flat)], flat.at[i].add(3), jnp.sort(x, 0), lax.top_k(x, 2)[0]),
        *(jnp.arange(5), lax.broadcasted_iota(x.dtype, (3, 4), 1), jnp.eye(3, dtype=x.dtype)),
    ]


def sums(x, y):
    wide = jnp.stack([x, y, x - y])
    found = [
        *(f(wide, (0, 2)) for f in (jnp.sum, jnp.max, jnp.min, jnp.prod)),
        *(f(wide > 0, 1) for f in (jnp.any, jnp.all)),
        *(jnp.argmax(wide, 1), jnp.argmin(wide, 2), wide.sum(()), jnp.sum(wide > 0)),
        *(jnp.cumsum(x, 1), lax.cumsum(x, 0, reverse=True), lax.cumlogsumexp(x), lax.cummax(x)),
        *(x.T @ y, x.T @ y[:, 0], x[0] @ y.T, jnp.einsum("bij,bkj->bik", wide, wide)),
        jnp.einsum("abc,cdb->dba", wide, wide.transpose(2, 0, 1)),
        lax.dot(x, y.T, preferred_element_type=jnp.float32).astype(x.dtype),
        lax.dot((4 * x).astype(jnp.int8), (4 * y.T).astype(jnp.int8), preferred_element_type=int),
    ]
    return [*found, *jax.tree.leaves(jax.vjp(lambda x, y: x @ jnp.exp(y.T), x, y)[1](x @ y.T))]


def programs(x, y):
    @jax.custom_jvp
    def custom(x):
        return jnp.sin(x)

    custom.defjvp(lambda primals, tangents: (jnp.sin(*primals), 2 * tangents[0]))
    both = lambda f: jax.tree.leaves(jax.value_and_grad(lambda x: jnp.sum(f(x)))(x))
    step = lambda carry, row: (carry * 0.5 + row[0], (jnp.sin(row[1]), carry))
    return [
        *(custom(x), jax.jit(lambda x: x + 1)(x), *both(custom), *both(jax.nn.relu)),
        *both(jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))),
        *jax.tree.leaves(lax.scan(step, x[0], (x, y))),
        *jax.tree.leaves(lax.scan(step, x[0], (x, y), reverse=True)),
        *both(lambda x: lax.scan(step, x[0], (x, y), reverse=True)[0]),
        *(lax.cond(x[0, 0] < i, jnp.sin, jnp.cos, x) for i in (-9, 9)),
        *(lax.switch(i + jnp.argmax(x) * 0, [jnp.sin, jnp.cos, jnp.exp], x) for i in (-1, 1, 7)),
        *lax.while_loop(lambda c: c[0] < y.sum() * 0 + 3, lambda c: (c[0] + 1, c[1] / 2), (0, x)),
        *both(lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)) * y),
        jax.random.normal(jax.random.key(0), (3,), x.dtype),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [elements, shapes, sums, programs])
def test_rules(function, kind):
    with jax.enable_x64(kind == "float64"):
        x, y = (jnp.asarray(np.random.default_rng(i).standard_normal((4, 5)), kind) for i in (0, 1))
        found, wanted = numpy_interpreter.evaluated(function)(x, y), jax.jit(function)(x, y)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert jax.typeof(a) == jax.typeof(b), i
            a, b = (np.asarray(z, z.dtype if z.dtype.kind in "biu" else np.float64) for z in (a, b))
            rounding = KINDS[kind]
            np.testing.assert_allclose(a, b, rounding, rounding, err_msg=str(i))


def test_what_is_not_finite_stays():
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0, -0.0, 1e30])

    def function(x):
        y = jnp.array(2.0)
        return [
            *(jnp.maximum(x, y), jnp.minimum(x, y), jnp.max(x), jnp.min(x), jnp.argmax(x)),
            *(jnp.sign(x), x * 0, x * x, 1 / x, jnp.exp(x), jnp.log(x), jnp.sqrt(x), jnp.sort(x)),
            *(jnp.clip(x, -1, 1), jax.nn.sigmoid(x), jnp.tanh(x), x > 0, x != x, x.astype(bool)),
            *(lax.rem(x, y), jnp.isfinite(x), x.astype(int), jnp.cumsum(x), x**2, x**-1),
        ]

    found, wanted = numpy_interpreter.evaluated(function)(x), jax.jit(function)(x)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(a, b, 1e-6, err_msg=str(i))


def test_rules_are_used(compilations):
    """A program of primitives with rules compiles nothing, in its derivative either."""

    def attention(q, k, v):
        return jax.nn.softmax(jnp.where(jnp.tri(6), q @ k.T / 3, -1e9)) @ v

    args = [np.ones((6, 7), np.float32)] * 3
    evaluated = numpy_interpreter.evaluated(jax.value_and_grad(lambda *a: attention(*a).sum()))
    evaluated(*args)
    assert not compilations
