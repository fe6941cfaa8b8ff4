"""Every op by every implementation, in the contexts that differ most"""

import functools
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_cases import DenseCase
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import Expected
from rms_norm_cases import REPLICATED, Case, stack
from support_table import record

from normfuse import (
    attention,
    dense,
    elementwise,
    gated_dense,
    gated_product,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
)

pytestmark = pytest.mark.oldest

_INTERPRETED = re.compile(r'op_name="[^"]*/pallas_(rms_norm|dense)')
SERVED = [("rms_norm", "native"), ("rms_norm", "pallas"), ("dense", "pallas"), ("dense", "xla")]


@functools.cache
def case_of(op, seed=0):
    return DenseCase(seed=seed) if op == "dense" else Case(op, seed=seed)


class Served:
    """A case by one implementation: values and gradients, and a check of the kernels used."""

    def __init__(self, request, op, implementation):
        self._request, self.implementation = request, implementation
        self.case, self.dense = case_of(op), op == "dense"
        options = {"implementation": implementation}
        self.values = functools.partial(self.case, **options)
        self.grad = functools.partial(self.case.grad, **options)
        self.loss = functools.partial(self.case.loss, **options)

    def both(self, *args):
        """Values and gradients in one program."""
        return *self.values(*args[: len(self.case.args)]), *self.grad(*args)

    @property
    def expected(self):
        return [*self.case.values(), *self.case.gradients()]

    def run(self, fn, *args, expected=None, slack=1.0, split=False):
        """Compiles and runs `fn`; its results must be `expected`, by this implementation.

        Pallas's dense refuses where arrays are `split` over a mesh or kernels over examples.
        """
        if split and self.dense and self.implementation == "pallas":
            with pytest.raises(NotImplementedError, match="split over a mesh|vmap over kernels"):
                jax.jit(fn).lower(*args)
            return None
        compiled = jax.jit(fn).lower(*args).compile()
        text = compiled.as_text()
        results = compiled(*args)
        self.case.check(results, self.expected if expected is None else expected, slack)
        found = {"native"} if hlo.calls(text) else set()
        found |= {"pallas"} if _INTERPRETED.search(text) else set()
        assert found == ({self.implementation} - {"xla"})
        record(self._request, self.implementation)
        return results

    def put(self, mesh, x, parameters=REPLICATED, kernel=None):
        """Operands and cotangents on a mesh: x and its like as `x` says, parameters as told."""
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        *big, last = self.case.args
        if self.dense:
            x_, kernel_ = big
            out = (kernel or parameters, parameters)
            specs = [x, out[0], P() if kernel else out[1]]
            cts = [place(self.case.cts[0], P(*x[:-1], None))]
            return [place(a, s) for a, s in zip((x_, kernel_, last), specs)], cts
        operands = [place(a, x) for a in big] + [place(last, parameters)]
        return operands, [place(ct, x) for ct in self.case.cts]


@pytest.fixture(params=SERVED, ids=lambda pair: "-".join(pair))
def served(request) -> Served:
    return Served(request, *request.param)


def test_jit(served):
    """`jit`, `grad`"""
    served.run(served.both, *served.case.args)


def test_eager(served, request):
    """without `jit`"""
    out, pullback = jax.vjp(served.values, *served.case.args)
    served.case.check(out, served.case.values())
    served.case.check(pullback(tuple(map(jnp.asarray, served.case.cts))), served.case.gradients())
    record(request, served.implementation)


def test_jvp(served):
    """`jvp`"""
    case = served.case
    push = lambda args, tangents: jax.jvp(served.values, args, tangents)
    served.run(push, case.args, case.tangents, expected=[*case.values(), *case.pushed()])


