"""Every spelling that `fuse` must find: its sites, values and gradients."""

import functools
import math

import equinox as eqx
import flax.linen as nn
import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from fuse_cases import Cases, draw, draws
from jax import lax

from normfuse import dense

B, T, H, D, E, V, F = 2, 16, 4, 8, 32, 96, 64
f32, bf16 = jnp.float32, jnp.bfloat16
softmax, silu = jax.nn.softmax, jax.nn.silu

case = Cases(b=B, t=T, h=H, d=D, e=E, v=V, f=F, k=2, g=2, s=24, n=7, l=3, p=2 * F)


def causal():
    return jnp.tril(jnp.ones((T, T), bool))


# ---------------------------------------------------------------- attention


def attend(*args, **options):
    usual = {"scores": "bthd,bshd->bhts", "values": "bhts,bshd->bthd", "scale": D**-0.5}
    return fuse_cases.attend(*args, **usual | options)


def masked(value=-1e9, keep=causal):
    return lambda s: jnp.where(keep(), s, value)


def attention(name, *args, shapes="bthd bthd bthd", low=False, **options):
    case(f"attention: {name}", shapes, attend(*args, **options), low=low, attention=1)


def attention_of(name, shapes, function, *more, **options):
    case(f"attention: {name}", shapes, function, *more, **{"attention": 1} | options)


ORDERS = {  # shapes, scores, values
    "bthd": ("bthd bthd bthd", "bthd,bshd->bhts", "bhts,bshd->bthd"),
    "bhtd": ("bhtd bhtd bhtd", "bhtd,bhsd->bhts", "bhts,bhsd->bhtd"),
    "keys of (d, s)": ("bhtd bhdt bhtd", "bhtd,bhds->bhts", "bhts,bhsd->bhtd"),
    "grouped": ("btkgd btkd btkd", "btkgd,bskd->bkgts", "bkgts,bskd->btkgd"),
    "grouped, groups last": ("btkgd btkd btkd", "btkgd,bskd->btkgs", "btkgs,bskd->btkgd"),
    "one key head": ("bthd btd btd", "bthd,bsd->bhts", "bhts,bsd->bthd"),
    "no heads": ("btd btd btd", "btd,bsd->bts", "bts,bsd->btd"),
}
for name, (shapes, scores, values) in ORDERS.items():
    keep = (lambda: causal()[:, None, None]) if "last" in name else causal
    options = {"scores": scores, "values": values, "shapes": shapes, "low": name == "grouped"}
    attention(name, masked(keep=keep), **options)

attention(
    "keys first in the scores",
    lambda s: jnp.where(causal().T, s, -jnp.inf),
    lambda s: softmax(s, -2),
    scores="bthd,bshd->bhst",
    values="bhst,bshd->bthd",
)
attention("cross, other lengths", shapes="bthd bshd bshd")
attention("soft cap", lambda s: jnp.where(causal(), 5 * jnp.tanh(s / 5), -1e9), low=True)


@case("attention: q @ k.T of split projections", attention=1)
def _():
    def attention(x, w):
        q, k, v = (y.reshape(B, T, H, D).swapaxes(1, 2) for y in jnp.split(x @ w, 3, axis=-1))
        scores = q @ jnp.swapaxes(k, -2, -1) / math.sqrt(D)
        scores = jnp.where(causal()[None, None] == 0, float("-inf"), scores)
        return (softmax(scores, axis=-1) @ v).swapaxes(1, 2).reshape(x.shape)

    return attention, draws((B, T, E), (E, 3 * E), scale=0.5)


def of_one_head(q, k, v):
    return softmax(jnp.where(causal(), q @ k.T / np.sqrt(D).astype(np.float32), -1e30)) @ v


def of_float32(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=f32) / math.sqrt(D)
    s = jnp.where(causal(), s, jnp.finfo(f32).min)
    return jnp.einsum("bhts,bshd->bthd", softmax(s).astype(v.dtype), v)


def divided_afterwards(q, k, v):
    s = jnp.where(causal(), jnp.einsum("bthd,bshd->bhts", q, k) / 3, -1e9)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return jnp.einsum("bhts,bshd->bhtd", e, v) / e.sum(-1, keepdims=True)


