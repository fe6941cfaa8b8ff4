"""Losses beside NaN and infinities: what spoils theirs spoils ours, and nothing else does.

Each loss is compiled once, and is given every kind of numbers. Logits of +inf are not among them: a
maximum that is subtracted makes them NaN, and one that is not leaves infinity.
"""

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_cases import Fused

N, ROWS, WORDS = 8, 8, 24
log_softmax, logsumexp = jax.nn.log_softmax, jax.nn.logsumexp
rows, words = jnp.arange(ROWS), jnp.arange(WORDS)


def entropy(z):
    log_p = log_softmax(z)
    return -jnp.sum(jnp.exp(log_p) * log_p, -1)


PICKED = fuse_cases.picked(rows, WORDS) | {
    # Its words are a constant, not equations.
    "comparison": lambda z, y: -jnp.where(words == y[:, None], log_softmax(z), 0).sum(-1),
    "smoothed": lambda z, y: -(log_softmax(z) * (0.9 * jax.nn.one_hot(y, WORDS) + 0.01)).sum(-1),
    "soft cap": lambda z, y: -log_softmax(5 * jnp.tanh(z / 5))[rows, y],
}
WHOLE = {
    "log-sum-exp": lambda z, y: logsumexp(z, -1),
    "entropy": lambda z, y: entropy(z),
    "beside an argmax": lambda z, y: (PICKED["take p"](z, y).mean(), jnp.argmax(z, -1)),
    "mean": lambda z, y: PICKED["lse - take z"](z, y).mean(),
}


def both_ways(function, count, serves=True):
    """Both functions' results and gradients by the first `count` arguments, compiled once."""
    fused = Fused(function, serves=serves)

    def of(f, args):
        def first(*args):
            found = f(*args)
            loss = found[0] if isinstance(found, tuple) else found
            return jnp.sum(loss * jnp.cos(1.0 + jnp.arange(loss.size)).reshape(loss.shape)), found

        return jax.value_and_grad(first, range(count), has_aux=True)(*args)

    return jax.jit(lambda *args: [of(f, args) for f in (fused, function)]), fused


def check(run, cases):
    for name, args in cases:
        got, want = map(jax.tree.leaves, run(*args))
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            limits = {"rtol": 1e-4, "atol": 1e-5, "err_msg": f"{name}: {i}"}
            np.testing.assert_allclose(np.float64(a), np.float64(b), **limits)


def numbers(rng):
    x, w, b = (rng.standard_normal(shape) for shape in ((ROWS, N), (N, WORDS), WORDS))
    return [np.asarray(a, np.float32) for a in (x, w, b)]


# ---------------------------------------------------------------- words that a mask replaces

SEEN = {"tail": np.arange(WORDS) < 20, "some": np.arange(WORDS) % 3 != 1}
SPOILED = {
    "NaN in the bias": lambda x, w, b, at: b.__setitem__(at, np.nan),
    "inf in the bias": lambda x, w, b, at: b.__setitem__(at, np.inf),
    "-inf in the bias": lambda x, w, b, at: b.__setitem__(at, -np.inf),
    "NaN in the kernel": lambda x, w, b, at: w.__setitem__((slice(None), at[0]), np.nan),
    "inf in the kernel": lambda x, w, b, at: w.__setitem__((slice(2), at[0]), np.inf),
    "NaN in x": lambda x, w, b, at: x.__setitem__((2, 1), np.nan),
    "nothing": lambda x, w, b, at: None,
}


@pytest.mark.parametrize("name", [*WHOLE, *PICKED])
@pytest.mark.parametrize("seen, fill", [("tail", -1e9), ("some", -np.inf)])
def test_words_that_a_mask_replaces(rng, name, seen, fill):
    """A number that is never read, and one that hides: 168 cases; labels are of both."""
    loss = (WHOLE | PICKED)[name]

    def function(x, w, b, y):
        return loss(jnp.where(SEEN[seen], x @ w + b, fill), y)

    def cases():
        for spoiled, spoil in SPOILED.items():
            args, hidden = numbers(rng), np.flatnonzero(~SEEN[seen])
            spoil(*args, hidden)
            y = rng.choice(np.flatnonzero(SEEN[seen]), ROWS)
            y[1] = hidden[0] if spoiled == "nothing" else y[1]
            yield spoiled, (*args, y)

    left = {"soft cap", "smoothed"}
    if np.isinf(fill):
        left |= {"entropy", "one-hot p", "lse - one-hot z"}
    run, fused = both_ways(function, 3, serves=name not in left)
    check(run, cases())
    assert bool(fused.served()) == (name not in left), str(fused)


