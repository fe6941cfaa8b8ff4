"""What looks like a site of `fuse` and is another function: its own values and gradients stay.

Sizes are equal wherever they can be, so that a wrong axis fits. `left` names a domain that nothing
may be served in: where what stands there is proven to be something else, or is read elsewhere.
"""

import dataclasses
import functools
import math

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fuse_cases import Cases, draw, draws
from jax import lax

from normfuse.layers.fuse import losses

N = 8
ROUNDED = 2.0**-6  # twice bfloat16's eps: what rounds on the way may be computed without that
CUBE, FOUR = (N, N, N), (N, N, N, N)
f32, bf16 = jnp.float32, jnp.bfloat16
softmax, stop = jax.nn.softmax, lax.stop_gradient
case = Cases()


def causal(k=0, n=N):
    return jnp.tril(jnp.ones((n, n), bool), k)


# ---------------------------------------------------------------- attention


def behind(parts=1):
    """How far keys are behind queries, divided as integers are in XLA: -1 by 2 is 0, not -1."""
    found = jnp.arange(N)[:, None] - jnp.arange(N)
    return lax.div(found, jnp.full_like(found, parts))


def attend(
    change=lambda s: s,
    weights=softmax,
    scores="btd,bsd->bts",
    values="bts,bsd->btd",
    scale=0.35,
):
    def attention(q, k, v):
        return jnp.einsum(values, weights(change(jnp.einsum(scores, q, k) * scale)), v)

    return attention


def attention_case(
    name, function, *more, left=None, low=False, scale=1.0, shapes=None, rounding=None
):
    args = draws(*(shapes or (CUBE,) * 3), scale=scale)
    case(
        f"attention: {name}",
        lambda: (function, [*args, *more]),
        low=low,
        options={"left": "attention" if left else None, "rounding": rounding},
    )


def masked(value=-1e9, keep=causal):
    return lambda s: jnp.where(keep(), s, value)


heads = {"scores": "bthd,bshd->bhts", "values": "bhts,bshd->bthd", "shapes": (FOUR,) * 3}


def with_heads(name, change=lambda s: s, weights=softmax, **options):
    function = attend(change, weights, heads["scores"], heads["values"])
    attention_case(name, function, shapes=heads["shapes"], **options)


attention_case("softmax over queries", attend(masked(), lambda s: softmax(s, -2)), left=True)
attention_case("softmax over two axes", attend(masked(), lambda s: softmax(s, (-2, -1))), left=True)
with_heads("softmax over heads", masked(), lambda s: softmax(s, 1), left=True)
attention_case("values summed over queries", attend(masked(), values="bts,btd->bsd"), left=True)
attention_case("values of a constant key", attend(masked(), values="bts,bsd->bt"))
attention_case("a mask on the other axis", attend(lambda s: jnp.where(causal().T, s, -1e9)))
attention_case(
    "a mask of queries and examples", attend(lambda s: jnp.where(causal()[:, :, None], s, -1e9))
)
attention_case("the other side of the mask", attend(lambda s: jnp.where(causal(-1), -1e9, s)))
attention_case("causal, one further", attend(masked(keep=lambda: causal(1))))
attention_case("causal, one less", attend(masked(keep=lambda: causal(-1))))
attention_case("causal, one less, by positions", attend(masked(keep=lambda: behind() > 0)))
attention_case("causal, halved towards 0", attend(masked(keep=lambda: behind(2) >= 0)))
attention_case("a window ahead", attend(masked(keep=lambda: ~causal(-1) & causal(3))))
attention_case("masked by a product with 0", attend(lambda s: s * causal()))
attention_case("a small number", attend(masked(-5.0)))
attention_case("a number that scores come near to", attend(masked(-1e4)), scale=15.0)
attention_case("-1e4 that is scaled afterwards", attend(lambda s: masked(-2e4)(s) * 1e-4))

# Rows that see nothing.
rows = np.arange(N)[:, None] % 3 > 0
NOTHING = {
    "-1e4 added": lambda s, m: s + jnp.where(m, 0.0, -1e4),
    "-1e9 added": lambda s, m: s + jnp.where(m, 0.0, -1e9),
    "-1e30 added": lambda s, m: s + jnp.where(m, 0.0, -1e30),
    "-inf added": lambda s, m: s + jnp.where(m, 0.0, -jnp.inf),
    "finfo.min added": lambda s, m: s + jnp.where(m, 0.0, jnp.finfo(f32).min),
    "-1e9 selected": lambda s, m: jnp.where(m, s, -1e9),
    "finfo.min selected": lambda s, m: jnp.where(m, s, jnp.finfo(f32).min),
    "-inf selected": lambda s, m: jnp.where(m, s, -jnp.inf),
    "two numbers selected": lambda s, m: jnp.where(m, s, jnp.where(causal(2), -1e9, -1e30)),
    "one number after another": lambda s, m: jnp.where(m, jnp.where(causal(), s, -1e9), -1e30),
    "the smaller number last": lambda s, m: jnp.where(m, jnp.where(causal(), s, -1e30), -1e9),
    "two added": lambda s, m: s + jnp.where(m, 0, -1e9) + jnp.where(causal(1), 0, -1e4),
    "multiplied": lambda s, m: s * m - 1e9 * (1 - m),
}
for i, (name, mask) in enumerate(NOTHING.items()):  # constant, and given at run time, in turn
    if i % 2:
        attention_case(
            f"rows of nothing, {name}",
            attend(lambda s, mask=mask: mask(s, jnp.asarray(causal() & rows))),
        )
    else:
        attention_case(
            f"rows of nothing at run time, {name}",
            lambda q, k, v, m, mask=mask: attend(lambda s: mask(s, m))(q, k, v),
            causal() & rows,
        )
for name in ("finfo.min selected", "-1e9 added"):
    attention_case(
        f"rows of nothing, less their log-sum-exp, {name}",
        lambda q, k, v, m, mask=NOTHING[name]: attend(
            lambda s: mask(s, m),
            lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
        )(q, k, v),
        causal() & rows,
    )