def split_on_the_way(q, k, v):
    s = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, 2, 2, D), k).reshape(B, H, T, T)
    p = softmax(masked(-1e37)(s / 3)).reshape(B, 2, 2, T, T)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, H, D)


def scaled_before(q, k, v):
    return attend(masked(), scale=1)(q * 0.6, k / 1.7, v)


of_jax = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
many = lambda x: jnp.repeat(x, 2, axis=2)
attention_of("vmap over batch and heads", "bthd bthd bthd", jax.vmap(jax.vmap(of_one_head, 1, 1)))
attention_of("scale on q and k", "bthd bthd bthd", scaled_before)
attention_of("scores and softmax in float32", "bthd bthd bthd", of_float32, low=True)
attention_of("divided after the values", "bthd bthd bthd", divided_afterwards, low=True)
attention_of("heads merged and split on the way", "bthd btkd btkd", split_on_the_way)
attention_of("jax.nn", "bthd btkd btkd", of_jax)
attention_of(
    "heads of keys repeated",
    "bthd btkd btkd",
    lambda q, k, v: attend(masked())(q, many(k), many(v)),
)


def by_hand(s):
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def with_a_slope_of_the_maximum(s):
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


attention("softmax, by hand", masked(), by_hand, low=True)
attention("softmax, gradient through the maximum", masked(), with_a_slope_of_the_maximum)
attention(
    "softmax, logsumexp", masked(), lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True))
)
attention("softmax, log_softmax", masked(), lambda s: jnp.exp(jax.nn.log_softmax(s)))
attention("softmax, where", lambda s: s, lambda s: softmax(s, where=causal()), low=True)


def differences():
    d = jnp.arange(T)[:, None] - jnp.arange(T)
    return d * (d < 6) + (d >= 6) * -1 >= 0


def pattern():
    return causal() & (np.random.default_rng(0).random((T, T)) < 0.8) | jnp.eye(T, dtype=bool)


def alibi(s):
    slopes = 2.0 ** -jnp.arange(1.0, H + 1)[:, None, None]
    distances = (jnp.arange(T) - jnp.arange(T)[:, None]).astype(f32)
    return masked()(s + slopes * distances).astype(s.dtype)


MASKS = {
    "tril of ones": lambda s: jnp.where(jnp.tril(jnp.ones_like(s)) > 0, s, -1e9),
    "added": lambda s: s + jnp.where(causal(), 0.0, -1e9).astype(s.dtype),
    "window": lambda s: jnp.where(causal() & ~jnp.tril(jnp.ones((T, T), bool), -5), s, -1e9),
    "window of differences": masked(keep=differences),
    "a constant pattern": masked(keep=pattern),
    "before a scale of more than 1": lambda s: masked()(s) * 1.5,
    "two": lambda s: masked()(s) + jnp.where(jnp.arange(T) < 12, 0.0, -1e9),
    "alibi": alibi,
}
for name, mask in MASKS.items():
    attention(f"mask, {name}", mask, low=name == "window")

SEEN = np.random.default_rng(0).random((B, T, T)) < 0.6
SEGMENTS = np.array([[0] * 5 + [1] * 11, [0] * 3 + [1] * 4 + [2] * 9])
NEAR = np.clip(np.arange(T) - np.arange(T)[:, None], -3, 3) + 3
by_distance = lambda b: jnp.einsum("hn,qkn->hqk", b, jax.nn.one_hot(NEAR, 7))
GIVEN = {  # functions of scores and of one more argument, which is known at run time only
    "a mask": (lambda s, m: jnp.where(m[:, None], s, -1e9), SEEN | np.eye(T, dtype=bool)),
    "a causal mask": (lambda s, m: jnp.where(m, s, -1e9), np.tril(np.ones((B, 1, T, T), bool))),
    "segments": (
        lambda s, i: jnp.where((i[:, None, :, None] == i[:, None, None]) & causal(), s, -1e9),
        SEGMENTS,
    ),
    "padded keys": (
        lambda s, n: jnp.where(jnp.arange(T) < n[:, None, None, None], s, -1e30),
        np.array([16, 5]),
    ),
    "a learned bias": (lambda s, b: masked()(s + b), draw(3, H, T, T)),
    "a bias by distance": (lambda s, b: s + b[NEAR].transpose(2, 0, 1), draw(3, 7, H)),
    "a bias by distance, as a product": (lambda s, b: s + by_distance(b), draw(3, H, 7)),
    "a mask and a bias that is a product": (
        lambda s, b: (jnp.where(causal(), 0.0, -1e9) + by_distance(b)) + s,
        draw(3, H, 7),
    ),
}
for name, (change, more) in GIVEN.items():
    attention_of(
        f"{name} given",
        "bthd bthd bthd",
        lambda q, k, v, more, change=change: attend(lambda s: change(s, more))(q, k, v),
        jnp.asarray(more),
        low=name in ("a mask", "a learned bias"),
    )