# ---------------------------------------------------------------- labels outside, and weights

REDUCED = {
    "a row each": lambda l, y, m: l,
    "mean": lambda l, y, m: l.mean(),
    "weighted": lambda l, y, m: (m * l).sum(),
    "selected": lambda l, y, m: jnp.where(m > 0.6, l, 0.0).sum() / jnp.sum(m > 0.6),
    "selected, then weighted": lambda l, y, m: (jnp.where(y != 3, l, 0.0) * m).sum(),
    "weighted, then selected": lambda l, y, m: jnp.where(y != 3, l * m, 0.0).sum(),
    "by integers": lambda l, y, m: (l * (y != 3).astype(jnp.float32)).sum(),
}
ROWS_SPOILED = {
    "nothing": lambda x, w, b: None,
    "NaN in two rows": lambda x, w, b: (x.__setitem__((3, 2), np.nan), x.__setitem__(5, np.nan)),
    "NaN in the kernel": lambda x, w, b: w.__setitem__((1, 5), np.nan),
    "-inf in the bias": lambda x, w, b: b.__setitem__(7, -np.inf),
}


def spoiled_rows(rng, dtype=np.int32):
    for name, spoil in ROWS_SPOILED.items():
        for outside in False, True:
            for weights in "zeros", "bad":
                args, y = numbers(rng), rng.integers(4, WORDS, ROWS)
                spoil(*args)
                y[[2, 5]] = 3
                y[[1, 3]] = 7  # of the bias' -inf: the loss is infinite
                if outside:
                    y[[0, 1, 4, 6]] = WORDS, -WORDS - 5, WORDS + 3, -1
                m = rng.uniform(0.5, 2, ROWS).astype(np.float32)
                m[[1, 3, 5]] = (0, 0, 0) if weights == "zeros" else (-1, np.inf, np.nan)
                y = y if np.issubdtype(dtype, np.signedinteger) else y % 200
                yield f"{name}, {outside}, {weights}", (*args, m, y.astype(dtype))


def reduced_loss(name, reduced):
    def function(x, w, b, m, y):
        z = x @ w if name == "soft cap" else x @ w + b
        return REDUCED[reduced](PICKED[name](z, y), y, m)

    return function


@pytest.mark.parametrize(
    "name, reduced",
    [
        *[("take p", r) for r in REDUCED],
        *[("lse - take z", r) for r in REDUCED],
        *[("p[rows, y]", r) for r in ("mean", "weighted", "selected")],
        *[(name, "weighted") for name in PICKED if "take" not in name and "rows" not in name],
        ("comparison", "selected"),
        ("lse - z[rows, y]", "selected"),
    ],
)
def test_labels_outside_and_weights(rng, name, reduced):
    """0 times NaN is NaN, a label outside is one NaN, and a selection is one: 16 cases each."""
    run, fused = both_ways(reduced_loss(name, reduced), 4)
    check(run, spoiled_rows(rng))
    assert fused.served() == {"loss": 1}, str(fused)
    assert (": sum" in str(fused)) == (reduced != "a row each"), str(fused)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_labels_of_other_integers(rng, dtype):
    function = lambda x, w, b, m, y: (m * PICKED["take p"](x @ w + b, y)).sum()
    with jax.enable_x64(dtype == np.int64):
        check(both_ways(function, 4)[0], spoiled_rows(rng, dtype))


@pytest.mark.parametrize("reduced", REDUCED)
@pytest.mark.parametrize("name", ["take p", "lse - z[rows, y]", "p[rows, y]"])
def test_no_compiled_loss_has_a_branch(rng, name, reduced):
    """A branch makes the host wait for the GPU."""
    _, args = next(spoiled_rows(rng))
    fused = Fused(reduced_loss(name, reduced))
    text = str(jax.make_jaxpr(jax.grad(lambda *args: fused(*args).sum()))(*args))
    assert "linear_cross_entropy" in text and " cond[" not in text, str(fused)
