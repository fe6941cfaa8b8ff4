"""Tests that losses nobody named are found, cut along their rows and computed as they stand."""

import functools
import math
import re
import types

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fuse import fuzz_losses
from fuse_cases import Fused
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_interpreter import evaluated

from normfuse import fuse
from normfuse.layers.fuse import region, search

ROWS, FEATURES, WORDS = 67, 8, 1030  # no chunk of rows divides these


def arguments(rows=ROWS, dtype=jnp.float32):
    """x, a kernel, another x and another kernel, as a teacher's or a reference's, and labels."""
    keys = jax.random.split(jax.random.key(0), 5)
    x, other = (jax.random.normal(k, (rows, FEATURES), dtype) for k in keys[:2])
    w, v = (jax.random.normal(k, (FEATURES, WORDS), dtype) * 0.5 for k in keys[2:4])
    return x, w, other, v, jax.random.randint(keys[4], (rows,), 0, WORDS)


def log_softmax(z):
    return jax.nn.log_softmax(z.astype(jnp.promote_types(z.dtype, jnp.float32)))


def pick(logp, y):
    return jnp.take_along_axis(logp, y[..., None], -1)[..., 0]


def kl(x, w, other, v, y):
    student = log_softmax(x @ w / 2)
    teacher = log_softmax(jax.lax.stop_gradient(other @ v) / 2)
    return 4 * jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), -1))


def reverse_kl(x, w, other, v, y):
    student, teacher = log_softmax(x @ w), jax.lax.stop_gradient(log_softmax(other @ v))
    return jnp.mean(jnp.sum(jnp.exp(student) * (student - teacher), -1))


def jsd(x, w, other, v, y, beta=0.3):
    p, q = log_softmax(x @ w), jax.lax.stop_gradient(log_softmax(other @ v))
    m = jnp.logaddexp(jnp.log(beta) + q, jnp.log1p(-beta) + p)
    of_q = jnp.sum(jnp.exp(q) * (q - m), -1)
    return jnp.mean(beta * of_q + (1 - beta) * jnp.sum(jnp.exp(p) * (p - m), -1))


def tvd(x, w, other, v, y):
    p, q = jax.nn.softmax(x @ w), jax.lax.stop_gradient(jax.nn.softmax(other @ v))
    return jnp.mean(jnp.sum(jnp.abs(p - q), -1)) / 2


def distilled(x, w, other, v, y):
    hard = optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()
    return 0.5 * hard + 0.5 * kl(x, w, other, v, y)


def cosine(x, w, other, v, y):
    p, q = x @ w, jax.lax.stop_gradient(other @ v)
    unit = lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return jnp.mean(1 - jnp.sum(unit(jnp.exp(p)) * unit(jnp.exp(q)), -1))


def focal(x, w, other, v, y):
    logp = jax.nn.log_softmax(x @ w)
    every = -((1 - jnp.exp(logp)) ** 2) * logp * jax.nn.one_hot(y, WORDS)
    return jnp.sum(every) / y.size


def brier(x, w, other, v, y):
    return jnp.mean(jnp.sum((jax.nn.softmax(x @ w) - jax.nn.one_hot(y, WORDS)) ** 2, -1))


def poly(x, w, other, v, y):
    p = jax.nn.softmax(x @ w)[jnp.arange(y.size), y]
    return jnp.mean(-jnp.log(p) + 1 - p)


def smoothed(x, w, other, v, y):
    near = jax.nn.one_hot(y, WORDS) * 0.8 + jax.nn.one_hot(y + 1, WORDS) * 0.1
    return jnp.mean(optax.softmax_cross_entropy(x @ w, near + 0.1 / WORDS))


def z_loss(x, w, other, v, y):
    z = 30 * jnp.tanh((x @ w + v[0]) / 30)
    lse = jax.nn.logsumexp(z, -1)
    target = jnp.sum(z * jax.nn.one_hot(y, WORDS), -1)
    return jnp.mean(lse - target + 1e-2 * lse**2 + 0.1 * jnp.max(z, -1))


def tsallis(x, w, other, v, y):
    return jnp.mean(1 - jnp.sum(jax.nn.softmax(x @ w) ** 2, -1))