@functools.partial(attention_of, "a row that sees nothing, by where=", "bthd bshd bshd")
def _(q, k, v):
    seen = (jnp.arange(24) < jnp.array([24, 0])[:, None])[:, None, None]
    return attend(weights=lambda s: softmax(s, where=seen))(q, k, v)


@case("attention: nnx", attention=1)
def _():
    graph, state = nnx.split(nnx.MultiHeadAttention(H, E, decode=False, rngs=nnx.Rngs(0)))

    def attention(state, x):
        mask = nnx.make_causal_mask(x[..., 0])
        return nnx.merge(graph, state)(x, mask=mask, deterministic=True)

    return attention, [state, draw(0, B, T, E)]


@case("attention: Equinox", attention=1)
def _():
    layer = eqx.nn.MultiheadAttention(H, E, key=jax.random.key(0))
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)

    def attention(arrays, x):
        layer = eqx.combine(arrays, rest)
        return jax.vmap(lambda x: layer(x, x, x, mask=causal()))(x)

    return attention, [arrays, draw(0, B, T, E)]


@case("attention: three in a scan with remat", attention=3)
def _():
    @jax.checkpoint
    def block(x, w):
        q, k, v = jnp.split((x @ w["in"]).reshape(B, T, H, 3 * D), 3, -1)
        for _ in range(3):
            v = attend(masked())(q, k, v)
        return x + v.reshape(x.shape) @ w["out"], None

    w = {"in": draw(1, 2, E, 3 * E, scale=0.2), "out": draw(2, 2, E, E, scale=0.2)}
    return lambda x, w: lax.scan(block, x, w)[0], [draw(0, B, T, E), w]


# ---------------------------------------------------------------- losses


def words():
    return jnp.asarray(np.random.default_rng(9).integers(0, V, (B, T)))


def picked(z, y):
    return jnp.take_along_axis(z, y[..., None], axis=-1)[..., 0]


def z_loss(z, y):
    lse = jax.nn.logsumexp(z, -1)
    return (lse - picked(z, y) + 1e-2 * jnp.square(lse)).mean()


def lse_by_hand(z):
    return jnp.log(jnp.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)


integers = optax.softmax_cross_entropy_with_integer_labels
one_hot, log_softmax, logsumexp = jax.nn.one_hot, jax.nn.log_softmax, jax.nn.logsumexp
INTEGERS, ONE_HOT = "optax, integers", "optax, one-hot"
LOSSES = {
    INTEGERS: lambda z, y: integers(z, y).mean(),
    ONE_HOT: lambda z, y: optax.softmax_cross_entropy(z, one_hot(y, V)).mean(),
    "log_softmax, gather": lambda z, y: -picked(log_softmax(z), y).mean(),
    "log_softmax, one-hot": lambda z, y: -jnp.sum(log_softmax(z) * one_hot(y, V)) / 7,
    "log_softmax, indexed twice": lambda z, y: (
        -log_softmax(z)[jnp.arange(B)[:, None], jnp.arange(T)[None], y].mean()
    ),
    "logsumexp by hand": lambda z, y: (lse_by_hand(z) - picked(z, y)).mean(),
    "logsumexp - one-hot": lambda z, y: (
        logsumexp(z, -1) - jnp.einsum("btv,btv->bt", z, one_hot(y, V, dtype=z.dtype))
    ).sum(),
    "float32": lambda z, y: integers(z.astype(f32), y).mean(),
    "of each row": integers,
    "masked mean": lambda z, y: (integers(z, y) * (y != 3)).sum() / (y != 3).sum(),
    "soft cap": lambda z, y: integers(3 * jnp.tanh(z / 3), y).mean(),
    "label smoothing": lambda z, y: optax.softmax_cross_entropy(
        z, optax.smooth_labels(one_hot(y, V), 0.1)
    ).mean(),
    "z-loss": z_loss,
    "perplexity": lambda z, y: jnp.exp(integers(z, y).mean() / 4),
}
LOW = INTEGERS, "log_softmax, one-hot", "float32", "masked mean", "soft cap"


