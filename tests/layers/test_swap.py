"""`swap`: a model of any framework whose own call is fused, and which is otherwise untouched."""

import copy
import pickle

import equinox as eqx
import flax.linen as nn
import foreign_norms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_cases import draw

from normfuse.layers import eqx as ours_eqx
from normfuse.layers import linen as ours_linen
from normfuse.layers import nnx as ours_nnx

DIM = 32
X = draw(0, 2, 16, DIM)


class NnxModel(nnx.Module):
    """A norm of its own, a gated MLP, and state that calls change."""

    def __init__(self, rngs, counts=True):
        linear = lambda n, m: nnx.Linear(n, m, use_bias=False, rngs=rngs)
        self.norm = foreign_norms.OnePlusScale(DIM, rngs=rngs)
        self.gate, self.up, self.down = linear(DIM, 64), linear(DIM, 64), linear(64, DIM)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(())) if counts else None

    def __call__(self, x, scale=1.0, *, deterministic=True):
        if self.calls is not None:
            self.calls[...] = self.calls[...] + 1
        y = self.norm(x)
        y = self.down(nnx.silu(self.gate(y)) * self.up(y))
        return x + scale * self.drop(y, deterministic=deterministic)


class EqxModel(eqx.Module):
    norm: eqx.nn.RMSNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    name: str = eqx.field(static=True, default="m")

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        linear = lambda n, m, key: eqx.nn.Linear(n, m, use_bias=False, key=key)
        self.norm = eqx.nn.RMSNorm(DIM, use_bias=False)
        self.gate, self.up, self.down = linear(DIM, 64, a), linear(DIM, 64, b), linear(64, DIM, c)

    def __call__(self, x, scale=1.0):
        y = jax.vmap(self.norm)(x)
        hidden = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return x + scale * jax.vmap(self.down)(hidden)


class LinenModel(nn.Module):
    dim: int = DIM

    @nn.compact
    def __call__(self, x, scale=1.0):
        y = nn.RMSNorm(name="norm")(x)
        hidden = nn.silu(nn.Dense(64, use_bias=False)(y)) * nn.Dense(64, use_bias=False)(y)
        return x + scale * nn.Dense(self.dim, use_bias=False)(hidden)


def nnx_case(**options):
    """A model, the swapped one, and a function that calls either."""
    model = NnxModel(nnx.Rngs(0), counts=False)
    return model, ours_nnx.swap(model, **options), lambda model, *args: model(*args)


def eqx_case(**options):
    model = EqxModel(jax.random.key(0))
    each = lambda model, x, *args: jax.vmap(lambda x: model(x, *args))(x)
    return model, ours_eqx.swap(model, **options), each


def linen_case(**options):
    model = LinenModel()
    variables = model.init(jax.random.key(0), X)
    return model, ours_linen.swap(model, **options), lambda m, *args: m.apply(variables, *args)


