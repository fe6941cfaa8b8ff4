"""Numbers at the ends of their range, and labels outside theirs: their results, and ours.

Where the function itself computes what float64 does, so does `fuse` of it. Where it overflows on
the way, `fuse` may still give the float64 result: it scales, sums and squares in another order.
"""

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from fuse_cases import Fused, draw, draws
from jax import lax

import normfuse
from normfuse.layers.fuse import attention as fused_attention
from normfuse.layers.fuse import losses

T, V = 8, 48
CAUSAL = np.tril(np.ones((T, T), bool))
EMPTY = CAUSAL & (np.arange(T) != 4)[:, None]  # query 4 sees nothing


def attend(change=lambda s: s, scale=0.35, before=1.0):
    return lambda q, k, v: fuse_cases.attend(change, scale=scale)(q * before, k, v)


def both(function, args, **options):
    """Both ways through the function, `fuse` of it and the function in float64."""
    fused = Fused(function, **options)
    want, got = fuse_cases.run(function, fused, args=args)["float32"]
    return want, got, fuse_cases.wide(function, args), fused


def close(got, want, rounding=None):
    for a, b in zip(got[:2], want[:2]):
        errors = fuse_cases.errors(a, b, fuse_cases.floor_of(b))
        assert max(errors) <= (rounding or fuse_cases.tolerance(64)), errors


# ---------------------------------------------------------------- scores


def scores_case(queries, keys):
    q, k, v = draws(*((2, T, T),) * 3)
    return [q.at[0, 3].multiply(queries), k.at[0, 2].multiply(keys), v]


def test_scores_that_overflow_before_they_are_scaled():
    """The one scale of both is multiplied at once: float64's result, where theirs is NaN."""
    for function, keys, theirs in (
        (attend(scale=1.0, before=1e-30), 1e20, True),
        (attend(scale=1e-30), 1e20, False),
        (attend(scale=1e-30, before=1e30), 1e5, False),
    ):
        want, got, exact, fused = both(function, scores_case(1e20, keys))
        assert fused.served() == {"attention": 1}
        assert np.isfinite(want[0][0]).all() == theirs
        close((got[0],), (exact[0],))


MASKS = {
    "selected": lambda s, keep: jnp.where(keep, s, -1e4),
    "added": lambda s, keep: s + jnp.where(keep, 0.0, -1e4),
    "multiplied": lambda s, keep: s + (1.0 - keep.astype(jnp.float32)) * -1e4,
}