def loss_case(name, shapes, logits, loss=INTEGERS, y=None, **options):
    """A loss of logits that a function makes of x, a kernel and more."""
    of_logits = LOSSES.get(loss, loss)
    function = lambda *args: of_logits(logits(*args[:-1]), args[-1])
    y = words() if y is None else y
    case(f"loss: {name}", shapes, function, y, scale=0.5, **{"loss": 1} | options)


for name in LOSSES:
    loss_case(name, "bte ev", jnp.matmul, name, low=name in LOW)
for name in (INTEGERS, ONE_HOT, "masked mean", "label smoothing", "z-loss"):
    biased = lambda x, w, b: x @ w + b
    loss_case(f"a bias, {name}", "bte ev v", biased, name, low=name == INTEGERS)


def of_equinox(x, w, b):
    layer = eqx.nn.Linear(E, V, key=jax.random.key(0))
    layer = eqx.tree_at(lambda l: (l.weight, l.bias), layer, (w, b))
    return jax.vmap(jax.vmap(layer))(x)


def without_some(x, w, b):
    return jnp.where(jnp.arange(V) < V - 9, x @ w + b, -jnp.inf)


def selected(z, y):
    each = integers(z, jnp.maximum(y, 0))
    return jnp.where(y == -100, 0, each).sum() / (y != -100).sum()


loss_case("a tied table", "bte ve", lambda x, w: x @ w.T)
loss_case("in rows", "bte ev", lambda x, w: (x.reshape(-1, E) @ w).reshape(B, T, V))
loss_case(
    "sliced logits",
    "bte ev",
    lambda x, w: (x @ w)[:, :-1],
    lambda z, y: integers(z, y[:, 1:]).mean(),
)
loss_case("a bias of nn.Dense", "bte ev v", lambda x, w, b: x @ w + b.reshape(1, 1, V))
loss_case("a scaled bias that is subtracted", "bte ev v", lambda x, w, b: x @ w - 2 * b)
loss_case("two biases", "bte ev v v", lambda x, w, b, c: x @ w + b + c)
loss_case("one number as a bias", "bte ev -", lambda x, w, b: x @ w + b)
loss_case("eqx.nn.Linear", "bte ve v", of_equinox)
loss_case(
    "an added mask of the vocabulary",
    "bte ev",
    lambda x, w: x @ w + jnp.where(jnp.arange(V) < V - 9, 0, -1e9),
)
loss_case("a mask that is given", "bte ev v", lambda x, w, m: x @ w + 1e4 * m)
loss_case("a bias and a mask of -inf", "bte ev v", without_some, y=jnp.minimum(words(), V - 10))
for name in ("of each row", "log_softmax, one-hot", "z-loss"):
    loss_case(
        f"labels that a mask hides, {name}",
        "bte ev",
        lambda x, w: jnp.where(jnp.arange(V) > 19, x @ w, -1e9),
        name,
    )
loss_case(
    "labels that a mask hides, summed",
    "bte ev",
    lambda x, w: jnp.where(np.arange(V) % 5 > 0, x @ w, -2e4),
)
loss_case("scaled inputs", "bte ev", lambda x, w: (x * E**-0.5) @ w)
loss_case(
    "vmapped examples",
    "bte ev",
    lambda x, w: jax.vmap(lambda x: x @ w)(x),
    lambda z, y: jax.vmap(LOSSES[INTEGERS])(z, y).mean(),
)
loss_case("-100 ignored by where", "bte ev", jnp.matmul, selected, y=words().at[:, ::3].set(-100))
loss_case("one-hot of -1 is nothing", "bte ev", jnp.matmul, ONE_HOT, y=words().at[:, ::3].set(-1))


