"""Losses that lead to one total: the function's own equations of log-sum-exps and picked logits.

Values and gradients are the plain function's in float64, with weights, labels outside and rows of
NaN; the gradients come with the loss, by three products.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_cases import Fused

ROWS, SEQUENCES, N, WORDS = 12, 3, 4, 16
log_softmax, logsumexp = jax.nn.log_softmax, jax.nn.logsumexp
stopped = jax.lax.stop_gradient


def cost(z, y):
    return -jnp.take_along_axis(log_softmax(z), y[..., None], -1)[..., 0]


def masked(z, m, y):
    kept = y >= 0
    each = jnp.where(kept, cost(z, jnp.where(kept, y, 0)), 0)
    return each.sum() / jnp.maximum(kept.sum(), 1)


def with_z_loss(z, m, y):
    lse = logsumexp(z, -1)
    each = lse - jnp.take_along_axis(z, y[:, None], 1)[:, 0]
    return (m * each).mean() + 0.1 * (lse**2).mean()


def of_sequences(z, m, y):
    each, m = (a.reshape(SEQUENCES, -1) for a in (cost(z, y), m))
    return ((each * m).sum(1) / m.sum(1)).mean()


def focal(z, m, y):
    each = cost(z, y)
    return ((1 - jnp.exp(-each)) ** 2 * each).mean()


def clipped(z, m, y):
    log_p = -cost(z, y)
    ratio, gain = jnp.exp(log_p - 1.1 * stopped(log_p)), m - 0.5
    return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()


@jax.custom_vjp
def doubled(each):
    return each


doubled.defvjp(lambda each: (each, None), lambda _, ct: (2 * ct,))
TOTALS = {
    "mean": lambda z, m, y: cost(z, y).mean(),
    "weights": lambda z, m, y: (cost(z, y) * m).sum() / m.sum(),
    "masked": masked,
    "z-loss": with_z_loss,
    "of sequences": of_sequences,
    "focal": focal,
    "poly": lambda z, m, y: (cost(z, y) + m * (1 - jnp.exp(-cost(z, y)))).mean(),
    "clipped": clipped,
    "softplus": lambda z, m, y: jax.nn.softplus(cost(z, y) * m).mean(),
    "a rule of its own": lambda z, m, y: (doubled(cost(z, y)) * m).mean(),
    "at least": lambda z, m, y: jnp.maximum(cost(z, y), m * 3).mean(),
    "log-sum-exps": lambda z, m, y: (logsumexp(z, -1) * m).sum(),
    "beside more": lambda z, m, y: ((cost(z, y) * m).sum(), cost(z, y), cost(z, y).mean()),
    "smoothed": lambda z, m, y: (
        -(m * (log_softmax(z) * (0.9 * jax.nn.one_hot(y, WORDS) + 0.1 / WORDS)).sum(-1)).mean()
    ),
    "NaN comes back": lambda z, m, y: jnp.tanh((cost(z, y) * m).mean()),
    "words hidden": lambda z, m, y: masked(jnp.where(jnp.arange(WORDS) < 13, z, -1e9), m, y % 13),
    "selected twice": lambda z, m, y: jnp.where(
        jnp.sum(m > 9) > 0, jnp.where(m > 0.5, cost(z, y), 0.0).sum() / jnp.sum(m > 9), 0.0
    ),
}
OTHERS = {
    "pairs": lambda z, m, y: jax.nn.softplus(cost(z, y).reshape(SEQUENCES, -1).sum(1)).mean(),
    "of all rows": lambda z, m, y: (cost(z, y) * jnp.cumsum(cost(z, y))).sum(),
    "a quotient": lambda z, m, y: cost(z, y).sum() / (cost(z, y) * m).sum(),
    "clipped and filled": lambda z, m, y: (
        (logsumexp(z, -1) * m).mean(),
        -log_softmax(z).at[jnp.arange(ROWS), y].get(mode="clip"),
        cost(z, y),
    ),
    "two labels": lambda z, m, y: (cost(z, y) * m + cost(z, y[::-1])).sum(),
}


def both_ways(function, *args):
    """Returns the results and gradients of both, of the first result; and the fused function."""

    def of(f, args):
        def first(*args):
            found = f(*args)
            return (found[0] if isinstance(found, tuple) else found), found

        return jax.value_and_grad(first, (0, 1, 2), has_aux=True)(*args)

    fused = Fused(function)
    program = jax.make_jaxpr(lambda *args: of(fused, args))(*args)
    both = jax.jit(lambda *args: [of(f, args) for f in (fused, function)])
    return both(*args), fused, str(program)


def numbers(rng):
    x, w = rng.standard_normal((ROWS, N)), rng.standard_normal((N, WORDS))
    y, m = rng.integers(0, WORDS, ROWS), rng.uniform(0.2, 1, ROWS)
    yield x, w, m, y
    spoiled = x.copy()
    spoiled[4, 1] = np.nan
    m[[2, 4]], y[[0, 3, 5, 7]] = 0, (-100, WORDS + 2, -1, -WORDS - 3)
    yield x, w, m, y
    yield spoiled, w, m, y


def check(rng, name, loss):
    fused, program = None, ""
    for x, w, m, y in numbers(rng):
        function = lambda x, w, m, y: loss(x @ w, m, y)
        (got, want), fused, program = both_ways(function, x, w, m, y)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)
        assert fused.served()["loss"] == 1, str(fused)
    return str(fused), program


@pytest.mark.parametrize("name", TOTALS)
def test_totals(rng, name):
    with jax.enable_x64(True):
        report, program = check(rng, name, TOTALS[name])
    assert ": sum" in report
    assert program.count("cross_entropy_loss_gradients") == 1, program
    assert "cross_entropy_gradients" not in program


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_total(rng, name):
    """Its rows' gradients are computed in the backward, once their cotangents are known."""
    with jax.enable_x64(True):
        report, program = check(rng, name, OTHERS[name])
    assert ": a row each" in report
    assert "cross_entropy_loss_gradients" not in program


