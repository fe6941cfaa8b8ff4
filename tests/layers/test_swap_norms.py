"""`swap` finds other people's norms by what they compute, and leaves the rest alone."""

import copy
import dataclasses
import pickle
import re
import threading
import time
import types
import warnings
from typing import ClassVar

import equinox as eqx
import foreign_norms
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from foreign_norms import DivideByRms, OnePlusScale, StaticEps, SumOverN, WholeInput
from jax.ad_checkpoint import checkpoint_name

from normfuse import rms_norm
from normfuse.layers import eqx as ours_eqx
from normfuse.layers import linen as ours_linen
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.swap import SERVED

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
SIZE = 48


def report_of(swap, model, **options):
    reports = []
    swap(model, report=reports.append, **options)
    return reports[0]


def assert_rounding(got, want, dtypes):
    """Equal but for the roundings of two results, each by a few of its narrowest dtype."""
    assert got.dtype == want.dtype and got.shape == want.shape
    eps = max(float(jnp.finfo(d).eps) for d in (got.dtype, *dtypes))
    got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
    # 8 + √n float32 roundings of the sum, four of the narrowest dtype: as swap itself allows
    allowed = 4 * eps + (8 + np.sqrt(SIZE)) * float(jnp.finfo(f32).eps)
    np.testing.assert_allclose(got, want, rtol=allowed, atol=allowed * np.abs(want).max())


@pytest.mark.parametrize("name", foreign_norms.NNX)
def test_nnx_norms_are_served(rng, name):
    theirs, norm = foreign_norms.NNX[name](SIZE), foreign_norms.NNX[name](SIZE)
    graph, base = nnx.graphdef(norm), type(norm)
    report = report_of(ours_nnx.swap, norm)
    assert [row.served for row in report.rows] == ["rms_norm"] and "float32" in str(report)
    assert type(norm) is not base and isinstance(norm, base)
    for shape, dtype in [((3, SIZE), f32), ((2, 3, SIZE), bf16), ((SIZE,), f16)]:
        x = jnp.asarray(rng.standard_normal((*shape[:-1], SIZE)) * 3, dtype)
        scale = [v.get_value().dtype for v in jax.tree.leaves(nnx.state(norm), is_leaf=variable)]
        own = bf16 if getattr(theirs, "dtype", f32) == bf16 else dtype
        assert_rounding(norm(x), theirs(x), (dtype, own, *scale))
        assert hlo.calls(jax.jit(lambda x: norm(x)).lower(x).compile()) == {"forward": 1}
    assert nnx.graphdef(ours_nnx.unswap(norm)) == graph and type(norm) is base


def variable(leaf):
    return isinstance(leaf, nnx.Variable)


@pytest.mark.parametrize("name", foreign_norms.NNX)
def test_nnx_gradients(rng, name):
    theirs, norm = foreign_norms.NNX[name](SIZE), ours_nnx.swap(foreign_norms.NNX[name](SIZE))
    x = jnp.asarray(rng.standard_normal((5, SIZE)), f32)
    dy = jnp.asarray(rng.standard_normal((5, SIZE)), f32)
    loss = lambda m, x: jnp.sum(m(x).astype(f32) * dy)
    got, want = (jax.jit(nnx.grad(loss, argnums=(0, 1)))(m, x) for m in (norm, theirs))
    tolerance = 2e-2 if getattr(theirs, "dtype", f32) == bf16 else 2e-5  # a sum of 5 or 48 terms
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.abs(b).max()))


def test_the_casts_are_the_class_own(rng):
    # x and scale rounded to bfloat16 first: a norm of the float32 values is further away.
    norm = foreign_norms.NNX["a dtype of its own"](SIZE)
    x = jnp.asarray(rng.standard_normal((64, SIZE)), f32)
    want, scale = norm(x), norm.scale[...]
    ours_nnx.swap(norm)
    plain = rms_norm(x, scale, eps=norm.epsilon, dtype=bf16)
    different = lambda y: float(jnp.mean(y != want))
    assert different(norm(x)) < 0.02 < 0.2 < different(plain)


@pytest.mark.parametrize("weight", [f32, bf16])
def test_the_bits_are_those_of_a_norm_that_rounds_before_its_weight(rng, weight):
    norm = foreign_norms.NNX["rounds before the weight"](SIZE)
    norm.weight = nnx.Param(norm.weight[...].astype(weight))
    x = jnp.asarray(rng.standard_normal((64, SIZE)), bf16)
    want, scale = norm(x), norm.weight[...]
    _, known = reference.round_before_weight(x, scale, eps=norm.variance_epsilon)
    got = np.asarray(ours_nnx.swap(norm)(x))
    assert got.dtype == want.dtype == jnp.promote_types(bf16, weight)
    assert known.mean() > 0.99 and np.all(got[known] == np.asarray(want)[known])


def test_eps_and_offset_are_the_class_own():
    x = jnp.full((1, SIZE), 1e-3)  # its mean square is the eps
    for norm in (
        DivideByRms(SIZE, norm_eps=1e-6, rngs=nnx.Rngs(0)),
        OnePlusScale(SIZE, rngs=nnx.Rngs(0)),
    ):
        want = norm(x)
        np.testing.assert_allclose(ours_nnx.swap(norm)(x), want, rtol=1e-5)
    norm = ours_nnx.swap(DivideByRms(SIZE, rngs=nnx.Rngs(0)))
    norm.norm_eps = 0.5  # an attribute that is changed later
    want = DivideByRms(SIZE, norm_eps=0.5, rngs=nnx.Rngs(0))(x)
    np.testing.assert_allclose(norm(x), want, rtol=1e-5)


