"""`swap` on Linen models, whose modules are made inside calls, under its transforms and tools."""

import pickle

import flax.errors
import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign_norms import LinenNorm

from normfuse import rms_norm
from normfuse.layers.linen import RMSNorm, swap, unswap

KEY, f32 = jax.random.key(0), jnp.float32
X = jax.random.normal(KEY, (3, 16))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.silu(nn.Dense(32)(LinenNorm()(x)))
        return x + nn.Dense(x.shape[-1], use_bias=False)(y), None


def wrapped(wrap):
    axes = {"params": 0, "intermediates": 0}
    options = {"variable_axes": axes, "split_rngs": {"params": True}}
    return {
        "none": lambda: Block,
        "jit": lambda: nn.jit(Block),
        "remat": lambda: nn.remat(Block),
        "vmap": lambda: nn.vmap(Block, in_axes=None, axis_size=2, **options),
        "scan of remat": lambda: nn.scan(nn.remat(Block, prevent_cse=False), length=3, **options),
    }[wrap]()


class Model(nn.Module):
    """A block under a transform, a norm of Linen's, and a method beside `__call__`."""

    wrap: str = "none"

    def setup(self):
        self.block = wrapped(self.wrap)()
        self.norm = nn.RMSNorm()
        self.last = nn.GroupNorm(2)

    def __call__(self, x):
        return self.last(self.norm(self.block(x, None)[0]))

    def embed(self, x):
        return self.norm(x)


def norms(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("normfuse_rms_norm[")


@pytest.mark.parametrize("wrap", ["none", "jit", "remat", "vmap", "scan of remat"])
def test_a_swapped_model_under_a_transform(wrap):
    model = Model(wrap)
    variables = jax.jit(model.init)(KEY, X)
    both = lambda m: jax.jit(jax.value_and_grad(lambda v: jnp.sum(jnp.sin(m.apply(v, X)))))
    want = both(model)(variables)  # nn.jit has traced the block without normfuse
    ours = swap(model)
    assert isinstance(ours, Model) and ours.wrap == wrap
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, both(ours)(variables), want)
    assert norms(ours.apply, variables, X) == 2 and norms(model.apply, variables, X) == 0
    assert norms(ours.init, KEY, X) == 0  # initialisation is the model's own


@pytest.mark.parametrize("wrap", ["none", "jit", "scan of remat"])
def test_linen_tools_see_the_same_model(wrap):
    model, variables = Model(wrap), jax.jit(Model(wrap).init)(KEY, X)
    capture = lambda m: m.apply(variables, X, capture_intermediates=True, mutable=["intermediates"])
    want, got = (jax.jit(capture, static_argnums=0)(m) for m in (model, swap(model)))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, got, want)
    width = {"width": 160}
    assert nn.tabulate(swap(model), KEY, console_kwargs=width)(X) == nn.tabulate(
        model, KEY, console_kwargs=width
    )(X)


def test_other_methods_bind_and_parents():
    model = swap(Model())
    variables = model.init(KEY, X)
    assert norms(lambda v: model.apply(v, X, method="embed"), variables) == 1
    assert norms(lambda v: model.apply(v, X, method=Model.__call__), variables) == 2
    assert norms(lambda v: model.apply(v, X, method=Model.embed), variables) == 1
    assert norms(lambda v: model.apply(v, X, method=lambda m, x: m.norm(x)), variables) == 1
    assert norms(lambda v: model.bind(v)(X), variables) == 2
    assert norms(lambda v: nn.apply(lambda m, x: m(x), model)(v, X), variables) == 2

    class Parent(nn.Module):
        child: nn.Module

        def __call__(self, x):
            return nn.RMSNorm(name=None, use_scale=False, parent=None).apply({}, self.child(x))

    assert (
        norms(lambda v: Parent(model).apply({"params": {"child": v["params"]}}, X), variables) == 2
    )


class Layers(nn.Module):
    features: int = 8

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(nn.Dense(self.features)(x))
        return nn.DenseGeneral(self.features)(y)


@pytest.mark.parametrize("missing", ["Dense_0 bias", "LayerNorm_0 scale", "LayerNorm_0 bias", ""])
def test_parameters_that_do_not_fit_are_an_error_as_without_swap(missing):
    params = Layers().init(KEY, X)["params"]
    model = Layers() if missing else Layers(16)
    if missing:
        module, name = missing.split()
        params = {
            n: {k: v for k, v in p.items() if (n, k) != (module, name)} for n, p in params.items()
        }
    with pytest.raises(flax.errors.FlaxError) as theirs:
        model.apply({"params": params}, X)
    with pytest.raises(type(theirs.value)):
        swap(model).apply({"params": params}, X)