@functools.partial(case, "loss: a chunked scan", "bte ev", loss=1)
def _(x, w):
    def step(total, xy):
        x, y = xy
        return total + integers(x @ w, y).sum().astype(f32), None

    chunks = x.reshape(B, 4, -1, E).swapaxes(0, 1), words().reshape(B, 4, -1).swapaxes(0, 1)
    return lax.scan(jax.checkpoint(step), jnp.zeros((), f32), chunks)[0] / (B * T)


# ---------------------------------------------------------------- norms


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def rms(x, eps=1e-6):
    return lax.rsqrt(mean(jnp.square(x)) + eps)


def low_rms(x):
    """Normalises in float32 and rounds."""
    wide = x.astype(f32)
    return (wide * rms(wide)).astype(x.dtype)


def rounded_rms(x, w):
    """Rounds its result, once."""
    wide = x.astype(f32)
    return (wide * rms(wide) * w.astype(f32)).astype(x.dtype)


def moments(x, w):
    m = mean(x)
    return (x - m) * lax.rsqrt(mean(x * x) - m * m + 1e-6) * w


def folded(x, w, own=lambda x, m, r, w, b: x * (r * w) + (b - m * (r * w))):
    """Keras' LayerNormalization."""
    return own(x, mean(x), lax.rsqrt(x.var(-1, keepdims=True) + 1e-6), w, w[::-1])


def layer_norm(x, w):
    return (x - mean(x)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * w


standardize = functools.partial(jax.nn.standardize, epsilon=1e-6)
of_a_row = lambda r, w: r * lax.rsqrt(jnp.mean(r * r) + 1e-6) * w
NORMS = {  # functions of x and w
    "rsqrt": lambda x, w: x * rms(x) * w,
    "square root": lambda x, w: x / jnp.sqrt(mean(x**2) + 1e-5) * w,
    "weight before the division": lambda x, w: w * x / jnp.sqrt(mean(x * x)),
    "einsum": lambda x, w: (
        x * lax.rsqrt(jnp.einsum("...d,...d->...", x, x)[..., None] / E + 1e-6) * w
    ),
    "power": lambda x, w: x * jnp.power(mean(x**2) + 1e-6, -0.5) * w,
    "1 + w": lambda x, w: x * rms(x) * (1 + w),
    "sum times 1/n": lambda x, w: (
        x * lax.rsqrt((x * x).sum(-1, keepdims=True) * (1 / E) + 1e-6) * w
    ),
    "reciprocal": lambda x, w: x * lax.reciprocal(jnp.sqrt(mean(x * x) + 1e-6)) * w,
    "eps within the sum": lambda x, w: (
        x * math.sqrt(E) / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + E * 1e-6) * w
    ),
    "without eps": lambda x, w: x * lax.rsqrt(mean(x * x)) * w,
    "statistics in float32": lambda x, w: (x * rms(x.astype(f32)).astype(x.dtype)) * w,
    "rounded, then the weight": lambda x, w: low_rms(x) * w,
    "1 + w in float32": lambda x, w: rounded_rms(x, 1 + w.astype(f32)),
    "rounded, then the weight by an einsum": lambda x, w: jnp.einsum("...k,k->...k", low_rms(x), w),
    "no weight": lambda x, w: x * rms(x),
    "vmapped rows": lambda x, w: jax.vmap(jax.vmap(lambda r: of_a_row(r, w)))(x),
    "and a bias": lambda x, w: x * rms(x) * w + w[::-1],
    "gated after": lambda x, w: x * rms(x) * w * silu(x[..., ::-1]),
    "layer norm": layer_norm,
    "layer norm, squares less the mean's": moments,
    "layer norm, no scale": lambda x, w: standardize(x),
    "layer norm, folded": folded,
    "layer norm, folded, less the mean": lambda x, w: folded(
        x, w, lambda x, m, r, w, b: x * (r * w) + (-m * (r * w) + b)
    ),
    "layer norm, folded in parts": lambda x, w: folded(
        x, w, lambda x, m, r, w, b: b + x * r * w - m * r * w
    ),
    "layer norm, folded before its scale": lambda x, w: folded(
        x, w, lambda x, m, r, w, b: (r * x - r * m) * w + b
    ),
}
for name, norm in NORMS.items():
    low = name.startswith(("rsqrt", "rounded", "1 + w in"))
    case(f"norm: {name}", "bte e", norm, low=low, norm=1)