def top_5(x, w, other, v, y):
    z = x @ w
    _, words = jax.lax.top_k(z, 5)
    right = jnp.mean(jnp.any(words == y[:, None], -1))
    return optax.softmax_cross_entropy_with_integer_labels(z, y).mean() + right


def confidence(x, w, other, v, y):
    z = x @ w
    most = jnp.sort(z, -1)[:, -2:]
    return jnp.mean(jax.nn.relu(1 - most[:, 1] + most[:, 0]))


def hinge(x, w, other, v, y):
    z = x @ w
    return jnp.mean(jnp.sum(jax.nn.relu(1 + z - pick(z, y)[:, None]), -1) + jnp.exp(z).min(-1))


def bce(x, w, other, v, y):
    return optax.sigmoid_binary_cross_entropy(x @ w, jax.nn.one_hot(y, WORDS)).mean()


def unlikelihood(x, w, other, v, y):
    p = jax.nn.softmax(x @ w, -1)
    return -jnp.mean(jnp.log1p(-pick(p, y)))


def mixture(x, w, other, v, y):
    each = jnp.tanh(jnp.stack([x, other, x - other], 1))
    p = jax.nn.softmax(jnp.einsum("rkn,nv->rkv", each, w), -1)
    prior = jax.nn.softmax(other[:, :3])
    return -jnp.mean(jnp.log(pick(jnp.einsum("rkv,rk->rv", p, prior), y)))


def logps(x, w, y):
    """The log-probabilities of pairs of texts: chosen ones, then rejected."""
    logp = pick(log_softmax(x @ w), jnp.maximum(y, 0))
    return jnp.sum(jnp.where(y >= 0, logp, 0).reshape(2, -1), -1), logp


def dpo(x, w, other, v, y):
    (chosen, rejected), _ = logps(x, w, y[: x.shape[0]])
    reference, _ = jax.lax.stop_gradient(logps(other, v, y))
    return -jax.nn.log_sigmoid(0.1 * (chosen - rejected - reference[0] + reference[1]))


def even(loss):
    """The loss of pairs: of an even number of rows."""
    return functools.wraps(loss)(
        lambda x, w, other, v, y: loss(
            x[:66], w, other[:66], v, jnp.where(y[:66] % 7 == 0, -100, y[:66])
        )
    )


def orpo(x, w, other, v, y):
    (chosen, rejected), each = logps(x, w, y)
    odds = lambda p: p - jnp.log1p(-jnp.exp(p / 33))
    ratio = -jax.nn.log_sigmoid(odds(chosen) - odds(rejected))
    return -each.mean() + 0.1 * ratio + 0.01 * jnp.mean(x @ w)


def cpo(x, w, other, v, y):
    (chosen, rejected), _ = logps(x, w, y)
    return -jax.nn.log_sigmoid(0.1 * (chosen - rejected)) - chosen / 33 + jnp.std(x @ w, -1).mean()


def simpo(x, w, other, v, y):
    (chosen, rejected), _ = logps(x, w, y)
    mean = jnp.mean(jax.nn.sigmoid(x @ w))
    return -jax.nn.log_sigmoid(2 * (chosen - rejected) / 33 - 0.5) + mean


def kto(x, w, other, v, y):
    logp, q = log_softmax(x @ w), jax.lax.stop_gradient(log_softmax(other @ v))
    ratio = pick(logp - q, jnp.maximum(y, 0))
    apart = jax.lax.stop_gradient(jnp.maximum(jnp.mean(jnp.sum(jnp.exp(logp) * (logp - q), -1)), 0))
    return jnp.mean(1 - jax.nn.sigmoid(0.1 * (ratio - apart)))


def grpo(x, w, other, v, y):
    logp, reference = log_softmax(x @ w), jax.lax.stop_gradient(log_softmax(other @ v))
    new, old = pick(logp, jnp.maximum(y, 0)), pick(reference, jnp.maximum(y, 0))
    ratio, advantage = jnp.exp(new - jax.lax.stop_gradient(new)), jnp.sin(jnp.arange(y.size))
    clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    apart = jnp.exp(old - new) - (old - new) - 1
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    each = clipped - 0.04 * apart + 0.01 * entropy
    return -jnp.sum(jnp.where(y >= 0, each, 0)) / jnp.sum(y >= 0)


