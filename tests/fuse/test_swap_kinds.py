"""`swap` of models that recognising classes served wrong, or not at all, in every framework."""

import warnings

import equinox as eqx
import flax.linen as nn
import flax.linen.partitioning as partitioning
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from flax import nnx
from fuse_cases import draw
from jax import lax

from normfuse.layers import eqx as ours_eqx
from normfuse.layers import linen as ours_linen
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.fuse.program import Program

pytestmark = pytest.mark.oldest

DIM = 32
X = draw(0, 2, 16, DIM)
SWAPS = {"nnx": ours_nnx.swap, "eqx": ours_eqx.swap, "linen": ours_linen.swap}
everywhere = pytest.mark.parametrize("home", SWAPS)


def rms(x, scale, eps=1e-6):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def made(home, function, **shapes):
    """A model of a framework that calls `function(x, *more, **parameters)`, and how to call it.

    Calling is `call(model, x, *more)`; the parameters have these shapes.
    """
    values = {n: draw(i, *shape, scale=0.3) for i, (n, shape) in enumerate(shapes.items(), 1)}
    if home == "nnx":

        class Model(nnx.Module):
            def __init__(self):
                for name, value in values.items():
                    setattr(self, name, nnx.Param(value))

            def __call__(self, x, *more):
                return function(x, *more, **{name: getattr(self, name)[...] for name in values})

        return Model(), lambda model, *args: model(*args)
    if home == "eqx":

        class Tree(eqx.Module):
            values: dict

            def __call__(self, x, *more):
                return function(x, *more, **self.values)

        return Tree(values), lambda model, *args: model(*args)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, *more):
            given = {name: self.param(name, lambda _, v=value: v) for name, value in values.items()}
            return function(x, *more, **given)

    return Layer(), lambda model, *args: model.apply({"params": values}, *args)


def compared(home, function, *args, rtol=2e-5, quantization=None, shapes):
    """Calls a model and the swapped one; returns the report."""
    model, call = made(home, function, **shapes)
    reports = []
    swapped = SWAPS[home](model, quantization=quantization, report=reports.append)
    got, want = call(swapped, *args), call(model, *args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not isinstance(b, jax.Array):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        size = float(jnp.max(jnp.abs(b), initial=1e-3))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * size)
    return reports[-1]


# ---------------------------------------------------------------- results and effects of a call

RETURNED = {
    "a tuple with None": lambda y: (y, None),
    "a tuple of one": lambda y: (y,),
    "a dictionary": lambda y: {"y": y},
    "nested": lambda y: [{"a": (y, 3, "text")}, None],
}


@pytest.mark.parametrize("home, name, kind", half(SWAPS, RETURNED, ["norm", "mlp"]))
def test_returned_containers(home, name, kind):
    wrap = RETURNED[name]
    if kind == "norm":
        function, shapes = lambda x, scale: wrap(rms(x, scale)), {"scale": (DIM,)}
    else:
        function = lambda x, gate, up, down: wrap((jax.nn.silu(x @ gate) * (x @ up)) @ down)
        shapes = {"gate": (DIM, 64), "up": (DIM, 64), "down": (64, DIM)}
    assert compared(home, function, X, shapes=shapes).fused[0].domain == kind


@everywhere
def test_side_effects(home, capsys):
    """A call happens once, with its prints and its state."""
    seen = []

    def function(x, scale):
        seen.append(x.shape)
        print("called")
        return rms(x, scale)

    model, call = made(home, function, scale=(DIM,))
    swapped = SWAPS[home](model, report=lambda report: None)
    for count in (1, 2):
        call(swapped, X)
        assert seen == [X.shape] * count
    assert capsys.readouterr().out == "called\n" * 2


# ---------------------------------------------------------------- FP8


@pytest.mark.parametrize(
    "home, spelling", [*zip(SWAPS, ["bhtd,hde->bte", "bthd,hde->bte", "bhtd,hde->tbe"])]
)
def test_fp8_contracts_two_axes(home, spelling):
    """Attention's output in Levanter and haliax: heads and their width, which are not last."""
    x = draw(5, 2, 4, 16, 16) if spelling.startswith("bhtd") else draw(5, 2, 16, 4, 16)
    function = lambda x, kernel: jnp.abs(jnp.einsum(spelling, x, kernel))
    shapes = {"kernel": (4, 16, DIM)}
    report = compared(home, function, x, quantization="fp8", rtol=0.1, shapes=shapes)
    assert [row.domain for row in report.fused] == ["product"], str(report)


