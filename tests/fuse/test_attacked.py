"""`fuse` of functions that nobody should write: they do the same with it as without."""

import collections
import contextlib
import functools
import inspect
import sys
import threading

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_cases import Fused, draw
from jax import lax
from jax.experimental import sparse

from normfuse import fuse
from normfuse.layers import nnx as ours_nnx

T = 8
CAUSAL = np.tril(np.ones((T, T), bool))
Q, K, V = (draw(i, T, T) for i in range(3))
SCALE = draw(3, T) + 1


def rms(x, scale=SCALE):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def attend(q, k=K, v=V):
    s = jnp.einsum("...td,...sd->...ts", q, k) / T**0.5
    p = jax.nn.softmax(jnp.where(CAUSAL, s, -1e9), -1)
    return jnp.einsum("...ts,...sd->...td", p, v)


def same(got, want, rtol=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not isinstance(b, jax.Array | np.ndarray | np.generic):
            assert a == b and type(a) is type(b)
            continue
        assert jax.typeof(a) == jax.typeof(b)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        size = max(1e-3, float(np.max(np.abs(b), initial=0))) if b.dtype.kind in "fc" else 1
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * size)


# ---------------------------------------------------------------- kinds of functions

FUNCTIONS = {}
Pair = collections.namedtuple("Pair", "a b")


def case(function=None, *, args=(Q,), **served):
    """A function with its arguments, and how many sites of each domain are served at least."""
    if function is None:
        return functools.partial(case, args=args, **served)
    FUNCTIONS[function.__name__] = function, args, served
    return function


@case(norm=1)
def default_arguments(x, scale=SCALE, eps=1e-6, *, gain=2.0):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale * gain


@case(args=(Q, "sin", ("cos", None, 3, 2.5)), norm=1)
def static_arguments(x, name, names):
    assert isinstance(names[2], int) and isinstance(names[3], float)
    return getattr(jnp, name)(rms(x)) + getattr(jnp, names[0])(x), names[1], name


@case(attention=1)
def results_of_all_kinds(x):
    return Pair(attend(x), {"n": None, "s": "text", "i": 3}), [np.float32(2), np.arange(3), x]


@case(args=(2, Q), norm=1)
def python_numbers_stay_python(n, x):
    assert type(n) is int
    return rms(x) * n, n + 1


@case(norm=1)
def weak_types(x):
    chosen = lax.select(CAUSAL | True, lax.broadcast(jnp.asarray(2.0), x.shape), x)
    return jnp.asarray(2.0) * 3, rms(x), jnp.asarray(1) + 1, chosen


@jax.custom_jvp
def nothing(x):
    return ()


nothing.defjvp(lambda primals, tangents: ((), ()))


@case(norm=1)
def a_call_without_results(x):
    nothing(x)
    return rms(x)


@case(args=(Q[:0], Q))
def no_rows(x, y):
    return rms(x), attend(jnp.zeros((0, T, T))), x.sum(), y


@case(args=(sparse.BCOO.fromdense(Q * (Q > 0.5)), Q), norm=1)
def sparse_arrays(m, x):
    return m @ rms(x)


@case(args=(Q, np.array(["a", "b"])), norm=1)
def text_and_numbers_of_a_state(x, names):
    a, b = (lax.rng_uniform(0.0, 1.0, (T,)) for _ in range(2))
    return rms(x), str(names[1]), (a == b).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
