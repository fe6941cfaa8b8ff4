"""Functions that look like sites of `fuse` and are others: their values and gradients stay.

Sizes are equal wherever they can be, so that a wrong axis fits. `left` names a domain that nothing
may be served in: where what stands there is proven to be something else, or is read elsewhere.
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


attention_case("softmax over queries", attend(masked(), lambda s: softmax(s, -2)), left=True)
attention_case("causal, one less, by positions", attend(masked(keep=lambda: behind() > 0)))
attention_case("causal, halved towards 0", attend(masked(keep=lambda: behind(2) >= 0)))
attention_case("masked by a product with 0", attend(lambda s: s * causal()))
attention_case("a small number", attend(masked(-5.0)))
attention_case("a number that scores come near to", attend(masked(-1e4)), scale=15.0)
attention_case("-1e4 that is scaled afterwards", attend(lambda s: masked(-2e4)(s) * 1e-4))

# Rows that see nothing.
rows = np.arange(N)[:, None] % 3 > 0
NOTHING = {
    "-1e9 added": lambda s, m: s + jnp.where(m, 0.0, -1e9),
    "-1e9 selected": lambda s, m: jnp.where(m, s, -1e9),
    "finfo.min selected": lambda s, m: jnp.where(m, s, jnp.finfo(f32).min),
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
    "stopped": lambda p: stop(p),
    "rounded": lambda p: p.astype(bf16).astype(p.dtype),
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
    "the log-sum-exp": lambda s, p: jax.nn.logsumexp(s, -1),
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
    "eps in the sum",
    attend(weights=lambda s: jnp.exp(s) / (jnp.exp(s).sum(-1, keepdims=True) + 1e-3)),
    left=True,
)
attention_case("scores and their transpose", attend(lambda s: s + s.swapaxes(-1, -2)), left=True)
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
attention_case(
    "top scores alone",
    attend(lambda s: jnp.where(s >= lax.top_k(s, 3)[0][..., -1:], s, -1e9)),
    left=True,
)
attention_case(
    "a learned temperature", lambda q, k, v, t: attend(lambda s: s / t)(q, k, v), jnp.float32(1.7)
)
attention_case("a negative scale after the mask", attend(lambda s: -masked(1e9)(s)))
attention_case("a NumPy float64 scale", attend(masked(), scale=np.float64(0.35)), low=True)
attention_case(
    "a mask that widens", attend(lambda s: s + jnp.where(causal(), 0, jnp.float32(-1e9))), low=True
)
attention_case(
    "float16",
    lambda q, k, v: attend(masked(-6e4))(*(x.astype(jnp.float16) for x in (q, k, v))).astype(f32),
    rounding=ROUNDED,
)


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
attention_case("gradients of masked scores changed", attend(straight_through(masked())), left=True)


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
loss_case(
    "labels outside, masked",
    lambda z, y: jnp.where(y < 0, 0.0, integers(z, y)).sum() / (y >= 0).sum(),
    y=words((-1, -100, -1, -100)),
)
loss_case(
    "words masked",
    lambda z, y: integers(jnp.where(jnp.arange(V) < V - 3, z, -1e9), y).sum(),
)
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
loss_case(
    "sigmoids", lambda z, y: optax.sigmoid_binary_cross_entropy(z, one_hot(y, V)).sum(), left=True
)
loss_case(
    "soft labels",
    lambda z, y, p: optax.softmax_cross_entropy(z, softmax(p)).sum(),
    draw(5, N, N, V),
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
    "a mask of run time": lambda z, y, b: integers(jnp.where(b > 0, z, -1e9), y),
    "words that are only made less likely": lambda z, y, b: integers(
        jnp.where(jnp.arange(V) < V - 3, z + b, -9.0), y
    ),
    "two masks": lambda z, y, b: integers(
        jnp.where(jnp.arange(V) > 2, jnp.where(jnp.arange(V) < V - 3, z, -1e9), -2e4) + b, y
    ),
    "a bias after a mask": lambda z, y, b: integers(
        jnp.where(jnp.arange(V) < V - 3, z, -1e9) + b, y
    ),
    "all words masked": lambda z, y, b: integers(jnp.where(jnp.arange(V) < 0, z + b, -1e9), y),
}
for name, loss in LEFT_BIASES.items():
    loss_case(name, lambda z, y, b, loss=loss: loss(z, y, b).sum(), draw(5, V), left=True)
loss_case("a bias", lambda z, y, b: integers(z + b, y).sum(), draw(5, V))
loss_case(
    "a learned factor, exponential",
    lambda z, y, t: integers(z * jnp.exp(t), y).mean(),
    jnp.float32(0.3),
)
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
norm_case("a floor", lambda x, w: x / jnp.maximum(jnp.sqrt(mean(x * x)), 1.2) * w, left=True)
norm_case(
    "no eps, rows of zeros",
    lambda x, w: (
        (x * (jnp.arange(N) > 2)[:, None]) * rms(x * (jnp.arange(N) > 2)[:, None], eps=0.0) * w
    ),
)
norm_case("1 / mean of squares", lambda x, w: x / (mean(x * x) + 1e-3) * w, left=True)
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
    "the variance of another axis",
    lambda x, w: (x - mean(x)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-3) * w,
)
norm_case("the normalised is read", lambda x, w: (lambda h: (h * w, h))(x * rms(x)))
norm_case(
    "an einsum with a vector of each token",
    lambda x, w: jnp.einsum("bnd,n->bnd", x * rms(x), jnp.arange(1.0, 1 + x.shape[1])),
)
norm_case("statistics stopped", lambda x, w: x * stop(rms(x)) * w, left=True)
norm_case(
    "rsqrt of another derivative",
    lambda x, w: x * other_derivative(lax.rsqrt)(mean(x * x) + 1e-3) * w,
    left=True,
)
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


FALSE = {
    "a jit that is called silu": silu,
    "a jit that is called relu": relu,
    "swish of another derivative": other_derivative(jax.nn.silu),
    "a relu that passes gradients": straight_through(jax.nn.relu),
    "a relu of maximum": lambda z: jnp.maximum(z, 0),
    "stopped": lambda z: stop(jax.nn.silu(z)),
    "rounded": lambda z: jax.nn.silu(z.astype(bf16)).astype(f32),
}
for i, (name, f) in enumerate(FALSE.items()):
    rounding = ROUNDED if name == "rounded" else None
    kind, mlp = [
        ("plain", lambda x, g, u, d, f=f: f(x @ g) @ d + u[0]),
        ("gated", lambda x, g, u, d, f=f: (f(x @ g) * (x @ u)) @ d),
    ][i % 2]
    mlp_case(f"{kind}, {name}", mlp, rounding=rounding)
act = jax.nn.silu
mlp_case("the hidden is read", lambda x, g, u, d: (lambda h: (h @ d, h))(act(x @ g) * (x @ u)))
mlp_case("the gate is read", lambda x, g, u, d: (lambda z: ((act(z) * (x @ u)) @ d, z))(x @ g))
mlp_case(
    "the hidden dropped out",
    lambda x, g, u, d: (jnp.where(keep, act(x @ g) * (x @ u), 0) / 0.9) @ d,
)

# ---------------------------------------------------------------- indexing


def index_case(name, function, *more):
    case(
        f"indexing: {name}",
        lambda: (function, [*draws((N, N), (N, N // 2)), *more]),
        low=False,
    )


index_case("a mask", lambda x, a: x.at[np.arange(N) % 2 == 0].set(1.5) * a[0, 0])
index_case(
    "a scatter of batches",
    lambda x, a: jax.vmap(lambda x, a: x.at[np.array([1, 6, 3, 0])].set(a))(x, a),
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


# ---------------------------------------------------------------- products that FP8 leaves


R, W = 64, 32
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
    "the default of HIGHEST": (
        lambda x, w: jnp.tanh(jax.default_matmul_precision("highest")(lambda: x @ w)()),
        ((R, W), (W, W)),
    ),
    "integers": (
        lambda x, w: (
            (jnp.round(4 * x).astype(jnp.int8) @ jnp.round(4 * w).astype(jnp.int8)).astype(f32)
            + 0 * x.sum()
        ),
        ((R, W), (W, W)),
    ),
    "few rows": (lambda x, w: jnp.tanh(x @ w), ((2, W), (W, W))),
    "a vector": (lambda x, w: jnp.tanh(x @ w), ((W,), (W, W))),
    "embedding by one-hot": (
        lambda t, x: jax.nn.one_hot(jnp.arange(R) % W, W) @ t + 0 * x.sum(),
        ((W, W), (1,)),
    ),
}


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