@pytest.mark.parametrize("home, dtype", [*zip(SWAPS, [jnp.int32, jnp.uint8, jnp.bool_])])
def test_fp8_of_integers(home, dtype):
    """A product of integers stays, exactly; a layer after it is served."""

    def function(x, kernel, other):
        return x @ jnp.round(kernel).astype(jnp.int32), jnp.abs(jnp.abs(x @ kernel) @ other)

    x = (jnp.abs(X) > 1).astype(dtype)
    shapes = {"kernel": (DIM, DIM), "other": (DIM, DIM)}
    report = compared(home, function, x, quantization="fp8", rtol=0.1, shapes=shapes)
    assert [row.what for row in report.fused] == ["product 32 x 32 -> 32, float32"], str(report)


# ---------------------------------------------------------------- the report


@everywhere
def test_served_in_the_report_is_served_in_the_program(home):
    """Each row of a norm is a call of ours, whatever the shape; and no call is without a row."""
    function = lambda x, scale: rms(rms(x, scale) + 1, scale)
    model, call = made(home, function, scale=(DIM,))
    for shape in ((2, 16, DIM), (DIM,), (1, DIM), (0, DIM), (3, 5, 7, DIM)):
        reports = []
        swapped = SWAPS[home](model, report=reports.append)
        program = jax.make_jaxpr(lambda x, swapped=swapped: call(swapped, x))(jnp.ones(shape))
        calls = [e for e in program.eqns if "rms_norm" in str(e.params.get("name", ""))]
        assert len(reports[-1].fused) == len(calls), (shape, str(reports[-1]))
    assert len(calls) == 2


def test_collections_besides_parameters():
    """T5X's: the axes' names of parameters in a collection of their own, and sown values."""

    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            make = partitioning.param_with_axes
            scale = make("scale", nn.initializers.ones, (DIM,), jnp.float32, axes=("embed",))
            y = rms(x, scale)
            self.sow("intermediates", "y", y)
            return y

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = x + Norm()(x)
            return x

    reports = []
    model = Layers()
    swapped = ours_linen.swap(model, report=reports.append)
    variables = model.init(jax.random.key(0), X)
    assert "params_axes" in variables
    got = swapped.apply(variables, X, mutable=["intermediates"])
    want = model.apply(variables, X, mutable=["intermediates"])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert [row.domain for row in reports[-1].fused] == ["norm"] * 3


def test_a_model_of_haiku_is_refused():
    with warnings.catch_warnings():  # it uses names that JAX has deprecated
        warnings.simplefilter("ignore")
        hk = pytest.importorskip("haiku", reason="Haiku does not import with this JAX")
    transformed = hk.transform(lambda x: hk.RMSNorm(-1)(x))
    for home, swap in SWAPS.items():
        with pytest.raises(TypeError, match=rf"{home}.swap: model must be a module.*normfuse.fuse"):
            swap(transformed)


# ---------------------------------------------------------------- often, and in large models


def print_nothing(report):
    del report


class Layer(nnx.Module):
    """A layer with an attribute of its own, which the call does not read."""

    def __init__(self, number, inner=None):
        self.number, self.scale, self.inner = number, nnx.Param(jnp.ones(DIM)), inner

    def __call__(self, x):
        x = x + rms(x, self.scale[...])
        return x if self.inner is None else self.inner(x)


def nested(count):
    layer = None
    for i in range(count):
        layer = Layer(i, layer)
    return layer


class Stacked(nnx.Module):
    def __init__(self, count):
        self.layers = nnx.List([Layer(i) for i in range(count)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("make, few, many", [(Stacked, 16, 64), (nested, 25, 100)])
def test_work_is_linear_in_the_layers(make, few, many, monkeypatch):
    """`swap` reads no layer, and a trace each equation a few times: by calls, not by a clock."""
    calls, reads = [], []
    for name in ("_equation", "made", "number", "depends", "line"):
        method = getattr(Program, name)

        def spy(self, *args, method=method):
            calls.append(1)
            return method(self, *args)

        monkeypatch.setattr(Program, name, spy)
    look = lambda self, name: reads.append(name) or object.__getattribute__(self, name)

    def work(count):
        model = make(count)
        with monkeypatch.context() as patch:
            patch.setattr(Layer, "__getattribute__", look)
            reads.clear()
            swapped = ours_nnx.swap(model, report=print_nothing)
            assert len(reads) <= 20  # those of the outermost module
        calls.clear()
        jax.make_jaxpr(lambda x: swapped(x))(X)
        return len(calls)

    assert work(many) <= 1.1 * many / few * work(few)
