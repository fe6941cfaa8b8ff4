"""Functions that look like sites of `fuse` and are others: their values and gradients stay.

Sizes are equal wherever they can be, so that a wrong axis fits. A domain with no sites is that of
what stands there and is proven to be something else, or is read elsewhere.
"""

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fuse_cases import Cases, attend, draw, draws
from jax import lax

from normfuse.layers.fuse import losses

N, V = 8, 16
ROUNDED = {"rounding": 2.0**-6}  # twice bfloat16's eps: it may be computed without a rounding
f32, bf16 = jnp.float32, jnp.bfloat16
softmax, stop = jax.nn.softmax, lax.stop_gradient
case = Cases(n=N, v=V, h=N // 2)


def causal(k=0):
    return jnp.tril(jnp.ones((N, N), bool), k)


# ---------------------------------------------------------------- attention


def attention(name, function, *more, **options):
    case(f"attention: {name}", "nnn nnn nnn", function, *more, **options)


def no_attention(name, function, *more, **options):
    attention(name, function, *more, attention=0, **options)


def masked(value=-1e9, keep=causal):
    return lambda s: jnp.where(keep(), s, value)


def behind(parts=1):
    """How far keys are behind queries, divided as integers are in XLA: -1 by 2 is 0, not -1."""
    found = jnp.arange(N)[:, None] - jnp.arange(N)
    return lax.div(found, jnp.full_like(found, parts))


no_attention("softmax over queries", attend(masked(), lambda s: softmax(s, -2)))
attention("causal, one less, by positions", attend(masked(keep=lambda: behind() > 0)))
attention("causal, halved towards 0", attend(masked(keep=lambda: behind(2) >= 0)))
attention("of no key, by positions", attend(masked(keep=lambda: (behind() >= 0) & (behind() < 0))))
attention("masked by a product with 0", attend(lambda s: s * causal()))
attention("a small number", attend(masked(-5.0)))
attention("a number that scores come near to", attend(masked(-1e4)), scale=15.0)
attention("-1e4 that is scaled afterwards", attend(lambda s: masked(-2e4)(s) * 1e-4))

# Rows that see nothing.
rows = np.arange(N)[:, None] % 3 > 0
NOTHING = {
    "-1e9 added": lambda s, m: s + jnp.where(m, 0.0, -1e9),
    "-1e9 selected": lambda s, m: jnp.where(m, s, -1e9),
    "finfo.min selected": lambda s, m: jnp.where(m, s, jnp.finfo(f32).min),
    "two numbers selected": lambda s, m: jnp.where(m, s, jnp.where(causal(2), -1e9, -1e30)),
    "one number after another": lambda s, m: jnp.where(m, jnp.where(causal(), s, -1e9), -1e30),
    "two added": lambda s, m: s + jnp.where(m, 0, -1e9) + jnp.where(causal(1), 0, -1e4),
    "multiplied": lambda s, m: s * m - 1e9 * (1 - m),
}


def of_lse(s):
    return jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True))


def given(mask, weights=softmax):
    return lambda q, k, v, m: attend(lambda s: mask(s, m), weights)(q, k, v)


for i, (name, mask) in enumerate(NOTHING.items()):  # constant, and given at run time, in turn
    if i % 2:
        constant = lambda s, mask=mask: mask(s, jnp.asarray(causal() & rows))
        attention(f"rows of nothing, {name}", attend(constant))
    else:
        attention(f"rows of nothing at run time, {name}", given(mask), causal() & rows)
for name in ("finfo.min selected", "-1e9 added"):
    less = given(NOTHING[name], of_lse)
    attention(f"rows of nothing, less their log-sum-exp, {name}", less, causal() & rows)
attention("a constant added to whole rows", attend(lambda s: s + jnp.where(rows, 0.0, -1e9)))
attention(
    "NaN where the mask hides it", lambda q, k, v: attend(masked())(q, k.at[:, -1].set(jnp.nan), v)
)
attention(
    "Inf where the mask hides it",
    lambda q, k, v: attend(masked(-jnp.inf))(q, k, v.at[:, -1].set(jnp.inf)),
)


def exponentials(denominator):
    """Weights without a maximum, over some function of them."""

    def weights(s):
        e = jnp.exp(s)
        return e / denominator(e.sum(-1, keepdims=True))

    return weights