def pairs(x, w, scale=3.0):
    """The scores of all pairs of 1030 images and texts."""
    return scale * jnp.tanh(jnp.tile(x, (16, 1))[:WORDS] + jnp.sin(w.T)) @ jnp.tanh(w)


def clip(x, w, other, v, y):
    z = pairs(x, w)
    one_way = -jnp.mean(jnp.diagonal(jax.nn.log_softmax(z, 1)) ** 2)
    return (one_way - jnp.mean(jnp.diag(jax.nn.log_softmax(z, 0)))) / 2


def siglip(x, w, other, v, y):
    signs = 2 * jnp.eye(WORDS) - 1
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * (pairs(x, w) + v[0, 0])), -1))


LOSSES = {
    loss.__name__: loss
    for loss in (
        *(kl, reverse_kl, jsd, tvd, distilled, cosine, focal, brier, poly, smoothed, z_loss),
        *(clip, siglip, tsallis, top_5, confidence, hinge, bce, unlikelihood, mixture, kto, grpo),
        *map(even, (dpo, orpo, cpo, simpo)),
    )
}


def served(loss, *args, kinds=("rows",), **options):
    """Returns a fused loss, which has to be served, and nothing left."""
    reports = []
    fused = fuse(loss, report=reports.append, **options)
    jax.eval_shape(fused, *args)
    by = [row.served.split(":")[0] for row in reports[-1].rows if row.domain == "loss"]
    assert by and {*by} <= {*kinds}, str(reports[-1])
    return fused


def wide(args):
    """The arguments in float64."""
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    return [np.asarray(a, np.float64) if is_float(a) else a for a in args]


def assert_as_close(found, theirs, exact, factor=3.0):
    """Asserts that results are as close to float64's as a function's own, within rounding."""
    for a, b, c in zip(*map(jax.tree.leaves, (found, theirs, exact)), strict=True):
        assert a.dtype == b.dtype
        if not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(a, b)
            continue
        ours, own = (np.abs(np.asarray(y, np.float64) - c).max() for y in (a, b))
        assert ours <= factor * own + 16 * jnp.finfo(a.dtype).eps * np.abs(c).max()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_their_own_equations(name):
    args, loss = arguments(), LOSSES[name]
    run = lambda f, args: evaluated(jax.value_and_grad(f, (0, 1, 2, 3)))(*args)
    kinds = ("rows", "linear_cross_entropy") if name in ("grpo", "dpo") else ("rows",)
    found = run(served(loss, *args, kinds=kinds), args)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, run(loss, wide(args)))
    assert_as_close(found, run(loss, args), exact)


# ---------------------------------------------------------------- wherever JAX is

ALL_X = 0, None, None, None, None


def vmapped(f):
    """A sum of losses of several x, and of several kernels."""
    each = jax.vmap(jax.vmap(f, ALL_X), (None, 0, None, None, None))
    return lambda x, w, *more: each(jnp.stack([x, 2 * x]), jnp.stack([w, -w, w / 2]), *more).sum()


def in_scan(f):
    run = lambda x, w, *more: lambda c, s: (c + f(s * x, w, *more), None)
    return lambda *args: jax.lax.scan(run(*args), 0.0, jnp.arange(1.0, 3.0))[0]


def in_cond(f):
    return lambda x, *more: jax.lax.cond(x[0, 0] < 9, lambda: f(x, *more), lambda: 0.0)


AROUND = {  # a function of a function, inside `fuse` or around it
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": in_scan,
    "cond": in_cond,
    "vmap": vmapped,
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("name", AROUND)
def test_contexts(name, inside):
    args, around = arguments(), AROUND[name]
    ours = served(around(distilled), *args) if inside else around(served(distilled, *args))
    both = lambda f: jax.value_and_grad(f, (0, 1))
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, evaluated(both(around(distilled)))(*wide(args)))
    assert_as_close(jax.jit(both(ours))(*args), evaluated(both(around(distilled)))(*args), exact)