@pytest.mark.parametrize("name", foreign_norms.NO_NORM)
def test_what_is_no_norm_stays_with_its_reason(name):
    make, why = foreign_norms.NO_NORM[name]
    module, other = make(), ours_nnx.RMSNorm(8, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    rows = report_of(ours_nnx.swap, nnx.Dict(a=module, b=other)).left
    assert [row.path for row in rows] == ["a"] and why in rows[0].reason, rows
    assert nnx.graphdef(module) == graph
    jax.tree.map(np.testing.assert_array_equal, key_data(nnx.state(module)), key_data(state))


def key_data(tree):
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


class Model(nnx.Module):
    """Norms of several kinds, twice, one of them tied."""

    def __init__(self, rngs):
        make = lambda: nnx.Dict(a=DivideByRms(16, rngs=rngs), b=OnePlusScale(16, rngs=rngs))
        self.layers = nnx.List([make(), make()])
        self.norm = self.layers[0]["a"]
        self.head = nnx.Linear(16, 4, rngs=rngs)
        self.last = nnx.GroupNorm(4, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer["b"](layer["a"](x))
        return self.last(self.head(self.norm(x)))


def test_a_model_keeps_its_state_and_its_training(rng):
    x = jnp.asarray(rng.standard_normal((4, 16)), f32)

    def train(swapped):
        model = Model(nnx.Rngs(0))
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        if swapped:
            assert ours_nnx.swap(ours_nnx.swap(model)) is model  # the second finds them swapped
            assert type(model.norm) is type(model.layers[1]["a"]) is not DivideByRms
            assert model.norm is model.layers[0]["a"]
            assert [path for path, _ in nnx.to_flat_state(nnx.state(model))] == paths

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.sin(m(x)) ** 2))(model)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer)) for _ in range(4)]

    np.testing.assert_allclose(train(True), train(False), rtol=1e-4)


def test_swapped_modules_pickle_and_copy(rng):
    x = jnp.asarray(rng.standard_normal((3, SIZE)), f32)
    norm = ours_nnx.swap(DivideByRms(SIZE, rngs=nnx.Rngs(0)), implementation="xla")
    module = ours_eqx.swap(StaticEps(SIZE))
    for model in (norm, module):
        for again in (pickle.loads(pickle.dumps(model)), copy.copy(model), copy.deepcopy(model)):
            assert type(again) is type(model)
            np.testing.assert_array_equal(again(x), model(x))
    assert type(nnx.clone(norm)) is type(norm) and nnx.graphdef(nnx.clone(norm)) == nnx.graphdef(
        norm
    )


def test_abstract_and_stacked_models_are_probed(rng):
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    assert len(report_of(ours_nnx.swap, model).swapped) == 5
    stack = nnx.vmap(lambda key: DivideByRms(SIZE, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    x = jnp.asarray(rng.standard_normal((2, SIZE)), f32)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return 2 * layer(x)

    want = forward(stack, x)
    np.testing.assert_allclose(forward(ours_nnx.swap(stack), x), want, rtol=1e-5)
    graph, state = nnx.split(stack)
    text = str(jax.make_jaxpr(lambda s, x: forward(nnx.merge(graph, s), x))(state, x))
    assert text.count("normfuse_rms_norm[") == 1


def test_a_sharded_model_is_probed(rng, eight_devices):
    for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,), devices=eight_devices)
        norm, theirs = (DivideByRms(SIZE, rngs=nnx.Rngs(0)) for _ in range(2))
        x = jnp.asarray(rng.standard_normal((16, SIZE)), bf16)
        want = theirs(x)
        with jax.set_mesh(mesh):
            features = jax.P("data" if axis_type is jax.sharding.AxisType.Auto else None)
            weight = jax.device_put(norm.w.get_value(), jax.NamedSharding(mesh, features))
            norm.w.set_value(weight)
            x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
            assert report_of(ours_nnx.swap, norm).swapped
            assert_rounding(nnx.jit(lambda m, x: m(x))(norm, x), want, (bf16,))


def test_calls_that_were_not_verified_are_the_class_own():
    norm = ours_nnx.swap(foreign_norms.NNX["float32 out"](SIZE))
    x = jnp.ones((2, SIZE))
    calls = lambda *args, **kwargs: str(jax.make_jaxpr(lambda: norm(*args, **kwargs))()).count(
        "normfuse_rms_norm["
    )
    assert calls(x) == calls(x=x) == calls(x, None) == calls(x, out_sharding=None) == 1
    with pytest.raises(AssertionError):
        norm(x, out_sharding=3)
    assert calls(jnp.ones((2, SIZE), int)) == 0
    norm.epsilon = np.float32(0.5)
    assert calls(x) == 0
    np.testing.assert_allclose(norm(x)[0], norm.weight[...] / np.sqrt(np.float32(1.5)), rtol=1e-6)
    norm.weight = nnx.Param(jnp.ones((2, SIZE)))
    assert calls(x) == 0
    whole = ours_eqx.swap(WholeInput(8))
    x = jnp.arange(16.0).reshape(2, 8)
    np.testing.assert_array_equal(whole(x), WholeInput(8)(x))  # the mean over both rows
    np.testing.assert_allclose(jax.vmap(whole)(x), jax.vmap(WholeInput(8))(x), rtol=1e-6)


class Config:
    def __init__(self, held=None):
        self.offset, self.held, self.whole = 0.0, held, self


@dataclasses.dataclass(frozen=True)
class Frozen:
    norm: Config


