"""Tests that attention without a kernel is cut along its queries where its scores are large."""

import jax
import jax.numpy as jnp
import pytest
from fuse_cases import Fused, compare, draws
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.layers.fuse import search

B, H, T, S, D = 2, 2, 18, 1026, 8  # no chunk divides these


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setitem(search.LARGEST_SCORES, "cpu", 0)


def shown(length):
    return jnp.arange(length)[:, None] + S - length >= jnp.arange(S)


def scored(q, k):
    return jnp.where(shown(q.shape[1]), jnp.einsum("bthd,bshd->bhts", q, k) * 0.35, -1e9)


def mixed(p, v):
    return jnp.einsum("bhts,bshd->bthd", p, v)


def sink(q, k, v, c):
    """One more number in the softmax's sum, of each head."""
    s, c = scored(q, k), c[:, None, None]
    most = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), c))
    e = jnp.exp(s - most)
    return mixed(e / (e.sum(-1, keepdims=True) + jnp.exp(c - most)), v)


def column(q, k, v, c):
    """The same by one more column, as gpt-oss writes it."""
    more = jnp.broadcast_to(c[:, None, None], (B, H, T, 1))
    return mixed(jax.nn.softmax(jnp.concatenate([scored(q, k), more], -1))[..., :-1], v)


def talking(q, k, v, c):
    """Each head's scores and weights are sums of all heads'."""
    mix = lambda a: jnp.einsum("bhts,hg->bgts", a, jnp.eye(H) + 0.1 * c)
    return mixed(mix(jax.nn.softmax(mix(scored(q, k)))), v)


def two_layers(q, k, v, c):
    """Of projected keys and values, and another of the first's result."""
    project = lambda a: jnp.sin(jnp.einsum("bshd,de->bshe", a, 1.1 * jnp.eye(D)))
    return sigmoid(sink(q, project(k), project(v), c), k, v, c)


def sigmoid(q, k, v, c):
    return mixed(jax.nn.sigmoid(scored(q, k) - c[:, None, None]), v)


ATTENTIONS = {
    "sink": (sink, 1),
    "column": (column, 1),
    "sigmoid": (sigmoid, 1),
    "talking heads": (talking, 1),
    "two layers": (two_layers, 2),
    "factors": (lambda q, k, v, c: mixed(jax.nn.softmax(scored(q, k)) * c[:, None, None], v), 1),
    "two caps": (
        lambda q, k, v, c: mixed(jax.nn.softmax(jnp.tanh(jnp.tanh(scored(q, k)) + 1)), v),
        1,
    ),
    # A chunk has whole heads where queries are combined.
    "along queries": (
        lambda q, k, v, c: mixed(jnp.cumsum(jax.nn.sigmoid(scored(q, k)), 2) / T, v),
        1,
    ),
    "rows of NaN": (
        lambda q, k, v, c: mixed(
            (e := jnp.exp(scored(q, k)) * (shown(T) & (jnp.arange(T) != 3)[:, None]))
            / e.sum(-1, keepdims=True),
            v,
        ),
        1,
    ),
}


def arguments(length=T):
    return draws((B, length, H, D), (B, S, H, D), (B, S, H, D), (H,))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_its_own_equations(name):
    function, count = ATTENTIONS[name]
    found, fused = compare(function, arguments(), jit=False)
    rows = [row.served for row in fused.rows if row.what.startswith("attention")]
    assert found["attention"] == count and len(rows) == count, str(fused)
    assert all(each.startswith("rows: its own equations in chunks of queries") for each in rows)


@pytest.mark.parametrize("function", [sink, sigmoid])
def test_it_takes_a_chunks_memory(function):
    both = lambda f: jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3)))
    compiled = [both(f).lower(*arguments(256)).compile() for f in (function, Fused(function))]
    theirs, ours = (c.memory_analysis().temp_size_in_bytes for c in compiled)
    assert ours < theirs / 3, (theirs, ours)


def test_a_mesh_has_no_collective_more():
    """Batch and heads are split; each device has its own chunks of queries."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = [P("data", None, "model")] * 3 + [P("model")]
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments(), specs)]
    texts = [jax.jit(f).lower(*args).compile().as_text() for f in (sink, Fused(sink))]
    names = "all-reduce(", "all-gather(", "all-to-all(", "collective-permute("
    theirs, ours = ([text.count(name) for name in names] for text in texts)
    assert ours == theirs == [0] * 4


def of_few(q, k, v, c):
    s = jnp.einsum("bthd,bshd->bhts", q, k[:, :512])
    return mixed(jax.nn.sigmoid(s - c[:, None, None]), v[:, :512])


STAYS = {
    "returned": lambda q, k, v, c: (p := jax.nn.sigmoid(scored(q, k)), mixed(p, v)),
    "over all": lambda q, k, v, c: mixed(jax.nn.softmax(scored(q, k), (0, 1, 2, 3)), v),
    "few keys": of_few,
}


@pytest.mark.parametrize("name", STAYS)
def test_it_stays(name):
    fused = Fused(STAYS[name], serves=False)
    jax.eval_shape(fused, *arguments())
    assert not fused.served(), str(fused)


def test_small_scores_stay(monkeypatch):
    """Those of a whole in memory, and attention that is served otherwise."""
    monkeypatch.setitem(search.LARGEST_SCORES, "cpu", 4 * B * H * T * S)
    fused = Fused(sink, serves=False)
    jax.eval_shape(fused, *arguments())
    assert not fused.served(), str(fused)
    monkeypatch.setitem(search.LARGEST_SCORES, "cpu", 4 * B * H * T * S - 1)
    fused = Fused(
        lambda q, k, v: (sink(q, k, v, jnp.ones(H)), mixed(jax.nn.softmax(scored(q + 1, k)), v))
    )
    jax.eval_shape(fused, *arguments()[:3])
    first, second = sorted(row.served.split(":")[0] for row in fused.rows)
    assert (first, second) == ("attention", "rows"), str(fused)
