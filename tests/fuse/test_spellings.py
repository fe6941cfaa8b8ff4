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

B, T, H, D, E, V = 2, 16, 4, 8, 32, 96
BTHD, BHTD = (B, T, H, D), (B, H, T, D)
BTE = (B, T, E)
f32, bf16 = jnp.float32, jnp.bfloat16
softmax = jax.nn.softmax

case = Cases()


def causal(t=T, s=None):
    return jnp.tril(jnp.ones((t, s or t), bool))


# ---------------------------------------------------------------- attention


BHTS = {"scores": "bthd,bshd->bhts", "values": "bhts,bshd->bthd", "scale": D**-0.5}


def attend(*args, **options):
    return fuse_cases.attend(*args, **BHTS | options)


def masked(value=-1e9, keep=causal):
    return lambda s: jnp.where(keep(), s, value)


QKV = BTHD, BTHD, BTHD

ORDERS = {  # scores, values, shapes
    "bthd": ("bthd,bshd->bhts", "bhts,bshd->bthd", QKV),
    "bhtd": ("bhtd,bhsd->bhts", "bhts,bhsd->bhtd", (BHTD, BHTD, BHTD)),
    "keys of (d, s)": ("bhtd,bhds->bhts", "bhts,bhsd->bhtd", (BHTD, (B, H, D, T), BHTD)),
    "grouped": (
        "btkgd,bskd->bkgts",
        "bkgts,bskd->btkgd",
        ((B, T, 2, 2, D), (B, T, 2, D), (B, T, 2, D)),
    ),
    "grouped, groups last": (
        "btkgd,bskd->btkgs",
        "btkgs,bskd->btkgd",
        ((B, T, 2, 2, D), (B, T, 2, D), (B, T, 2, D)),
    ),
    "one key head": ("bthd,bsd->bhts", "bhts,bsd->bthd", (BTHD, (B, T, D), (B, T, D))),
    "no heads": ("btd,bsd->bts", "bts,bsd->btd", ((B, T, D),) * 3),
}
for name, (scores, values, shapes) in ORDERS.items():
    keep = (lambda: causal()[:, None, None]) if "last" in name else causal
    case(
        f"attention: {name}",
        lambda a=scores, b=values, shapes=shapes, keep=keep: (
            attend(masked(keep=keep), scores=a, values=b),
            draws(*shapes),
        ),
        attention=1,
        low="one" in name or "grouped" in name,
    )

case(
    "attention: products the other way round",
    lambda: (
        lambda q, k, v: jnp.einsum(
            "bshd,bhts->bthd", v, softmax(masked()(jnp.einsum("bshd,bthd->bhts", k, q) / 3))
        ),
        draws(*QKV),
    ),
    attention=1,
)
case(
    "attention: keys first in the scores",
    lambda: (
        attend(
            lambda s: jnp.where(causal().T, s, -jnp.inf),
            lambda s: softmax(s, -2),
            scores="bthd,bshd->bhst",
            values="bhst,bshd->bthd",
        ),
        draws(*QKV),
    ),
    attention=1,
)


@case("attention: q @ k.T of split projections", attention=1, low=True)
def _():
    def attention(x, w):
        heads = (y.reshape(B, T, H, D).swapaxes(1, 2) for y in jnp.split(x @ w, 3, axis=-1))
        q, k, v = heads
        scores = q @ jnp.swapaxes(k, -2, -1) / math.sqrt(D)
        scores = jnp.where(causal()[None, None] == 0, float("-inf"), scores)
        return (softmax(scores, axis=-1) @ v).swapaxes(1, 2).reshape(x.shape)

    return attention, draws(BTE, (E, 3 * E), scale=0.5)


@case("attention: vmap over batch and heads", attention=1)
def _():
    def one(q, k, v):
        return softmax(jnp.where(causal(), q @ k.T / np.sqrt(D).astype(np.float32), -1e30)) @ v

    return jax.vmap(jax.vmap(one, 1, 1)), draws(*QKV)


@case("attention: cross, other lengths", attention=1)
def _():
    return attend(), draws(BTHD, (B, 24, H, D), (B, 24, H, D))


@case("attention: scale on q and k", attention=1)
def _():
    return lambda q, k, v: attend(masked(), scale=1)(q * 0.6, k / 1.7, v), draws(*QKV)