HELD = {
    "itself": (Config, lambda c: c),
    "an object": (lambda: Config(Config(Config())), lambda c: c.held.held),
    "a list of dicts": (lambda: Config([{"norm": Config()}]), lambda c: c.held[0]["norm"]),
    "a frozen dataclass": (lambda: Config(Frozen(Config())), lambda c: c.held.norm),
    "a namespace": (lambda: types.SimpleNamespace(of=Config()), lambda c: c.of),
}


@pytest.mark.parametrize("make, part", HELD.values(), ids=HELD)
def test_a_configuration_that_changes_is_followed(make, part):
    class Norm(nnx.Module):
        def __init__(self, config):
            self.weight, self.config = nnx.Param(jnp.ones(8)), config

        def __call__(self, x):
            return foreign_norms.normal(x) * (part(self.config).offset + self.weight[...])

    config, x = make(), jnp.full((2, 8), 3.0)
    norm = ours_nnx.swap(Norm(config))
    assert "normfuse_rms_norm[" in str(jax.make_jaxpr(lambda x: norm(x))(x))
    np.testing.assert_allclose(norm(x), 1, rtol=1e-6)
    part(config).offset = 1.0
    np.testing.assert_allclose(norm(x), 2, rtol=1e-6)


class Written(nnx.Module):
    """Its formula is given, of (x, the weight)."""

    def __init__(self, formula, size=64):
        self.w, self.formula = nnx.Param(jnp.ones(size)), formula

    def __call__(self, x):
        return self.formula(x, self.w[...])


def rms(x, eps):
    wide = x.astype(f32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)


def small(eps):
    """`(x, w) -> the norm` with another eps for x of 16 bits."""
    of = lambda x: eps if x.dtype != f32 else 1e-6
    return lambda x, w: (rms(x, of(x)) * w).astype(x.dtype)


@pytest.mark.parametrize(
    "formula",
    [lambda x, w: (rms(x, jnp.finfo(x.dtype).eps) * w).astype(x.dtype), small(1e-3), small(1e-9)],
    ids=["finfo", "larger", "smaller"],
)
@pytest.mark.parametrize("size", [16, 64, 1024])
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_an_eps_that_depends_on_the_dtype_is_followed(formula, size, dtype, rng):
    norm, theirs = ours_nnx.swap(Written(formula, size)), Written(formula, size)
    for magnitude in (1e-3, 0.02, 1.0):
        x = jnp.asarray(magnitude * rng.standard_normal((3, size)), dtype)
        got, want = (np.asarray(f(x), np.float64) for f in (norm, theirs))
        np.testing.assert_allclose(got, want, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("size", [64, 128, 1024])
def test_an_eps_that_depends_on_the_size_is_followed(size, rng):
    class L2(nnx.Module):
        def __call__(self, x):
            length = jnp.sum(x * x, -1, keepdims=True) + 1e-6
            return x * jax.lax.rsqrt(length) * x.shape[-1] ** 0.5

    x = jnp.asarray(1e-4 * rng.standard_normal((3, size)), f32)
    np.testing.assert_allclose(ours_nnx.swap(L2())(x), L2()(x), rtol=1e-5)


@pytest.mark.parametrize("eps", [float(np.finfo(np.float32).tiny), 1e-30])
def test_zeros_stay_zeros_with_a_tiny_eps(eps):
    formula = lambda x, w: rms(x, eps) * w
    norm = ours_nnx.swap(Written(formula))
    assert "normfuse_rms_norm[" in str(jax.make_jaxpr(lambda x: norm(x))(jnp.ones((2, 64))))
    x = jnp.ones((2, 64)).at[1].set(0)
    np.testing.assert_allclose(norm(x), Written(formula)(x), rtol=1e-6)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -10, 10),))


@jax.custom_jvp
def straight(x):
    return 2 * x


@straight.defjvp
def _straight(primals, tangents):  # as of a clamp far from the probes
    (x,), (dx,) = primals, tangents
    return 2 * x, 2 * dx * (jnp.abs(x) < 100)


NOT_NORMS = {
    "a gradient that is clipped": lambda x, w: clipped(rms(x, 1e-6) * w),
    "a gradient that stops": lambda x, w: straight(rms(x, 1e-6) * w / 2),
    "a soft cap": lambda x, w: 1000 * jnp.tanh(rms(x, 1e-6) / 1000) * w,
    "a name for policies": lambda x, w: checkpoint_name(rms(x, 1e-6) * w, "normed"),
}


@pytest.mark.parametrize("formula", NOT_NORMS.values(), ids=NOT_NORMS)
def test_what_is_more_than_a_norm_stays(formula):
    size = 4096
    with pytest.warns(UserWarning, match="nothing in Written is served"):
        norm = ours_nnx.swap(Written(formula, size))
    assert type(norm) is Written


class Optional(nnx.Module):
    def __call__(self, x, offset=1.0, mask=None):
        offset = 0.0 if offset is None else offset
        return foreign_norms.normal(x) * offset if mask is None else x


def test_none_is_an_argument_where_it_is_no_default():
    norm, theirs, x = ours_nnx.swap(Optional()), Optional(), jnp.full((2, 8), 3.0)
    calls = [(x,), (x, None), (x, 1.0, None), (x, None, None), (x, 2.0)]
    for args in calls:
        np.testing.assert_allclose(norm(*args), theirs(*args), rtol=1e-6)
    for kwargs in ({"offset": None}, {"mask": None}, {"x": x}):
        args = () if "x" in kwargs else (x,)
        np.testing.assert_allclose(norm(*args, **kwargs), theirs(*args, **kwargs), rtol=1e-6)
    served = lambda *args: "normfuse_rms_norm[" in str(jax.make_jaxpr(lambda x: norm(x, *args))(x))
    assert served() and served(1.0, None) is False and not served(None)


