"""`fuse` of functions that nobody should write: they do the same with it as without."""

import collections
import contextlib
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_cases import Fused, draw
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, sparse

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


@case(args=(np.float64(0.5), np.asarray(Q)), norm=1)
def numpy_scalars(gain, x):
    return rms(jnp.asarray(x)) * gain


@case(args=(2, Q), norm=1)
def python_numbers_stay_python(n, x):
    assert type(n) is int
    return rms(x) * n, n + 1


@case(norm=1)
def weak_types(x):
    return jnp.asarray(2.0) * 3, rms(x), jnp.asarray(1) + 1


@case(args=(Q, jax.random.key(0)), norm=1)
def keys(x, key):
    key, more = jax.random.split(key)
    return rms(x) + jax.random.normal(more, x.shape), key


@case(args=(Q.astype(jnp.complex64) * (1 + 2j),))
def complex_numbers(z):
    return z * lax.rsqrt(jnp.mean(jnp.square(z), -1, keepdims=True) + 1e-6) + (z @ z.T) @ z


@case(args=(Q[:0], Q))
def no_rows(x, y):
    return rms(x), attend(jnp.zeros((0, T, T))), x.sum(), y


@case(args=(jnp.float32(3), Q))
def no_dimensions(a, x):
    return a * lax.rsqrt(a * a + 1e-6), jnp.sum(x * a)


@case(args=(sparse.BCOO.fromdense(Q * (Q > 0.5)), Q), norm=1)
def sparse_arrays(m, x):
    return m @ rms(x)


@case(attention=1, norm=1)
def a_loop_with_constants(x):
    table = jnp.sin(x)

    def body(state):
        i, x = state
        return i + 1, rms(attend(x)) + table

    return lax.while_loop(lambda state: state[0] < 3, body, (0, x))


@case(attention=1, norm=1)
def branches_of_different_sites(x):
    branches = [lambda x: attend(x), lambda x: rms(x), lambda x: x[::-1]]
    return [lax.switch(i, branches, x) for i in (jnp.int32(x[0, 0] > -9), jnp.int32(2))]


@case(attention=1)
def a_scan_that_carries_sites(x):
    return lax.scan(lambda c, k: (attend(c, k) + c, c.sum()), x, jnp.stack([K, V, Q]))


@jax.custom_jvp
def slow(x):
    return rms(x)


slow.defjvp(lambda p, t: (slow(*p), 3 * t[0]))


@jax.custom_vjp
def quick(x):
    return attend(x)


quick.defvjp(lambda x: (quick(x), x), lambda x, g: (g * 2 + x,))


@jax.custom_gradient
def own(x):
    return rms(x), lambda g: (g * 5,)


@case(norm=0, attention=0)
def derivatives_of_their_own(x):
    return slow(x) + quick(x) + own(x)


@case(attention=1)
def a_checkpoint_with_names(x):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    part = lambda x: jnp.sin(checkpoint_name(attend(x), "kept"))
    return jax.checkpoint(part, policy=policy)(x)


@case(attention=1)
def a_vmap_within(x):
    return jax.vmap(lambda k: attend(x, k))(jnp.stack([K, V]))


@case(norm=1)
def a_linearization_within(x):
    y, push = jax.linearize(jnp.tanh, x)
    return rms(push(x)) + y