@case("attention: scores and softmax in float32", attention=1, low=True)
def _():
    def attention(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=f32) / math.sqrt(D)
        s = jnp.where(causal(), s, jnp.finfo(f32).min)
        return jnp.einsum("bhts,bshd->bthd", softmax(s).astype(v.dtype), v)

    return attention, draws(*QKV)


def by_hand(s):
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


SOFTMAX = {
    "by hand": by_hand,
    "gradient through the maximum": lambda s: (lambda e: e / jnp.sum(e, -1, keepdims=True))(
        jnp.exp(s - jnp.max(s, -1, keepdims=True))
    ),
    "logsumexp": lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
    "log_softmax": lambda s: jnp.exp(jax.nn.log_softmax(s)),
    "where": lambda s: softmax(s, where=causal()),
}
for name, weights in SOFTMAX.items():
    case(
        f"attention: softmax, {name}",
        lambda f=weights, name=name: (
            attend(masked() if name != "where" else lambda s: s, f),
            draws(*QKV),
        ),
        attention=1,
        low="hand" in name or name == "where",
    )


@case("attention: divided after the values", attention=1, low=True)
def _():
    def attention(q, k, v):
        s = jnp.where(causal(), jnp.einsum("bthd,bshd->bhts", q, k) / 3, -1e9)
        e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
        return jnp.einsum("bhts,bshd->bhtd", e, v) / e.sum(-1, keepdims=True)

    return attention, draws(*QKV)


MASKS = {
    "where -inf": masked(-jnp.inf),
    "where finfo.min": lambda s: jnp.where(causal(), s, jnp.finfo(s.dtype).min),
    "tril of ones": lambda s: jnp.where(jnp.tril(jnp.ones_like(s)) > 0, s, -1e9),
    "added": lambda s: s + jnp.where(causal(), 0.0, -1e9).astype(s.dtype),
    "window": lambda s: jnp.where(causal() & ~jnp.tril(jnp.ones((T, T), bool), -5), s, -1e9),
    "window of differences": lambda s: jnp.where(
        (d := jnp.arange(T)[:, None] - jnp.arange(T)) * (d < 6) + (d >= 6) * -1 >= 0, s, -1e9
    ),
    "a constant pattern": lambda s: jnp.where(
        causal() & (np.random.default_rng(0).random((T, T)) < 0.8) | jnp.eye(T, dtype=bool),
        s,
        -1e9,
    ),
    "before a scale of more than 1": lambda s: jnp.where(causal(), s, -1e9) * 1.5,
    "two": lambda s: jnp.where(causal(), s, -1e9) + jnp.where(jnp.arange(T) < 12, 0.0, -1e9),
    "alibi": lambda s: jnp.where(
        causal(),
        s
        + 2.0 ** -jnp.arange(1.0, H + 1)[:, None, None]
        * (jnp.arange(T) - jnp.arange(T)[:, None]).astype(f32),
        -1e9,
    ).astype(s.dtype),
}
for name, mask in MASKS.items():
    case(
        f"attention: mask, {name}",
        lambda mask=mask: (attend(mask), draws(*QKV)),
        attention=1,
        low=name in ("window", "added", "two"),
    )


@case("attention: soft cap", attention=1, low=True)
def _():
    return attend(lambda s: jnp.where(causal(), 5 * jnp.tanh(s / 5), -1e9)), draws(*QKV, scale=1.5)


SEEN = np.random.default_rng(0).random((B, T, T)) < 0.6
SEGMENTS = [[0] * 5 + [1] * 11, [0] * 3 + [1] * 4 + [2] * 9]
NEAR = np.clip(np.arange(T) - np.arange(T)[:, None], -3, 3) + 3
mask_added = lambda: jnp.where(causal(), 0.0, -1e9)
GIVEN = {  # functions of scores and of one more argument, which is known at run time only
    "a mask": (lambda s, m: jnp.where(m[:, None], s, -1e9), SEEN | np.eye(T, dtype=bool)),
    "a causal mask": (lambda s, m: jnp.where(m, s, -1e9), np.tril(np.ones((B, 1, T, T), bool))),
    "segments": (
        lambda s, i: jnp.where((i[:, None, :, None] == i[:, None, None]) & causal(), s, -1e9),
        np.array(SEGMENTS),
    ),
    "padded keys": (
        lambda s, n: jnp.where(jnp.arange(T) < n[:, None, None, None], s, -1e30),
        np.array([16, 5]),
    ),
    "a learned bias": (lambda s, b: masked()(s + b), draw(3, H, T, T)),
    "a bias by distance": (lambda s, b: s + b[NEAR].transpose(2, 0, 1), draw(3, 7, H)),
    "a bias by distance, as a product": (
        lambda s, b: s + jnp.einsum("hn,qkn->hqk", b, jax.nn.one_hot(NEAR, 7)),
        draw(3, H, 7),
    ),
    "a mask and a bias that is a product": (
        lambda s, b: (mask_added() + jnp.einsum("hn,qkn->hqk", b, jax.nn.one_hot(NEAR, 7))) + s,
        draw(3, H, 7),
    ),
}
for name, (change, more) in GIVEN.items():
    case(
        f"attention: {name} given",
        lambda change=change, more=more: (
            lambda q, k, v, more: attend(lambda s: change(s, more))(q, k, v),
            [*draws(*QKV), jnp.asarray(more)],
        ),
        attention=1,
        low=name in ("a mask", "segments", "a learned bias"),
    )