@pytest.mark.filterwarnings("ignore:swap. nothing in List is served")  # as it multiplies by 2
def test_code_that_changes_is_followed():
    """As a notebook does that defines a class again."""

    class Norm(nnx.Module):
        eps, mode = 1e-6, 1

        def __call__(self, x):
            return foreign_norms.normal(x, self.eps)

    def doubled(self, x):
        return 2 * foreign_norms.normal(x, self.eps)

    x, norm = jnp.full((2, 8), 0.01), ours_nnx.swap(Norm())
    for change in ({}, {"eps": 1e-3}, {"__call__": doubled}):
        for name, value in change.items():
            setattr(Norm, name, value)
        for module in (norm, ours_nnx.swap(nnx.List([Norm()]), rules={})[0]):
            np.testing.assert_allclose(module(x), Norm()(x), rtol=1e-5)


def test_what_the_code_reads_is_followed():
    """A number, an attribute of a configuration and a helper, all outside of the class."""
    settings = types.SimpleNamespace(eps=1e-6)
    names = {"nnx": nnx, "jnp": jnp, "jax": jax, "settings": settings, "__name__": __name__}
    source = """
GAIN = 1.0
def normal(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + settings.eps)
class Norm(nnx.Module):
    def __call__(self, x):
        return normal(x) * GAIN
"""
    exec(source, names)
    of = names["Norm"]
    x, norm = jnp.asarray([[0.01, 0.02], [0.03, -0.01]]), ours_nnx.swap(of())
    other = lambda x: jnp.tanh(x)
    changes = [("settings", "eps", 1e-3), (None, "GAIN", 3.0), (None, "normal", other)]
    for holder, name, value in changes:
        setattr(settings, name, value) if holder else names.update({name: value})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a norm no more
            for module in (norm, ours_nnx.swap(of())):
                np.testing.assert_allclose(module(x), of()(x), rtol=1e-5, err_msg=name)


def test_a_global_that_a_call_sets_is_not_followed():
    names = {"nnx": nnx, "normal": foreign_norms.normal, "CALLS": 0, "__name__": __name__}
    source = """
class Norm(nnx.Module):
    def __call__(self, x):
        global CALLS
        CALLS += 1
        return normal(x)
"""
    exec(source, names)
    norm = ours_nnx.swap(names["Norm"]())
    known = len(SERVED[type(norm)].verified)
    for _ in range(3):
        norm(jnp.ones((2, 8)))
    assert len(SERVED[type(norm)].verified) <= known + 1


def test_functions_that_read_each_other_are_looked_at_once():
    every = ", ".join(f"f{i}" for i in range(40))
    source = "".join(
        f"def f{i}(x):\n    return x if x is not None else ({every})\n" for i in range(40)
    )
    source += """
class Norm(nnx.Module):
    def __call__(self, x):
        return normal(f0(x))
"""
    names = {"nnx": nnx, "normal": foreign_norms.normal, "__name__": __name__}
    exec(source, names)
    norm = ours_nnx.swap(names["Norm"]())  # in a second, not in 40 to the power of 8 steps
    names["f0"] = lambda x: 2 * x + 1
    x = jnp.asarray([[1.0, -3.0]])
    np.testing.assert_allclose(norm(x), foreign_norms.normal(2 * x + 1), rtol=1e-6)


class ZeroCentred(nnx.Param):
    def get_value(self, **options):
        return super().get_value(**options) + 1


class OfVariable(nnx.Module):
    def __init__(self, variable):
        self.w = variable

    def __call__(self, x):
        return foreign_norms.normal(x) * self.w[...]


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_a_variable_with_another_value_than_it_holds_stays(hook):
    add = lambda _, value: value + 1
    ones = jnp.ones(8)
    of = nnx.Param(ones, on_get_value=add) if hook else ZeroCentred(ones)
    with pytest.warns(UserWarning, match="w has another value than it holds"):
        norm = ours_nnx.swap(OfVariable(of))
    assert type(norm) is OfVariable


@pytest.mark.parametrize(
    "change", [lambda y: 20 * jnp.tanh(y / 20), lambda y: 1.01 * y], ids=["a soft cap", "a gain"]
)
def test_roundings_hide_nothing(change):
    formula = lambda x, w: change(rms(x, 1e-6) * w).astype(bf16)
    with pytest.warns(UserWarning, match="nothing in Written is served"):
        ours_nnx.swap(Written(formula, 64))


def test_a_variable_may_be_told_a_dtype():
    norm = OfVariable(nnx.Param(jnp.ones(8), dtype=jnp.bfloat16))  # which is metadata
    (row,) = report_of(ours_nnx.swap, norm).rows
    assert row.served == "rms_norm" and "float32" in row.error
    assert norm(jnp.ones((2, 8))).dtype == f32


class ByLength(nnx.Module):
    """Normalises whichever axis has as many elements as its weight."""

    def __init__(self, size):
        self.w = nnx.Param(jnp.ones(size))

    def __call__(self, x):
        axis = x.shape.index(self.w.shape[0])
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        rstd = jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-6)
        return x * rstd * self.w[...].reshape(shape)