@pytest.mark.parametrize("loss", [kl, bce, top_5], ids=lambda loss: loss.__name__)
def test_forward_mode_second_order_and_gradients_of_each(loss):
    args = arguments()
    x, w, *more = args
    along = x[::-1], w[:, ::-1]

    def run(f, x, w):
        at = lambda x, w: f(x, w, *more)
        each = jax.vmap(jax.grad(f, (0, 1)), ALL_X)(jnp.stack([x, 2 * x]), w, *more)
        return [jax.jvp(at, (x, w), along), jax.jvp(jax.grad(at, (0, 1)), (x, w), along), each]

    found, wanted = (evaluated(run)(f, x, w) for f in (served(loss, *args), loss))
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("stored", ["whole", "in parts"])
def test_meshes(kind, stored, eight_devices):
    """Rows are split as they are, with no collective that the function did not need."""
    kinds = (getattr(AxisType, kind),) * 2
    mesh = jax.make_mesh((4, 2), ("data", "more"), kinds, devices=eight_devices)
    x, w, other, v, y = arguments(64)
    of_kernel = P() if stored == "whole" else P("more" if kind == "Explicit" else "data")
    specs = P("data"), of_kernel, P("data"), of_kernel, P("data")
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w, other, v, y), specs)
        ]
        ours = served(distilled, *args)
        run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile()
        found, theirs = run(ours), run(distilled)
        for a, b in zip(*map(jax.tree.leaves, (found(*args), theirs(*args))), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
    moved = lambda compiled: sum(c.bytes for c in hlo.collectives(compiled))
    assert len(hlo.collectives(found)) <= len(hlo.collectives(theirs))
    assert moved(found) <= moved(theirs)


def test_rules_of_derivatives_on_explicit_axes(eight_devices):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,), devices=eight_devices[:2])
    x, w, *_ = arguments(64)
    loss = lambda x, w: jnp.mean(jax.nn.softplus(x @ w).sum(-1))
    with jax.set_mesh(mesh):
        args = jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(w, P())
        run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(*args)
        found, want = run(served(loss, *args)), run(loss)
    for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("check", [True, False])
def test_shard_map(check, eight_devices):
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=eight_devices[:4])
    args = arguments(64)
    specs = P("data"), P(), P("data"), P(), P("data")

    def mapped(f):
        mean = lambda *args: jax.lax.pmean(f(*args), "data")
        return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)

    run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(*args)
    want = run(mapped(kl))
    for ours in (mapped(served(kl, *args)), served(mapped(kl), *args)):
        for a, b in zip(*map(jax.tree.leaves, (run(ours), want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def summed_up(x, w, other, v, y):
    """Equations that combine words in ways that no rule knows."""
    p = jax.nn.softmax(x @ w)
    sizes = jnp.stack([p.max(-1), p.min(-1)], -1) * p.reshape(-1, 2, p.shape[1] // 2).sum(-1)
    return jnp.mean(jnp.cumsum(p, -1) ** 2) + jnp.mean(
        jnp.where(jnp.any(p > 0.1, -1), sizes.sum(-1), 0)
    )


def largest(x, w, other, v, y):
    """Logits of one sign, whose best words are of any device, and labels outside."""
    z = jnp.maximum(x @ w, -1)
    outside = jnp.where(y % 9 == 0, y + 2000, y).astype(jnp.uint16)
    filled = jnp.take_along_axis(z, outside[:, None].astype(jnp.int32), 1, fill_value=3)[:, 0]
    clipped = jnp.take_along_axis(z, outside[:, None], 1, mode="clip")[:, 0]
    best = jax.lax.top_k(z, 7)[0] * jnp.arange(7)
    own = jnp.argmax(z, -1) + jnp.argmin(z, -1) * jax.lax.top_k(z, 3)[1].sum(-1)
    return jnp.mean(filled * clipped + best.sum(-1) + jnp.exp(z).max(-1)) + jnp.mean(own) / 1e6


def elsewhere(x, w, other, v, y):
    """A bias, a penalty of each word and logits that are not all of rows and the words."""
    z = (x * jnp.linalg.norm(x, axis=-1, keepdims=True)) @ w + v[0]
    scale = 1 + jnp.mean(z, -1, keepdims=True) ** 2
    return jnp.mean(jnp.sum(jax.nn.softplus(z / scale - v[1]), -1) * (x[:, 0] + scale[:, 0]))


SHARED = kl, distilled, brier, poly, smoothed, mixture, summed_up, largest, elsewhere


AMBIGUOUS = distilled, poly, mixture, summed_up, largest  # on Explicit axes, without fuse, too


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "loss, kind",
    [*[(l, "Auto") for l in SHARED], *[(l, "Explicit") for l in SHARED if l not in AMBIGUOUS]],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_devices_share_words(loss, kind, shape, eight_devices):
    """A vocabulary stays split: no more collectives than theirs, and none of logits or kernels."""
    kinds, names = (getattr(AxisType, kind),) * len(shape), ("data", "model")[-len(shape) :]
    mesh = jax.make_mesh(shape, names, kinds, devices=eight_devices[: math.prod(shape)])
    reports, data = [], P("data" if len(shape) > 1 else None)
    specs = data, P(None, "model"), data, P(None, "model"), data
    run = lambda f, args: jax.jit(jax.value_and_grad(f, (0, 1, 3))).lower(*args).compile()
    with jax.enable_x64(True), jax.set_mesh(mesh):
        given = arguments(66, jnp.float64)
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(given, specs)]
        found, theirs = run(fuse(loss, report=reports.append), args), run(loss, args)
        for a, b in zip(*map(jax.tree.leaves, (found(*args), theirs(*args))), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12 * np.abs(b).max())
        assert found(*args)[1][1].sharding.is_equivalent_to(args[1].sharding, 2)
    assert any(row.served.startswith("rows") for row in reports[0].rows), str(reports[0])
    ours, own = hlo.collectives(found), hlo.collectives(theirs)
    if loss is summed_up:  # what no rule knows is gathered, a chunk at a time
        assert sum(c.bytes for c in ours) <= sum(c.bytes for c in own)
        return
    assert len(ours) <= len(own) or loss is largest  # which gathers what theirs has gathered once
    assert all(c.bytes < 8 * WORDS for c in ours if c.kind == "all-gather")
    assert sum(c.bytes for c in ours) <= sum(c.bytes for c in own)


def of_pairs(x, w, other, v, y):
    p, q = jax.nn.softmax(x @ w), jax.nn.softmax(other @ v)
    return jnp.mean(jnp.max(jnp.abs(p[:, :, None] - q[:, None, :]), (1, 2)))


def test_devices_have_no_part_of_pairs_of_words(eight_devices):
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=eight_devices[:2])
    args, specs = arguments(8), (P(), P(None, "model"), P(), P(None, "model"), P())
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)]
        run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(*args)
        for a, b in zip(*map(jax.tree.leaves, (run(served(of_pairs, *args)), run(of_pairs)))):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