class LowRank(nn.Module):
    """Adds to its Dense by an interceptor of its own."""

    @nn.compact
    def __call__(self, x):
        a, b = (self.param(name, nn.initializers.ones, (16, 16)) for name in "ab")

        def add(call, args, kwargs, context):
            y = call(*args, **kwargs)
            is_dense = isinstance(context.module, nn.Dense) and context.method_name == "__call__"
            return y + args[0] @ a @ b if is_dense else y

        with nn.intercept_methods(add):
            return nn.Dense(16)(nn.RMSNorm()(x))


def test_an_interceptor_within_the_model_keeps_its_calls():
    model, reports = LowRank(), []
    variables = model.init(KEY, X)
    with pytest.warns(UserWarning, match="an interceptor within the model takes its calls"):
        y = swap(model, report=reports.append).apply(variables, X)
    np.testing.assert_allclose(y, model.apply(variables, X), rtol=1e-5)
    reasons = {row.layer: row.reason for row in reports[-1].rows}
    assert "interceptor" in reasons["Dense"] and "interceptor" in reasons["RMSNorm"]


def test_interceptors_see_no_probes():
    seen = []

    def to_bfloat16(call, args, kwargs, context):
        seen.append(call(*args, **kwargs))
        return seen[-1].astype(jnp.bfloat16)

    class Norm(LinenNorm):
        pass

    variables = Norm().init(KEY, X)
    with nn.intercept_methods(to_bfloat16):
        y = swap(Norm()).apply(variables, X)
    assert y.dtype == jnp.bfloat16 and len(seen) == 1
    assert not isinstance(seen[0], jax.core.Tracer)
    assert swap(Norm()).apply(variables, X).dtype == f32


def test_unswap_pickle_and_again():
    model = swap(Model(), implementation="xla")
    variables = model.init(KEY, X)
    again = pickle.loads(pickle.dumps(model))
    assert norms(again.apply, variables, X) == norms(model.apply, variables, X) == 0
    assert norms(swap(model).apply, variables, X) == 2
    assert type(unswap(model)) is Model and unswap(model) == Model() and unswap(Model()) == Model()


def test_the_report_comes_when_modules_are_met(capsys):
    model = swap(Model(), report=print)
    variables = model.init(KEY, X)
    assert not capsys.readouterr().out  # initialisation is the model's own
    model.apply(variables, X)
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:3]) for line in lines[1:]] == [
        "block.LinenNorm_0 LinenNorm rms_norm",
        "block.Dense_* (2) Dense",
        "norm RMSNorm rms_norm",
        "last GroupNorm not:",
        "4 of 5",
    ]
    model.apply(variables, X)
    assert not capsys.readouterr().out


class Sown(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "x", x)
        return x * self.param("scale", nn.initializers.ones_init(), (16,))


def test_what_is_no_norm_stays():
    reports = []
    model = nn.Sequential(
        [
            Sown(),
            type("Centred", (nn.LayerNorm,), {})(use_bias=False),
            nn.Dropout(0.5, deterministic=True),
            LinenNorm(epsilon=jnp.float32(1e-3)),  # pyright: ignore[reportArgumentType]
        ]
    )
    ours = swap(model, report=reports.append)
    variables = model.init(KEY, X)
    with pytest.warns(UserWarning, match="nothing in Sequential is served by normfuse"):
        got = ours.apply(variables, X, mutable=["intermediates"])
    want = model.apply(variables, X, mutable=["intermediates"])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    reasons = {row.layer: row.reason for row in reports[0].left}
    assert "changes its variables" in reasons["Sown"] or "holds intermediates" in reasons["Sown"]
    assert "subtracts the mean" in reasons["Centred"]
    assert reasons["LinenNorm"] == "it holds arrays in epsilon"