ADAPTIVE = {  # functions and the shapes of their arguments
    "heads": ("bthd d", lambda x, w: x * rms(x) * w),
    "heads split from features": (
        "bte d",
        lambda x, w: (low_rms(x.reshape(B, T, H, D)) * w).reshape(x.shape),
    ),
    "gated before": ("bte bte e", lambda x, g, w: low_rms(x * silu(g)) * w),
    "residual": ("bte bte e", lambda x, y, w: (x + y, low_rms(x + y) * w)),
    "adaptive layer norm": (
        "bte be be",
        lambda x, s, b: standardize(x) * (1 + s[:, None]) + b[:, None],
    ),
    "adaptive, of one array": (
        "bte bf",
        lambda x, c: standardize(x) * (1 + c[:, None, :E]) + c[:, None, E:],
    ),
    "adaptive layer norm of a sum": (
        "bte bte be be",
        lambda x, y, s, b: (x + y, standardize(x + y) * (1 + s[:, None]) + b[:, None]),
    ),
    "adaptive RMS": ("bte be", lambda x, s: low_rms(x) * (1 + s[:, None])),
    "in a scan": (
        "bte le",
        lambda x, w: lax.scan(lambda x, w: (x + low_rms(x) * w, None), x, w)[0],
    ),
}
for name, (shapes, norm) in ADAPTIVE.items():
    case(f"norm: {name}", shapes, norm, norm=1)
case(
    "norm: that a loss reads",
    "bte e ev",
    lambda x, w, kernel: integers(rounded_rms(x, w) @ kernel, words()).mean(),
    scale=0.5,
    norm=1,
    loss=1,
    low=True,
)
case(
    "norm: of queries and keys",
    "bthd bthd bthd d",
    lambda q, k, v, w: attend()(rounded_rms(q, w), rounded_rms(k, w), v),
    norm=2,
    attention=1,
    low=True,
)
case(
    "two: an attention and the norms of its result, which it lays out anew",
    "bthd bthd bthd d",
    lambda q, k, v, w: (
        (y := attend(masked())(q, k, v)),
        rounded_rms(y, w),
        low_rms(y.reshape(B, T, -1)),
    ),
    low=True,
    attention=1,
    norm=2,
)
case(
    "norm: a pre-norm and a post-norm",
    "bte e e ee",
    lambda x, a, b, k: x + low_rms(jnp.tanh((low_rms(x) * a) @ k)) * b,
    norm=2,
)

LAYERS = {
    "nnx.RMSNorm": lambda: nnx.RMSNorm(E, rngs=nnx.Rngs(0)),
    "nnx.LayerNorm": lambda: nnx.LayerNorm(E, rngs=nnx.Rngs(0)),
    "nnx.LayerNorm, two passes": lambda: nnx.LayerNorm(
        E, use_fast_variance=False, rngs=nnx.Rngs(0)
    ),
    "nn.RMSNorm": lambda: nn.RMSNorm(),
    "nn.LayerNorm": lambda: nn.LayerNorm(),
    "eqx.nn.RMSNorm": lambda: eqx.nn.RMSNorm(E),
    "eqx.nn.LayerNorm": lambda: eqx.nn.LayerNorm(E),
}


def functional(layer, x):
    """A framework's layer as a function of its arrays and x."""
    if isinstance(layer, nnx.Module):
        graph, state = nnx.split(layer)
        return lambda state, x: nnx.merge(graph, state)(x), [state, x]
    if isinstance(layer, nn.Module):
        return layer.apply, [layer.init(jax.random.key(0), x), x]
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)
    call = lambda arrays, x: jax.vmap(jax.vmap(eqx.combine(arrays, rest)))(x)
    return call, [arrays, x]


for name, make in LAYERS.items():
    case(f"norm: {name}", norm=1)(lambda make=make: functional(make(), 2 + draw(0, B, T, E)))

# ---------------------------------------------------------------- MLPs