@case(attention=1)
def a_callback_within(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    y = jax.pure_callback(np.sin, shape, x, vmap_method="sequential")
    return attend(y)


@case(attention=300, norm=0)
def hundreds_of_sites(x):
    for i in range(300):
        x = x + 0.1 * attend(x + i)
    return x


NOT_DIFFERENTIATED = "a_callback_within", "a_loop_with_constants", "complex_numbers"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
def test_functions(name):
    function, args, served = FUNCTIONS[name]
    fused = Fused(function)
    arrays = [i for i, a in enumerate(args) if isinstance(a, jax.Array | sparse.BCOO)]
    static = tuple(i for i in range(len(args)) if i not in arrays)
    want, got = function(*args), fused(*args)
    same(got, want)
    found = fused.served()
    for domain, count in served.items():
        assert found.get(domain, 0) == 0 if count == 0 else found[domain] >= count, str(fused)
    if name in NOT_DIFFERENTIATED:
        return

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


@pytest.mark.parametrize("kind", ["object", "method", "partial", "static", "class", "lambda"])
def test_callables(kind):
    @dataclasses.dataclass
    class Model:
        calls: int = 0

        def __call__(self, x):
            self.calls += 1
            return attend(x) + self.calls

        def method(self, x):
            return self(x)

        @staticmethod
        def static(x):
            return attend(x)

    model = Model()
    function = {
        "object": model,
        "method": model.method,
        "partial": functools.partial(attend, k=V),
        "static": Model.static,
        "class": functools.partial(lambda cls, x: cls.static(x), Model),
        "lambda": lambda x: attend(x),
    }[kind]
    fused = Fused(function)
    got = fused(Q)
    before, model.calls = model.calls, 0
    same(got, function(Q))
    assert fused.served() == {"attention": 1}
    assert before == model.calls == (kind in ("object", "method"))  # its state changes once a call


# ---------------------------------------------------------------- effects


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


def test_it_recovers_after_an_error():
    fails = [True]

    def function(x):
        if fails.pop() if fails else False:
            raise ValueError("once")
        return attend(x)

    fused = Fused(function)
    with pytest.raises(ValueError, match="once"):
        fused(Q)
    same(fused(Q), function(Q))


def test_endless_recursion_is_the_functions_error():
    fused = Fused(lambda x: fused(x + 1))
    with pytest.raises(RecursionError):
        fused(Q)


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


def draws_from_an_object(x, random, kept):
    return attend(x + jax.random.normal(random(), x.shape))


def draws_twice(x, random, kept):
    kept[:] = [{"both": (random(), x.sum()), "n": 3}]
    return attend(x + jax.random.normal(random(), x.shape))


@pytest.mark.parametrize("body", [keeps_in_a_list, draws_from_an_object, draws_twice])
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


def test_a_name_that_a_function_rebinds():
    def run(wrap):
        count, last = 0, None

        def function(x):
            nonlocal count, last
            count, last = count + 1, x[0] + 1
            return attend(x)

        return wrap(function)(Q), count, last

    same(run(Fused), run(lambda f: f))


def test_a_tracer_from_outside_is_read():
    def outer(x):
        y = jnp.sin(x)
        return Fused(lambda z: attend(z) + y)(x)

    plain = lambda x: attend(x) + jnp.sin(x)
    same(jax.jit(outer)(Q), plain(Q))
    total = lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2))(Q)
    same(total(outer), total(plain), 1e-4)


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
    message = (
        "fuse: function must compute its results while it is called, got an? .*generator|async"
    )
    with pytest.raises(TypeError, match=message):
        fuse(function)
    with pytest.raises(TypeError, match=message):
        fuse(functools.partial(function))
    with pytest.raises(TypeError, match="while it is called, got one that returns <"):
        Fused(lambda x: [call := function(x), getattr(call, "close", int)()][0])(Q)


def test_the_order_of_effects():
    def run(wrap):
        seen = []

        def function(x):
            io_callback(lambda v: seen.append(("a", float(v))), None, x[0, 0], ordered=True)
            y = rms(attend(x))
            note = lambda v: seen.append(("b", round(float(v), 3)))
            jax.debug.callback(note, y[1, 1], ordered=True)
            io_callback(lambda v: seen.append(("c", float(v))), None, x[0, 1], ordered=True)
            return y

        y = jax.jit(wrap(function))(Q)
        jax.effects_barrier()
        return y, seen

    (got, mine), (want, theirs) = run(Fused), run(lambda f: f)
    same(got, want)
    assert mine == theirs and len(mine) == 3


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


# ---------------------------------------------------------------- uses

f = lambda x: rms(attend(x))
AROUND = {
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f))(draw(0, 2, 3, T, T)),
    "pmap": lambda f: jax.pmap(f)(Q[None]),
    "vjp with aux": lambda f: (lambda y, pull, aux: (y, pull(K), aux))(
        *jax.vjp(lambda x: (f(x), {"aux": f(x).sum()}), Q, has_aux=True)
    ),
    "hessian": lambda f: jax.hessian(lambda x: jnp.sum(f(x * Q) ** 2))(jnp.float32(0.5)),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(Q).out_avals[0].shape,
    "lower": lambda f: jax.jit(f).lower(Q).compile()(Q),
    "scan": lambda f: lax.scan(lambda c, _: (f(c), c[0]), Q, length=3),
    "a transposed derivative": lambda f: jax.linear_transpose(
        jax.linearize(f, Q)[1], jax.ShapeDtypeStruct(Q.shape, Q.dtype)
    )(K),
    "bfloat16": lambda f: f(Q.astype(jnp.bfloat16)).shape,
}


@pytest.mark.parametrize("name", AROUND)
def test_around(name):
    fused = Fused(f)
    same(AROUND[name](fused), AROUND[name](f), 2e-4)
    assert fused.reports and fused.served().get("attention"), str(fused)