def test_results_beside_a_total_have_their_own_gradients(rng):
    function = lambda x, w, y: (cost(x @ w, y).mean(), cost(x @ w, y) ** 2)
    x, w, _, y = next(numbers(rng))
    both = lambda f: jax.grad(lambda *a: sum(map(jnp.sum, f(*a, y))), (0, 1))
    with jax.enable_x64(True):
        fused = Fused(function)
        for a, b in zip(both(fused)(x, w), both(function)(x, w), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    assert ": sum" in str(fused)


@pytest.mark.parametrize("ct", [np.nan, np.inf])
def test_a_cotangent_that_is_not_finite_reaches_rows_with_a_part(rng, ct):
    """As where a mask selects no row, and the count that divides comes from another device."""
    x, w, _, y = next(numbers(rng))
    for kept in np.arange(ROWS) < 5, np.zeros(ROWS, bool):
        total = lambda x, w, kept: jnp.where(kept > 0, cost(x @ w, y), 0.0).sum()
        pulled = lambda f: jax.jit(lambda *args: jax.vjp(f, *args)[1](jnp.float32(ct)))
        given = [jnp.asarray(a, jnp.float32) for a in (x, w, kept)]
        found, want = (pulled(f)(*given) for f in (Fused(total), total))
        for a, b in zip(found[:2], want[:2], strict=True):
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
            np.testing.assert_array_equal(np.asarray(a)[np.isfinite(b)], 0)


def test_float16_divides_gradients_by_the_count_last(rng):
    """Words' gradients of a mean, 2^-20 and less, would be too small."""
    rows, words = 2048, 1024
    x, w = rng.standard_normal((rows, N)), rng.standard_normal((N, words))
    y, half = rng.integers(0, words, rows), [jnp.asarray(a, jnp.float16) for a in (x, w)]
    wide = lambda x: jnp.promote_types(x.dtype, jnp.float32)
    function = lambda x, w: cost(jnp.dot(x, w, preferred_element_type=wide(x)), y).mean()
    found = jax.jit(jax.grad(Fused(function), (0, 1)))(*half)
    exact = jax.jit(jax.grad(function, (0, 1)))(*[a.astype(jnp.float32) for a in half])
    for a, b in zip(found, exact, strict=True):
        assert np.linalg.norm(np.float32(a) - b) < 2.0**-11 * np.linalg.norm(b)


def test_chunks_are_added_up_before_0_divides_them(rng):
    """Each row by itself would be infinite, of both signs, and their sum NaN."""
    x, w, _, y = next(numbers(rng))
    signs = np.where(np.arange(ROWS) % 2, 1.0, -1.0)
    function = lambda x, w, signs: (cost(x @ w, y) * signs).sum() / signs.sum()
    fused = Fused(function)
    found, want = (jax.jit(f)(x, w, signs) for f in (fused, function))
    assert np.isinf(want)
    np.testing.assert_array_equal(found, want)
    assert ": sum" in str(fused)