@pytest.mark.parametrize("name, keep, at_run_time", half(MASKS, [CAUSAL, EMPTY], [False, True]))
def test_a_mask_of_1e4(name, keep, at_run_time):
    """Scores of thousands stand above it; a row that sees nothing is what theirs gives.

    Selected, that is the mean of all values; added, the softmax of its scores.
    """
    mask, size = MASKS[name], 30.0
    args = draws(*((2, T, T),) * 3)
    args[:2] = [size * x for x in args[:2]]
    if at_run_time:
        function = lambda q, k, v, m: attend(lambda s: mask(s, m))(q, k, v)
        args.append(jnp.asarray(keep))
    else:
        function = attend(lambda s: mask(s, jnp.asarray(keep)))
    # A constant mask that is added, with rows that see nothing, is left.
    serves = at_run_time or keep is CAUSAL or name == "selected"
    want, got, exact, fused = both(function, args, serves=serves)
    rounding = max(4e-7 * size**2 * T, fuse_cases.tolerance(64))  # scores are thousands
    assert serves or not fused.served()
    close(got, want, rounding if name == "selected" else 2e-3)  # s - 1e4 has 3 digits of s
    if fused.served():
        close(got, exact, rounding)
    if keep is EMPTY and name == "selected":
        np.testing.assert_allclose(got[0][0][:, 4], args[2].mean(1), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- rows that see nothing

LEAST = jnp.finfo(jnp.float32).min


def exps(s, of=None):
    """Exponentials of scores less their maximum, or that of others."""
    return jnp.exp(s - lax.stop_gradient(jnp.max(s if of is None else of, -1, keepdims=True)))


def parts(e, **options):
    return e / jnp.sum(e, -1, keepdims=True, **options)


def late(e):
    return e, jnp.sum(e, -1, keepdims=True)


# Weights of scores and a mask, or such and what the product with the values is divided by; and
# whether they are served where the mask may hide a whole row.
WEIGHTS = {
    "times the mask": (lambda s, m: parts(exps(s) * m), False),
    "times the mask again": (lambda s, m: parts(exps(s) * m) * m, False),
    "times a reciprocal": (lambda s, m: (e := exps(s) * m) * (1 / late(e)[1]), False),
    "0 elsewhere": (lambda s, m: parts(jnp.where(m, exps(s), 0.0)), True),
    "a sum of what is seen": (lambda s, m: jnp.where(m, parts(exps(s), where=m), 0.0), False),
    "-1e9, other maximum": (lambda s, m: parts(exps(jnp.where(m, s, -1e9), s)), False),
    "-inf, other maximum": (lambda s, m: parts(exps(jnp.where(m, s, -jnp.inf), s)), True),
    "-inf added": (lambda s, m: parts(exps(s + jnp.where(m, 0, -jnp.inf))), False),
    "least / .5": (lambda s, m: parts(exps(jnp.where(m, s, LEAST) / 0.5)), True),
    "least / .5 and times the mask": (
        lambda s, m: parts(exps(jnp.where(m, s, LEAST) / 0.5) * m),
        True,
    ),
    "-1e9 and where=": (lambda s, m: jax.nn.softmax(jnp.where(m, s, -1e9), where=m), True),
    "-inf, then causal -1e9": (
        lambda s, m: parts(exps(jnp.where(CAUSAL, jnp.where(m, s, -jnp.inf), -1e9))),
        False,
    ),
    "-1e9, then causal -2e9": (
        lambda s, m: parts(exps(jnp.where(CAUSAL, jnp.where(m, s, -1e9), -2e9))),
        False,
    ),
    "eps in the sum": (lambda s, m: (e := exps(s) * m) / (late(e)[1] + 1e-9), False),
    "NaN replaced": (lambda s, m: jnp.nan_to_num(parts(exps(jnp.where(m, s, -jnp.inf)))), False),
}


@pytest.mark.parametrize("name, at_run_time", half(WEIGHTS, [True, False]))
def test_rows_that_see_nothing(name, at_run_time):
    """Values and gradients are theirs, NaN among them, or the attention stays."""
    weights, served = WEIGHTS[name]

    def attention(q, k, v, mask=EMPTY):
        found = weights(jnp.einsum("btd,bsd->bts", q, k) * 0.35, jnp.asarray(mask))
        p, total = found if isinstance(found, tuple) else (found, 1.0)
        return jnp.einsum("bts,bsd->btd", p, v) / total

    args = [*draws(*((2, T, T),) * 3), *([jnp.asarray(EMPTY)] if at_run_time else [])]
    fused = Fused(attention, serves=False)
    want, got = fuse_cases.run(attention, fused, args=args)["float32"]
    close(got, want)
    assert fused.served() == ({"attention": 1} if served else {}), str(fused)


BIASED = {
    "no mask": lambda s, b, m: s + b,
    "causal -1e9": lambda s, b, m: jnp.where(CAUSAL, s + b, -1e9),
    "-1e9": lambda s, b, m: jnp.where(m, s + b, -1e9),
    "-1e9 added": lambda s, b, m: s + b + jnp.where(m, 0, -1e9),
    "-inf, then the bias": lambda s, b, m: jnp.where(m, s, -jnp.inf) + b,
    "-inf after the bias": lambda s, b, m: jnp.where(m, s + b, -jnp.inf),
    "twice the bias": lambda s, b, m: s + 2 * b,
}
HIDING = np.zeros((T, T), np.float32)
HIDING[2, :], HIDING[5, :6], HIDING[T - 1, :], HIDING[6, 3:] = (-np.inf,) * 4


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_that_hides_rows(name):
    """Values are theirs, and gradients: but a NaN may reach the gradient of more keys."""

    def attention(q, k, v, b, mask):
        s = BIASED[name](jnp.einsum("btd,bsd->bts", q, k) * 0.35, b, mask)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(s), v)

    args = [*draws(*((2, T, T),) * 3), draw(4, T, T) + HIDING, jnp.asarray(EMPTY)]
    fused = Fused(attention, serves=False)
    want, got = fuse_cases.run(attention, fused, args=args)["float32"]
    # A float32 beside 1e9 has no digits left of scores.
    rounding = 0.3 if name.endswith("-1e9 added") else None
    close((got[0],), (want[0],), rounding)
    if not name.startswith("-inf"):
        close((got[1],), (want[1],), rounding)
    else:
        for a, b in zip(got[1], want[1]):
            assert np.isnan(np.asarray(a)[np.isnan(b)]).all()
    assert fused.served() == ({} if name == "-inf, then the bias" else {"attention": 1}), fused