attention_case(
    "rows of nothing, where=",
    attend(weights=lambda s: softmax(s, where=jnp.asarray(causal() & rows))),
)
attention_case(
    "rows of nothing at run time, where=",
    lambda q, k, v, m: attend(weights=lambda s: softmax(s, where=m))(q, k, v),
    causal() & rows,
)
attention_case(
    "rows of nothing, masked twice",
    attend(masked(), lambda s: jnp.where(rows, softmax(s), 0.0)),
)
attention_case(
    "rows of nothing, NaN replaced",
    attend(
        lambda s: jnp.where(causal() & rows, s, -jnp.inf),
        lambda s: jnp.where(jnp.isnan(p := softmax(s)), 0.0, p),
    ),
)
attention_case("a constant added to whole rows", attend(lambda s: s + jnp.where(rows, 0.0, -1e9)))
attention_case(
    "NaN where the mask hides it",
    lambda q, k, v: attend(masked())(q, k.at[:, -1].set(jnp.nan), v),
)
attention_case(
    "Inf where the mask hides it",
    lambda q, k, v: attend(masked(-jnp.inf))(q, k, v.at[:, -1].set(jnp.inf)),
)
attention_case(
    "exponentials that overflow",
    attend(weights=lambda s: jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)),
    scale=20.0,
)

# Probabilities and scores that change, or that something else reads.
keep = np.random.default_rng(0).random(CUBE) < 0.9
AFTER = {
    "dropped out": lambda p: jnp.where(keep, p / 0.9, 0.0),
    "scaled": lambda p: p * 0.9,
    "scaled by row": lambda p: p * (1 + jnp.arange(N, dtype=p.dtype)[:, None]),
    "masked": lambda p: p * causal(),
    "clipped": lambda p: jnp.clip(p, 0.05, 0.5),
    "squared and normalised": lambda p: p**2 / (p**2).sum(-1, keepdims=True),
    "moved": lambda p: jnp.roll(p, 1, -1),
    "summed up": lambda p: jnp.cumsum(p, -1),
    "less the mean": lambda p: p - p.mean(-1, keepdims=True),
    "stopped": lambda p: stop(p),
    "rounded": lambda p: p.astype(bf16).astype(p.dtype),
    "normalised over queries": lambda p: p / p.sum(-2, keepdims=True),
    "with the diagonal": lambda p: p + jnp.eye(N),
}
for name, change in AFTER.items():
    attention_case(
        f"probabilities {name}",
        attend(lambda s: s, lambda s, change=change: change(softmax(s))),
        left=name not in ("scaled", "scaled by row", "rounded"),
        rounding=ROUNDED if name == "rounded" else None,
    )


def reading(read, change=lambda s: s):
    """Attention, and what something else makes of its scores and probabilities."""

    def attention(q, k, v):
        s = change(jnp.einsum("btd,bsd->bts", q, k) * 0.35)
        p = softmax(s)
        return jnp.einsum("bts,bsd->btd", p, v), read(s, p)

    return attention


READERS = {
    "probabilities": lambda s, p: p,
    "the maximum": lambda s, p: s.max(-1),
    "the log-sum-exp": lambda s, p: jax.nn.logsumexp(s, -1),
    "the entropy": lambda s, p: -(p * jnp.log(p)).sum(),
    "a slice of probabilities": lambda s, p: p[:, 0],
    "the best key": lambda s, p: jnp.argmax(p, -1),
}
for name, read in READERS.items():
    attention_case(f"something reads {name}", reading(read), left=True)
attention_case("something reads masked scores", reading(lambda s, p: s, masked()), left=True)

attention_case(
    "the log-sum-exp stopped",
    attend(weights=lambda s: jnp.exp(s - stop(jax.nn.logsumexp(s, -1, keepdims=True)))),
    left=True,
)
attention_case(
    "the sum stopped",
    attend(weights=lambda s: jnp.exp(s) / stop(jnp.exp(s).sum(-1, keepdims=True))),
    left=True,
)


def in_parts(first, second):
    """A softmax whose numerator and denominator have the maximum subtracted each on its own."""

    def weights(s):
        top = s.max(-1, keepdims=True)
        return jnp.exp(s - first(top)) / jnp.exp(s - second(top)).sum(-1, keepdims=True)

    return weights


unstopped = lambda x: x
attention_case("one maximum stopped", attend(weights=in_parts(stop, unstopped)), left=True)
attention_case("the other maximum stopped", attend(weights=in_parts(unstopped, stop)), left=True)
attention_case("both maxima stopped", attend(weights=in_parts(stop, stop)))
attention_case("neither maximum stopped", attend(weights=in_parts(unstopped, unstopped)))
attention_case("scores stopped", attend(lambda s: stop(s)))
attention_case("queries stopped", lambda q, k, v: attend(masked())(stop(q), k, v))
attention_case(
    "one more in the sum",
    attend(weights=lambda s: jnp.exp(s) / (1 + jnp.exp(s).sum(-1, keepdims=True))),
    left=True,
)
attention_case(
    "a learned sink",
    attend(
        weights=lambda s: softmax(jnp.concatenate([s, jnp.zeros((N, N, 1))], -1))[..., :-1],
    ),
    left=True,
)
attention_case(
    "another maximum",
    attend(
        weights=lambda s: (lambda e: e / (e.sum(-1, keepdims=True) + 1e-2))(jnp.exp(s - s.max()))
    ),
)
attention_case(
    "eps in the sum",
    attend(weights=lambda s: jnp.exp(s) / (jnp.exp(s).sum(-1, keepdims=True) + 1e-3)),
    left=True,
)
attention_case("relu", attend(weights=lambda s: jax.nn.relu(s) / N), left=True)
attention_case(
    "of both products",
    lambda q, k, v: jnp.einsum(
        "bts,bsd->btd", softmax(q @ k.swapaxes(1, 2) + k @ q.swapaxes(1, 2)), v
    ),
)
attention_case("scores and their transpose", attend(lambda s: s + s.swapaxes(-1, -2)), left=True)
attention_case("a bias made of scores", attend(lambda s: s + jnp.tanh(s)), left=True)
for value in (-jnp.inf, -1e9):
    attention_case(
        f"scores masked by {value:g}, of the other's mean",
        attend(masked(value), lambda s: softmax(s - s.mean(-1, keepdims=True))),
        left=True,
    )


