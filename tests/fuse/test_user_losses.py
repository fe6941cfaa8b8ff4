"""Losses as users write them: each is cut along its rows, or stays with a reason that is true."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fuse import fuzz_losses
from fuse.test_rows import WORDS, arguments, assert_as_close, log_softmax, pick, wide
from numpy_interpreter import evaluated

from normfuse import fuse

ROWS = 18
KEY = jax.random.key(7)
LOSSES, LEFT = {}, {}


def loss(function):
    LOSSES[function.__name__] = function
    return function


def left(reason):
    def add(function):
        LEFT[function.__name__] = reason
        return loss(function)

    return add


@loss
def hard_negatives(x, w, other, v, y):
    z = x @ w
    others = jnp.where(jax.nn.one_hot(y, WORDS) > 0, -jnp.inf, z)
    hardest = jax.lax.top_k(others, 8)[0]
    return jnp.mean(jax.nn.logsumexp(hardest, -1) - pick(z, y))


@loss
def hard_rows(x, w, other, v, y):
    """The half of the rows that costs most, of all rows."""
    each = -pick(jax.nn.log_softmax(x @ w), y) + 0 * jnp.square(x @ w).mean(-1)
    return jnp.sort(each)[ROWS // 2 :].mean()


@loss
def weighted_one_hot(x, w, other, v, y):
    hot = jax.nn.one_hot(y, WORDS) * (y % 3 > 0)[:, None]
    return -jnp.sum(hot * log_softmax(x @ w) * jnp.cos(other[:, :1])) / 9


@loss
def margin(x, w, other, v, y):
    z = x @ w
    return jnp.mean(jnp.maximum(1 + z - pick(z, y)[:, None], 0).sum(-1) - 1)


@loss
def label_distribution(x, w, other, v, y):
    target = jax.nn.softmax(jnp.sin(jnp.arange(ROWS * 1.0))[:, None] * v[0])
    return optax.losses.kl_divergence(log_softmax(x @ w), target).mean()


@loss
def gumbel(x, w, other, v, y):
    noise = jax.random.gumbel(KEY, (ROWS, WORDS))
    z = x @ w
    soft = jax.nn.softmax((z + noise) / 0.7)
    return jnp.mean(jnp.sum(soft * jax.lax.stop_gradient(other @ v), -1))


@loss
def straight_through(x, w, other, v, y):
    p = jax.nn.softmax(x @ w)
    hard = jax.nn.one_hot(jnp.argmax(p, -1), WORDS)
    return jnp.mean(jnp.sum((hard + p - jax.lax.stop_gradient(p)) * jnp.cos(other @ v), -1))


@loss
def noise_contrastive(x, w, other, v, y):
    z = x @ w
    noise = jax.random.randint(KEY, (ROWS, 16), 0, WORDS)
    others = jnp.take_along_axis(z, noise, 1) - jnp.log(16 / WORDS)
    own = pick(z, y) - jnp.log(16 / WORDS)
    return -jnp.mean(jax.nn.log_sigmoid(own) + jax.nn.log_sigmoid(-others).sum(-1))


@loss
def sampled_softmax(x, w, other, v, y):
    z, kept = x @ w, jax.random.bernoulli(KEY, 0.2, (WORDS,))
    some = jnp.where(kept | (jax.nn.one_hot(y, WORDS) > 0), z, -1e9)
    return jnp.mean(jax.nn.logsumexp(some, -1) - pick(z, y)) + jnp.mean(jnp.tanh(z))


@loss
def hierarchical(x, w, other, v, y):
    z = x @ w
    groups = jax.nn.log_softmax(z[:, :10])
    words = jax.nn.log_softmax(z[:, 10:].reshape(ROWS, 10, -1), -1)
    group = y % 10
    own = words[jnp.arange(ROWS), group, y % 102]
    return -jnp.mean(pick(groups, group) + own)


@loss
def token_weighted_kl(x, w, other, v, y):
    p, q = log_softmax(x @ w), jax.lax.stop_gradient(log_softmax(other @ v))
    mask = jnp.where(y % 3 > 0, jnp.cos(y), 0)
    return jnp.sum(jnp.sum(jnp.exp(q) * (q - p), -1) * mask) / jnp.maximum(jnp.sum(mask > 0), 1)


@loss
def ppo(x, w, other, v, y):
    logp, reference = log_softmax(x @ w), jax.lax.stop_gradient(log_softmax(other @ v))
    ratio = jnp.exp(pick(logp, y) - pick(reference, y))
    advantage = jnp.sin(jnp.arange(ROWS * 1.0))
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1).mean()
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -gain.mean() - 0.01 * entropy


@loss
def reinforce(x, w, other, v, y):
    logp = log_softmax(x @ w)
    word = jax.random.categorical(KEY, jax.lax.stop_gradient(logp))
    reward = jax.lax.stop_gradient(jnp.sin(word))
    return -jnp.mean(pick(logp, word) * (reward - reward.mean()))


TEACHER = np.random.default_rng(0).normal(size=(8, WORDS)).astype(np.float32)


@loss
def closed_over_teacher(x, w, other, v, y):
    q = jax.nn.softmax(jax.lax.stop_gradient(other @ jnp.asarray(TEACHER, x.dtype)) / 3)
    return -9 * jnp.mean(jnp.sum(q * jax.nn.log_softmax(x @ w / 3), -1))


@loss
def with_router(x, w, other, v, y):
    """The loss of a mixture of experts beside that of the words."""
    gates = jax.nn.softmax(other @ v[:, :4])
    share = jax.nn.one_hot(gates.argmax(-1), 4).mean(0)
    words = jnp.mean((1 - pick(jax.nn.softmax(x @ w), y)) ** 2)
    return words + 0.01 * 4 * jnp.sum(share * gates.mean(0))


@loss
def some_words(x, w, other, v, y):
    logp = jax.nn.log_softmax(x @ w, where=jnp.arange(WORDS) % 5 > 0)
    return -jnp.mean(pick(logp, y // 5 * 5 + 1)) + jnp.mean(jax.nn.softmax(x @ w) ** 2)


@loss
def safe_cross_entropy(x, w, other, v, y):
    target = jax.nn.one_hot(y, WORDS) * 0.9 + jax.nn.one_hot(y + 3, WORDS) * 0.1
    return optax.safe_softmax_cross_entropy(x @ w, target).mean()


@loss
def poly_by_optax(x, w, other, v, y):
    return optax.losses.poly_loss_cross_entropy(x @ w, jax.nn.one_hot(y, WORDS), epsilon=2.0).mean()


@loss
def focal_by_optax(x, w, other, v, y):
    return (
        optax.losses.sigmoid_focal_loss(x @ w, jax.nn.one_hot(y, WORDS), alpha=0.25).sum(-1).mean()
    )


@loss
def perceptron(x, w, other, v, y):
    return jnp.mean(optax.losses.multiclass_perceptron_loss(x @ w, y))


@loss
def hinge_by_optax(x, w, other, v, y):
    return jnp.mean(optax.losses.multiclass_hinge_loss(x @ w, y))


@loss
def kl_of_logs(x, w, other, v, y):
    return optax.losses.kl_divergence_with_log_targets(
        log_softmax(x @ w), log_softmax(x @ v)
    ).mean()


@loss
def two_vocabularies(x, w, other, v, y):
    first, second = jnp.unstack((x @ w).reshape(ROWS, 2, -1), axis=1)
    return -jnp.mean(pick(jax.nn.log_softmax(first - second / 2), y // 2))


@loss
def sparsemax(x, w, other, v, y):
    z = x @ w
    down = -jnp.sort(-z, -1)
    total = jnp.cumsum(down, -1)
    count = jnp.sum(1 + jnp.arange(1, WORDS + 1) * down > total, -1)
    support = jnp.take_along_axis(total, count[:, None] - 1, 1)[:, 0]
    tau = (support - 1) / count
    chosen = jnp.where(z > tau[:, None], z**2 - tau[:, None] ** 2, 0)
    return jnp.mean(0.5 * chosen.sum(-1) + 0.5 - pick(z, y))


@loss
def by_optax_sparsemax(x, w, other, v, y):
    p = optax.projections.projection_simplex
    return jnp.mean(jax.vmap(p)(x @ w)[:, 0]) + jnp.mean(jax.nn.softmax(x @ w) ** 2)


@loss
def expected_reward(x, w, other, v, y):
    return -jnp.mean(jax.nn.softmax(x @ w) @ jnp.tanh(v[0]))


@loss
def ranking(x, w, other, v, y):
    """ListNet: top-one probabilities of scores and of relevances."""
    relevance = jax.nn.softmax(5 * jax.nn.one_hot(y, WORDS))
    return optax.losses.ranking_softmax_loss(x @ w, relevance)


@loss
def calibration(x, w, other, v, y):
    p = jax.nn.softmax(x @ w)
    return jnp.abs(p.max(-1).mean() - jnp.mean(p.argmax(-1) == y)) + jnp.mean(-jnp.log(pick(p, y)))


@loss
def reciprocal_rank(x, w, other, v, y):
    z = x @ w
    own = pick(z, y)
    rank = 1 + jnp.sum(z > own[:, None], -1)
    return jnp.mean(jax.nn.logsumexp(z, -1) - own), jnp.mean(1 / rank)


@loss
def bits_per_byte(x, w, other, v, y):
    each = -pick(log_softmax(x @ w), y) / jnp.log(2.0)
    return jnp.sum(each) / jnp.sum(1 + y % 5) + 1e-3 * jnp.mean(jnp.abs(x @ w))


@loss
def maximal_entropy(x, w, other, v, y):
    logp = log_softmax(x @ w)
    entropy = jax.scipy.special.entr(jnp.exp(logp)).sum(-1)
    return -jnp.mean(pick(logp, y)) - 0.1 * jnp.mean(jnp.minimum(entropy, 3))


@loss
def renyi(x, w, other, v, y):
    p, q = log_softmax(x @ w), jax.lax.stop_gradient(log_softmax(other @ v))
    return jnp.mean(jax.nn.logsumexp(0.5 * p + 0.5 * q, -1)) / (0.5 - 1)


@loss
def user_chunks(x, w, other, v, y):
    """Chunks that the user wrote, whose bodies are programs of their own."""

    def one(part):
        a, b = part
        return jnp.sum((1 - pick(jax.nn.softmax(a @ w), b)) ** 2)

    return jnp.sum(jax.lax.map(one, (x.reshape(3, -1, 8), y.reshape(3, -1)))) / ROWS


@loss
def ctc(x, w, other, v, y):
    """Its recursion over time combines rows, and begins with what is of each."""
    z = (x @ w).reshape(2, ROWS // 2, WORDS)
    labels = y.reshape(2, -1)[:, :3] % (WORDS - 1) + 1
    return optax.ctc_loss(z, jnp.zeros(z.shape[:2]), labels, jnp.zeros(labels.shape)).mean()


@left("it adds up rows")
def balanced(x, w, other, v, y):
    """Divides by how likely each word is in all rows (Sinkhorn, as SwAV does)."""
    p = jnp.exp(x @ w / 9)
    p = p / p.sum(0)
    return -jnp.mean(jnp.log(pick(p / p.sum(-1, keepdims=True), y)))


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    args, function, reports = arguments(ROWS), LOSSES[name], []
    first = lambda f: lambda *args: jax.tree.leaves(f(*args))[0]

    def run(f, args):
        return evaluated(jax.value_and_grad(first(f), (0, 1)))(*args)

    with fuzz_losses.uncompiled():
        found = run(fuse(function, report=reports.append), args)
    rows = [row for row in reports[0].rows if row.domain == "loss"]
    if name in LEFT:
        assert LEFT[name] in " ".join(row.reason for row in rows), str(reports[0])
    else:
        assert rows and all(row.served for row in rows), str(reports[0])
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, run(function, wide(args)))
    assert_as_close(found, run(function, args), exact)