def test_a_class_that_takes_its_axis_from_the_shape(rng):
    norm = ours_nnx.swap(ByLength(16))
    for shape in ((3, 5, 16), (16, 5, 16)):
        x = jnp.asarray(rng.standard_normal(shape) * np.arange(1, 17), f32)
        np.testing.assert_allclose(norm(x), ByLength(16)(x), rtol=1e-5)


class Placing(nnx.Module):
    def __call__(self, x):
        y = foreign_norms.normal(x)
        if jax.sharding.get_abstract_mesh().empty:
            return y
        return jax.lax.with_sharding_constraint(y, jax.P("data", None))


def test_a_class_that_places_its_result_on_the_mesh_at_hand(eight_devices):
    norm, x = ours_nnx.swap(Placing()), jnp.ones((8, 16))
    run = lambda x: norm(x)
    assert "sharding_constraint" not in str(jax.make_jaxpr(run)(x))
    with jax.set_mesh(jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))):
        assert "sharding_constraint" in str(jax.make_jaxpr(run)(x))


def test_true_is_not_one():
    class Norm(nnx.Module):
        def __init__(self, mode):
            self.mode = mode

        def __call__(self, x):
            return foreign_norms.normal(x) * (2 if self.mode is True else 1)

    norm, x = ours_nnx.swap(Norm(1)), jnp.ones((2, 8))
    np.testing.assert_allclose(norm(x), 1, rtol=1e-5)
    norm.mode = True
    np.testing.assert_allclose(norm(x), 2, rtol=1e-5)


class Branching(nnx.Module):
    """Its eps, its formula or nothing depends on how long x is."""

    def __init__(self, how):
        self.w, self.how = nnx.Param(jnp.ones(8)), how

    def __call__(self, x):
        if self.how == "eps":
            return foreign_norms.normal(x, 1e-5 if x.shape[0] < 100 else 1e-2) * self.w[...]
        if self.how == "formula" and x.shape[1] == 1:
            return x * self.w[...]
        return foreign_norms.normal(x) * self.w[...]


@pytest.mark.parametrize("how, other", [("eps", (100, 2, 8)), ("formula", (4, 1, 8))])
def test_a_class_that_branches_on_the_length_of_x(how, other):
    norm = ours_nnx.swap(Branching(how))
    for shape, served in (((4, 2, 8), True), (other, False), ((7, 3, 8), True)):
        x = jnp.full(shape, 0.1)
        program = str(jax.make_jaxpr(lambda x: norm(x))(x))
        assert ("normfuse_rms_norm[" in program) == served, shape
        np.testing.assert_allclose(norm(x), Branching(how)(x), rtol=1e-6)
    with pytest.raises(
        NotImplementedError, match=rf"shape \({other[0]}, .*computes something else"
    ):
        ours_nnx.swap(norm, implementation="native")(jnp.ones(other))


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (5, 1, 8), (1, 5, 8), (1, 1, 1, 8)])
@pytest.mark.parametrize("of", [DivideByRms, OnePlusScale, SumOverN, Branching])
def test_axes_of_length_one_are_served(of, shape):
    norm = ours_nnx.swap(Branching("") if of is Branching else of(8, rngs=nnx.Rngs(0)))
    program = str(jax.make_jaxpr(lambda x: norm(x))(jnp.ones(shape)))
    assert "normfuse_rms_norm[" in program


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_served_where_the_parameters_are_traced(rank):
    graph, state = nnx.split(ours_nnx.swap(nnx.Dict(a=DivideByRms(SIZE, rngs=nnx.Rngs(0)))))
    module, _ = eqx.partition(ours_eqx.swap(StaticEps(SIZE)), eqx.is_array)
    for dtype in (f32, bf16, f16):
        x = jax.ShapeDtypeStruct((2, 3, 4, SIZE)[-rank:], dtype)
        text = str(jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)["a"](x))(state, x))
        assert text.count("normfuse_rms_norm[") == 1
        assert str(jax.make_jaxpr(lambda m, x: m(x))(module, x)).count("normfuse_rms_norm[") == 1


def test_implementation_reaches_found_norms():
    norm = ours_nnx.swap(DivideByRms(SIZE, rngs=nnx.Rngs(0)), implementation="native")
    native = type(norm)
    assert type(ours_nnx.swap(norm)) is native  # says nothing of implementation
    assert type(ours_nnx.swap(norm, implementation="xla")) is not native
    ours_nnx.swap(norm, implementation="native")
    with pytest.raises(NotImplementedError, match="DivideByRms: .* cannot serve here"):
        norm(jnp.ones((2, SIZE), int))


# ---------------------------------------------------------------- Equinox


@pytest.mark.parametrize("name", foreign_norms.EQX)
def test_equinox_norms_are_served(rng, name):
    theirs = foreign_norms.EQX[name](SIZE)
    norm = ours_eqx.swap(theirs)
    assert isinstance(norm, type(theirs)) and type(norm) is not type(theirs)
    for dtype in (f32, bf16):
        x = jnp.asarray(rng.standard_normal((5, SIZE)), dtype)
        loss = lambda m, x: jnp.sum(jnp.sin(jax.vmap(m)(x).astype(f32)))
        assert_rounding(jax.vmap(norm)(x), jax.vmap(theirs)(x), (dtype,))
        f = eqx.filter_jit(eqx.filter_grad(loss))
        tolerance = 40 * float(jnp.finfo(dtype).eps)  # sums of five rows of sines
        for a, b in zip(jax.tree.leaves(f(norm, x)), jax.tree.leaves(f(theirs, x)), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    arrays, static = eqx.partition(norm, eqx.is_array)
    program = jax.jit(lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x)).lower(arrays, x)
    assert hlo.calls(program.compile()) == {"forward": 1}
    back = ours_eqx.unswap(norm)
    assert jax.tree.structure(back) == jax.tree.structure(theirs)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(theirs)))