def less_of_its_maximum(s):
    weights = jnp.exp(s - 0.7 * jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


attention_case(
    "scores that may see nothing, less .7 of their maximum",
    attend(masked(jnp.finfo(jnp.float32).min), less_of_its_maximum),
    left=True,
)
attention_case("scores less those of queries", attend(lambda s: s - s.max(-2, keepdims=True)))
attention_case(
    "the cap around the bias",
    lambda q, k, v: attend(lambda s: 3 * jnp.tanh((s + causal()) / 3))(q, k, v),
)
attention_case("a cap that is not one", attend(lambda s: 3 * jnp.tanh(s / 5)))
attention_case(
    "top scores alone",
    attend(lambda s: jnp.where(s >= lax.top_k(s, 3)[0][..., -1:], s, -1e9)),
    left=True,
)
attention_case(
    "a learned temperature", lambda q, k, v, t: attend(lambda s: s / t)(q, k, v), jnp.float32(1.7)
)
attention_case(
    "a temperature of queries",
    lambda q, k, v, t: attend(lambda s: s * jnp.exp(t)[:, None])(q, k, v),
    jnp.arange(N, dtype=f32) / N,
)
attention_case("a negative scale after the mask", attend(lambda s: -masked(1e9)(s)))
attention_case("a NumPy float64 scale", attend(masked(), scale=np.float64(0.35)), low=True)
attention_case(
    "a mask that widens", attend(lambda s: s + jnp.where(causal(), 0, jnp.float32(-1e9))), low=True
)
attention_case(
    "q of bfloat16 alone", lambda q, k, v: attend(masked())(q.astype(bf16), k, v), rounding=ROUNDED
)
attention_case(
    "float16",
    lambda q, k, v: attend(masked(-6e4))(*(x.astype(jnp.float16) for x in (q, k, v))).astype(f32),
    rounding=ROUNDED,
)
attention_case(
    "products of integers",
    lambda q, k, v: (
        attend()(jnp.round(q), jnp.round(k), v)
        + attend()(*(x.astype(jnp.int32) for x in (q, k)), v)
    ),
)
attention_case("q, k and v are one", lambda q, k, v: attend(masked())(q, q, q) + k + v)
attention_case("a gate", lambda q, k, v: softmax(q @ k[0]) * (q @ v[0]), left=True)
attention_case("one query", lambda q, k, v: attend()(q[:, :1], k, v))


def other_derivative(function, slope=0.5):
    """The function with a part of its derivative."""
    changed = jax.custom_jvp(function)
    changed.defjvp(lambda p, t: (function(*p), slope * jax.jvp(function, p, t)[1]))
    return changed


def straight_through(function):
    changed = jax.custom_vjp(function)
    changed.defvjp(lambda x: (function(x), None), lambda _, g: (g,))
    return changed


attention_case(
    "a softmax of another derivative",
    attend(masked(), other_derivative(lambda s: softmax(s))),
    left=True,
)
attention_case(
    "a softmax that passes gradients through",
    attend(masked(), straight_through(lambda s: softmax(s))),
    left=True,
)
attention_case(
    "gradients of scores changed", attend(other_derivative(lambda s: s * 1.0)), left=True
)
attention_case("gradients of masked scores changed", attend(straight_through(masked())), left=True)


@functools.partial(jax.jit, inline=False)
def _softmax(s):
    return jnp.exp(s) / jnp.exp(2 * s).sum(-1, keepdims=True)


@jax.jit
def _where(m, s, value):
    return s + value * m


attention_case("a jit that is called _softmax", attend(weights=_softmax), left=True)
attention_case("a jit that is called _where", attend(lambda s: _where(causal(), s, -1e-3)))

# ---------------------------------------------------------------- losses

V = 16


def words(outside=()):
    y = np.random.default_rng(9).integers(0, V, (N, N))
    y.reshape(-1)[3 : 3 + 5 * len(outside) : 5] = outside
    return jnp.asarray(y)


def loss_case(
    name, loss, *more, y=None, left=None, low=False, scale=0.4, rounding=None, strict=True
):
    y = words() if y is None else y
    args = draws((N, N, N), (N, V), scale=scale)
    case(
        f"loss: {name}",
        lambda: (
            lambda x, w, *more: loss(x @ w, y, *more),
            [*args, *more],
        ),
        low=low,
        options={"left": "loss" if left else None, "rounding": rounding, "strict": strict},
    )


def picked(z, y, **options):
    return jnp.take_along_axis(z, y[..., None], axis=-1, **options)[..., 0]


integers = optax.softmax_cross_entropy_with_integer_labels
log_softmax, logsumexp, one_hot = jax.nn.log_softmax, jax.nn.logsumexp, jax.nn.one_hot
OUTSIDE = {  # spellings that do something of their own with labels outside the vocabulary
    "optax, integers": lambda z, y: integers(z, y),
    "optax, one-hot": lambda z, y: optax.softmax_cross_entropy(z, one_hot(y, V)),
    "one-hot of log_softmax": lambda z, y: -(one_hot(y, V) * log_softmax(z)).sum(-1),
    "lse less a one-hot": lambda z, y: logsumexp(z, -1) - (one_hot(y, V) * z).sum(-1),
    "comparison": lambda z, y: -jnp.where(jnp.arange(V) == y[..., None], log_softmax(z), 0).sum(-1),
    "gather that clips": lambda z, y: -picked(log_softmax(z), y, mode="clip"),
    "gather that fills": lambda z, y: -picked(log_softmax(z), y, mode="fill"),
    "lse less one that fills with 0": lambda z, y: (
        logsumexp(z, -1) - picked(z, y, mode="fill", fill_value=0)
    ),
    "indexed": lambda z, y: -log_softmax(z)[jnp.arange(N)[:, None], jnp.arange(N)[None], y],
    "indexed, filled": lambda z, y: (
        -log_softmax(z).at[jnp.arange(N)[:, None], jnp.arange(N)[None], y].get(mode="fill")
    ),
    "clipped labels": lambda z, y: integers(z, jnp.clip(y, 0, V - 1)),
    "vmapped index": lambda z, y: jax.vmap(jax.vmap(lambda z, y: logsumexp(z) - z[y]))(z, y),
    "unsigned labels": lambda z, y: integers(z, y.astype(jnp.uint8)),
}
# Indexing promises JAX that indices are inside: outside, its value and its gradient disagree.
PROMISED = {"indexed"}
for name, loss in OUTSIDE.items():
    outside = () if name in PROMISED else (-1, V, -100, V + 5, -V, -V - 1, 1000)
    loss_case(
        f"labels outside, {name}",
        lambda z, y, loss=loss: (lambda rows: (rows, rows.mean()))(loss(z, y)),
        y=words(outside),
        strict=False,  # gradients of NaN
    )
loss_case(
    "labels outside, masked",
    lambda z, y: jnp.where(y < 0, 0.0, integers(z, y)).sum() / (y >= 0).sum(),
    y=words((-1, -100, -1, -100)),
)
loss_case(
    "labels outside, weighted by 0",
    lambda z, y: (integers(z, y) * (y >= 0)).sum() / (y >= 0).sum(),
    y=words((-1, -100, -1, -100)),
    strict=False,
)
loss_case(
    "labels of the other axis",
    lambda z, y: (logsumexp(z, -1) - picked(z, y.T)).sum(),
)
loss_case("log-sum-exp over rows", lambda z, y: (logsumexp(z, 1)[:, None] - z).sum(), left=True)
loss_case("log-sum-exp over examples", lambda z, y: (logsumexp(z[..., :N], 0) - picked(z, y)).sum())
loss_case("some words alone", lambda z, y: (logsumexp(z[..., :-3], -1) - picked(z, y)).sum())
loss_case(
    "words masked", lambda z, y: integers(jnp.where(jnp.arange(V) < V - 3, z, -1e9), y % 9).sum()
)
loss_case("two log-sum-exps", lambda z, y: (2 * logsumexp(z, -1) - picked(z, y)).sum())
loss_case(
    "the label added again",
    lambda z, y: logsumexp(z, -1) - picked(z, y) + picked(z, y),
    y=words((-1, V, -100, 1000)),
    strict=False,
)
loss_case(
    "focal",
    lambda z, y: (lambda l: (-jnp.square(1 - jnp.exp(l)) * l).sum())(picked(log_softmax(z), y)),
)
loss_case("of probabilities", lambda z, y: -jnp.log(picked(softmax(z), y)).mean())
loss_case(
    "probabilities that vanish", lambda z, y: -jnp.log(picked(softmax(z), y)).mean(), scale=9.0
)
loss_case(
    "sigmoids", lambda z, y: optax.sigmoid_binary_cross_entropy(z, one_hot(y, V)).sum(), left=True
)
loss_case(
    "soft labels",
    lambda z, y, p: optax.softmax_cross_entropy(z, softmax(p)).sum(),
    draw(5, N, N, V),
)
loss_case("weights of words", lambda z, y, c: (integers(z, y) * c[y]).sum(), draw(5, V))
loss_case(
    "weights within the one-hot",
    lambda z, y, c: -(log_softmax(z) * one_hot(y, V) * c).sum(),
    draw(5, V),
)
LEFT_BIASES = {  # that are none of each word alone
    "a bias of each row": lambda z, y, b: integers(z + z[..., :1] * b, y),
    "a soft cap and then a bias": lambda z, y, b: integers(2 * jnp.tanh(z / 2) + b, y),
    "a soft cap and then a mask": lambda z, y, b: integers(
        jnp.where(jnp.arange(V) < V - 3, jnp.tanh(z), -1e9), y % 9
    ),
    "a mask of some rows": lambda z, y, b: integers(
        jnp.where((jnp.arange(V) < V - 3) | (y > 4)[..., None], z, -1e9) + b, y % 9
    ),
    "words that are only made less likely": lambda z, y, b: integers(
        jnp.where(jnp.arange(V) < V - 3, z + b, -9.0), y
    ),
    "a mask of run time": lambda z, y, b: integers(jnp.where(b > 0, z, -1e9), y),
    "two masks": lambda z, y, b: integers(
        jnp.where(jnp.arange(V) > 2, jnp.where(jnp.arange(V) < V - 3, z, -1e9), -2e4) + b, y
    ),
    "a bias after a mask": lambda z, y, b: integers(
        jnp.where(jnp.arange(V) < V - 3, z, -1e9) + b, y
    ),
    "all words masked": lambda z, y, b: integers(jnp.where(jnp.arange(V) < 0, z, -1e9) + b, y),
}
for name, loss in LEFT_BIASES.items():
    loss_case(name, lambda z, y, b, loss=loss: loss(z, y, b).sum(), draw(5, V), left=True)
loss_case("a bias", lambda z, y, b: integers(z + b, y).sum(), draw(5, V))
loss_case("a constant prior", lambda z, y: integers(z + jnp.log(1.0 + jnp.arange(V)), y).sum())
loss_case(
    "a learned factor, exponential",
    lambda z, y, t: integers(z * jnp.exp(t), y).mean(),
    jnp.float32(0.3),
)
loss_case(
    "a temperature of rows", lambda z, y, t: integers(z * t[:, None], y).mean(), 1 + draw(5, N) / 9
)
loss_case("a negative factor", lambda z, y: integers(-0.5 * z, y).mean())
loss_case("a cap that is not one", lambda z, y: integers(3 * jnp.tanh(z / 5), y).mean())
loss_case("a NumPy float64 factor", lambda z, y: integers(z * np.float64(0.7), y).mean(), low=True)
loss_case("shifted by a maximum of all", lambda z, y: integers(z - z.max(), y).mean())
loss_case(
    "the log-sum-exp stopped", lambda z, y: (stop(logsumexp(z, -1)) - picked(z, y)).sum(), left=True
)


def lse_in_parts(z, first, second):
    top = z.max(-1, keepdims=True)
    return (jnp.log(jnp.exp(z - first(top)).sum(-1, keepdims=True)) + second(top))[..., 0]


for first, second in ((stop, unstopped), (unstopped, stop), (stop, stop)):
    loss_case(
        f"maxima stopped: {first is stop}, {second is stop}",
        lambda z, y, first=first, second=second: (
            lse_in_parts(z, first, second) - picked(z, y)
        ).sum(),
        left=first is not second,
    )
loss_case(
    "a maximum less itself, stopped",
    lambda z, y: (logsumexp(z, -1) - picked(z, y) + z.max(-1) - stop(z.max(-1))).sum(),
    left=True,
)
loss_case("logits stopped", lambda z, y: integers(stop(z), y).sum() + z.sum())
loss_case(
    "log-probabilities stopped in part",
    lambda z, y: -picked(log_softmax(z) - stop(log_softmax(z)) / 2, y).sum(),
)
loss_case(
    "another derivative",
    lambda z, y: integers(other_derivative(lambda z: log_softmax(z))(z), y).sum(),
    left=True,
)
loss_case(
    "gradients of logits changed",
    lambda z, y: integers(other_derivative(lambda z: z * 1.0)(z), y).sum(),
    left=True,
)
for name, read in {
    "the best word": lambda z: z.argmax(-1),
    "accuracy": lambda z: (z.argmax(-1) == words()).mean(),
    "probabilities": softmax,
    "logits": lambda z: z,
    "the mean": lambda z: z.mean(),
    "the largest": lambda z: z.max(-1),
    "best five": lambda z: lax.top_k(z, 5),
    "a slice": lambda z: z[:, 0],
    "the entropy": lambda z: -(softmax(z) * log_softmax(z)).sum(),
    "the log-sum-exp": lambda z: logsumexp(z, -1),
}.items():
    loss_case(f"something reads {name}", lambda z, y, read=read: (integers(z, y).mean(), read(z)))
loss_case("NaN in a row", lambda z, y: integers(z.at[0, 0].multiply(jnp.nan), y))
case(
    "loss: contrastive, both ways",
    lambda: (
        lambda a, b: (lambda z: integers(z, jnp.arange(N)) + integers(z.T, jnp.arange(N)))(a @ b.T),
        draws((N, N), (N, N)),
    ),
    low=False,
)
case(
    "loss: a kernel for each example",
    lambda: (
        lambda x, w: integers(jnp.einsum("btd,bdv->btv", x, w), words()).mean(),
        draws(CUBE, (N, N, V)),
    ),
    low=False,
)
case(
    "loss: picked from other logits",
    lambda: (
        lambda x, w, u: (logsumexp(x @ w, -1) - picked(x @ u, words())).sum(),
        draws(CUBE, (N, V), (N, V)),
    ),
    low=False,
)
case(
    "loss: other rows are picked",
    lambda: (
        lambda x, w: (logsumexp(x @ w, -1) - picked(x[::-1] @ w, words())).sum(),
        draws(CUBE, (N, V)),
    ),
    low=False,
)

# ---------------------------------------------------------------- norms


def norm_case(name, norm, *more, left=None, low=False, scale=1.0, shape=CUBE, rounding=None):
    args = [scale * (1.3 * draw(0, *shape) + 0.3), 1 + draw(1, N) / 4]
    case(
        f"norm: {name}",
        lambda: (norm, [*args, *more]),
        low=low,
        options={"left": "norm" if left else None, "rounding": rounding},
    )


def mean(x, axis=-1):
    return jnp.mean(x, axis, keepdims=True)


def rms(x, axis=-1, eps=1e-3):
    return lax.rsqrt(mean(x * x, axis) + eps)


norm_case("eps outside of the root", lambda x, w: x / (jnp.sqrt(mean(x * x)) + 0.1) * w, left=True)
norm_case("eps added to 1 / root", lambda x, w: x * (lax.rsqrt(mean(x * x)) + 0.1) * w, left=True)
norm_case("a floor", lambda x, w: x / jnp.maximum(jnp.sqrt(mean(x * x)), 1.2) * w, left=True)
norm_case(
    "a floor of squares", lambda x, w: x * lax.rsqrt(jnp.maximum(mean(x * x), 1.2)) * w, left=True
)
norm_case("eps added to x", lambda x, w: x * lax.rsqrt(mean((x + 0.1) ** 2)) * w)
norm_case("over the other axis", lambda x, w: x * rms(x, 1) * w)
norm_case("over two axes", lambda x, w: x * rms(x, (1, 2)) * w)
norm_case("statistics of another axis", lambda x, w: x * rms(x, 1).swapaxes(1, 2) * w)
norm_case("statistics of other examples", lambda x, w: x * rms(x).swapaxes(0, 1) * w)
norm_case("statistics of another array", lambda x, w, y: x * rms(y) * w, draw(3, *CUBE))
norm_case("a weight for each number", lambda x, w, m: x * rms(x) * m * w, draw(3, *CUBE))
norm_case("a weight made of x", lambda x, w: x * rms(x) * jnp.tanh(x.mean((0, 1))) * w)
norm_case("the weight's size", lambda x, w: x * rms(x) * jnp.abs(w))
norm_case("a weight of 2 + w", lambda x, w: x * rms(x) * (2 + w))
norm_case("a learned eps", lambda x, w, c: x * lax.rsqrt(mean(x * x) + c) * w, jnp.float32(0.7))
norm_case(
    "an eps of rows", lambda x, w, c: x * lax.rsqrt(mean(x * x) + c[:, None]) * w, draw(3, N) ** 2
)
norm_case(
    "no eps, rows of zeros",
    lambda x, w: (
        (x * (jnp.arange(N) > 2)[:, None]) * rms(x * (jnp.arange(N) > 2)[:, None], eps=0.0) * w
    ),
)
norm_case("the mean squared", lambda x, w: x * lax.rsqrt(mean(x) ** 2 + 1e-3) * w, left=True)
norm_case("the mean magnitude", lambda x, w: x / (mean(jnp.abs(x)) + 1e-3) * w, left=True)
norm_case("fourth powers", lambda x, w: x * lax.rsqrt(mean(x**4) + 1e-3) * w, left=True)
norm_case("1 / mean of squares", lambda x, w: x / (mean(x * x) + 1e-3) * w, left=True)
norm_case("times the root", lambda x, w: x * jnp.sqrt(mean(x * x) + 1e-3) * w, left=True)
norm_case("the root alone", lambda x, w: rms(x) * w, left=True)
norm_case("the sum", lambda x, w: x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-3) * w)
norm_case(
    "the sum over n - 1",
    lambda x, w: x * lax.rsqrt((x * x).sum(-1, keepdims=True) / (N - 1) + 1e-3) * w,
)
norm_case(
    "the sum over n - 1 of many",
    lambda x, w: x * lax.rsqrt((x * x).sum(-1, keepdims=True) / 127 + 1e-3) * w[0],
    shape=(N, N, 128),
)
norm_case(
    "the sum by rows' number",
    lambda x, w: x[:, :5] * lax.rsqrt((x * x).sum(-1, keepdims=True)[:, :5] / 5 + 1e-3) * w,
)
norm_case(
    "a mean of some",
    lambda x, w: (
        x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True, where=jnp.arange(N) < 5) + 1e-3) * w
    ),
)
norm_case("a weighted mean", lambda x, w: x * lax.rsqrt(mean(x * x * w) + 1e-3) * w)
norm_case(
    "ddof", lambda x, w: (x - mean(x)) * lax.rsqrt(x.var(-1, keepdims=True, ddof=1) + 1e-3) * w
)
norm_case(
    "eps beside the deviation", lambda x, w: (x - mean(x)) / (x.std(-1, keepdims=True) + 1e-2) * w
)
norm_case("centred, of squares", lambda x, w: (x - mean(x)) * rms(x) * w, left=True)
norm_case(
    "not centred, of the variance",
    lambda x, w: x * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * w,
    left=True,
)
norm_case(
    "centred by another mean",
    lambda x, w: (x - mean(x, 1)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * w,
)
norm_case(
    "centred by the median",
    lambda x, w: (lambda c: c * rms(c) * w)(x - stop(jnp.median(x, -1, keepdims=True))),
)
norm_case(
    "the variance of another axis",
    lambda x, w: (x - mean(x)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-3) * w,
)
norm_case("a bias of x", lambda x, w: jax.nn.standardize(x) * w + x)
norm_case(
    "groups", lambda x, w: (lambda g: (g * rms(g)).reshape(x.shape) * w)(x.reshape(N, N, 2, -1))
)
norm_case(
    "a batch norm",
    lambda x, w: (x - mean(x, (0, 1))) * lax.rsqrt(x.var((0, 1), keepdims=True) + 1e-3) * w,
)
norm_case("statistics are read", lambda x, w: (x * rms(x) * w, rms(x)))
norm_case("the normalised is read", lambda x, w: (lambda h: (h * w, h))(x * rms(x)))
norm_case("statistics stopped", lambda x, w: x * stop(rms(x)) * w, left=True)
norm_case(
    "the variance stopped",
    lambda x, w: (x - mean(x)) * stop(lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)) * w,
    left=True,
)
norm_case("x stopped", lambda x, w: stop(x) * rms(stop(x)) * w + x)
norm_case("the weight stopped", lambda x, w: x * rms(x) * stop(w))
norm_case(
    "rsqrt of another derivative",
    lambda x, w: x * other_derivative(lax.rsqrt)(mean(x * x) + 1e-3) * w,
    left=True,
)
norm_case(
    "a norm of another derivative",
    lambda x, w: straight_through(lambda x: x * rms(x))(x) * w,
    left=True,
)
norm_case(
    "rounded statistics", lambda x, w: x * rms(x).astype(bf16).astype(f32) * w, rounding=ROUNDED
)
norm_case(
    "rounded on the way", lambda x, w: (x * rms(x)).astype(bf16).astype(f32) * w, rounding=ROUNDED
)
norm_case(
    "NumPy float64 eps", lambda x, w: x * lax.rsqrt(mean(x * x) + np.float64(1e-3)) * w, low=True
)
norm_case("float32 statistics, wide result", lambda x, w: x * rms(x.astype(f32)) * w, low=True)
norm_case("NaN in a row", lambda x, w: (lambda x: x * rms(x) * w)(x.at[0, 0, 0].set(jnp.nan)))
norm_case(
    "a large mean of squares",
    lambda x, w: (lambda x, m: (x - m) * lax.rsqrt(mean(x * x) - m * m + 1e-3) * w)(
        x + 30, mean(x + 30)
    ),
)