def gelu_by_hand(z):
    return 0.5 * z * (1 + jnp.tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))


def of_one_kernel(x, w, d):
    g, u = jnp.split(x @ w, 2, -1)
    return (silu(g) * u) @ d


def of_stacked_kernels(x, w, d):
    g, u = jnp.einsum("bte,gef->gbtf", x, w)
    return (silu(g) * u) @ d


def by_einsums(x, g, u, d):
    gate, up = (jnp.einsum("bte,ef->btf", x, w) for w in (g, u))
    return jnp.einsum("btf,fe->bte", silu(gate) * up, d)


gated = lambda f: lambda x, g, u, d: (f(x @ g) * (x @ u)) @ d
MLPS = {
    "gated by silu": ("bte ef ef fe", gated(silu)),
    "gated by gelu": ("bte ef ef fe", gated(jax.nn.gelu)),
    "gated by gelu by hand": ("bte ef ef fe", gated(gelu_by_hand)),
    "gated by sigmoid": ("bte ef ef fe", gated(jax.nn.sigmoid)),
    "gate on the right": ("bte ef ef fe", lambda x, g, u, d: ((x @ u) * silu(x @ g)) @ d),
    "kernels (out, in)": ("bte fe fe ef", lambda x, g, u, d: (silu(x @ g.T) * (x @ u.T)) @ d.T),
    "einsum": ("bte ef ef fe", by_einsums),
    "one kernel, split": ("bte ep fe", of_one_kernel),
    "stacked kernels": ("bte gef fe", of_stacked_kernels),
    "vmapped rows": (
        "bte fe fe ef",
        lambda x, g, u, d: jax.vmap(jax.vmap(lambda r: d @ (silu(g @ r) * (u @ r))))(x),
    ),
    "with biases": (
        "bte ef ef fe f f",
        lambda x, g, u, d, a, b: (silu(x @ g + a) * (x @ u + b)) @ d,
    ),
    "plain gelu, biases": ("bte ef f fe e", lambda x, w, a, d, b: jax.nn.gelu(x @ w + a) @ d + b),
    "squared relu": ("bte ef fe", lambda x, w, d: jnp.square(jax.nn.relu(x @ w)) @ d),
}
for name, (shapes, mlp) in MLPS.items():
    case(f"mlp: {name}", shapes, mlp, scale=0.4, low=name == "gated by silu", mlp=1)
silu_by_hand = lambda z: z * (1 / (1 + jnp.exp(-z)))
case("mlp: gated by silu by hand", "bte ef ef fe", gated(silu_by_hand), scale=0.4)  # it may stay

# ---------------------------------------------------------------- indexing


def rotary(x, a):
    even, odd = x[..., ::2], x[..., 1::2]
    y = jnp.zeros_like(x).at[..., ::2].set(even * jnp.cos(a) - odd * jnp.sin(a))
    return y.at[..., 1::2].set(even * jnp.sin(a) + odd * jnp.cos(a))


case("indexing: rotary embedding", "fe ft", rotary, indexing=1)


@pytest.mark.parametrize("case", **case.parameters())
def test_spelling(case):
    case.check()


# ---------------------------------------------------------------- what is served by what


def test_a_norm_that_is_read_in_two_dtypes_is_computed_once():
    """A router in float32 reads what the layers read in bfloat16, say."""

    def function(x, w):
        y = rounded_rms(x, w)
        return jnp.sin(y), jnp.sin(y.astype(f32))

    args = [a.astype(bf16) for a in draws((B, T, E), (E,))]
    fused = fuse_cases.Fused(function)
    for got, exact in zip(fused(*args), function(*args), strict=True):
        assert got.dtype == exact.dtype
        # A bfloat16 y may be rounded to its neighbour, 2^-8 of it; it is below 16.
        np.testing.assert_allclose(got.astype(f32), exact.astype(f32), rtol=0, atol=2.0**-4)
    assert fused.served() == {"norm": 1}