attention("exponentials that overflow", attend(weights=exponentials(lambda x: x)), scale=20.0)

# Probabilities and scores that change, or that something else reads.
keep = np.random.default_rng(0).random((N, N, N)) < 0.9
after = lambda change: attend(weights=lambda s: change(softmax(s)))
attention("probabilities dropped out", after(lambda p: jnp.where(keep, p / 0.9, 0.0)))
no_attention("probabilities stopped", after(stop))
eight = lambda x: x.astype(jnp.float8_e4m3fn).astype(f32)  # quantizes: no mere rounding
no_attention("probabilities of 8 bits", after(eight))
no_attention("scores of 8 bits", attend(eight))
attention("probabilities rounded", after(lambda p: p.astype(bf16).astype(f32)), options=ROUNDED)


def reading(read, change=lambda s: s):
    """Attention, and what something else makes of its scores and probabilities."""

    def attention(q, k, v):
        s = change(jnp.einsum("btd,bsd->bts", q, k) * 0.35)
        p = softmax(s)
        return jnp.einsum("bts,bsd->btd", p, v), read(s, p)

    return attention


READERS = {
    "probabilities": reading(lambda s, p: p),
    "the log-sum-exp": reading(lambda s, p: jax.nn.logsumexp(s, -1)),
    "the best key": reading(lambda s, p: jnp.argmax(p, -1)),
    "masked scores": reading(lambda s, p: s, masked()),
}
for name, function in READERS.items():
    no_attention(f"something reads {name}", function)


def in_parts(first, second):
    """A softmax whose numerator and denominator have the maximum subtracted each on its own."""

    def weights(s):
        top = s.max(-1, keepdims=True)
        return jnp.exp(s - first(top)) / jnp.exp(s - second(top)).sum(-1, keepdims=True)

    return weights