MANY = {  # make keys and values of fewer heads those of the queries' number
    "repeated": lambda x: jnp.repeat(x, 2, axis=2),
    "broadcast": lambda x: jnp.broadcast_to(x[:, :, :, None], (B, T, 2, 2, D)).reshape(BTHD),
}
for name, many in MANY.items():
    case(
        f"attention: heads of keys {name}",
        lambda many=many: (
            lambda q, k, v: attend(masked())(q, many(k), many(v)),
            draws(BTHD, (B, T, 2, D), (B, T, 2, D)),
        ),
        attention=1,
    )


@case("attention: a row that sees nothing, by where=", attention=1)
def _():
    def attention(q, k, v, n):
        seen = (jnp.arange(24) < n[:, None])[:, None, None]
        return attend(weights=lambda s: softmax(s, where=seen))(q, k, v)

    return attention, [*draws(BTHD, (B, 24, H, D), (B, 24, H, D)), jnp.array([24, 0])]


@case("attention: jax.nn", attention=1)
def _():
    return (
        functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
        draws(BTHD, (B, T, 2, D), (B, T, 2, D)),
    )


@case("attention: nnx", attention=1, low=True)
def _():
    layer = nnx.MultiHeadAttention(H, E, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def attention(state, x):
        mask = nnx.make_causal_mask(x[..., 0])
        return nnx.merge(graph, state)(x, mask=mask, deterministic=True)

    return attention, [state, draw(0, *BTE)]


@case("attention: Linen", attention=1)
def _():
    layer, x = nn.MultiHeadDotProductAttention(H), draw(0, *BTE)

    def attention(variables, x):
        return layer.apply(variables, x, mask=nn.make_causal_mask(x[..., 0]))

    return attention, [layer.init(jax.random.key(0), x), x]


@case("attention: Equinox", attention=1)
def _():
    layer = eqx.nn.MultiheadAttention(H, E, key=jax.random.key(0))
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)

    def attention(arrays, x):
        layer = eqx.combine(arrays, rest)
        return jax.vmap(lambda x: layer(x, x, x, mask=causal()))(x)

    return attention, [arrays, draw(0, *BTE)]


@case("attention: heads merged and split on the way", attention=1)
def _():
    def attention(q, k, v):
        s = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, 2, 2, D), k).reshape(B, H, T, T)
        p = softmax(masked(-1e37)(s / 3)).reshape(B, 2, 2, T, T)
        return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(BTHD)

    return attention, draws(BTHD, (B, T, 2, D), (B, T, 2, D))


@case("attention: three in a scan with remat", attention=3)
def _():
    @jax.checkpoint
    def block(x, w):
        q, k, v = jnp.split((x @ w["in"]).reshape(B, T, H, 3 * D), 3, -1)
        for _ in range(3):
            v = attend(masked())(q, k, v)
        return x + v.reshape(x.shape) @ w["out"], None

    w = {"in": draw(1, 2, E, 3 * E, scale=0.2), "out": draw(2, 2, E, E, scale=0.2)}
    return lambda x, w: lax.scan(block, x, w)[0], [draw(0, *BTE), w]


# ---------------------------------------------------------------- losses


def words(i=9, shape=(B, T)):
    return jnp.asarray(np.random.default_rng(i).integers(0, V, shape))


def picked(z, y):
    return jnp.take_along_axis(z, y[..., None], axis=-1)[..., 0]