@jax.jit
def rms_norm(x, w):
    return x * lax.rsqrt(jnp.abs(mean(x)) + 1e-3) * w


norm_case("a jit that is called rms_norm", lambda x, w: rms_norm(x, w), left=True)

# ---------------------------------------------------------------- MLPs


def mlp_case(name, mlp, *more, left=None, scale=0.6, rounding=None):
    x, *kernels = draws(CUBE, (N, N), (N, N), (N, N), scale=scale)
    args = [x.at[0, 0].set(0), *kernels]  # at 0, derivatives of one function may differ
    case(
        f"mlp: {name}",
        lambda: (mlp, [*args, *more]),
        low=False,
        options={"left": "mlp" if left else None, "rounding": rounding},
    )


@jax.jit
def silu(z):
    return z * jnp.tanh(z)


@jax.jit
def relu(z):
    return jnp.maximum(z, 0.5)


@jax.jit
def gelu(z):
    return 0.5 * z * (1 + jnp.tanh(0.8 * (z + 0.05 * z**3)))


FALSE = {
    "a jit that is called silu": silu,
    "a jit that is called relu": relu,
    "a jit that is called gelu": gelu,
    "gelu of other constants": lambda z: 0.5 * z * (1 + jnp.tanh(0.79 * (z + 0.0447 * z**3))),
    "quick gelu": lambda z: z * jax.nn.sigmoid(1.702 * z),
    "silu of its opposite": lambda z: z * jax.nn.sigmoid(-z),
    "sigmoid of another": lambda z: z * jax.nn.sigmoid(z.swapaxes(-1, -2)),
    "relu of two": lambda z: jnp.maximum(z, z.swapaxes(-1, -2)),
    "relu at 0.1": lambda z: jnp.maximum(z, 0.1),
    "min": lambda z: jnp.minimum(z, 0.0),
    "swish of another derivative": other_derivative(jax.nn.silu),
    "a relu that passes gradients": straight_through(jax.nn.relu),
    "a relu of maximum": lambda z: jnp.maximum(z, 0),
    "a relu of where": lambda z: jnp.where(z > 0, z, 0),
    "a relu of where, at least": lambda z: jnp.where(z >= 0, z, 0),
    "stopped": lambda z: stop(jax.nn.silu(z)),
    "stopped in part": lambda z: z * stop(jax.nn.sigmoid(z)),
    "clipped": lambda z: jnp.clip(jax.nn.silu(z), -0.2, 1.0),
    "rounded": lambda z: jax.nn.silu(z.astype(bf16)).astype(f32),
    "softmax": softmax,
}
for i, (name, f) in enumerate(FALSE.items()):
    rounding = ROUNDED if name == "rounded" else None
    kind, mlp = [
        ("plain", lambda x, g, u, d, f=f: f(x @ g) @ d + u[0]),
        ("gated", lambda x, g, u, d, f=f: (f(x @ g) * (x @ u)) @ d),
    ][i % 2]
    mlp_case(f"{kind}, {name}", mlp, rounding=rounding)