# ---------------------------------------------------------------- layouts, values, dtypes, memory


def rows_and_columns(x, w, other, v, y):
    """Logits of (batch, time, words), flat labels, a weight for each text and a bias in time."""
    z = x.reshape(11, 6, -1) @ w + other[:6, :1]
    logp = jax.nn.log_softmax(z + v[0]).reshape(-1, WORDS)
    each = (pick(logp, y[:66]) ** 3).reshape(11, 6) * jnp.arange(11.0)[:, None]
    return jnp.sum(each) / 66 + jnp.mean(jnp.max(jnp.exp(z), -1))


def turned(x, w, other, v, y):
    """Words before rows, from a kernel that is stored so."""
    z = jax.lax.dot_general(w.T, x, (((1,), (1,)), ((), ())))
    return jnp.mean(jnp.sum(jax.nn.softmax(z, 0) ** 2 * jnp.cos(z), 0))


def two_layouts(x, w, other, v, y):
    """Rows by two indices, of which a loss counts one and a weight the other."""
    z = jnp.einsum("abn,nv->abv", x[:66].reshape(11, 6, -1), w)
    p = jax.nn.softmax(jnp.swapaxes(z, 0, 1))
    return jnp.mean(jnp.sum(p**3, -1) * other[:6, :1])


@pytest.mark.parametrize("loss", [rows_and_columns, turned, two_layouts], ids=lambda f: f.__name__)
def test_layouts(loss):
    args = arguments()
    args = (args[0][:66], *args[1:])
    run = lambda f, args: evaluated(jax.value_and_grad(f, (0, 1, 2, 3)))(*args)
    found = run(served(loss, *args), args)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, run(loss, wide(args)))
    assert_as_close(found, run(loss, args), exact)


def weighted(x, w, other, v, y):
    z = jnp.where(jnp.arange(WORDS) < 1000, x @ w, -jnp.inf)
    p = jax.nn.softmax(z)
    each = (1 - pick(p, y)) ** 2 * -pick(jax.nn.log_softmax(z), y)
    return jnp.sum(jnp.where(other[:, 0] > 0, each, 0)), each, jnp.argmax(z, -1)