LOSSES = {
    "optax, integers": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y).mean(),
    "optax, one-hot": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, V)).mean(),
    "log_softmax, gather": lambda z, y: -picked(jax.nn.log_softmax(z), y).mean(),
    "log_softmax, one-hot": lambda z, y: -jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(y, V)) / 7,
    "log_softmax, indexed twice": lambda z, y: (
        -jax.nn.log_softmax(z)[jnp.arange(B)[:, None], jnp.arange(T)[None], y].mean()
    ),
    "logsumexp - gather": lambda z, y: (jax.nn.logsumexp(z, -1) - picked(z, y)).mean(),
    "logsumexp by hand": lambda z, y: (
        jnp.log(jnp.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1) - picked(z, y)
    ).mean(),
    "logsumexp - one-hot": lambda z, y: (
        jax.nn.logsumexp(z, -1) - jnp.einsum("btv,btv->bt", z, jax.nn.one_hot(y, V, dtype=z.dtype))
    ).sum(),
    "float32": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(
        z.astype(f32), y
    ).mean(),
    "sum": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y).sum(),
    "of each row": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y),
    "masked mean": lambda z, y: (
        (optax.softmax_cross_entropy_with_integer_labels(z, y) * (y != 3)).sum() / (y != 3).sum()
    ),
    "mask within the one-hot": lambda z, y: (
        -jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(y, V) * (y % 3 > 0)[..., None]) / 9
    ),
    "soft cap": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(
        3 * jnp.tanh(z / 3), y
    ).mean(),
    "label smoothing": lambda z, y: optax.softmax_cross_entropy(
        z, optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)
    ).mean(),
    "z-loss": lambda z, y: (lambda lse: (lse - picked(z, y) + 1e-2 * jnp.square(lse)).mean())(
        jax.nn.logsumexp(z, -1)
    ),
    "perplexity": lambda z, y: jnp.exp(
        optax.softmax_cross_entropy_with_integer_labels(z, y).mean() / 4
    ),
}
BF16 = (
    "optax, integers",
    "optax, one-hot",
    "log_softmax, gather",
    "float32",
    "masked mean",
    "soft cap",
)
for name, loss in LOSSES.items():
    case(
        f"loss: {name}",
        lambda loss=loss: (
            lambda x, w, y: loss(x @ w, y),
            [draw(0, *BTE), draw(1, E, V, scale=0.3), words()],
        ),
        loss=1,
        low=name in BF16,
    )
    if name in (*BF16, "label smoothing", "z-loss") and name != "soft cap":
        case(
            f"loss: a bias, {name}",
            lambda loss=loss: (
                lambda x, w, b, y: loss(x @ w + b, y),
                [draw(0, *BTE), draw(1, E, V, scale=0.3), draw(2, V), words()],
            ),
            loss=1,
            low=name in BF16,
        )

integers = LOSSES["optax, integers"]


def of_rows(name, product, *shapes, loss=integers, y=None, **options):
    case(
        f"loss: {name}",
        lambda: (
            lambda *args: loss(product(*args[:-1]), args[-1]),
            [*draws(*shapes, scale=0.5), words() if y is None else y],
        ),
        **{"loss": 1} | options,
    )


of_rows("a tied table", lambda x, w: x @ w.T, BTE, (V, E))
of_rows("in rows", lambda x, w: (x.reshape(-1, E) @ w).reshape(B, T, V), BTE, (E, V))
of_rows(
    "sliced logits",
    lambda x, w: (x @ w)[:, :-1],
    BTE,
    (E, V),
    loss=lambda z, y: integers(z, y[:, 1:]),
)
of_rows("a bias of nn.Dense", lambda x, w, b: x @ w + b.reshape(1, 1, V), BTE, (E, V), (V,))
of_rows("a scaled bias that is subtracted", lambda x, w, b: x @ w - 2 * b, BTE, (E, V), (V,))
of_rows("two biases", lambda x, w, b, c: x @ w + b + c, BTE, (E, V), (V,), (V,))
of_rows("one number as a bias", lambda x, w, b: x @ w + b, BTE, (E, V), ())
of_rows(
    "nn.Dense",
    lambda x, w, b: nn.Dense(V).apply({"params": {"kernel": w, "bias": b}}, x),
    BTE,
    (E, V),
    (V,),
)
of_rows(
    "eqx.nn.Linear",
    lambda x, w, b: jax.vmap(
        jax.vmap(
            eqx.tree_at(
                lambda l: (l.weight, l.bias), eqx.nn.Linear(E, V, key=jax.random.key(0)), (w, b)
            )
        )
    )(x),
    BTE,
    (V, E),
    (V,),
)
of_rows(
    "an added mask of the vocabulary",
    lambda x, w: x @ w + jnp.where(jnp.arange(V) < V - 9, 0, -1e9),
    BTE,
    (E, V),
)
of_rows("a mask that is given", lambda x, w, m: x @ w + 1e4 * m, BTE, (E, V), (V,))
of_rows(
    "a bias and a mask of -inf",
    lambda x, w, b: jnp.where(jnp.arange(V) < V - 9, x @ w + b, -jnp.inf),
    BTE,
    (E, V),
    (V,),
    y=jnp.minimum(words(), V - 10),
)
for name in ("of each row", "log_softmax, one-hot", "z-loss"):
    of_rows(
        f"labels that a mask hides, {name}",
        lambda x, w: jnp.where(jnp.arange(V) > 19, x @ w, -1e9),
        BTE,
        (E, V),
        loss=LOSSES[name],
    )