def test_a_loss_divided_by_a_sum_of_ones_is_one_sum():
    """EasyLM divides by the sum of its mask; with a row each, logits would be computed again."""

    def loss(x, w, y):
        valid = jnp.ones((B, T))
        rows = jnp.where(valid > 0, picked(log_softmax(x @ w), y), 0.0)
        return -jnp.mean(rows.sum(-1) / jnp.maximum(valid.sum(-1), 1e-10))

    fused = fuse_cases.Fused(loss)
    jax.eval_shape(fused, draw(0, B, T, E), draw(1, E, V), words())
    assert [row.served for row in fused.rows] == ["linear_cross_entropy: sum"]


def test_a_loss_that_a_mask_selects_and_another_counts_is_one_sum():
    def loss(x, w, y):
        rows = jnp.where(y > 3, -picked(log_softmax(x @ w), y), 0.0)
        return jnp.sum(rows * (y < 9))

    fused = fuse_cases.Fused(loss)
    jax.eval_shape(fused, draw(0, B, T, E), draw(1, E, V), words())
    assert [row.served for row in fused.rows] == ["linear_cross_entropy: sum"]


@pytest.mark.parametrize("narrow, dtype", [(bf16, "bfloat16"), (f32, "float32")])
def test_attention_is_computed_as_wide_as_its_result_is_kept(narrow, dtype):
    """What is rounded on the way may be computed in bfloat16, as cuDNN can."""

    def function(q, k, v):
        y = attend()(*(x.astype(f32) for x in (q, k, v)))
        return jnp.sin(y.astype(narrow).reshape(B, -1).astype(f32))

    fused = fuse_cases.Fused(function)
    jax.eval_shape(fused, *[jax.ShapeDtypeStruct((B, T, 2, E), bf16)] * 3)
    assert [row.what.split()[-1] for row in fused.rows] == [dtype]


# ---------------------------------------------------------------- products, in FP8

in_a_scan = lambda x, w: lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0]
X, W = (B, T, E), (E, F)
PRODUCTS = {  # function, shapes, products
    "matmul": (lambda x, w: x @ w, (X, W), 1),
    "transposed kernel": (lambda x, w: x @ w.T, (X, (F, E)), 1),
    "einsum to heads": (lambda x, w: jnp.einsum("bte,ehd->bthd", x, w), (X, (E, 4, 16)), 1),
    "features first": (lambda x, w: jnp.einsum("ebt,ef->fbt", x, w), ((E, B, T), W), 1),
    "vmapped rows": (lambda x, w: jax.vmap(jax.vmap(lambda r: w @ r))(x), (X, (F, E)), 1),
    "cast kernel": (lambda x, w: x @ w.astype(f32).astype(x.dtype), (X, W), 1),
    "joined kernels": (lambda x, v, w: jnp.tanh(x) @ jnp.concatenate([v, w], 1), (X, W, W), 1),
    "kernels stacked for a scan": (
        lambda x, v, w: in_a_scan(x, jnp.stack([v, w])),
        (X, (E, E), (E, E)),
        1,
    ),
    "frozen kernel": (lambda x, w: x @ lax.stop_gradient(w) * w[0], (X, W), 1),
    "q, k, v of one input": (lambda x, q, k, v: (x @ q, x @ k, x @ v), (X, W, W, W), 3),
    "of this library": (dense, (X, W), 1),
    "of this library, with a bias and an activation": (
        functools.partial(dense, activation="gelu"),
        (X, W, (F,)),
        1,
    ),
    "in a scan": (in_a_scan, (X, (3, E, E)), 1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    """In FP8: served, within FP8's rounding of float32, and not equal to it."""
    function, shapes, count = PRODUCTS[name]
    low = [x.astype(bf16) for x in draws(*shapes, scale=0.5)]
    # A result of the function may be logits, which stay: something has to come after it.
    whole = lambda *args: jax.tree.map(jnp.sin, function(*args))
    fused = fuse_cases.Fused(whole, quantization="fp8")
    exact, got = fuse_cases.run(whole, fused, args=low)["float32"]
    assert fused.served() == {"product": count}, str(fused)
    # e4m3 has 3 bits after the point, e5m2 two: uniform errors of 2^-4 and 2^-3 at most, 1/√3 of
    # that on average, from two operands; layers add up.
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got[:2]), jax.tree.leaves(exact[:2]))):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 0.3
        assert i or error > 2e-3, "not quantized"
    fuse_cases.check_types(got, exact)