class Net(eqx.Module):
    norms: list
    shared: eqx.Module
    head: eqx.nn.Linear

    def __init__(self):
        self.norms = [WholeInput(8), StaticEps(8), StaticEps(8, use_weight=False)]
        self.shared = self.norms[0]
        self.head = eqx.nn.Linear(8, 2, key=jax.random.key(0))

    def __call__(self, x):
        for norm in (*self.norms, self.shared):
            x = x + norm(x)
        return self.head(x)


def test_equinox_optimizer_state_is_swapped_likewise(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), f32)
    optimizer = optax.adamw(1e-2, mu_dtype=bf16)

    @eqx.filter_jit
    def step(model, state):
        loss = lambda m: jnp.mean(jnp.sin(jax.vmap(m)(x)) ** 2)
        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    def train(swap_at):
        model = Net()
        state, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
        for i in range(4):
            if i == swap_at:
                model, state = ours_eqx.swap(model), ours_eqx.swap(state)
                fresh = optimizer.init(eqx.filter(model, eqx.is_array))
                assert jax.tree.structure(state) == jax.tree.structure(fresh)
            model, state, value = step(model, state)
            losses.append(float(value))
        return losses

    # the first moment is bfloat16, so the norms' last bits move the steps by up to 2^-8 of them
    np.testing.assert_allclose(train(2), train(None), rtol=1e-3)


class ByFlag(eqx.Module):
    w: jax.Array
    zero_centred: bool  # a leaf, which an optimizer's state has not

    def __call__(self, x):
        return foreign_norms.normal(x) * (self.w + 1 if self.zero_centred else self.w)


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_equinox_optimizer_state_of_norms_that_differ_in_a_leaf(flags):
    model = {"norms": [ByFlag(jnp.ones(8), flag) for flag in flags]}
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    model, state = ours_eqx.swap(model), ours_eqx.swap(state)
    assert all(type(norm) in SERVED for norm in model["norms"])
    fresh = optimizer.init(eqx.filter(model, eqx.is_array))
    assert jax.tree.structure(state) == jax.tree.structure(fresh)


def test_equinox_more_arrays_are_no_filtered_copy():
    class Shifted(eqx.Module):
        weight: jax.Array
        shift: jax.Array | None = None

        def __call__(self, x):
            y = foreign_norms.normal(x) * self.weight
            return y if self.shift is None else y + self.shift

    model = [Shifted(jnp.ones(8)), Shifted(jnp.ones(8), jnp.ones(8))]
    reasons = [row.reason for row in report_of(ours_eqx.swap, model).rows]
    assert not reasons[0] and "2 arrays: shift, weight" in reasons[1]


def test_equinox_tied_norms_stay_tied():
    swapped = ours_eqx.swap(Net())
    assert swapped.shared is swapped.norms[0] and type(swapped.shared) is not WholeInput