def test_second_derivative(served):
    """reverse mode over reverse mode, along a direction"""
    case = served.case
    slope = lambda x: jnp.vdot(served.grad(x, *case.args[1:])[0], case.tangents[0])
    plain = lambda x: jnp.vdot(
        case.grad(x, *case.args[1:], implementation="xla")[0], case.tangents[0]
    )
    want = np.asarray(jax.grad(plain)(case.args[0]), np.float64)
    scale = np.full(want.shape, np.abs(want).max())  # 400 terms of this size cancel
    expected = [Expected(want, 8 * scale, 400)]
    served.run(jax.grad(slope), case.args[0], expected=expected)


def test_scan(served):
    """`scan`"""

    def loop(*args):
        step = lambda carry, ct: (carry, served.grad(*args, *ct))
        grads = jax.lax.scan(step, None, [jnp.asarray(ct)[None] for ct in served.case.cts])[1]
        return [g[0] for g in grads]

    served.run(loop, *served.case.args, expected=served.case.gradients())


def test_cond(served):
    """`cond`"""
    skip = lambda *args: [jnp.zeros_like(a) for a in args]
    fn = lambda flag, *args: jax.lax.cond(flag, lambda *a: [*served.grad(*a)], skip, *args)
    served.run(fn, True, *served.case.args, expected=served.case.gradients())


def test_remat(served):
    """`checkpoint`"""
    fn = jax.grad(jax.checkpoint(served.loss), tuple(range(len(served.case.args))))
    served.run(fn, *served.case.args, expected=served.case.gradients())


def test_vmap(served):
    """`vmap` of the gradient, over the activations"""
    other = case_of(served.case.op, seed=1)
    few = -2 if served.dense else -1  # kernel and bias, or scale, are shared
    shared = served.case.args[few:]
    first = [np.stack(pair, 1) for pair in zip(served.case.args[:few], other.args[:few])]
    cts = [np.stack(pair) for pair in zip(served.case.cts, other.cts)]
    big = len(first)
    fn = lambda xs, cts: jax.vmap(lambda xs, cts: served.grad(*xs, *shared, *cts)[:big], (1, 0))(
        xs, cts
    )
    cases = [served.case.gradients()[:big]]
    borrowed = case_of(served.case.op, seed=1)
    if served.dense:
        borrowed = DenseCase(seed=1)
        borrowed.args = (*borrowed.args[:few], *shared)
    else:
        borrowed = borrowed.replace(args=(*borrowed.args[:few], *shared))
    cases.append(borrowed.gradients()[:big])
    served.run(fn, first, cts, expected=[stack(pair) for pair in zip(*cases)])


def test_vmap_over_parameters(served):
    """`vmap` of the forward, over everything"""
    other = case_of(served.case.op, seed=1)
    args = [np.stack(pair) for pair in zip(served.case.args, other.args)]
    expected = [stack(pair) for pair in zip(served.case.values(), other.values())]
    served.run(jax.vmap(served.values), *args, expected=expected, split=True)


@pytest.fixture
def mesh(auto_mesh):
    return auto_mesh


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(served, mesh, check_vma):
    """`shard_map`, `check_vma` on and off"""
    rows, many = P(("data", "model")), len(served.case.args)
    few = 2 if served.dense else 1
    specs = (rows,) * (many - few) + (P(),) * few
    fn = jax.shard_map(
        served.values, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=check_vma
    )
    if not check_vma:  # JAX does not differentiate by what is shared without it
        served.run(fn, *served.case.args, expected=served.case.values())
        return
    loss = lambda *args: sum(jnp.sum(o * ct) for o, ct in zip(fn(*args), served.case.cts))
    grad = jax.grad(loss, tuple(range(many)))
    served.run(grad, *served.case.args, expected=served.case.gradients())


def test_auto_rows(served, auto_mesh):
    """Auto axes that split the rows, parameters stored split (FSDP)"""
    args, cts = served.put(auto_mesh, P("data", None, None), P("data"))
    served.run(served.both, *args, *cts, split=True)


def test_auto_features(served, auto_mesh):
    """Auto axes that split the features"""
    kernel = P("model", None) if served.dense else None
    args, cts = served.put(auto_mesh, P("data", None, "model"), kernel=kernel)
    served.run(served.both, *args, *cts, split=True)