def test_functions(name):
    function, args, served = FUNCTIONS[name]
    fused = Fused(function, serves=name != "no_rows")
    arrays = [i for i, a in enumerate(args) if isinstance(a, jax.Array | sparse.BCOO)]
    static = tuple(i for i in range(len(args)) if i not in arrays)
    want, got = function(*args), fused(*args)
    same(got, want)
    found = fused.served()
    assert "program" not in {row.domain for row in fused.rows}, str(fused)  # all could be read
    for domain, count in served.items():
        assert found.get(domain, 0) == 0 if count == 0 else found[domain] >= count, str(fused)

    def total(f, x):
        given = [*args]
        given[place] = x
        leaves = [y for y in jax.tree.leaves(f(*given)) if isinstance(y, jax.Array)]
        return sum(jnp.sum(jnp.sin(y)) for y in leaves if jnp.issubdtype(y.dtype, jnp.floating))

    (place, *_) = [
        i for i in arrays if isinstance(args[i], jax.Array) and args[i].dtype == jnp.float32
    ] or static
    each = [functools.partial(total, f) for f in (fused, function)]
    gradients = [jax.jit(jax.grad(one))(args[place]) for one in each]
    same(*gradients, rtol=1e-4)


@pytest.mark.parametrize("kind", ["object", "method"])
def test_callables(kind):
    class Model:
        calls = 0

        def __call__(self, x):
            self.calls += 1
            return attend(x) + self.calls

        def method(self, x):
            return self(x)

    model = Model()
    function = model if kind == "object" else model.method
    fused = Fused(function)
    got = fused(Q)
    assert model.calls == 1  # its state changes once a call
    model.calls = 0
    same(got, function(Q))
    assert fused.served() == {"attention": 1}


# ---------------------------------------------------------------- effects


def test_no_row_of_what_nothing_reads():
    fused = Fused(
        lambda x: (lax.scan(lambda c, _: (rms(c), None), x, None, length=2), x)[1], serves=False
    )
    assert (fused(Q) == Q).all() and not fused.rows


def test_errors_are_the_functions():
    class Mine(BaseException):
        pass

    for error in (Mine("a"), KeyError("b"), StopIteration(3), RecursionError("c")):

        def raising(x, error=error):
            attend(x)
            raise error

        with pytest.raises(type(error)) as caught:
            Fused(raising)(Q)
        assert caught.value is error or caught.value.__cause__ is error


def test_endless_recursion_is_the_functions_error():
    fused = Fused(lambda x: fused(x + 1))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)  # JAX's errors take time by depth squared
    try:
        with pytest.raises(RecursionError):
            fused(Q)
    finally:
        sys.setrecursionlimit(limit)


class Random:
    """A stateful stream of keys, as EasyLM's `JaxRNG`."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        self.key, drawn = jax.random.split(self.key)
        return drawn


def keeps_in_a_list(x, random, kept):
    kept.append(x * 2)
    return attend(x)


def draws_twice(x, random, kept):
    kept[:] = [{"both": (random(), x.sum()), "n": 3}]
    return attend(x + jax.random.normal(random(), x.shape))


@pytest.mark.parametrize("body", [keeps_in_a_list, draws_twice])
@pytest.mark.parametrize("around", ["eager", "jit", "grad", "leaks"])
def test_what_a_function_writes_into_its_closure(body, around):
    """It is there afterwards, as in the plain function, and belongs to the caller's trace."""

    def run(wrap):
        random, kept = Random(jax.random.key(0)), [jnp.ones(2)]
        f = wrap(lambda x: body(x, random, kept))

        def step(x):
            y = jax.grad(lambda x: f(x * 1).sum())(x) if around == "grad" else f(x)
            stays = [] if around == "grad" else kept  # those that depend on x are its trace's
            return y, jax.random.key_data(random()), jax.tree.map(jnp.shape, kept), stays

        if around in ("jit", "grad"):
            return jax.jit(lambda x: [r for i, r in enumerate(step(x)) if i != 2])(Q)
        with jax.checking_leaks() if around == "leaks" else contextlib.nullcontext():
            y, key, shapes, kept = step(Q)
        kept = jax.tree.map(
            lambda a: 0 if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a, kept[1:]
        )
        return y, key, shapes, kept

    same(run(Fused), run(lambda f: f), 1e-4)


def test_a_ref_in_the_closure():
    def run(wrap):
        ref = jax.new_ref(Q)

        def function(x):
            ref[...] += rms(ref[...] + x)
            return ref[...] + rms(x)

        return [jax.jit(wrap(function))(Q) for _ in range(2)], ref[...]

    same(run(Fused), run(lambda f: f))


