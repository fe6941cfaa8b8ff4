"""The step: its loss and gradient, updates that it refuses, and that nothing is copied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_model import CONFIG, first_devices

from normfuse.models.functional import build
from normfuse.train.config import OptimConfig
from normfuse.train.evaluate import Evaluator
from normfuse.train.mesh import batch_sharding, on_devices
from normfuse.train.metrics import NATS_PER_BIT
from normfuse.train.step import Program, loss_and_gradient, make_optimizer, schedule

OPTIM = OptimConfig(lr=1e-2, warmup=2, clip=0.5)


@pytest.fixture(scope="module")
def one_device():
    return first_devices(1, 1, 1)


@pytest.fixture
def mesh(one_device):
    """A mesh of one device, made current."""
    with jax.set_mesh(one_device):
        yield one_device


@pytest.fixture(scope="module")
def compiled(one_device):
    """A program that leaves no update out, and its step for `(4, 17)` tokens."""
    program = _program(one_device)
    with jax.set_mesh(one_device):
        return program, program.lower(4, 16).compile()


def _program(mesh):
    return Program(
        build("nnx", CONFIG),
        make_optimizer(OPTIM, 20),
        schedule(OPTIM, 20),
        mesh,
        microbatches=1,
    )


def _tokens(rng, mesh, batch=4, seq=16):
    tokens = rng.integers(0, CONFIG.vocab_size, (batch, seq + 1)).astype(np.int32)
    return on_devices(tokens, batch_sharding(mesh))


_gradient = jax.jit(loss_and_gradient, static_argnums=0, static_argnames=("microbatches", "mesh"))


def _host(tree):
    return jax.tree.map(np.array, tree)


def _equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_microbatches_sum_to_the_whole_gradient(mesh, rng):
    model = build("eqx", CONFIG)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = _tokens(rng, mesh, batch=8)
    whole = _gradient(model, params, tokens, microbatches=1, mesh=mesh)
    split = _gradient(model, params, tokens, microbatches=4, mesh=mesh)
    for a, b in zip(*map(jax.tree.leaves, (split, whole)), strict=True):
        # Only the order of a sum over 128 tokens differs.
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-22 * 128**0.5 * np.abs(b).max())


def _first_update(p, g, clipped, rate):
    """AdamW's first update in float64: corrected, the moments are g and its square."""
    p, g = np.float64(p), np.float64(g) * clipped
    return p - rate * (g / (np.abs(g) + OPTIM.eps) + OPTIM.weight_decay * p * (p.ndim > 1))


def test_step_equals_adamw_by_hand(compiled, mesh, rng):
    program, step = compiled
    tokens = _tokens(rng, mesh)
    state = program.init(0)
    params = _host(state.params)
    state, metrics = step(state, tokens)
    loss, gradient = _gradient(
        program.model, jax.device_put(params), tokens, microbatches=1, mesh=mesh
    )

    norm, rate = _norm(gradient), OPTIM.lr / 3
    clipped = OPTIM.clip / norm
    assert clipped < 0.9  # or the test would not see whether gradients are clipped
    update = functools.partial(_first_update, clipped=clipped, rate=rate)
    expected = jax.tree.map(update, params, gradient)
    assert float(metrics.loss) == pytest.approx(float(loss), rel=1e-6)
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(metrics.learning_rate) == pytest.approx(rate, rel=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        # Adam's first update has the size of the learning rate, 3e-3, whatever the gradient's; a
        # tiny gradient's rounding is divided by its own size, so some per mille of it may differ.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    # The update hides the size of a gradient, and the moments show it.
    first, second = (optax.tree.get(state.optimizer, name) for name in ("mu", "nu"))
    for g, m, v in zip(*map(jax.tree.leaves, (gradient, first, second)), strict=True):
        size = 1e-5 * np.abs(g).max()  # sums over 64 tokens in another order
        np.testing.assert_allclose(m, (1 - OPTIM.b1) * clipped * g, rtol=1e-4, atol=size)
        np.testing.assert_allclose(v, (1 - OPTIM.b2) * (clipped * g) ** 2, rtol=2e-4, atol=size**2)


def _norm(tree) -> float:
    return sum(float(np.sum(np.float64(leaf) ** 2)) for leaf in jax.tree.leaves(tree)) ** 0.5


def _poisoned(state):
    return state._replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))


def test_bad_step_halts_before_the_update(compiled, mesh, rng):
    program, step = compiled
    tokens = _tokens(rng, mesh)
    state, _ = step(program.init(0), tokens)
    good = _host(state)
    bad, metrics = step(_poisoned(state), tokens)
    assert not np.isfinite(float(metrics.loss))
    assert bool(metrics.halted) and int(bad.step) == 1
    assert _equal(bad.optimizer, good.optimizer)
    healed = bad._replace(params=jax.device_put(good.params, program.shardings().params))
    after, _ = step(healed, tokens)  # a good step in flight behind the bad one changes nothing
    assert _equal(after.params, good.params)
    assert int(after.step) == 1


def test_a_validation_is_the_mean_over_its_windows(mesh, rng):
    """Also where these do not fill the last batch: here six, four at once."""
    model = build("nnx", CONFIG)
    params = model.init(jax.random.key(0))
    tokens = rng.integers(0, CONFIG.vocab_size, 6 * 8 + 1).astype(np.int32)
    options = {"seq_len": 8, "batch_size": 4, "tokens_per_byte": 0.25}
    found = Evaluator(model, mesh, tokens, **options)(params, 6 * 8)
    loss = float(model.loss(params, tokens[:-1].reshape(6, 8), tokens[1:].reshape(6, 8)))
    # Means of float32 numbers, taken in another order.
    assert found.loss == pytest.approx(loss, rel=8 * 2**-24)
    assert found.bits_per_byte == found.loss / NATS_PER_BIT * 0.25


def test_learning_rate_rises_linearly_then_falls_by_a_cosine():
    rate = schedule(OptimConfig(lr=1.0, warmup=4, final_lr=0.1), 20)
    np.testing.assert_allclose([rate(k) for k in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert float(rate(12)) == pytest.approx(0.1 + 0.9 * 0.5, rel=1e-6)
    assert float(rate(20)) == pytest.approx(0.1, rel=1e-6)
    assert float(schedule(OptimConfig(lr=1.0), 40)(0)) == pytest.approx(1 / 3, rel=1e-6)
    assert float(schedule(OptimConfig(lr=1.0, warmup=0), 40)(0)) == 1.0
    assert float(schedule(OptimConfig(lr=1.0, warmup=40), 40)(40)) == 1.0


def test_clipping_and_decay_follow_the_configuration():
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer = make_optimizer(OptimConfig(lr=0.5, warmup=0, weight_decay=0.1), 10)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)  # lr * decay * 1
    np.testing.assert_array_equal(updates["scale"], 0)
    huge = jax.tree.map(lambda x: 1e30 * x, params)
    assert all(
        np.isfinite(x).all()
        for x in jax.tree.leaves(optimizer.update(huge, optimizer.init(params), params)[0])
    )