def test_equinox_no_norm_stays():
    class Groups(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            parts = x.reshape(*x.shape[:-1], 2, -1)
            return foreign_norms.normal(parts).reshape(x.shape) * self.w

    class Keyed(eqx.Module):
        w: jax.Array

        def __call__(self, x, *, key):
            return foreign_norms.normal(x) * self.w * jax.random.normal(key, x.shape)

    class Table(eqx.Module):  # what it computes depends on an array that is no parameter
        w: jax.Array
        table: tuple[np.ndarray, ...] = eqx.field(static=True)

        def __call__(self, x):
            return foreign_norms.normal(x) * self.w * self.table[0]

    with pytest.warns(UserWarning, match="array is being set as static"):
        tables = [Table(jnp.ones(8), (np.ones(8),))]
    model = [Groups(jnp.ones(8)), Keyed(jnp.ones(8)), eqx.nn.GroupNorm(2, 8), eqx.nn.RMSNorm(8)]
    report = report_of(ours_eqx.swap, model + tables)
    reasons = {row.layer: row.reason for row in report.left}
    assert "other modules or arrays in table" in reasons["Table"]
    assert "row by row" in reasons["Groups"] and "its call fails" in reasons["Keyed"]
    assert "2 arrays: bias, weight" in reasons["GroupNorm"] and len(report.swapped) == 1


# ---------------------------------------------------------------- rules


class Biased(nnx.Module):
    def __init__(self):
        self.scale, self.bias = nnx.Param(jnp.ones(8)), nnx.Param(jnp.ones(8))

    def __call__(self, x):
        return foreign_norms.normal(x) * self.scale[...] + self.bias[...]


def fitting(norm, x):
    return rms_norm(x, norm.scale[...]) + norm.bias[...]


def test_a_rule_for_a_module_with_random_numbers():
    class Dropped(Biased):
        def __init__(self):
            super().__init__()
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.dropout(super().__call__(x))

    rule = lambda m, x: m.dropout(fitting(m, x))
    row = report_of(ours_nnx.swap, Dropped(), rules={Dropped: rule}).swapped[0]
    assert row.error == "not verified: it holds keys of random numbers"


def test_a_rule_serves_what_is_not_recognised(rng):
    model = nnx.Dict(a=Biased(), b=DivideByRms(8, rngs=nnx.Rngs(0)))
    x = jnp.asarray(rng.standard_normal((3, 8)), f32)
    want = model["a"](x)
    report = report_of(ours_nnx.swap, model, rules={Biased: fitting, DivideByRms: None})
    assert [row.served for row in report.rows] == ["rule fitting", ""]
    assert report.left[0].reason == "a rule leaves it alone" and type(model["b"]) is DivideByRms
    np.testing.assert_allclose(model["a"](x), want, rtol=1e-5, atol=1e-6)
    assert hlo.calls(jax.jit(lambda x: model["a"](x)).lower(x).compile()) == {"forward": 1}
    again = pickle.loads(pickle.dumps(model["a"]))
    np.testing.assert_array_equal(again(x), model["a"](x))
    assert type(ours_nnx.unswap(model)["a"]) is Biased


@pytest.mark.parametrize(
    "rule, why",
    [
        (lambda m, x: rms_norm(x, m.scale[...], eps=0.1) + m.bias[...], r"differs from .* by 0\.0"),
        (lambda m, x: rms_norm(x, m.scale[...]), "differs from the class by"),
        (lambda m, x: fitting(m, x).astype(bf16), r"returns bfloat16\[3,8\], the class float32"),
        (lambda m, x: rms_norm(x, m.weight[...]), "its call fails .* AttributeError"),
    ],
)
def test_a_rule_that_does_not_fit(rule, why):
    model = nnx.Dict(block=nnx.List([DivideByRms(8, rngs=nnx.Rngs(0)), Biased()]))
    graph = nnx.graphdef(model)
    with pytest.raises(ValueError, match=rf"the rule for Biased does not fit block\.1: .*{why}"):
        ours_nnx.swap(model, rules={Biased: rule})
    assert nnx.graphdef(model) == graph  # nothing has changed


def test_rules_of_the_wrong_kind():
    for rules in ([Biased], {"Biased": fitting}, {Biased: 3}):
        with pytest.raises(TypeError, match="swap: rules must map classes to functions"):
            ours_nnx.swap(nnx.Dict(a=Biased()), rules=rules)
    model = nnx.Dict(a=nnx.RMSNorm(8, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="swap: report must be a function .* got 3"):
        ours_nnx.swap(model, report=3)  # pyright: ignore[reportArgumentType]
    assert type(model["a"]) is nnx.RMSNorm  # nothing has changed


def test_equinox_rules(rng):
    model = Net()
    x = jnp.asarray(rng.standard_normal(8), f32)
    promoted = lambda norm, x: jnp.result_type(norm.weight, x)
    rule = lambda norm, x: rms_norm(x, norm.weight, eps=norm.eps, dtype=promoted(norm, x))
    swapped = ours_eqx.swap(model, rules={WholeInput: rule})
    np.testing.assert_allclose(swapped(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"the rule for StaticEps does not fit norms\.1: .*'float'"
    ):
        ours_eqx.swap(model, rules={StaticEps: lambda norm, x: norm.eps[x]})


# ---------------------------------------------------------------- the report and warnings


def test_the_printed_report(capsys):
    ours_nnx.swap(Model(nnx.Rngs(0)), report=print)
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"module +class +served by, or why not +verified error$", lines[0])
    assert any(
        re.match(r"layers\.\*\.b \(2\) +OnePlusScale +rms_norm +float32 \d", l) for l in lines
    )
    assert any(re.match(r"last +GroupNorm +not: it has 2 arrays: bias, scale$", l) for l in lines)
    assert lines[-1] == "5 of 6 modules are served by normfuse"


def test_the_reported_error_is_the_models_own():
    def errors(**options):
        norm = foreign_norms.SumOverN(SIZE, rngs=nnx.Rngs(0), **options)
        return report_of(ours_nnx.swap, norm).rows[0].error

    own = errors(dtype=f32)
    assert "e-07" in own and errors() != own  # in bfloat16
    assert errors(dtype=f32) == own


def test_what_is_no_model_is_an_error_that_names_the_swap_to_use():
    theirs, model = StaticEps(8), DivideByRms(8, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError, match=r"a StaticEps, .* of equinox; .*normfuse\.layers\.eqx\.swap"
    ):
        ours_nnx.swap(theirs)
    with pytest.raises(TypeError, match=r"of flax\.nnx; use normfuse\.layers\.nnx\.swap$"):
        ours_eqx.swap(model)
    with pytest.raises(TypeError, match=r"of flax\.nnx; use normfuse\.layers\.nnx\.swap$"):
        ours_linen.swap(model)  # pyright: ignore[reportArgumentType]
    for swap in (ours_nnx.swap, ours_eqx.swap, ours_linen.swap):
        with pytest.raises(TypeError, match="must be a module, got the class DivideByRms; call it"):
            swap(DivideByRms)
    for unswap in (ours_nnx.unswap, ours_eqx.unswap, ours_linen.unswap):
        with pytest.raises(TypeError, match="^unswap: model must be a module, got the class"):
            unswap(DivideByRms)
    for unswap in (ours_eqx.unswap, ours_linen.unswap):
        with pytest.raises(TypeError, match=r"^unswap: .* use normfuse\.layers\.nnx\.unswap$"):
            unswap(model)
    with pytest.raises(TypeError, match="^unswap: model must be a linen Module, got NoneType"):
        ours_linen.unswap(None)
    with pytest.warns(UserWarning, match=r"there is no nnx\.Module in State$"):
        ours_nnx.swap(nnx.state(model))


def test_replacing_nothing_warns():
    model = nnx.Dict(a=nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0)))
    with pytest.warns(
        UserWarning, match="nothing in Dict is served by normfuse .GroupNorm: it has 2 arrays"
    ):
        ours_nnx.swap(model)
    with pytest.warns(UserWarning, match="nothing in GroupNorm is served"):
        ours_eqx.swap(eqx.nn.GroupNorm(2, 4))
    swapped = ours_nnx.swap(Model(nnx.Rngs(0)))
    ours_nnx.swap(swapped)  # all is swapped already
    net = eqx.nn.GroupNorm(2, 4)
    ours_eqx.swap(optax.adam(1e-3).init(eqx.filter(net, eqx.is_array)))  # an optimizer's state
    ours_nnx.swap(nnx.Optimizer(swapped, optax.adam(1e-3), wrt=nnx.Param))