def test_variables_that_are_refs():
    with nnx.var_defaults(ref=True):
        model = nnx.BatchNorm(T, rngs=nnx.Rngs(0))
    ours_nnx.fuse(lambda model, x: model(x), report=str)(model, Q)
    same(model.mean[...], 0.01 * Q.mean(0))


def test_modules_of_another_trace_stay_whole():
    """Their state cannot change there: the error is nnx's own, before any of it is taken apart."""
    model = nnx.Sequential(nnx.Linear(T, T, rngs=nnx.Rngs(0)), nnx.BatchNorm(T, rngs=nnx.Rngs(0)))
    loss = lambda model, x: model(x).sum()
    expected = model.layers[1].mean[...]
    for function in (loss, ours_nnx.fuse(loss, report=str)):
        with pytest.raises(flax.errors.TraceContextError, match="from a different trace level"):
            jax.jit(lambda x, function=function: function(model, x))(Q)
    same(model.layers[1].mean[...], expected)
    assert model(Q).shape == Q.shape


def test_a_name_that_a_function_rebinds():
    def run(wrap):
        count, last = 0, None

        def function(x):
            nonlocal count, last
            count, last = count + 1, x[0] + 1
            return attend(x)

        return wrap(function)(Q), count, last

    same(run(Fused), run(lambda f: f))


def changing(change):
    def function(tree):
        y = attend(tree["x"])
        change(tree)
        return y

    return function


CHANGES = {
    "replaced": lambda tree: tree.update(x=tree["x"] + 1),
    "added": lambda tree: tree.update(y=tree["x"]),
    "removed": lambda tree: tree.pop("x"),
    "in a list": lambda tree: tree["more"].append(tree["more"].pop() + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_containers_of_a_call_are_its_own(name):
    """Losses take keys out of their batch: they change a copy, as under `jax.jit`."""
    tree = {"x": Q, "more": [Q]}
    fused = Fused(changing(CHANGES[name]))
    same(fused(tree), attend(Q))
    assert fused.served() == {"attention": 1}
    assert [*tree] == ["x", "more"] and tree["x"] is tree["more"][0] is Q


@jax.tree_util.register_pytree_node_class
class Held:
    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_changes_of_objects_are_an_error_unless_they_are_returned():
    def lost(tree):
        tree["held"].x = tree["held"].x + 1
        return attend(Q)

    def returned(tree):
        held = tree.pop("held")
        held.x = held.x + 1
        return attend(Q), held

    with pytest.raises(ValueError, match="changes arrays in a Held in its arguments.*return them"):
        Fused(lost)({"held": Held(Q)})
    same(Fused(returned)({"held": Held(Q)})[1].x, Q + 1)


async def coroutine(x):
    return attend(x)


def generator(x):
    yield attend(x)


async def both(x):
    yield attend(x)


@pytest.mark.parametrize("function", [coroutine, generator, both])
@pytest.mark.parametrize("fuse", [fuse, ours_nnx.fuse], ids=["fuse", "nnx.fuse"])
def test_functions_that_run_later_are_refused(function, fuse):
    for one in (function, functools.partial(function)):
        with pytest.raises(TypeError, match="while it is called, got one that returns <"):
            fuse(one)(Q)


def test_threads_call_one_fused_function():
    """Each call traces for itself: eager ones, and jitted ones of several shapes, at once."""
    reports = []
    fused = fuse(lambda x: rms(attend(x)), report=reports.append)
    inputs = [draw(i, *[2] * (i % 3), T, T) for i in range(12)]
    found, errors = {}, []

    def work(i):
        try:
            call = fused if i % 2 else jax.jit(fused)
            found[i] = call(inputs[i])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(reports) >= len(inputs) // 2  # jit may share traces
    for i, x in enumerate(inputs):
        same(found[i], rms(attend(x)))