act = jax.nn.silu
mlp_case("of two inputs", lambda x, g, u, d, y: (act(x @ g) * (y @ u)) @ d, draw(7, *CUBE))
mlp_case("the sum", lambda x, g, u, d: (act(x @ g) + x @ u) @ d)
mlp_case("the same product", lambda x, g, u, d: (act(x @ g) * (x @ g)) @ d + u[0])
mlp_case(
    "contracted over rows", lambda x, g, u, d: jnp.einsum("btf,te->bfe", act(x @ g) * (x @ u), d)
)
mlp_case("the hidden is read", lambda x, g, u, d: (lambda h: (h @ d, h))(act(x @ g) * (x @ u)))
mlp_case("the gate is read", lambda x, g, u, d: (lambda z: ((act(z) * (x @ u)) @ d, z))(x @ g))
mlp_case(
    "the hidden dropped out",
    lambda x, g, u, d: (jnp.where(keep, act(x @ g) * (x @ u), 0) / 0.9) @ d,
)
mlp_case("a bias of rows", lambda x, g, u, d: (act(x @ g + u[0][:, None]) * (x @ u)) @ d)
mlp_case("a bias of both", lambda x, g, u, d: act(x @ g + u) @ d)
mlp_case(
    "kernels of examples",
    lambda x, g, u, d, k: (act(x @ g) * jnp.einsum("bte,bef->btf", x, k)) @ d,
    draw(8, *CUBE),
)
mlp_case(
    "NaN and Inf",
    lambda x, g, u, d: (lambda x: (act(x @ g) * (x @ u)) @ d)(
        x.at[0, 0, 0].set(jnp.nan).at[1, 1, 1].set(jnp.inf)
    ),
)
mlp_case(
    "split off the middle",
    lambda x, g, u, d: (lambda h: (act(h[..., :4]) * h[..., 3:7]) @ d[:4])(x @ g) + u[0],
)