def test_what_is_not_finite_is_theirs():
    """Labels outside and of words that are masked, rows of NaN and of infinities, weights of 0."""
    x, w, other, v, y = arguments()
    x = x.at[3].set(jnp.nan).at[9, 0].set(jnp.inf)
    y = y.at[:6].set(jnp.array([-1, -100, WORDS, 1029, -WORDS - 5, 10**6]))
    args = x, w, other, v, y
    both = lambda f: jax.vjp(lambda x, w: f(x, w, other, v, y)[:2], x, w)
    (found, pulled), (want, theirs) = both(served(weighted, *args)), both(weighted)
    np.testing.assert_allclose(found[1], want[1], rtol=1e-5)
    np.testing.assert_array_equal(fuse(weighted)(*args)[2], weighted(*args)[2])
    for cts in ((1.0, jnp.zeros(ROWS)), (0.0, jnp.where(jnp.arange(ROWS) > 20, 1.0, 0))):
        for a, b in zip(pulled(cts), theirs(cts), strict=True):
            np.testing.assert_array_equal(jnp.isnan(a), jnp.isnan(b))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    with jax.enable_x64(True):
        args = arguments(dtype=jnp.dtype(dtype))
        run = lambda f, args: evaluated(jax.value_and_grad(f, (0, 1)))(*args)
        exact = jax.tree.map(np.asarray, run(kl, wide(args)))
        assert_as_close(run(served(kl, *args), args), run(kl, args), exact)


def test_gpus_have_few_chunks(monkeypatch):
    """Equal ones, of whole tiles; and pairs are not cut both ways, which takes twice as long."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    spec = types.SimpleNamespace(region=types.SimpleNamespace(width=4 * 32000))
    chunks = lambda *shape: region._sizes(spec, shape)  # pyright: ignore[reportArgumentType]
    assert chunks(8192) == (4096,) and chunks(4000) == (4000,) and chunks(20, 1024) == (4, 1024)
    fused = Fused(clip, serves=False)
    jax.eval_shape(fused, *arguments(WORDS))
    assert "takes longer" in str(fused) and not fused.served(), str(fused)


@pytest.mark.parametrize("name", ["kl", "brier", "bce", "tvd", "top_5", "mixture", "jsd"])
def test_memory(name):
    """A step's temporaries are those of chunks, and gradients."""
    args, loss = arguments(512), LOSSES[name]
    step = lambda f: jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile()
    ours, theirs = (
        step(f).memory_analysis().temp_size_in_bytes for f in (served(loss, *args), loss)
    )
    assert ours < 0.35 * theirs


# ---------------------------------------------------------------- what stays


def normalised(x, w, other, v, y):
    """By all rows, as no chunk can."""
    p = jax.nn.softmax(x @ w)
    return jnp.mean((p / jnp.max(p, 0)) ** 2)


def returned(x, w, other, v, y):
    p = jax.nn.softmax(x @ w)
    return jnp.mean(p**2), p


def next_words(x, w, other, v, y):
    """By rows that an index counts, but for the last."""
    p = jax.nn.softmax(x @ w)
    return jnp.max(p[jnp.arange(y.size - 1), y[1:]])


def mlp(x, w, other, v, y):
    return jnp.mean(jnp.exp(jax.nn.gelu(x @ w) @ jnp.tile(v.T, 8)) ** 2)


LEFT = {
    normalised: "reduce_max at test_rows.py:{line}: it combines rows",
    returned: "its logits are read as a whole",
    next_words: "gather at test_rows.py:{line}: it combines rows",
    mlp: None,
}


@pytest.mark.parametrize("loss", LEFT, ids=lambda f: f.__name__)
def test_what_stays(loss):
    args, reports = arguments(), []
    found = fuse(loss, report=reports.append)(*args)
    jax.tree.map(np.testing.assert_array_equal, found, loss(*args))
    line = loss.__code__.co_firstlineno + 3
    reason = LEFT[loss] and LEFT[loss].format(line=line)
    assert [row.reason for row in reports[0].rows] == ([reason] if reason else [])


# ---------------------------------------------------------------- numbers and rules of other kinds