FINITE = np.zeros((T, T), np.float32)
FINITE[2, :3], FINITE[5, 1:], FINITE[6, :7] = (-np.inf,) * 3
LAST = np.arange(T) < 6
WRITTEN = {  # beside a bias that leaves rows no key that a mask shows, but some that it hides
    "least added": lambda s, b, m: s + b + jnp.where(m, 0.0, LEAST),
    "1e9 added": lambda s, b, m: s + b + jnp.where(m, 0.0, -1e9),
    "1e4 added": lambda s, b, m: s + (b + jnp.where(m, 0.0, -1e4)),
    "1e9 written": lambda s, b, m: jnp.where(m, s + b, -1e9),
    "least written": lambda s, b, m: jnp.where(m, s + b, LEAST),
}


@pytest.mark.parametrize(
    "name, mask, hiding",
    [
        *((name, CAUSAL, True) for name in WRITTEN),
        *((name, EMPTY, hiding) for name in WRITTEN for hiding in (False, True)),
        *((name, np.zeros((T, T), bool), False) for name in ("least added", "1e4 added")),
        ("least added", np.broadcast_to(LAST, (T, T)), False),
    ],
    ids=lambda x: str(x) if isinstance(x, str | bool) else str(int(x.sum())),
)
def test_gradients_of_rows_whose_keys_are_all_hidden(name, mask, hiding):
    """Queries, keys, values and the bias get what theirs get, from such rows too."""

    def attention(q, k, v, b, mask):
        s = WRITTEN[name](jnp.einsum("btd,bsd->bts", q, k) * 0.35, b, mask)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(s), v)

    args = [*draws(*((2, T, T),) * 3), draw(4, T, T) + (FINITE if hiding else 0), jnp.asarray(mask)]
    fused = Fused(attention)
    want, got = fuse_cases.run(attention, fused, args=args)["float32"]
    assert np.isfinite(want[0][0]).all() and fused.served() == {"attention": 1}, str(fused)
    close(got, want, 4e-3 if name.startswith("1e4 added") else None)  # 3 digits beside 1e4


@pytest.mark.parametrize("empty", [False, True])
def test_sequences_that_see_nothing_need_no_second_attention(empty):
    """A mask of keys alone hides all of a sequence's keys or none: its derivative has no branch."""

    def attention(q, k, v, mask):
        s = jnp.einsum("btd,bsd->bts", q, k) * 0.35 + jnp.where(mask, 0.0, LEAST)[:, None]
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(s), v)

    mask = jnp.stack([jnp.arange(T) < 5, (jnp.arange(T) < 3) & (not empty)])
    args = [*draws(*((2, T, T),) * 3), mask]
    fused = Fused(attention)
    want, got = fuse_cases.run(attention, fused, args=args)["float32"]
    close(got, want)
    assert fused.served() == {"attention": 1}, str(fused)
    text = str(jax.make_jaxpr(lambda *args: fuse_cases.both_ways(fused, args))(*args))
    assert text.count("normfuse_attention[") == 1 and "cond[" not in text