of_rows(
    "labels that a mask hides, summed",
    lambda x, w: jnp.where(np.arange(V) % 5 > 0, x @ w, -2e4),
    BTE,
    (E, V),
)
of_rows("scaled inputs", lambda x, w: (x * E**-0.5) @ w, BTE, (E, V))
of_rows(
    "vmapped examples",
    lambda x, w: jax.vmap(lambda x: x @ w)(x),
    BTE,
    (E, V),
    loss=lambda z, y: jax.vmap(integers)(z, y).mean(),
)
of_rows(
    "-100 ignored by where",
    lambda x, w: x @ w,
    BTE,
    (E, V),
    loss=lambda z, y: (
        jnp.where(
            y == -100, 0, optax.softmax_cross_entropy_with_integer_labels(z, jnp.maximum(y, 0))
        ).sum()
        / (y != -100).sum()
    ),
    y=words().at[:, ::3].set(-100),
)
of_rows(
    "one-hot of -1 is nothing",
    lambda x, w: x @ w,
    BTE,
    (E, V),
    loss=LOSSES["optax, one-hot"],
    y=words().at[:, ::3].set(-1),
)


@case("loss: a chunked scan", loss=1)
def _():
    def loss(x, w, y):
        def step(total, xy):
            x, y = xy
            return total + LOSSES["sum"](x @ w, y).astype(f32), None

        chunks = x.reshape(B, 4, -1, E).swapaxes(0, 1), y.reshape(B, 4, -1).swapaxes(0, 1)
        return lax.scan(jax.checkpoint(step), jnp.zeros((), f32), chunks)[0] / y.size

    return loss, [draw(0, *BTE), draw(1, E, V, scale=0.3), words()]


# ---------------------------------------------------------------- norms


def rms(x, eps=1e-6):
    return lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)


def low_rms(x, eps=1e-6):
    """Normalises in float32 and rounds."""
    wide = x.astype(f32)
    return (wide * rms(wide, eps)).astype(x.dtype)