def of_complex_logits(x, w, other, v, y):
    total = jnp.log(jnp.sum(jnp.exp(x @ (w * (1 + 0.3j)) / 3), -1))
    return jnp.mean(jnp.imag(total) ** 2)


@jax.custom_vjp
def conjugated(z):
    return jnp.abs(z)


conjugated.defvjp(lambda z: (conjugated(z), z), lambda z, ct: (3 * z * ct,))


def of_a_complex_rule(x, w, other, v, y):
    return jnp.mean(jnp.max(conjugated(jnp.exp(x @ (w * (1 + 0.3j)) / 9)), -1))


def on_platforms(x, w, other, v, y):
    p = jax.lax.platform_dependent(jax.nn.softmax(x @ w), cpu=jnp.sin, default=jnp.cos)
    return jnp.mean(jnp.max(p, -1))


@jax.custom_vjp
def asking(a, b):
    return a * b


asking.defvjp(
    lambda a, b: (a.value * b.value, b.value * (2 if b.perturbed else 7)),
    lambda kept, ct: (ct * kept, None),
    symbolic_zeros=True,
)


def of_an_asking_rule(x, w, other, v, y):
    return jnp.mean(jnp.max(asking(jax.nn.softmax(x @ w), jnp.cos(other @ v)), -1))


def of_a_complex_total(x, w, other, v, y):
    return jnp.imag(jnp.mean(jnp.log(jnp.sum(jnp.exp((x @ w) * (1 + 1j) / 3), -1))))


KINDS = of_complex_logits, of_a_complex_rule, of_a_complex_total, on_platforms, of_an_asking_rule