def test_a_second_attention_has_no_keys_where_all_rows_see_some(monkeypatch):
    """The bias may be -inf as far as is known; padding, as T5X writes it, leaves rows no key."""
    calls, attention = [], normfuse.attention

    def recorded(*args, lengths=None, **options):
        calls.append(lengths)
        return attention(*args, lengths=lengths, **options)

    monkeypatch.setattr("normfuse.layers.attention.attention", recorded)
    monkeypatch.setattr("jax.checkpoint", lambda function: function)
    q, k, v, bias = draws(*((2, T, 1, T),) * 3, (1, 1, T, T))
    options = {"rows": "shifted", "infinite": True, "causal": False, "window": None}
    with jax.disable_jit():
        for row, wanted in ((None, [0, 0]), (1, [0, T])):
            mask = jnp.asarray(CAUSAL)[None, None].repeat(2, 0)
            mask = mask if row is None else mask.at[row, 0, 4].set(False)
            fused_attention.attend(q, k, v, {"bias": bias, "mask": mask}, **options)
            first, second = calls[-2:]
            assert first is None and second.tolist() == wanted


@pytest.mark.parametrize("name", ["twice a bias", "the least number added, and a bias"])
def test_float64_stays_float64(name):
    def attention(q, k, v, b, mask):
        s = jnp.einsum("btd,bsd->bts", q, k) * 0.35 + 2 * b
        if name != "twice a bias":
            s = s + jnp.where(mask, 0.0, jnp.finfo(jnp.float64).min)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(s), v)

    with jax.enable_x64(True):
        args = fuse_cases.cast(draws(*((2, T, T),) * 3, (T, T)), jnp.float64)
        args = [*args[:3], args[3] / 3, jnp.asarray(EMPTY)]
        fused = Fused(attention)
        want, got = (fuse_cases.both_ways(f, args) for f in (attention, fused))
        assert fused.served() == {"attention": 1}
        close(got, want, 1e-12)


# ---------------------------------------------------------------- labels outside the vocabulary

OUTSIDE = jnp.array([1, 2, -1, -100, V, V + 3, 0])
log_softmax, logsumexp = jax.nn.log_softmax, jax.nn.logsumexp
rows = jnp.arange(len(OUTSIDE))
PICKED = fuse_cases.picked(rows, V) | {
    "promised": lambda z, y: -log_softmax(z).at[rows, y].get(mode="promise_in_bounds"),
    "filled with 0": lambda z, y: (
        logsumexp(z, -1) - jnp.take_along_axis(z, y[:, None], 1, mode="fill", fill_value=0)[:, 0]
    ),
    "vmapped index": lambda z, y: jax.vmap(lambda z, y: logsumexp(z) - z[y])(z, y),
    "with the square": lambda z, y: -log_softmax(z)[rows, y] + 0.1 * logsumexp(z, -1) ** 2,
}
REDUCED = {
    "a row each": lambda l, y: l,
    "mean": lambda l, y: l.mean(),
    "masked": lambda l, y: jnp.where(y != V, l, 0.0).sum(),
    "weighted": lambda l, y: (l * jnp.cos(rows)).sum(),
}


@pytest.mark.parametrize("name, reduced", half(PICKED, REDUCED))
def test_labels_outside(name, reduced, monkeypatch):
    """Values and gradients are theirs, whatever a spelling makes of them."""
    monkeypatch.setattr(losses, "SMALLEST", 2)
    function = lambda x, w, y: REDUCED[reduced](PICKED[name](x @ w, y), y)
    args = [draw(0, len(OUTSIDE), 16), draw(1, 16, V), OUTSIDE]
    want, got, _, fused = both(function, args, serves=name != "filled with 0")
    assert fused.served() == ({} if name == "filled with 0" else {"loss": 1}), str(fused)
    close(got, want)


def test_a_comparison_selects_nothing_of_nan(monkeypatch):
    """A label outside gives 0, whatever the row's log-sum-exp is."""
    monkeypatch.setattr(losses, "SMALLEST", 2)
    function = lambda x, w, y: PICKED["comparison"](x @ w, y)
    args = [jnp.full((len(OUTSIDE), 16), jnp.nan), draw(1, 16, V), OUTSIDE]
    want, got, _, fused = both(function, args)
    assert fused.served() == {"loss": 1} and np.sum(want[0][0] == 0) == 4
    close((got[0],), (want[0],))