def less_of_its_maximum(s):
    weights = jnp.exp(s - 0.7 * stop(s.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


def with_a_sink(s):
    return softmax(jnp.concatenate([s, jnp.zeros((N, N, 1))], -1))[..., :-1]


def other_derivative(function, rule=None):
    """The function with a part of its derivative, or another rule."""
    changed = jax.custom_jvp(function)
    changed.defjvp(rule or (lambda p, t: (function(*p), 0.5 * jax.jvp(function, p, t)[1])))
    return changed


def straight_through(function):
    changed = jax.custom_vjp(function)
    changed.defvjp(lambda x: (function(x), None), lambda _, g: (g,))
    return changed


unstopped = lambda x: x
WEIGHTS = {  # that are no softmax
    "the log-sum-exp stopped": lambda s: jnp.exp(s - stop(jax.nn.logsumexp(s, -1, keepdims=True))),
    "the sum stopped": exponentials(stop),
    "one maximum stopped": in_parts(stop, unstopped),
    "the other maximum stopped": in_parts(unstopped, stop),
    "one more in the sum": exponentials(lambda total: 1 + total),
    "a learned sink": with_a_sink,
    "eps in the sum": exponentials(lambda total: total + 1e-3),
    "of another derivative": other_derivative(lambda s: softmax(s)),
    "that the rule computes": other_derivative(
        lambda s: softmax(2 * s), lambda p, t: jax.jvp(lambda s: softmax(s), p, t)
    ),
}
for name, weights in WEIGHTS.items():
    no_attention(name, attend(weights=weights))
SCORES = {  # that something else changes
    "and their transpose": attend(lambda s: s + s.swapaxes(-1, -2)),
    "that may see nothing, less .7 of their maximum": attend(
        masked(jnp.finfo(f32).min), less_of_its_maximum
    ),
    "at the top alone": attend(lambda s: jnp.where(s >= lax.top_k(s, 3)[0][..., -1:], s, -1e9)),
    "with other gradients": attend(straight_through(masked())),
}
of_the_others = lambda s: softmax(s - s.mean(-1, keepdims=True))
for value in (-jnp.inf, -1e9):
    SCORES[f"masked by {value:g}, of the other's mean"] = attend(masked(value), of_the_others)
for name, function in SCORES.items():
    no_attention(f"scores {name}", function)
attention(
    "a learned temperature", lambda q, k, v, t: attend(lambda s: s / t)(q, k, v), jnp.float32(1.7)
)
attention("a negative scale after the mask", attend(lambda s: -masked(1e9)(s)))
attention("a NumPy float64 scale", attend(masked(), scale=np.float64(0.35)), low=True)
attention(
    "biases of 16 bits",
    lambda q, k, v, a, b: attend(lambda s: s + a.astype(f32) + b.astype(f32))(q, k, v),
    *[x.astype(bf16) for x in draws((N, N), (N, N), scale=9)],
)
no_attention(
    "values at the highest precision",
    lambda q, k, v: jnp.matmul(softmax(q @ k.swapaxes(1, 2)), v, precision="highest"),
)
attention(
    "a mask that widens", attend(lambda s: s + jnp.where(causal(), 0, jnp.float32(-1e9))), low=True
)
attention(
    "bfloat16 that is multiplied in float32",
    lambda q, k, v, *low: attend(masked())(*(x.astype(f32) for x in low)) + q * k * v,
    *[x.astype(bf16) for x in draws(*((N, N, N),) * 3)],
)
attention(
    "float16",
    lambda q, k, v: attend(masked(-6e4))(*(x.astype(jnp.float16) for x in (q, k, v))).astype(f32),
    options=ROUNDED,
)

# ---------------------------------------------------------------- losses

integers = optax.softmax_cross_entropy_with_integer_labels
log_softmax, logsumexp, one_hot = jax.nn.log_softmax, jax.nn.logsumexp, jax.nn.one_hot


def words(*outside):
    y = np.random.default_rng(9).integers(0, V, (N, N))
    y.reshape(-1)[3 : 3 + 5 * len(outside) : 5] = outside
    return jnp.asarray(y)


def loss_case(name, of_logits, *more, y=None, **options):
    """A loss of logits and labels."""
    y = words() if y is None else y
    function = lambda x, w, *more: of_logits(x @ w, y, *more)
    case(f"loss: {name}", "nnn nv", function, *more, scale=0.4, **options)


def no_loss(name, of_logits, *more, **options):
    loss_case(name, of_logits, *more, loss=0, **options)


def picked(z, y):
    return jnp.take_along_axis(z, y[..., None], axis=-1)[..., 0]


def focal(z, y):
    l = picked(log_softmax(z), y)
    return (-jnp.square(1 - jnp.exp(l)) * l).sum()


some = jnp.arange(V) < V - 3
loss_case(
    "labels outside, masked",
    lambda z, y: jnp.where(y < 0, 0.0, integers(z, y)).sum() / (y >= 0).sum(),
    y=words(-1, -100, -1, -100),
)
loss_case("words masked", lambda z, y: integers(jnp.where(some, z, -1e9), y).sum())
no_loss(
    "words of -inf times 0, which is NaN",
    lambda z, y: -(log_softmax(jnp.where(some, z, -jnp.inf)) * one_hot(y, V)).sum(),
)
loss_case(
    "the label added again",
    lambda z, y: logsumexp(z, -1) - picked(z, y) + picked(z, y),
    y=words(-1, V, -100, 1000),
    options={"strict": False},
)
loss_case("focal", focal)
no_loss("sigmoids", lambda z, y: optax.sigmoid_binary_cross_entropy(z, one_hot(y, V)).sum())
loss_case(
    "soft labels",
    lambda z, y, p: optax.softmax_cross_entropy(z, softmax(p)).sum(),
    draw(5, N, N, V),
)
LEFT_BIASES = {  # that are none of each word alone
    "a bias of each row": lambda z, y, b: integers(z + z[..., :1] * b, y),
    "a soft cap and then a bias": lambda z, y, b: integers(2 * jnp.tanh(z / 2) + b, y),
    "a soft cap and then a mask": lambda z, y, b: integers(
        jnp.where(some, jnp.tanh(z), -1e9), y % 9
    ),
    "a mask of some rows": lambda z, y, b: integers(
        jnp.where(some | (y > 4)[..., None], z, -1e9) + b, y % 9
    ),
    "a mask of run time": lambda z, y, b: integers(jnp.where(b > 0, z, -1e9), y),
    "words that are only made less likely": lambda z, y, b: integers(
        jnp.where(some, z + b, -9.0), y
    ),
    "two masks": lambda z, y, b: integers(
        jnp.where(jnp.arange(V) > 2, jnp.where(some, z, -1e9), -2e4) + b, y
    ),
    "a bias after a mask": lambda z, y, b: integers(jnp.where(some, z, -1e9) + b, y),
    "all words masked": lambda z, y, b: integers(jnp.where(jnp.arange(V) < 0, z + b, -1e9), y),
}
for name, loss in LEFT_BIASES.items():
    no_loss(name, lambda z, y, b, loss=loss: loss(z, y, b).sum(), draw(5, V))
for n, name, loss in (
    (N, "weights", lambda z, y, a, b: (integers(z, y) * a * b).sum()),
    (V, "biases", lambda z, y, a, b: integers(z + a + b, y).sum()),
):
    of_16 = lambda z, y, *more, loss=loss: loss(z, y, *[x.astype(f32) for x in more])
    loss_case(f"{name} of 16 bits", of_16, *[x.astype(bf16) for x in draws((n,), (n,), scale=9)])
loss_case(
    "a learned factor, exponential",
    lambda z, y, t: integers(z * jnp.exp(t), y).mean(),
    jnp.float32(0.3),
)
no_loss("the log-sum-exp stopped", lambda z, y: (stop(logsumexp(z, -1)) - picked(z, y)).sum())


def lse_in_parts(first, second):
    def loss(z, y):
        top = z.max(-1, keepdims=True)
        lse = jnp.log(jnp.exp(z - first(top)).sum(-1, keepdims=True)) + second(top)
        return (lse[..., 0] - picked(z, y)).sum()

    return loss


no_loss("the first maximum stopped", lse_in_parts(stop, unstopped))
no_loss("the second maximum stopped", lse_in_parts(unstopped, stop))
loss_case("both maxima stopped", lse_in_parts(stop, stop))
no_loss(
    "a maximum less itself, stopped",
    lambda z, y: (logsumexp(z, -1) - picked(z, y) + z.max(-1) - stop(z.max(-1))).sum(),
)
no_loss(
    "gradients of logits changed",
    lambda z, y: integers(other_derivative(lambda z: z * 1.0)(z), y).sum(),
)
no_loss("logits of 8 bits", lambda z, y: integers(eight(z), y).sum())
swapped = lambda z: z.reshape(N, N, 2, -1).swapaxes(2, 3).reshape(z.shape)
no_loss("words in another order", lambda z, y: integers(swapped(z), y).sum())
no_loss(
    "words in another order, one-hot",
    lambda z, y: optax.softmax_cross_entropy(swapped(z), one_hot(y, V)).sum(),
)
loss_case(
    "the best word in another order", lambda z, y: (integers(z, y).mean(), swapped(z).argmax(-1))
)
loss_case(
    "a mean of no rows at all",
    lambda z, y, m: integers(z, y).mean(where=m),
    jnp.zeros((N, N), bool),
)
holes = jnp.where(jnp.arange(N) % 3 > 0, draw(5, N), jnp.nan)
loss_case(
    "weights of no number that a mask hides",
    lambda z, y, w: jnp.where(jnp.isnan(w), 0.0, integers(z, y) * w).sum(),
    holes,
)
loss_case(
    "weights of no number after a mask",
    lambda z, y, w: (jnp.where(jnp.isnan(w), 0.0, integers(z, y)) * w).sum(),
    holes,
)
for name, read in {
    "the best word": lambda z: z.argmax(-1),
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

# ---------------------------------------------------------------- norms


def norm(name, function, **options):
    case(f"norm: {name}", "nnn n", lambda x, w: function(x + 0.3, 1 + w / 4), **options)


def no_norm(name, function):
    norm(name, function, norm=0)


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def rms(x, eps=1e-3):
    return lax.rsqrt(mean(x * x) + eps)


def with_rows_of_zeros(x, w):
    x = x * (jnp.arange(N) > 2)[:, None]
    return x * rms(x, eps=0.0) * w


def of_large_moments(x, w):
    x = x + 30
    m = mean(x)
    return (x - m) * lax.rsqrt(mean(x * x) - m * m + 1e-3) * w


def folded(of_mean, between=lambda x: x):
    """x·r·w + w/2 − mean·r·w, but for what is done to the mean and its factor."""

    def function(x, w):
        m, r = mean(x), lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
        return x * (between(r) * w) + (w / 2 - of_mean(x, m, r, w))

    return function


no_norm("folded, the mean added", folded(lambda x, m, r, w: -m * (r * w)))
no_norm("folded, twice the mean", folded(lambda x, m, r, w: 2 * m * (r * w)))
no_norm("folded, of another scale", folded(lambda x, m, r, w: m * (r * w[::-1])))
no_norm("folded, of another axis", folded(lambda x, m, r, w: x.mean(-2, keepdims=True) * (r * w)))
no_norm("folded, the mean stopped", folded(lambda x, m, r, w: stop(m) * (r * w)))
no_norm("folded, of another x", folded(lambda x, m, r, w: jnp.sin(x).mean(-1)[..., None] * (r * w)))
no_norm(
    "folded, the square of a statistic", folded(lambda x, m, r, w: m * (r * w), lambda r: r * r)
)
no_norm(
    "the root of a scaled statistic", lambda x, w: x * jnp.sqrt((1 / (mean(x * x) + 1)) * abs(w))
)


no_norm("by the mean of squares", lambda x, w: x / (mean(x * x) + 1e-3) * w)
no_norm("eps outside of the root", lambda x, w: x / (jnp.sqrt(mean(x * x)) + 0.1) * w)
no_norm("a floor", lambda x, w: x / jnp.maximum(jnp.sqrt(mean(x * x)), 1.2) * w)
norm("no eps, rows of zeros", with_rows_of_zeros)
norm("eps beside the deviation", lambda x, w: (x - mean(x)) / (x.std(-1, keepdims=True) + 1e-2) * w)
no_norm("centred, of squares", lambda x, w: (x - mean(x)) * rms(x) * w)
no_norm(
    "not centred, of the variance", lambda x, w: x * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * w
)
norm(
    "the variance of another axis",
    lambda x, w: (x - mean(x)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-3) * w,
)
norm("the normalised is read", lambda x, w: (lambda h: (h * w, h))(x * rms(x)))
norm(
    "an einsum with a vector of each token",
    lambda x, w: jnp.einsum("bnd,n->bnd", x * rms(x), jnp.arange(1.0, 1 + N)),
)
no_norm("statistics of 8 bits", lambda x, w: x * eight(rms(x)) * w)
no_norm(
    "a root that is squared, of rows of zeros",
    lambda x, w: (lambda x: x * lax.rsqrt(jnp.sqrt(mean(x * x)) ** 2 + 1e-3) * w)(x * (x > 9)),
)
no_norm("statistics stopped", lambda x, w: x * stop(rms(x)) * w)
no_norm(
    "rsqrt of another derivative",
    lambda x, w: x * other_derivative(lax.rsqrt)(mean(x * x) + 1e-3) * w,
)
norm("a large mean of squares", of_large_moments)

# ---------------------------------------------------------------- MLPs


def mlp(name, function, **options):
    # At 0 derivatives may differ, and reach x.
    at_zero = lambda x, *kernels: function(x - stop(x.at[0, 1:].set(0).at[1:].set(0)), *kernels)
    case(f"mlp: {name}", "nnn nn nn nn", at_zero, scale=0.6, **options)


@jax.jit
def silu(z):
    return z * jnp.tanh(z)


FALSE = {
    "a jit that is called silu": silu,
    "swish of another derivative": other_derivative(jax.nn.silu),
    "a relu that passes gradients": straight_through(jax.nn.relu),
    "stopped": lambda z: stop(jax.nn.silu(z)),
    "of 8 bits": lambda z: eight(jax.nn.silu(z)),
    "rounded": lambda z: jax.nn.silu(z.astype(bf16)).astype(f32),
}
for i, (name, f) in enumerate(FALSE.items()):
    plain = lambda x, g, u, d, f=f: f(x @ g) @ d + u[0]
    gated = lambda x, g, u, d, f=f: (f(x @ g) * (x @ u)) @ d
    kind, function = [("plain", plain), ("gated", gated)][i % 2]
    mlp(f"{kind}, {name}", function, options=ROUNDED if name == "rounded" else None)
# A gated one has an up of 0 where its gate is.
mlp("plain, a relu of maximum", lambda x, g, u, d: jnp.maximum(x @ g, 0) @ d + u[0])
act = jax.nn.silu
mlp("a precise product", lambda x, g, u, d: jnp.matmul(act(x @ g), d, precision="highest"), mlp=0)
mlp("the hidden is read", lambda x, g, u, d: (lambda h: (h @ d, h))(act(x @ g) * (x @ u)))
mlp("the gate is read", lambda x, g, u, d: (lambda z: ((act(z) * (x @ u)) @ d, z))(x @ g))

# ---------------------------------------------------------------- indexing

case("indexing: a mask", "nn nh", lambda x, a: x.at[np.arange(N) % 2 == 0].set(1.5) * a[0, 0])
case(
    "indexing: a scatter of batches",
    "nn nh",
    lambda x, a: jax.vmap(lambda x, a: x.at[np.array([1, 6, 3, 0])].set(a))(x, a),
)


@pytest.mark.parametrize("case", **case.parameters())
def test_lookalike(case):
    case.check()


# ---------------------------------------------------------------- products that FP8 leaves

R, W = 64, 32
as_integers = lambda x: jnp.round(4 * x).astype(jnp.int8)
LEFT = {  # functions and the shapes of their arguments
    "kernels of the batch": (
        lambda x, y: jnp.einsum("btd,bde->bte", x, y),
        ((4, 16, W), (4, W, W)),
    ),
    "scores": (lambda q, k: jnp.einsum("btd,bsd->bts", q, k), ((4, 32, W), (4, 32, W))),
    "HIGHEST": (
        # The activation: what is the function's own result stays for that alone.
        lambda x, w: jnp.tanh(jnp.matmul(x, w, precision=lax.Precision.HIGHEST)),
        ((R, W), (W, W)),
    ),
    "an algorithm": (
        lambda x, w: jnp.tanh(jnp.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)),
        ((R, W), (W, W)),
    ),
    "integers": (
        lambda x, w: (as_integers(x) @ as_integers(w)).astype(f32) + 0 * x.sum(),
        ((R, W), (W, W)),
    ),
    "few rows": (lambda x, w: jnp.tanh(x @ w), ((2, W), (W, W))),
    "a vector": (lambda x, w: jnp.tanh(x @ w), ((W,), (W, W))),
    "embedding by one-hot": (
        lambda t, x: one_hot(jnp.arange(R) % W, W) @ t + 0 * x.sum(),
        ((W, W), (1,)),
    ),
    "embedding by a select": (
        lambda t, x: jnp.where(jnp.arange(R)[:, None] % W == jnp.arange(W), 0.9, 0.1) @ t + 0 * x,
        ((W, W), (1,)),
    ),
}


@pytest.mark.parametrize("rows, why", [(4, "4, less than 16"), (32, "32, where others have 512")])
def test_a_reason_says_whose_rows_are_few(rows, why):
    def function(x, c, w):
        return jnp.tanh(x @ w) if rows > 4 else 0.0, jnp.tanh(c @ w)

    fused = fuse_cases.Fused(function, quantization="fp8", serves=False)
    jax.eval_shape(fused, *draws((512, W), (rows, W), (W, W)))
    assert [row.reason for row in fused.rows if row.reason] == [f"few rows: {why}"], fused


@pytest.mark.parametrize("name", LEFT)
def test_fp8_leaves(name):
    """Values and gradients are the function's own, without FP8's rounding."""
    function, shapes = LEFT[name]
    args = [x.astype(bf16).astype(f32) for x in draws(*shapes, scale=0.5)]
    served, fused = fuse_cases.compare(function, args, quantization="fp8")
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


def test_fp8_has_one_input_of_gate_and_up_in_one_order():
    def mlp(p, x):
        turned = x.reshape(R, 2, -1).swapaxes(1, 2).reshape(R, W)
        return (act(turned @ p[0]) * (x @ p[1])) @ p[2] + x

    x, *kernels = draws((R, W), *((W, W),) * 3, scale=0.3)
    change = mlp(kernels, x) - x
    found = fuse_cases.Fused(mlp, quantization="fp8")(kernels, x) - x
    assert np.linalg.norm(found - change) < 0.2 * np.linalg.norm(change)


@pytest.mark.parametrize(
    "classes, reason",
    [(500, "a softmax or a loss reads its result"), (50257, "50257 is no multiple of 16")],
)
def test_every_product_says_fp8_or_why_not(classes, reason, monkeypatch):
    """The head of a loss that stays has a row too."""
    monkeypatch.setattr(losses, "SMALLEST", 1024)  # the users' own

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
