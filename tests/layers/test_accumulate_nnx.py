"""Gradients over microbatches of nnx models, and everything else that a microbatch changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normfuse
from normfuse.layers.nnx import Linear, accumulate_gradients

COUNT, ROWS, DIM = 3, 6, 16
# Flax would rather have `nnx.capture` around; its `sow` works without.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using 'Module.sow.*:DeprecationWarning"),
]


class Sown(nnx.Intermediate):
    """The kind of what a module sows."""


class Model(nnx.Module):
    """Random numbers, and running statistics."""

    def __init__(self, rngs, dtype=jnp.float32):
        self.up = Linear(DIM, 16, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = Linear(16, 8, rngs=rngs, param_dtype=dtype)
        self.total = nnx.Intermediate(jnp.zeros(()))

    def __call__(self, x):
        x = self.dropout(self.norm(self.up(x)))
        self.total[...] += jnp.sum(x)
        return self.down(x)


def loss(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


@pytest.fixture
def xs(rng):
    return jnp.asarray(rng.standard_normal((COUNT, ROWS, DIM)), jnp.float32)


def assert_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want)):
        if jnp.issubdtype(a.dtype, jnp.floating):
            # float32 sums of up to 100 numbers of order 1, in another order
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=str(path))
        else:
            assert jnp.array_equal(a, b), path


def test_values_are_those_of_a_loop_with_value_and_grad(xs):
    """In every step: loss, gradients, and the whole state of the model afterwards."""
    model, theirs = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    optimizers = [nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param) for m in (model, theirs)]
    run = nnx.jit(lambda model, xs: accumulate_gradients(loss, model, xs))
    each = nnx.jit(nnx.value_and_grad(loss))
    for step in range(2):
        value, gradients = run(model, xs)
        losses, apart = zip(*[each(theirs, x) for x in xs])
        np.testing.assert_allclose(value, np.mean(losses), rtol=1e-5)
        mean = jax.tree.map(lambda *g: sum(g) / COUNT, *apart)
        assert_close(gradients, mean)
        assert_close(nnx.state(model), nnx.state(theirs))
        assert model.dropout.rngs.count[...] == COUNT * (step + 1)  # every microbatch has its own
        for optimizer, m in zip(optimizers, (model, theirs)):
            optimizer.update(m, mean)


def test_what_a_loss_sows_it_returns(xs):
    class Sowing(Model):
        def __call__(self, x):
            self.sow(Sown, "hidden", x)
            return super().__call__(x)

    def popping(model, x):
        return loss(model, x), nnx.pop(model, Sown)

    run = nnx.jit(lambda model: accumulate_gradients(popping, model, xs, has_aux=True))
    (_, aux), _ = run(Sowing(nnx.Rngs(0)))
    np.testing.assert_array_equal(aux["hidden"].get_value()[0], xs)
    with pytest.raises(ValueError, match="hidden is new, .* return it as aux"):
        accumulate_gradients(loss, Sowing(nnx.Rngs(0)), xs)


def test_gradients_of_what_wrt_says_alone(xs):
    model = Model(nnx.Rngs(0), jnp.bfloat16)
    kernels = nnx.PathContains("kernel")
    _, gradients = accumulate_gradients(loss, model, xs, wrt=kernels)
    assert jax.tree.structure(gradients) == jax.tree.structure(nnx.state(model, kernels))
    assert {a.dtype.name for a in jax.tree.leaves(gradients)} == {"float32"}
    theirs = Model(nnx.Rngs(0), jnp.bfloat16)
    grad = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, kernels)))
    for got, *want in zip(*map(jax.tree.leaves, [gradients, *[grad(theirs, x) for x in xs]])):
        mean = sum(w.astype(jnp.float32) for w in want) / COUNT
        # A rounding of each gradient to bfloat16, which ours do without.
        np.testing.assert_allclose(got, mean, rtol=0, atol=2**-8 * float(jnp.abs(mean).max()) * 4)


class Frozen(nnx.Variable):
    """Of a user's own kind: differentiated where `wrt` says so."""


def test_variables_of_other_kinds_may_be_differentiated():
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = Frozen(jnp.full(2, 3.0))

    run = lambda model, x: jnp.sum(model.scale[...] * x)
    _, gradients = accumulate_gradients(run, Scaled(), jnp.ones((4, 2)), wrt=Frozen)
    assert gradients["scale"][...].tolist() == [1, 1]


def test_replicas(xs, eight_devices):
    """One reduction a step; what each replica would change by itself is refused."""
    del eight_devices
    model, xs = Linear(DIM, 8, rngs=nnx.Rngs(0)), jnp.concatenate([xs] * 4, 1)
    value, want = accumulate_gradients(loss, model, xs)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        specs = jax.tree.map(lambda _: P(), nnx.state(model, nnx.Param))
        options = {"replicas": "data", "specs": specs}
        run = nnx.jit(lambda model, xs: accumulate_gradients(loss, model, xs, **options))
        got = run(model, xs)
        np.testing.assert_allclose(got[0], value, rtol=1e-5)
        assert_close(got[1], want)
        with pytest.raises(ValueError, match="changes .*count, which each replica .* replicas out"):
            accumulate_gradients(loss, Model(nnx.Rngs(0)), xs, replicas="data")


def test_bad_input_is_one_clear_error(xs):
    model = Model(nnx.Rngs(0))
    with pytest.raises(TypeError, match="nnx.*: loss_fn must be a function, got int"):
        accumulate_gradients(3, model, xs)
    with pytest.raises(ValueError, match=r"scalar loss, got shape \(6, 8\)"):
        accumulate_gradients(lambda model, x: model(x), model, xs)

    def doubles(model, x):
        model.up.kernel[...] *= 2
        return loss(model, x)

    with pytest.raises(ValueError, match="changes up.kernel, a parameter.* out of wrt"):
        accumulate_gradients(doubles, model, xs)

    def widens(model, x):
        model.norm.mean.set_value(jnp.zeros((2, 16)))
        return jnp.float32(0)

    with pytest.raises(ValueError, match=r"norm.mean is \(16,\) before, \(2, 16\) after"):
        accumulate_gradients(widens, model, xs)

    def creates(model, x):
        model.last = nnx.Intermediate(x)
        return jnp.float32(0)

    with pytest.raises(ValueError, match=r"last is new, \(6, 16\) after: .* return it as aux"):
        accumulate_gradients(creates, model, xs)


@pytest.mark.parametrize("of", [lambda m: m, nnx.state, lambda m: {"model": [nnx.state(m)]}])
def test_the_function_of_arrays_refuses_other_variables(xs, of):
    """They would be parameters there: each microbatch would begin with the same."""
    with pytest.raises(ValueError, match=r"is a RngCount.*: normfuse\.layers\.nnx\.acc"):
        normfuse.accumulate_gradients(lambda p, x: 0.0, of(nnx.Dropout(0.5, rngs=nnx.Rngs(0))), xs)
    normfuse.accumulate_gradients(lambda p, x: 0.0, nnx.state(Model(nnx.Rngs(0)), nnx.Param), xs)