def test_rules_and_options(rng):
    rule = lambda norm, x: rms_norm(x, norm.get_variable("params", "scale"), scale_offset=1.0)
    variables = Model().init(KEY, X)
    want = Model().apply(variables, X)
    ours = swap(Model(), rules={LinenNorm: rule, nn.RMSNorm: None})
    np.testing.assert_allclose(ours.apply(variables, X), want, rtol=1e-5, atol=1e-5)
    assert norms(ours.apply, variables, X) == 1
    wrong = lambda norm, x: rms_norm(x, norm.get_variable("params", "scale"))
    with pytest.raises(ValueError, match=r"the rule for LinenNorm does not fit block\.LinenNorm_0"):
        swap(Model(), rules={LinenNorm: wrong}).apply(variables, X)
    fp8 = swap(Model(), quantization="fp8").apply(variables, X)
    assert 1e-4 < float(jnp.max(jnp.abs(fp8 - want))) < 0.3
    with pytest.raises(NotImplementedError, match="LinenNorm: .* cannot serve here"):
        swap(LinenNorm(), implementation="native").apply(
            {"params": {"scale": jnp.ones(16)}}, X.astype(int)
        )


def test_partitioned_parameters_and_dtypes(rng):
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.normal(0.1), ("features",))
            scale = self.param("scale", init, (x.shape[-1],), jnp.bfloat16)
            variance = jnp.mean(jnp.square(x.astype(f32)), -1, keepdims=True)
            return (x * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale

    model, ours = Boxed(), swap(Boxed())
    variables = model.init(KEY, X)
    for dtype in (f32, jnp.bfloat16):
        got, want = (m.apply(variables, X.astype(dtype)) for m in (ours, model))
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got, f32), np.asarray(want, f32), rtol=0.02)
    compiled = jax.jit(ours.apply).lower(variables, X).compile()
    assert hlo.calls(compiled) == {"forward": 1}


def test_models_of_our_own_layers_and_bad_input():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return RMSNorm()(x)

    ours = swap(Own())
    assert norms(ours.apply, ours.init(KEY, X), X) == 1
    with pytest.raises(TypeError, match="swap: model must be a linen Module, got int"):
        swap(3)
    with pytest.raises(ValueError, match="swap: Model is bound to variables"):
        swap(Model().bind(Model().init(KEY, X)))
    with pytest.raises(ValueError, match="quantization must be"):
        swap(Model(), quantization="int4")


@pytest.mark.newest
def test_native_refuses_a_layer_norm_with_named_arguments():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(x=x)

    variables = Named().init(KEY, X)
    want = Named().apply(variables, X)
    np.testing.assert_array_equal(swap(Named()).apply(variables, X), want)
    with pytest.raises(NotImplementedError, match="nn.LayerNorm: .*'native' .* named arguments"):
        swap(Named(), implementation="native").apply(variables, X)


@pytest.mark.newest
def test_fp8_of_a_product_with_named_arguments_is_refused():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.DenseGeneral(4)(inputs=x)

    variables = Named().init(KEY, X)
    with pytest.raises(ValueError, match="nn.DenseGeneral: quantization='fp8' does not go with"):
        swap(Named(), quantization="fp8").apply(variables, X)


class Twice(nn.RMSNorm):
    """The norm of its base and the same without a scale: for probes one norm, of 1 + scale."""

    @nn.compact
    def __call__(self, x, *, mask=None, gain=None):
        square = jnp.mean(jnp.square(x), -1, keepdims=True)
        y = super().__call__(x, mask=mask) + x * jax.lax.rsqrt(square + self.epsilon)
        return y if gain is None else y * gain


class WithGain(nn.Module):
    @nn.compact
    def __call__(self, x, **gain):
        return Twice(scale_init=nn.initializers.normal())(x, **gain)


def test_what_a_class_inherits_is_its_bases_own():
    model = WithGain()
    variables = model.init(KEY, X)
    ours = swap(model)
    assert norms(ours.apply, variables, X) == 1  # served
    for gain in ({}, {"gain": 2.0}):  # by its own code, whose `super().__call__` is RMSNorm's
        got, want = (m.apply(variables, X, **gain) for m in (ours, model))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


class Asking(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        offset = 1.0 if self.has_rng("noise") else 0.0
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (offset + scale)


class Inner(Asking):
    """Its own call asks for nothing, but a method that it uses."""

    @property
    def last(self):
        return (lambda: self.name == "last")()

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (self.last + scale)


@pytest.mark.parametrize(
    "norm, asked", [(Asking(), "has_rng"), (Inner(name="last"), "name")], ids=["rng", "name"]
)
def test_a_call_that_asks_for_its_surroundings_stays(norm, asked):
    variables, rngs = norm.init(KEY, X), {"noise": KEY}
    with pytest.warns(UserWarning, match=f"its code reads self.{asked}, which a probe cannot know"):
        got = swap(norm).apply(variables, X, rngs=rngs)
    np.testing.assert_array_equal(got, norm.apply(variables, X, rngs=rngs))