@pytest.mark.parametrize("loss", KINDS, ids=lambda f: f.__name__)
def test_kinds_of_numbers_and_of_rules(loss):
    args, reports = arguments(16), []
    run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(*args)
    for a, b in zip(*map(jax.tree.leaves, (run(fuse(loss, report=reports.append)), run(loss)))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
    assert len(reports[0].fused) == ("complex" in loss.__name__), str(reports[0])


@pytest.mark.parametrize("each", ["rows", "linear_cross_entropy"])
def test_second_derivatives_are_those_of_rules(each):
    """What a rule of gradients returns has that rule's derivative, not the function's."""
    x, w, *more = args = arguments(16)

    def loss(x, w, other, v, y):
        p = log_softmax(x @ w)
        n = jnp.max(jnp.exp(p), -1) if each == "rows" else pick(p, y)
        return jnp.mean(fuzz_losses.own_gradient(n) ** 2)

    def run(f):
        squares = lambda *moving: sum(map(jnp.vdot, *[jax.grad(f, (0, 1))(*moving, *more)] * 2))
        return jax.jit(jax.grad(squares, (0, 1)))(x, w)

    for a, b in zip(run(served(loss, *args, kinds=(each,))), run(loss), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


# ---------------------------------------------------------------- random losses


def test_random_losses(monkeypatch):
    monkeypatch.setattr(search, "SMALLEST", 8)
    with jax.enable_x64(True):
        failed, counts = fuzz_losses.run_many(range(12))
    assert not failed
    assert counts["rows"] >= 6


# ---------------------------------------------------------------- gradients at once


def masked_means(x, w, other, v, y):
    """Means of chosen rows, one of them by text, added up; beside them what has no gradient."""
    z = x @ w
    lse, chosen = jax.nn.logsumexp(z, -1), y % 3 > 0
    each = jnp.where(chosen, lse - pick(z, y), 0)
    by_text = each.reshape(8, -1).sum(1) / chosen.reshape(8, -1).sum(1)
    z_loss = jnp.sum(lse**2 * chosen) / jnp.maximum(chosen.sum(), 1)
    loss = jnp.where(chosen.any(), by_text.mean() + 1e-2 * z_loss, 0.0)
    return loss - jnp.mean(jax.nn.softmax(z) ** 2) / 9, (each, z_loss, jnp.argmax(z, -1))


def two_heads(x, w, other, v, y):
    return jnp.mean(jnp.sum(jax.nn.softmax(x @ w) * jnp.tanh(other @ v), -1))


def of_a_mean(x, w, other, v, y):
    return jnp.sqrt(jnp.mean(jax.nn.softmax(x @ w) ** 2))


def of_two_means(x, w, other, v, y):
    p = jax.nn.softmax(x @ w)
    return jnp.mean(p**2) * jnp.mean(pick(p, y))


def of_several_totals(x, w, other, v, y):
    p = jax.nn.softmax(x @ w)
    return jnp.sum(jnp.tanh(jnp.stack([p.max(-1), p.min(-1)], -1).sum(0)))


def in_turns(x, w, other, v, y):
    return in_scan(tsallis)(x, w, other, v, y)


OF_ROWS = {
    "square": lambda z, y: log_softmax(z)[:, 0] ** 2,
    "pick": lambda z, y: -pick(log_softmax(z), y),
}
MEANS = {  # of a number for each row, which rows, and a number
    "select": lambda n, chosen, c: jnp.where(chosen, n, 0).sum() / chosen.sum() * c,
    "product": lambda n, chosen, c: (n * chosen).sum() / chosen.sum() * c,
}
AT_ONCE, AGAIN = "gradients at once", "in the backward again"
PRODUCTS = {
    masked_means: (AT_ONCE, 3),
    two_heads: (AT_ONCE, 6),
    of_a_mean: (AT_ONCE, 3),
    of_two_means: (AGAIN, 4),
    of_several_totals: (AGAIN, 4),
    in_turns: (AGAIN, 4),
    jax.checkpoint(tsallis): (AT_ONCE, 4),  # nothing is kept: the value alone in the forward
}


@pytest.mark.parametrize("loss", PRODUCTS, ids=lambda f: f.__name__)
def test_gradients_come_with_the_loss(loss):
    args, reports, (when, products) = arguments(64), [], PRODUCTS[loss]
    has_aux, moved = loss is masked_means, (0, 1, 2, 3) if loss is two_heads else (0, 1)
    of = lambda f: jax.jit(jax.value_and_grad(f, moved, has_aux=has_aux))
    compiled = of(fuse(loss, report=reports.append)).lower(*args)
    assert [row.served for row in reports[0].rows] == [f"rows: its own equations in chunks, {when}"]
    assert compiled.as_text().count("stablehlo.dot_general") == products
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, of(loss)(*wide(args)))
    assert_as_close(compiled.compile()(*args), of(loss)(*args), exact)


def test_gradients_of_what_is_returned_beside():
    """Each end has its own gradient, whoever asks for it."""
    args = arguments(64)
    ours = served(masked_means, *args)

    def gradient(f, i):
        def asked(*args):
            loss, (each, z_loss, _) = f(*args)
            return (loss, each @ jnp.cos(jnp.arange(64.0)), z_loss)[i]

        return jax.grad(asked, (0, 1))(*args)

    for i in range(3):
        for a, b in zip(gradient(ours, i), gradient(masked_means, i), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("each", OF_ROWS)
@pytest.mark.parametrize("end", MEANS)
def test_means_of_no_rows(each, end):
    """The numbers that divide or multiply a total may be NaN or infinite: so are its gradients,
    but for those of rows that a select has taken out of it."""
    x, w, other, v, y = arguments()

    def loss(x, w, chosen, factor):
        return MEANS[end](OF_ROWS[each](x @ w, y), chosen, factor)

    for chosen in (y < 0, y % 3 > 0):
        for factor in (jnp.nan, jnp.inf, 0.0, 2.0):
            args = x, w, chosen, factor
            run = lambda f, args=args: evaluated(jax.value_and_grad(f, (0, 1, 3)))(*args)
            fused = served(loss, *args, kinds=("rows", "linear_cross_entropy"))
            for a, b in zip(*map(jax.tree.leaves, map(run, (fused, loss))), strict=True):
                np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
                a, b = (np.where(np.isfinite(y), y, 0) for y in (a, b))
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_products_sum_gradients_of_kernels():
    """A chunk's share of a kernel's gradient is not rounded to the kernel's dtype."""
    args = arguments(64, jnp.bfloat16)
    for loss in (two_heads, turned):
        step = jax.jit(jax.grad(served(loss, *args), (0, 1, 2, 3)))
        made = re.findall(r"dot_general.*-> tensor<(.*)>", step.lower(*args).as_text())
        assert {t for t in made if t.startswith(f"{WORDS}x8x")} == {f"{WORDS}x8xf32"}