def test_swapping_inside_jit_says_why_not():
    model = nnx.Dict(a=DivideByRms(8, rngs=nnx.Rngs(0)), b=nnx.RMSNorm(8, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    swapped = lambda state: ours_nnx.swap(nnx.merge(graph, state))["b"](jnp.ones(8))
    with pytest.warns(UserWarning, match="a stays as it is: its arrays are traced: .* outside of"):
        jax.jit(swapped)(state)
    with pytest.warns(UserWarning, match="stays as it is: its arrays are traced"):
        eqx.filter_jit(lambda m: ours_eqx.swap(m)(jnp.ones(8)))(WholeInput(8))
    alone, state = nnx.split(DivideByRms(8, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="swap: DivideByRms stays as it is: its arrays are traced"):
        jax.jit(lambda state: ours_nnx.swap(nnx.merge(alone, state))(jnp.ones(8)))(state)


class FieldsOfTheClass(eqx.Module):
    """Its own `__init__` leaves defaults on the class."""

    weight: jax.Array
    eps: float = 1e-6
    kind: ClassVar[str] = "rms"

    def __init__(self, size):
        self.weight = jnp.linspace(0.5, 2, size)

    def __call__(self, x):
        rstd = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps)
        return x * rstd * self.weight


def test_fields_that_the_class_has_stay_there():
    model, x = FieldsOfTheClass(8), jnp.arange(8.0)
    ours = ours_eqx.swap(model)
    assert isinstance(ours, FieldsOfTheClass) and type(ours) is not FieldsOfTheClass
    assert (ours.eps, ours.kind) == (1e-6, "rms") and "normfuse" in str(jax.make_jaxpr(ours)(x))
    np.testing.assert_allclose(ours(x), model(x), rtol=1e-6)
    assert eqx.tree_equal(ours_eqx.unswap(ours), model)


def test_probing_is_done_once_a_configuration(monkeypatch):
    from normfuse.layers import recognize

    probed = []
    formula = recognize.formula
    monkeypatch.setattr(recognize, "formula", lambda c: probed.append(c) or formula(c))

    class Norm(DivideByRms):
        pass

    make = lambda eps: Norm(8, norm_eps=eps, rngs=nnx.Rngs(0))
    ours_nnx.swap(nnx.List([make(1e-6), make(1e-6), make(1e-5), make(1e-6)]))
    assert len(probed) == 2


def test_modules_that_differ_in_any_attribute_are_told_apart(rng):
    class Norm(nnx.Module):
        def __init__(self, factor, eps, dtype):
            self.weight = nnx.Param(jnp.ones(8))
            self.__factor, self.eps, self.dtype = factor, eps, dtype

        def __call__(self, x):
            weight = self.__factor * self.weight[...]
            return (foreign_norms.normal(x, self.eps) * weight).astype(self.dtype)

    x = jnp.asarray(rng.standard_normal((3, 8)) * 1e-3, f32)
    small, large = np.float32(1e-6), np.float32(1e-3)
    for given in [(1, small, np.float32), (2, small, np.float32), (1, large, np.float32)] + [
        (1, small, np.float16)
    ]:
        norm = Norm(*given)
        want = norm(x)
        got = ours_nnx.swap(nnx.Dict(a=norm, b=nnx.Linear(2, 2, rngs=nnx.Rngs(0))))["a"](x)
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2 * float(jnp.finfo(want.dtype).eps))


def test_a_derivative_of_ones_own_that_is_right_is_served(rng):
    @jax.custom_vjp
    def normal(x):
        return foreign_norms.normal(x)

    def backward(y_and_rstd, g):
        y, rstd = y_and_rstd
        return (rstd * (g - y * jnp.mean(g * y, -1, keepdims=True)),)

    def forward(x):
        rstd = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x * rstd, (x * rstd, rstd)

    normal.defvjp(forward, backward)
    norm = foreign_norms.Scaled(lambda m, x: normal(x) * m.weight[...])
    x = jnp.asarray(rng.standard_normal((3, 8)), f32)
    value = lambda x: jnp.sum(norm(x) ** 3)
    want = jax.grad(value)(x)
    assert report_of(ours_nnx.swap, norm).swapped
    np.testing.assert_allclose(jax.grad(value)(x), want, rtol=1e-4, atol=1e-4)


def test_threads_make_one_class():
    class Norm(DivideByRms):
        def __init_subclass__(cls, **options):
            time.sleep(0.05)  # a thread is in the middle of it when the other one begins
            super().__init_subclass__(**options)

    norms = [Norm(8, rngs=nnx.Rngs(0)) for _ in range(2)]
    ours_nnx.swap(ours_nnx.unswap(ours_nnx.swap(Norm(8, rngs=nnx.Rngs(0)))))
    threads = [
        threading.Thread(target=ours_nnx.swap, args=(n,), kwargs={"implementation": "xla"})
        for n in norms
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert type(norms[0]) is type(norms[1]) is not Norm