NORMS = {  # functions of x and w
    "rsqrt": lambda x, w: x * rms(x) * w,
    "square root": lambda x, w: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * w,
    "weight before the division": lambda x, w: w * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)),
    "einsum": lambda x, w: (
        x * lax.rsqrt(jnp.einsum("...d,...d->...", x, x)[..., None] / E + 1e-6) * w
    ),
    "power": lambda x, w: x * jnp.power(jnp.mean(x**2, -1, keepdims=True) + 1e-6, -0.5) * w,
    "1 + w": lambda x, w: x * rms(x) * (1 + w),
    "sum times 1/n": lambda x, w: (
        x * lax.rsqrt((x * x).sum(-1, keepdims=True) * (1 / E) + 1e-6) * w
    ),
    "reciprocal": lambda x, w: (
        x * lax.reciprocal(jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)) * w
    ),
    "eps within the sum": lambda x, w: (
        x * math.sqrt(E) / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + E * 1e-6) * w
    ),
    "magnitude": lambda x, w: jnp.sqrt(E) * x / jnp.linalg.norm(x, axis=-1, keepdims=True) * w,
    "without eps": lambda x, w: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * w,
    "statistics in float32": lambda x, w: (x * rms(x.astype(f32)).astype(x.dtype)) * w,
    "rounded, then the weight": lambda x, w: low_rms(x) * w,
    "1 + w in float32": lambda x, w: (
        x.astype(f32) * rms(x.astype(f32)) * (1 + w.astype(f32))
    ).astype(x.dtype),
    "rounded, then the weight by an einsum": lambda x, w: jnp.einsum("...k,k->...k", low_rms(x), w),
    "no weight": lambda x, w: x * rms(x),
    "vmapped rows": lambda x, w: jax.vmap(
        jax.vmap(lambda r: r * lax.rsqrt(jnp.mean(r * r) + 1e-6) * w)
    )(x),
    "and a bias": lambda x, w: x * rms(x) * w + w[::-1],
    "gated after": lambda x, w: x * rms(x) * w * jax.nn.silu(x[..., ::-1]),
    "layer norm": lambda x, w: (
        (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * w
    ),
    "layer norm, squares less the mean's": lambda x, w: (
        lambda m, s: (x - m) * lax.rsqrt(s - m * m + 1e-6) * w
    )(x.mean(-1, keepdims=True), jnp.mean(x * x, -1, keepdims=True)),
    "layer norm, folded": lambda x, w: (lambda m, r: x * (r * w) + (w[::-1] - m * (r * w)))(
        x.mean(-1, keepdims=True), lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    ),
    "layer norm, no scale": lambda x, w: jax.nn.standardize(x, epsilon=1e-6),
}
STRANGE = {"magnitude", "layer norm, folded"}  # they may stay
LOW = ("rsqrt", "rounded", "1 + w in", "the weight, then", "layer norm in", "layer norm, stand")
for name, norm in NORMS.items():
    case(
        f"norm: {name}",
        lambda norm=norm: (norm, [draw(0, *BTE) * 2 + 0.5, 1 + draw(1, E, scale=0.25)]),
        **({} if name in STRANGE else {"norm": 1}),
        low=name.startswith(LOW),
    )


def norm_case(name, norm, *shapes, **options):
    case(
        f"norm: {name}",
        lambda: (norm, [1.5 * a + 0.25 for a in draws(*shapes)]),
        **{"norm": 1} | options,
    )


norm_case("heads", lambda x, w: x * rms(x) * w, BTHD, (D,))
norm_case(
    "heads split from features",
    lambda x, w: (low_rms(x.reshape(B, T, H, D)) * w).reshape(x.shape),
    BTE,
    (D,),
)
norm_case("gated before", lambda x, g, w: low_rms(x * jax.nn.silu(g)) * w, BTE, BTE, (E,))
norm_case("residual", lambda x, y, w: (x + y, low_rms(x + y) * w), BTE, BTE, (E,))
norm_case(
    "adaptive layer norm",
    lambda x, s, b: jax.nn.standardize(x, epsilon=1e-6) * (1 + s[:, None]) + b[:, None],
    BTE,
    (B, E),
    (B, E),
)
norm_case(
    "adaptive, of one array",
    lambda x, c: (lambda s, b: jax.nn.standardize(x, epsilon=1e-6) * (1 + s) + b)(
        *jnp.split(c[:, None], 2, -1)
    ),
    BTE,
    (B, 2 * E),
)
norm_case(
    "adaptive layer norm of a sum",
    lambda x, y, s, b: (x + y, jax.nn.standardize(x + y) * (1 + s[:, None]) + b[:, None]),
    BTE,
    BTE,
    (B, E),
    (B, E),
)
norm_case("adaptive RMS", lambda x, s: low_rms(x) * (1 + s[:, None]), BTE, (B, E))


def rounded_rms(x, w):
    """Rounds its result, once."""
    wide = x.astype(f32)
    return (wide * rms(wide) * w.astype(f32)).astype(x.dtype)


case(
    "norm: that a loss reads",
    lambda: (
        lambda x, w, kernel, y: integers(rounded_rms(x, w) @ kernel, y),
        [*draws(BTE, (E,), (E, V), scale=0.5), words()],
    ),
    norm=1,
    loss=1,
    low=True,
)
case(
    "norm: of queries and keys",
    lambda: (
        lambda q, k, v, w: attend()(rounded_rms(q, w), rounded_rms(k, w), v),
        draws(*QKV, (D,)),
    ),
    norm=2,
    attention=1,
    low=True,
)
norm_case(
    "in a scan",
    lambda x, w: lax.scan(lambda x, w: (x + low_rms(x) * w, None), x, w)[0],
    BTE,
    (3, E),
)