def test_explicit_rows(served, explicit_mesh):
    """Explicit axes that split the rows, parameters stored split (FSDP)"""
    with jax.set_mesh(explicit_mesh):
        args, cts = served.put(explicit_mesh, P("data", None, None), P("data"))
        results = served.run(served.both, *args, *cts, split=True)
    assert results is None or jax.typeof(results[-1]).sharding.spec == P("data")


def test_explicit_features(served, explicit_mesh):
    """Explicit axes that split the features, the dense layer's own"""
    with jax.set_mesh(explicit_mesh):
        split = P("data", None, None) if served.dense else P("data", None, "model")
        kernel = P(None, "model") if served.dense else None
        args, cts = served.put(explicit_mesh, split, kernel=kernel)
        if served.dense:
            cts = [jax.sharding.reshard(cts[0], P("data", None, "model"))]
        served.run(served.both, *args, *cts, split=True)


@pytest.mark.parametrize("op", ["rms_norm", "dense"])
def test_partly_manual_shard_map(op, auto_mesh, request):
    """`shard_map` over some of the mesh's axes"""
    case = case_of(op)
    specs = (P("data"),) + (P(),) * (len(case.args) - 1)
    options = {"mesh": auto_mesh, "in_specs": specs, "out_specs": P("data"), "axis_names": {"data"}}

    def run(implementation):
        fn = functools.partial(case, implementation=implementation)
        return jax.jit(jax.shard_map(fn, **options))(*case.args)

    with pytest.raises(NotImplementedError, match="'pallas' cannot serve here: shard_map is man"):
        run("pallas")
    case.check(run(("pallas", "xla")), case.values())
    record(request, "plain HLO")


# ---------------------------------------------------------------- bad input

OPS = {
    "dense": lambda **options: dense(X, X, **options),
    "gated_dense": lambda **options: gated_dense(X, X, X, **options),
    "gated_product": lambda **options: gated_product(X, X, X, **options),
    "linear_cross_entropy": lambda **options: linear_cross_entropy(X, X, [0, 1], **options),
    "rms_norm": lambda **options: rms_norm(X, **options),
    "layer_norm": lambda **options: layer_norm(X, **options),
    "attention": lambda **options: attention(*[X[None, None]] * 3, **options),
    "elementwise": lambda **options: elementwise(
        "template <class T> T same(T x) { return x; }", **options
    )(X),
}
X = np.ones((2, 2), np.float32)
ANY = [
    ({"implementation": 5}, (TypeError, ValueError), "implementation must .* got 5; None takes"),
    (
        {"implementation": ["xla", 3]},
        (TypeError, ValueError),
        r"implementation must .* got \['xla',",
    ),
    ({"implementation": "cuda"}, ValueError, "implementation must name .*'xla', got 'cuda'; None"),
    ({"dtype": 3}, TypeError, "dtype must be .*got 3"),
]
SOME = [
    ("linear_cross_entropy", {"contract": 1.0}, ValueError, "contract must be 0, .* got 1.0"),
    ("linear_cross_entropy", {"logits_dtype": "int32"}, TypeError, "logits_dtype must .*got int32"),
]


@pytest.mark.parametrize(
    "op, options, error, message", [*((op, *row) for op in OPS for row in ANY), *SOME]
)
def test_bad_options_are_named_with_their_value_and_the_way_out(op, options, error, message):
    with pytest.raises(error, match=message.replace("'xla', got", "'xla',? got")):
        OPS[op](**options)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU serves it")
def test_the_variable_is_named_where_it_asks_for_what_cannot_serve(monkeypatch):
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "native")
    message = "implementation='native' cannot serve here: .* set NORMFUSE_IMPLEMENTATION, now "
    with pytest.raises(NotImplementedError, match=message + "'native', to 'native,xla', to let"):
        linear_cross_entropy(X, X, [0, 1]).block_until_ready()