CASES = {"nnx": nnx_case, "eqx": eqx_case, "linen": linen_case}
every_framework = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def assert_close(got, want, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        scale = max(1e-3, float(jnp.max(jnp.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


@every_framework
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_call_is_served_and_computes_the_same(make, quantization):
    reports = []
    model, swapped, call = make(quantization=quantization, report=reports.append)
    got, want = call(swapped, X, 0.5), call(model, X, 0.5)
    assert_close(got, want, 2e-5 if quantization is None else 0.1)
    domains = [row.domain for row in reports[-1].fused]
    assert {"norm", "mlp"} <= {*domains}, str(reports[-1])
    if quantization == "fp8":
        assert "GatedMLP, fp8" in str(reports[-1]), str(reports[-1])
    program = lambda m: str(jax.make_jaxpr(lambda x: call(m, x))(X))
    assert "rms_norm" in program(swapped) and "normfuse" not in program(model)


@every_framework
def test_gradients_are_the_models(make):
    model, swapped, call = make()
    gradient = jax.grad(lambda m, x: jnp.sum(jnp.sin(call(m, x))), 1)
    assert_close(gradient(swapped, X), gradient(model, X), 1e-4)


def test_nothing_of_an_nnx_model_is_touched():
    model = NnxModel(nnx.Rngs(0))
    graph = nnx.graphdef(model)
    swapped = ours_nnx.swap(model)
    assert nnx.graphdef(model) == graph and type(model) is NnxModel
    assert isinstance(swapped, NnxModel) and swapped.up is model.up
    paths = lambda model: [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert paths(swapped) == paths(model)
    for _ in range(3):  # what calls change is the model's, too: they have the same Variables
        nnx.jit(lambda model: model(X, deterministic=False))(swapped)
    assert model.calls[...] == swapped.calls[...] == 3


def test_nothing_of_an_equinox_model_is_touched():
    model = EqxModel(jax.random.key(0))
    swapped = ours_eqx.swap(model)
    assert isinstance(swapped, EqxModel) and type(model) is EqxModel
    assert all(a is b for a, b in zip(jax.tree.leaves(swapped), jax.tree.leaves(model)))
    paths = lambda m: [path for path, _ in jax.tree_util.tree_leaves_with_path(m)]
    assert paths(swapped) == paths(model)
    changed = eqx.tree_at(lambda m: m.norm.weight, swapped, 2 * model.norm.weight)
    assert type(changed) is type(swapped) and changed.name == "m"


def test_nothing_of_a_linen_model_is_touched():
    model, swapped = LinenModel(), ours_linen.swap(LinenModel())
    assert isinstance(swapped, LinenModel) and swapped.dim == DIM
    of = lambda m: m.init(jax.random.key(0), X)
    assert_close(of(swapped), of(model), 0)
    assert jax.tree.structure(of(swapped)) == jax.tree.structure(of(model))
    variables = of(model)
    got, sown = swapped.apply(variables, X, mutable=["intermediates"], capture_intermediates=True)
    want, expected = model.apply(
        variables, X, mutable=["intermediates"], capture_intermediates=True
    )
    assert_close((got, sown), (want, expected))
    doubled = lambda module, x: 2 * module(x)
    assert_close(swapped.apply(variables, X, method=doubled), 2 * model.apply(variables, X))


@every_framework
def test_equal_options_make_one_program(make):
    """JAX traces once for equal models: in a loop that swaps, and after a copy."""
    traces = []
    model, swapped, call = make(skip=["nowhere"])
    modules = {NnxModel: ours_nnx, EqxModel: ours_eqx, LinenModel: ours_linen}
    again = modules[type(model)].swap(model, skip=["nowhere"])
    assert type(again) is type(swapped)
    assert type(copy.deepcopy(swapped)) is type(copy.copy(swapped)) is type(swapped)
    assert type(modules[type(model)].swap(again, skip=["nowhere"])) is type(swapped)
    other = modules[type(model)].swap(swapped, quantization="fp8")
    assert type(other).__mro__[1] is type(model)  # the options of the last swap are its own

    @(nnx.jit if type(model) is NnxModel else eqx.filter_jit)
    def run(model, x):
        traces.append(x)
        return call(model, x)

    with pytest.warns(UserWarning, match="skip='nowhere' is in no row"):
        run(swapped, X)
    for each in (again, copy.deepcopy(swapped)):
        run(each, X)
    assert len(traces) == 1


@every_framework
def test_a_pickled_model_is_swapped_again(make):
    model, swapped, call = make(quantization="fp8")
    again = pickle.loads(pickle.dumps(swapped))
    assert type(again) is type(swapped)
    assert_close(call(again, X), call(swapped, X), 0)


def test_bad_input_is_one_clear_error():
    good = EqxModel(jax.random.key(0))
    with pytest.raises(TypeError, match="swap: model must be a module, got the class"):
        ours_eqx.swap(type(good))
    for wrong in (3, None, lambda x: x, {"a": good}):
        with pytest.raises(TypeError, match="swap: model must be a module with a"):
            ours_eqx.swap(wrong)
    with pytest.raises(ValueError, match=r"quantization must be None or 'fp8', got 'int8'"):
        ours_eqx.swap(good, quantization="int8")
    with pytest.raises(TypeError, match="report must be a function, got 'print'"):
        ours_eqx.swap(good, report="print")


def test_a_bound_linen_model_is_refused():
    variables = LinenModel().init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="LinenModel is bound to variables; swap it before"):
        ours_linen.swap(LinenModel().bind(variables))