@pytest.mark.parametrize("name", ["lse - one-hot z", "one-hot p", "p[rows, y]"])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32, jnp.int8])
def test_labels_of_other_integers(name, dtype, monkeypatch):
    """An unsigned label has no -1, and one of 8 bits no size of a vocabulary."""
    monkeypatch.setattr(losses, "SMALLEST", 2)
    labels = jnp.array([1, 2, V, 100, 127, 0, 5], dtype)
    if dtype == jnp.uint32:
        labels = labels.at[3].set(2**32 - 1)
    function = lambda x, w, y: PICKED[name](x @ w, y)
    args = [draw(0, len(labels), 16), draw(1, 16, V), labels]
    want, got, _, fused = both(function, args)
    assert fused.served() == {"loss": 1}, str(fused)
    close(got, want)


def test_a_label_of_minus_one_among_selected_rows(monkeypatch):
    """-V - 1 is -1 after JAX has wrapped it: outside, thus NaN, and no row that costs nothing."""
    monkeypatch.setattr(losses, "SMALLEST", 2)
    labels = jnp.array([1, 2, -V - 1, 0])

    def function(x, w, y):
        loss = -jnp.take_along_axis(log_softmax(x @ w), y[:, None], 1, mode="fill")[:, 0]
        return jnp.where(y > 1, 0.0, loss).sum()

    want, got, _, fused = both(function, [draw(0, len(labels), 16), draw(1, 16, V), labels])
    assert fused.served() == {"loss": 1} and np.isnan(want[0][0]) and np.isnan(got[0][0])


# ---------------------------------------------------------------- norms


def centred(x, w):
    h = x - x.mean(-1, keepdims=True)
    return h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6) * w


def by_squares(x, w):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True) - mean * mean
    return (x - mean) * lax.rsqrt(variance + 1e-6) * w


def root_mean_square(x, w):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * w


@pytest.mark.parametrize(
    "function, size", half([centred, by_squares, root_mean_square], [1e25, 1e15, 1e-3, 1e-30])
)
def test_norms_whose_squares_overflow(function, size):
    """A LayerNorm's statistics are scaled: float64's result where theirs is 0 or NaN."""
    args = [draw(0, 4, 64) * size, draw(1, 64)]
    want, got, exact, fused = both(function, args)
    assert fused.served() == {"norm": 1}
    overflows = size == 1e25
    if overflows and function is root_mean_square:  # 0 in both: x · rsqrt(inf)
        assert not np.asarray(want[0][0]).any() and not np.asarray(got[0][0]).any()
        return
    if overflows:
        assert np.isnan(want[0][0]).all() or not np.asarray(want[0][0]).any()
    else:
        close(want, exact, 1e-3 if function is by_squares else None)
    close((got[0], got[1][1:]), (exact[0], exact[1][1:]))


def test_one_plus_w_is_added_in_its_dtype():
    """1 + 15.9375 is 17 in bfloat16, and 16.9375 in float32, which times rstd rounds to 16.875."""
    x, w = jnp.ones((4, 64), jnp.bfloat16), jnp.full(64, 15.9375, jnp.bfloat16)

    def normed(x, w, wide):
        wide_x = x.astype(jnp.float32)
        y = wide_x * lax.rsqrt(jnp.square(wide_x).mean(-1, keepdims=True) + 1e-6)
        if wide:
            return (y * (1 + w.astype(jnp.float32))).astype(x.dtype)
        return (y * (1 + w).astype(jnp.float32)).astype(x.dtype)

    for wide, value in ((False, 17.0), (True, 16.875)):
        fused = Fused(lambda x, w, wide=wide: normed(x, w, wide))
        assert (fused(x, w) == value).all() and (normed(x, w, wide) == value).all()
        assert fused.served() == {"norm": 1}