@case("norm: a pre-norm and a post-norm", norm=2)
def _():
    def block(x, a, b, k):
        return x + low_rms(jnp.tanh((low_rms(x) * a) @ k)) * b

    return block, draws(BTE, (E,), (E,), (E, E))


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
    case(f"norm: {name}", lambda make=make: functional(make(), 2 + draw(0, *BTE)), norm=1)

# ---------------------------------------------------------------- MLPs

F = 64
GATED = {
    "silu": jax.nn.silu,
    "silu by hand": lambda z: z * (1 / (1 + jnp.exp(-z))),
    "silu by tanh": lambda z: 0.5 * z * (1 + jnp.tanh(z / 2)),
    "gelu": jax.nn.gelu,
    "gelu by hand": lambda z: (
        0.5 * z * (1 + jnp.tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    ),
    "sigmoid": jax.nn.sigmoid,
}
for name, activation in GATED.items():
    case(
        f"mlp: gated by {name}",
        lambda f=activation: (
            lambda x, g, u, d: (f(x @ g) * (x @ u)) @ d,
            draws(BTE, (E, F), (E, F), (F, E), scale=0.4),
        ),
        **({} if name in ("silu by hand", "silu by tanh") else {"mlp": 1}),  # they may stay
        low=name == "silu",
    )


def mlp_case(name, mlp, *shapes, **options):
    case(f"mlp: {name}", lambda: (mlp, draws(*shapes, scale=0.4)), **{"mlp": 1} | options)


silu = jax.nn.silu
mlp_case(
    "gate on the right", lambda x, g, u, d: ((x @ u) * silu(x @ g)) @ d, BTE, (E, F), (E, F), (F, E)
)
mlp_case(
    "kernels (out, in)",
    lambda x, g, u, d: (silu(x @ g.T) * (x @ u.T)) @ d.T,
    BTE,
    (F, E),
    (F, E),
    (E, F),
)
mlp_case(
    "einsum",
    lambda x, g, u, d: jnp.einsum(
        "btf,fe->bte",
        silu(jnp.einsum("bte,ef->btf", x, g)) * jnp.einsum("bte,ef->btf", x, u),
        d,
    ),
    BTE,
    (E, F),
    (E, F),
    (F, E),
)
mlp_case(
    "one kernel, split",
    lambda x, w, d: (lambda g, u: (silu(g) * u) @ d)(*jnp.split(x @ w, 2, -1)),
    BTE,
    (E, 2 * F),
    (F, E),
)
mlp_case(
    "stacked kernels",
    lambda x, w, d: (lambda h: (silu(h[0]) * h[1]) @ d)(jnp.einsum("bte,kef->kbtf", x, w)),
    BTE,
    (2, E, F),
    (F, E),
)
mlp_case(
    "vmapped rows",
    lambda x, g, u, d: jax.vmap(jax.vmap(lambda r: d @ (silu(g @ r) * (u @ r))))(x),
    BTE,
    (F, E),
    (F, E),
    (E, F),
)
mlp_case(
    "with biases",
    lambda x, g, u, d, a, b: (silu(x @ g + a) * (x @ u + b)) @ d,
    BTE,
    (E, F),
    (E, F),
    (F, E),
    (F,),
    (F,),
)
mlp_case("plain gelu", lambda x, w, d: jax.nn.gelu(x @ w) @ d, BTE, (E, F), (F, E))
mlp_case(
    "plain gelu, biases",
    lambda x, w, a, d, b: jax.nn.gelu(x @ w + a) @ d + b,
    BTE,
    (E, F),
    (F,),
    (F, E),
    (E,),
)
mlp_case("squared relu", lambda x, w, d: jnp.square(jax.nn.relu(x @ w)) @ d, BTE, (E, F), (F, E))


def test_a_norm_that_is_read_in_two_dtypes_is_computed_once():
    """A router in float32 reads what the layers read in bfloat16, say."""

    def function(x, w):
        y = rounded_rms(x, w)
        return jnp.sin(y), jnp.sin(y.astype(f32))

    args = [a.astype(bf16) for a in draws(BTE, (E,))]
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
        rows = jnp.where(valid > 0, picked(jax.nn.log_softmax(x @ w), y), 0.0)
        return -jnp.mean(rows.sum(-1) / jnp.maximum(valid.sum(-1), 1e-10))

    fused = fuse_cases.Fused(loss)
    jax.eval_shape(fused, draw(0, *BTE), draw(1, E, V), words())
    assert [row.served for row in fused.rows] == ["linear_cross_entropy: sum"]


# ---------------------------------------------------------------- products, in FP8

FP8 = {"quantization": "fp8"}
PRODUCTS = {  # function, shapes, products
    "matmul": (lambda x, w: x @ w, (BTE, (E, F)), 1),
    "transposed kernel": (lambda x, w: x @ w.T, (BTE, (F, E)), 1),
    "einsum to heads": (
        lambda x, w: jnp.einsum("bte,ehd->bthd", x, w),
        (BTE, (E, 4, 16)),
        1,
    ),
    "features first": (lambda x, w: jnp.einsum("ebt,ef->fbt", x, w), ((E, B, T), (E, F)), 1),
    "vmapped rows": (lambda x, w: jax.vmap(jax.vmap(lambda r: w @ r))(x), (BTE, (F, E)), 1),
    "cast kernel": (lambda x, w: x @ w.astype(f32).astype(x.dtype), (BTE, (E, F)), 1),
    "joined kernels": (
        lambda x, v, w: jnp.tanh(x) @ jnp.concatenate([v, w], 1),
        (BTE, (E, F), (E, F)),
        1,
    ),
    "kernels stacked for a scan": (
        lambda x, v, w: lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, jnp.stack([v, w]))[0],
        (BTE, (E, E), (E, E)),
        1,
    ),
    "frozen kernel": (lambda x, w: x @ lax.stop_gradient(w) * w[0], (BTE, (E, F)), 1),
    "conv of width 1": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "VALID", None, None, ("NWC", "WIO", "NWC")
        ),
        (BTE, (1, E, F)),
        None,
    ),
    "q, k, v of one input": (
        lambda x, q, k, v: (x @ q, x @ k, x @ v),
        (BTE, (E, F), (E, F), (E, F)),
        3,
    ),
    "of this library": (dense, (BTE, (E, F)), 1),
    "of this library, with a bias and an activation": (
        functools.partial(dense, activation="gelu"),
        (BTE, (E, F), (F,)),
        1,
    ),
    "in a scan": (
        lambda x, w: lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0],
        (BTE, (3, E, E)),
        1,
    ),
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
    served = fused.served()
    if count is not None:
        assert served == {"product": count}, str(fused)
    # e4m3 has 3 bits after the point, e5m2 two: uniform errors of 2^-4 and 2^-3 at most, 1/√3 of
    # that on average, from two operands; layers add up.
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got[:2]), jax.tree.leaves(exact[:2]))):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 0.3
        assert not count or i or error > 2e-3, "not quantized"
    fuse_cases.check_types(got, exact)