# ---------------------------------------------------------------- indexing


def index_case(name, function, *more):
    case(
        f"indexing: {name}",
        lambda: (function, [*draws((N, N), (N, N // 2)), *more]),
        low=False,
    )


index_case("an index twice", lambda x, a: x.at[:, np.array([0, 2, 2, 5])].set(a))
index_case("an index twice, added", lambda x, a: x.at[:, np.array([0, 2, 2, 5])].add(a))
index_case("outside, dropped", lambda x, a: x.at[:, np.array([0, 9, 2, 12])].set(a))
index_case(
    "outside, filled with 3",
    lambda x, a: x.at[:, np.array([0, 9, 2, 5])].get(mode="fill", fill_value=3.0) * a,
)
index_case("outside, read", lambda x, a: x[:, np.array([0, 9, 2, -12])] * a)
index_case(
    "outside, wrapped", lambda x, a: jnp.take(x, np.array([0, 9, 2, -12]), 1, mode="wrap") * a
)
index_case("without order", lambda x, a: x.at[:, np.array([5, 0, 7, 3])].set(a))
index_case("rows and columns", lambda x, a: x.at[np.arange(4), np.array([5, 0, 7, 3])].set(a[0]))
index_case("a block", lambda x, a: x.at[np.ix_([0, 3], [1, 2, 5, 7])].set(a[:2]))
index_case("both strided", lambda x, a: x.at[::2, 1::2].set(a[::2]))
index_case("overlapping", lambda x, a: x.at[:, ::2].set(a).at[:, :4].set(2 * a))
index_case("the old is read", lambda x, a: x.at[:, ::2].set(a) + x)
index_case(
    "between is read", lambda x, a: (lambda y: (y, y.at[:, 1::2].set(a)))(x.at[:, ::2].set(a))
)
index_case("minimum", lambda x, a: x.at[:, ::2].min(a))
index_case("power", lambda x, a: jnp.abs(x).at[:, ::2].power(2.0) * a[0, 0])
index_case("stopped", lambda x, a: stop(x).at[:, ::2].set(a) + x.at[:, ::2].set(stop(a)))
index_case("given indices", lambda x, a, i: x.at[:, i].set(a), jnp.array([0, 3, 4, 7]))
index_case("a given start", lambda x, a, i: lax.dynamic_update_slice(x, a, (0, i)), jnp.int32(6))
index_case("a start outside", lambda x, a: lax.dynamic_update_slice(x, a, (0, 6)))
index_case("a mask", lambda x, a: x.at[np.arange(N) % 2 == 0].set(1.5) * a[0, 0])
index_case("other dtypes", lambda x, a: x.astype(jnp.float16).at[:, ::2].set(a.astype(jnp.float16)))
index_case("Inf added", lambda x, a: x.at[0, 0].set(jnp.inf).at[:, ::2].add(a))
index_case(
    "a scatter of batches",
    lambda x, a: jax.vmap(lambda x, a: x.at[np.array([1, 6, 3, 0])].set(a))(x, a),
)
index_case(
    "indices of each row",
    lambda x, a: jax.vmap(lambda x, a, i: x.at[i].set(a))(
        x, a, np.stack([np.random.default_rng(i).permutation(N)[:4] for i in range(N)])
    ),
)
index_case(
    "taken along an axis",
    lambda x, a: (
        jnp.take_along_axis(
            x, np.stack([np.random.default_rng(i).permutation(N)[:4] for i in range(N)]), 1
        )
        * a
    ),
)
index_case(
    "unique, they say",
    lambda x, a: x.at[:, np.array([0, 2, 4, 6])].set(
        a, unique_indices=True, indices_are_sorted=True
    ),
)
index_case(
    "segments", lambda x, a: jax.ops.segment_sum(x, np.array([0, 0, 1, 2, 2, 2, 3, 3]), 4) * a[0, 0]
)


@pytest.mark.parametrize("case", **case.parameters())
def test_lookalike(case):
    function, args = case.make()
    _, fused = fuse_cases.compare(
        function,
        args,
        low=case.low,
        jit=False,
        rounding=case.options.get("rounding"),
        strict=case.options.get("strict", True),
    )
    if left := case.options.get("left"):
        assert not [row for row in fused.rows if row.served and fuse_cases.domain(row) == left]


def test_there_are_enough():
    """Sixty look-alikes at least, and some of each domain."""
    found = {domain: sum(c.name.startswith(domain) for c in case) for domain in fuse_cases.DOMAINS}
    assert sum(found.values()) >= 60
    assert all(found[d] >= 20 for d in ("attention", "loss", "norm", "mlp", "indexing"))


# ---------------------------------------------------------------- products that FP8 leaves


@dataclasses.dataclass(frozen=True)
class Left:
    name: str
    function: object
    shapes: tuple


R, W = 64, 32
TABLE = np.cos(np.outer(np.arange(W), np.arange(W)) * 2 * math.pi / W).astype(np.float32)
LEFT = [
    Left("a NumPy table", lambda x: x @ TABLE, ((R, W),)),
    Left("a constant table", lambda x: x @ jnp.asarray(TABLE), ((R, W),)),
    Left("a table of iota", lambda x: x @ jnp.cos(jnp.outer(*[jnp.arange(W) / W] * 2)), ((R, W),)),
    Left("a pooling matrix", lambda x: jnp.eye(W).repeat(2, 1) @ x, ((R, W),)),
    Left("a kernel of x", lambda x, w: x @ jnp.tanh(x[:W] * w), ((R, W), (W, W))),
    Left(
        "a hypernetwork",
        lambda x, c, w: x @ (c @ w).reshape(W, W),
        ((R, W), (W,), (W, W * W)),
    ),
    Left(
        "kernels of the batch",
        lambda x, y: jnp.einsum("btd,bde->bte", x, y),
        ((4, 16, W), (4, W, W)),
    ),
    Left("scores", lambda q, k: jnp.einsum("btd,bsd->bts", q, k), ((4, 32, W), (4, 32, W))),
    Left(
        "HIGHEST",
        # The activation: what is the function's own result stays for that alone.
        lambda x, w: jnp.tanh(jnp.matmul(x, w, precision=lax.Precision.HIGHEST)),
        ((R, W), (W, W)),
    ),
    Left(
        "the default of HIGHEST",
        lambda x, w: jnp.tanh(jax.default_matmul_precision("highest")(lambda: x @ w)()),
        ((R, W), (W, W)),
    ),
    Left(
        "integers",
        lambda x, w: (
            (jnp.round(4 * x).astype(jnp.int8) @ jnp.round(4 * w).astype(jnp.int8)).astype(f32)
            + 0 * x.sum()
        ),
        ((R, W), (W, W)),
    ),
    Left("a router", lambda x, w: lax.top_k(softmax(x @ w), 2)[0], ((R, W), (W, 16))),
    Left("few rows", lambda x, w: jnp.tanh(x @ w), ((2, W), (W, W))),
    Left("a vector", lambda x, w: jnp.tanh(x @ w), ((W,), (W, W))),
    Left(
        "embedding by one-hot",
        lambda t, x: jax.nn.one_hot(jnp.arange(R) % W, W) @ t + 0 * x.sum(),
        ((W, W), (1,)),
    ),
]


@pytest.mark.parametrize("left", LEFT, ids=[case.name for case in LEFT])
def test_fp8_leaves(left):
    """Values and gradients are the function's own, without FP8's rounding."""
    args = [x.astype(bf16).astype(f32) for x in draws(*left.shapes, scale=0.5)]
    served, fused = fuse_cases.compare(left.function, args, quantization="fp8")
    assert "product" not in served, fused


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_fp8_leaves_the_logits_of_a_loss(dtype):
    """Its value keeps its bits; its gradient is in FP8, with e5m2's rounding."""

    def function(x, w):
        logits = (x.astype(dtype) @ w.astype(dtype)).astype(f32) / 0.7
        return integers(logits, jnp.arange(R) % W).mean()

    args = draws((R, W), (W, W), scale=0.5)
    both = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(*args)
    fused = fuse_cases.Fused(function, quantization="fp8")
    (value, found), (plain, exact) = both(fused), both(fuse_cases.Fused(function))
    assert fused.served() == {"loss": 1} and value == plain
    for one, other in zip(found, exact):
        assert 0.01 < np.linalg.norm(one - other) / np.linalg.norm(other) < 0.1


@pytest.mark.parametrize(
    "classes, reason",
    [(500, "a softmax or a loss reads its result"), (50257, "50257 is no multiple of 16")],
)
def test_every_product_says_fp8_or_why_not(classes, reason, monkeypatch):
    """The head of a loss that stays has a row too."""
    monkeypatch.setattr(losses, "SMALLEST", 1024)  # as for users

    def function(x, w, odd, head):
        logits = jnp.sin(x @ w @ odd @ odd.T) @ head
        return integers(logits, jnp.arange(R)).mean() if classes == 500 else logits

    args = draws((R, W), (W, W), (W, 40), (W, classes), scale=0.5)
    fused = fuse_cases.Fused(function, quantization="fp8")
    jax.eval_shape(fused, *args)
    products = [row for row in fused.rows if row.domain == "product"]
    assert sum("fp8" in row.served for row in products) == 1, fused
    reasons = sorted(row.reason for row in products if not row.served)
    assert reasons == sorted(["40 is no multiple of 16"] * 2 + [reason]), fused


def test_fp8_leaves_products_of_parameters():
    """What LoRA merges is computed as it is written; the product with x may be in FP8."""

    def layer(params, x):
        return x @ (params["w"] + params["a"] @ params["b"])

    w, a, b, x = draws((W, W), (W, 16), (16, W), (R, W), scale=0.5)
    fused = fuse_cases.Fused(layer, quantization="fp8")
    fuse_cases.run(fused, args=[{"w": w, "a": a, "b": b}, x])
    assert fused.served().get("product", 0) <= 1, fused