# ---------------------------------------------------------------- indexing


INDEXING = {  # functions of x (B, T, E) and a (B, T, E / 2); number of sites, or any
    "set even": (lambda x, a: x.at[..., ::2].set(a), 1),
    "read a permutation": (lambda x, a: x[..., np.random.default_rng(1).permutation(E)], None),
    "rotary embedding": (
        lambda x, a: (
            jnp.zeros_like(x)
            .at[..., ::2]
            .set(x[..., ::2] * jnp.cos(a) - x[..., 1::2] * jnp.sin(a))
            .at[..., 1::2]
            .set(x[..., ::2] * jnp.sin(a) + x[..., 1::2] * jnp.cos(a))
        ),
        2,
    ),
}
for name, (function, count) in INDEXING.items():
    case(
        f"indexing: {name}",
        lambda function=function: (function, draws(BTE, (B, T, E // 2))),
        **({} if count is None else {"indexing": count}),
    )

# Sites that may be one together.
AT_LEAST = {"interleave", "rotary embedding", "z-loss"}


@pytest.mark.parametrize("case", **case.parameters())
def test_spelling(case):
    function, args = case.make()
    served, fused = fuse_cases.compare(function, args, low=case.low, jit=False)
    for domain, count in case.expected.items():
        found = served.get(domain, 0)
        enough = 1 <= found if case.name.split(": ")[1] in AT_LEAST else found == count
        assert enough, f"{served}, expected {case.expected}\n{fused}"
    if case.low:
        assert set(fused.served()) >= set(case.expected), f"not served in bfloat16\n{fused}"
