"""The front door of `fuse`: what a call leaves in Python objects, errors, results, and options."""

import collections
import contextvars
import cProfile
import dataclasses
import functools
import gc
import logging
import types
import weakref

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_cases import draw, rms
from jax.experimental import io_callback

import normfuse
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.fuse import Report, Row

X, SCALE = draw(0, 4, 8), draw(1, 8)


class Box:
    pass


class Slots:
    __slots__ = ("kept",)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    kept: object


class Hostile:
    def __getattr__(self, name):
        raise RuntimeError(name)


class Deaf:
    def __getattribute__(self, name):
        raise RuntimeError(name)


Pair = collections.namedtuple("Pair", "first rest")


# ---------------------------------------------------------------- what a call leaves in objects


def in_attribute(one, put=setattr, get=getattr):
    return lambda x: put(one, "kept", x), lambda: get(one, "kept")


def in_items(items, key, of=lambda x: x, back=lambda x: x):
    return lambda x: items.__setitem__(key, of(x)), lambda: back(items[key])


def in_context():
    variable = contextvars.ContextVar("kept", default=0)
    return variable.set, variable.get


def in_a_cell():
    kept = 0

    def put(x):
        nonlocal kept
        kept = x

    return put, lambda: kept


def in_a_set():
    kept, box = set(), Box()
    kept.add(box)
    return in_attribute(box)[0], lambda: next(iter(kept)).kept


def behind_weak_references():
    box, by_name = Box(), weakref.WeakValueDictionary()
    by_name["box"] = box
    return lambda x, box=box: setattr(by_name["box"], "kept", x), lambda: box.kept


def deep(make, get, count=30):
    outer = inner = make()
    for _ in range(count):
        inner = get(inner)
    return outer, inner


def deep_in_dictionaries():
    kept, inner = deep(lambda: collections.defaultdict(dict), lambda d: d.setdefault("in", {}))
    return lambda x: inner.update(kept=x), lambda: inner["kept"]


def deep_in_objects():
    def step(box):
        box.inner = Box()
        return box.inner

    kept, inner = deep(Box, step)
    return lambda x: setattr(inner, "kept", x), lambda kept=kept: inner.kept


def in_a_wide_list():
    boxes = [Box() for _ in range(6000)]
    return in_attribute(boxes[-1])[0], lambda: boxes[-1].kept


def in_a_log():
    records, log = [], logging.getLogger("normfuse.test_front")
    handler = logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    log.propagate = False
    return lambda x: log.warning("%s", x), lambda: records[-1].args[0]


def in_an_error():
    kept = []

    def put(x):
        try:
            raise ValueError(x)
        except ValueError as error:
            kept[:] = [error]

    return put, lambda: kept[0].args[0]


def in_a_class():
    class Own:
        kept = 0

    return in_attribute(Own)[0], lambda: Own().kept


def in_a_deque():
    kept = collections.deque(maxlen=2)
    return kept.append, lambda: kept[-1]


def in_a_pytree_of_objects():
    box = Box()
    tree = {"box": box, "more": (1, box)}
    return lambda x: setattr(tree["more"][1], "kept", x), lambda: box.kept


def in_a_function_made_there():
    kept = []
    return lambda x: kept.append(lambda: x), lambda: kept[-1]()


def in_a_default():
    kept = []

    def put(x):
        def own(x=x):
            return x

        kept.append(own)

    return put, lambda: kept[-1]()


def raw(action):
    """Writes or reads an attribute of an object that answers nothing."""
    return lambda one, name, *value: action(one, name, *value)


KEPT = {
    "an attribute": lambda: in_attribute(Box()),
    "slots": lambda: in_attribute(Slots()),
    "a frozen dataclass with slots": lambda: in_attribute(Frozen(0), object.__setattr__),
    "a hostile __getattr__": lambda: in_attribute(Hostile()),
    "a hostile __getattribute__": lambda: in_attribute(
        Deaf(), object.__setattr__, object.__getattribute__
    ),
    "a class": in_a_class,
    "a module": lambda: in_attribute(types.ModuleType("state")),
    "a function's attribute": lambda: in_attribute(lambda: 0),
    "a list": lambda: in_items([0], 0),
    "an ordered dictionary": lambda: in_items(collections.OrderedDict(), "kept"),
    "a named tuple": lambda: in_items(
        {}, "kept", lambda x: Pair(x + 1, (x, "word")), lambda pair: pair.first + pair.rest[0]
    ),
    "a deque": in_a_deque,
    "a set of objects": in_a_set,
    "weak references": behind_weak_references,
    "a context variable": in_context,
    "a cell": in_a_cell,
    "dictionaries, 30 deep": deep_in_dictionaries,
    "objects, 30 deep": deep_in_objects,
    "a wide list": in_a_wide_list,
    "a log": in_a_log,
    "an error": in_an_error,
    "a pytree of objects": in_a_pytree_of_objects,
    "a function made there": in_a_function_made_there,
    "a default": in_a_default,
}


def results(make, wrap, around):
    put, get = make()

    def function(x):
        y = rms(x, SCALE)
        put(y * 2)
        return y + get()

    if around == "jit":
        call = wrap(function)
        return jax.jit(lambda x: (call(x), call(x + 1), get()))(X)
    call = wrap(function)
    return call(X), call(X + 1), get()


def same(got, want, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", KEPT)
def test_what_objects_keep_is_there_afterwards(name):
    around = "jit" if len(name) % 3 == 0 else "eager"
    want = results(KEPT[name], lambda f: f, around)
    same(results(KEPT[name], fuse_cases.Fused, around), want)


def test_objects_that_a_server_has_frozen_stay_so():
    kept, x = [], jnp.ones(8)
    gc.freeze()
    frozen = gc.get_freeze_count()
    fuse_cases.Fused(lambda x: kept.append(x * 2), serves=False)(x)
    assert gc.get_freeze_count() > frozen / 2
    np.testing.assert_array_equal(kept[0], 2)


def squares():
    x = jnp.ones(8)
    while True:
        x = x * 2
        yield x


@functools.lru_cache(maxsize=4)
def table(n):
    return jnp.arange(n) * 2.0


def of_objects(x):
    kept = np.empty(1, object)
    kept[0] = x
    return kept


STREAM, HELD = squares(), []
REFUSED = {
    "the generator squares": lambda x: next(STREAM),
    "the _lru_cache_wrapper table": lambda x: table(8),
    "an object of type partial": lambda x: HELD.append(functools.partial(jnp.add, x * 2)) or 0,
    "an object that Python's garbage collector cannot see": lambda x: (
        HELD.append(of_objects(x * 2)) or 0
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_given_back_is_refused_before_anything_runs(name):
    ran, kept = [], {}

    def function(x):
        io_callback(lambda: ran.append(1), None, ordered=True)
        kept["sum"] = x.sum()
        return rms(x, SCALE) + REFUSED[name](x)

    with pytest.raises(ValueError, match=f"fuse: {name} keeps an array.*a dictionary or an attri"):
        fuse_cases.Fused(function)(X)
    jax.effects_barrier()
    assert not ran and float(kept["sum"]) == float(X.sum())  # what can be given back is


@pytest.mark.filterwarnings("ignore:Python iterable type")
@pytest.mark.parametrize("make", [lambda y: lambda: y, lambda y: map(jnp.sin, [y])])
def test_results_may_hold_arrays_in_objects_that_are_no_trees(make):
    read = lambda held: held() if callable(held) else next(held)
    function = lambda x: (rms(x, SCALE), make(x * 2))
    same(read(fuse_cases.Fused(function)(X)[1]), read(function(X)[1]))


def by_custom_vjp(f, bwd):
    f = jax.custom_vjp(f)
    f.defvjp(lambda x: (x * 2, None), lambda _, dy: (bwd(dy),))
    return f


def by_custom_jvp(f, derivative):
    f = jax.custom_jvp(f)
    f.defjvp(lambda x, dx: (x[0] * 2, derivative(dx[0])))
    return f


RULES = {  # how a rule of a derivative holds a value of the loss
    "custom_vjp": lambda h: by_custom_vjp(lambda x: x * 2, lambda dy: dy * h),
    "custom_jvp": lambda h: by_custom_jvp(lambda x: x * 2, lambda dx: dx * h),
    "custom_gradient": lambda h: jax.custom_gradient(lambda x: (x * 2, lambda dy: dy * h)),
    "a default": lambda h: by_custom_vjp(lambda x: x * 2, lambda dy, h=h: dy * h),
    "partial": lambda h: by_custom_vjp(lambda x: x * 2, functools.partial(jnp.multiply, h)),
    "an object": lambda h: (lambda one: by_custom_vjp(lambda x: x * 2, lambda dy: dy * one.h))(
        types.SimpleNamespace(h=h)
    ),
    "within remat": lambda h: jax.checkpoint(by_custom_vjp(lambda x: x * 2, lambda dy: dy * h)),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_derivatives_that_hold_values_of_the_loss(name):
    """Nothing can put a value into a rule, so such a loss runs as it is, and the report says so."""
    kept = {}

    def loss(x):
        y = rms(x, SCALE)
        kept["y"] = y
        return RULES[name](jnp.exp(jax.lax.stop_gradient(y)))(y).sum()

    reports = []
    fused = normfuse.fuse(loss, report=reports.append)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: f):
        same(transform(fused)(X), transform(loss)(X))
    (row,) = reports[0].rows
    assert row.domain == "program" and "closes over what it computes" in row.reason
    same(kept["y"], rms(X, SCALE))
    with pytest.raises(ValueError, match="require='norm' is not met.*closes over"):
        normfuse.fuse(loss, require="norm", report=str)(X)


def test_rules_that_hold_an_object_for_a_number_of_its_own_are_served():
    def loss(x):
        one = types.SimpleNamespace(h=jnp.exp(x), factor=3.0)
        twice = by_custom_vjp(lambda x: x * 2, lambda dy: dy * one.factor)
        return twice(rms(x, SCALE)).sum()

    fused = fuse_cases.Fused(loss)
    same(jax.grad(fused)(X), jax.grad(loss)(X))
    assert len(fused.reports[-1].fused) == 1


def test_rules_of_derivatives_cost_no_collection_of_garbage(monkeypatch):
    """A rule refers to its trace: it is known by counting, without a look at all objects."""

    def function(x):
        body = lambda c, _: (jax.jit(jax.nn.relu)(c) + jnp.logaddexp(c, 1.0), None)
        return jax.lax.scan(body, jax.nn.relu(rms(x, SCALE)), None, length=2)[0]

    collections = []
    monkeypatch.setattr("gc.collect", lambda *_: collections.append(1))
    fused = fuse_cases.Fused(function)
    jax.make_jaxpr(jax.grad(lambda x: fused(x).sum()))(X)
    assert len(fused.reports[-1].fused) == 1 and not collections


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_objects_are_as_the_plain_function_leaves_them(error):
    def run(wrap):
        kept, calls = {"sum": jnp.zeros(())}, []

        def function(x):
            kept["sum"] += rms(x, SCALE).sum()
            calls.append(1)
            if len(calls) == 1:
                raise error("mine")
            return x + kept["sum"]

        call = wrap(function)
        with pytest.raises(error, match="mine"):
            call(X)
        return kept["sum"] + 0, call(X)

    same(run(fuse_cases.Fused), run(lambda f: f))


@pytest.mark.parametrize("where", ["report", "skip", "require", "callback"])
def test_after_an_error_of_an_option_or_a_callback_objects_have_numbers(where):
    kept, ran = {}, []

    def fails(*_):
        ran.append(1)
        raise KeyError("mine")

    def function(x):
        kept["sum"] = x.sum()
        y = rms(x, SCALE)
        if where == "callback":
            io_callback(fails, None, y[0])
        return y

    options = {"report": str} | ({} if where == "callback" else {where: fails})
    if where == "require":
        options["require"] = "loss"
    with pytest.raises(Exception, match="mine|no loss|none was found"):
        jax.block_until_ready(normfuse.fuse(function, **options)(X))
        jax.effects_barrier()
    assert float(kept["sum"]) == float(X.sum()) and len(ran) == (where != "require")


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad])
def test_an_error_of_a_callback_comes_from_the_only_run(transform):
    ran = []

    def fails(v):
        ran.append(v)
        raise RuntimeError("mine")

    def function(x):
        y = rms(x, SCALE)
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        return (y * jax.pure_callback(fails, kind, jax.lax.stop_gradient(y[0, 0]))).sum()

    with pytest.raises(jax.errors.JaxRuntimeError, match="mine"):
        jax.block_until_ready(transform(fuse_cases.Fused(function))(X))
    assert len(ran) == 1


def test_debug_nans_find_nan_in_results():
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        fuse_cases.Fused(lambda x: jnp.log(rms(x, SCALE) - 100))(X)


# ---------------------------------------------------------------- arguments and results

OBJECTS = [
    *(np.array([1 << 40, 7]), np.array([1e300]), np.array([1.5], np.longdouble), jnp.ones(3)),
    *(np.zeros(2, [("a", "i4")]), np.array(["word"]), np.array([1], "M8[s]"), np.float64(1e300)),
]


@pytest.mark.parametrize("i", range(len(OBJECTS)))
def test_results_that_nothing_touches_are_the_objects_themselves(i):
    one = OBJECTS[i]
    y, given, closed_over = fuse_cases.Fused(lambda x, one_: (rms(x, SCALE), one_, [one]))(X, one)
    assert given is one and closed_over[0] is one
    same(y, rms(X, SCALE))


@jax.tree_util.register_pytree_node_class
class Copying:
    """Each flattening makes new arrays."""

    def __init__(self, array):
        self.array = array

    def tree_flatten(self):
        return (self.array * 1,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_objects_whose_flattening_makes_new_arrays():
    fused = fuse_cases.Fused(lambda x, one: rms(x, one.array))
    same(fused(X, Copying(SCALE)), rms(X, SCALE))

    def changes(x, one):
        one.array = one.array + 1
        return rms(x, one.array)

    with pytest.raises(ValueError, match="changes arrays in a Copying"):
        fuse_cases.Fused(changes)(X, Copying(SCALE))


class Counting(nnx.Module):
    def __init__(self):
        self.scale, self.calls = nnx.Param(SCALE), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, counts=True):
        if counts:
            self.calls[...] += 1
        return rms(x, self.scale[...])


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("way", ["fuse", "swap"])
def test_nnx_leaks_nothing(way, counts):
    model = Counting()
    call = lambda model, x: model(x, counts)
    with jax.checking_leaks():
        if way == "swap":
            y = nnx.jit(call)(ours_nnx.swap(model, report=str), X)
        else:
            y = nnx.jit(ours_nnx.fuse(call, report=str))(model, X)
    same(y, rms(X, SCALE))
    assert int(model.calls[...]) == counts


# ---------------------------------------------------------------- closures

WORDS = {f"word {i}": i for i in range(200_000)}
LISTS = {f"word {i}": [i, "more"] for i in range(1000)}  # a call each, or two


def nested(tree, depth):
    return {"in": nested(tree, depth - 1)} if depth else tree


def calls_of(function, *args):
    with cProfile.Profile() as profile:
        jax.make_jaxpr(fuse_cases.Fused(function))(*args)
    return sum(each.callcount for each in profile.getstats())


def test_words_in_a_closure_cost_nothing():
    few = {"word": 1}
    call = lambda words: calls_of(lambda x: rms(x, SCALE) * len(words), X)
    call(few)  # JAX traces some functions once
    assert max(call(WORDS), call(LISTS)) < call(few) + 5000


OTHERS = [Box() for _ in range(6000)]
TEACHER = {"first": draw(2, 16, 16), "second": draw(3, 16, 16)}
TEACHERS = {
    "30 dictionaries deep": nested(TEACHER, 30),
    "lists in tuples": [({"more": [TEACHER]},)],
    "beside other objects": [*OTHERS, TEACHER],
    "beside words": [WORDS, TEACHER],
}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_tree_of_arrays_is_a_model_at_any_depth(name):
    tree = TEACHERS[name]

    def student_and_teacher(x):
        kernels = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]
        return jnp.tanh(jnp.tanh(x @ kernels[0]) @ kernels[1])

    fused = fuse_cases.Fused(student_and_teacher, quantization="fp8")
    fused(draw(4, 32, 16))
    assert sum("fp8" in row.served for row in fused.rows) == 2, fused.rows


# ---------------------------------------------------------------- options


def scores(q, k, v):
    return jax.nn.softmax(q @ k.mT / 3, -1) @ v


def test_what_is_required_is_served_or_an_error():
    q = draw(0, 2, 4, 8)
    call = lambda function, require: normfuse.fuse(function, report=str, require=require)
    same(call(scores, ("attention",))(q, q, q), scores(q, q, q))
    with pytest.raises(ValueError, match="require='loss' is not met in scores: none was found"):
        call(scores, ("attention", "loss"))(q, q, q)

    def twice(q, k, v):  # the second needs its scores
        weights = jax.nn.softmax(q @ k.mT / 3, -1)
        return scores(q, k, v), weights @ v, weights

    with pytest.raises(ValueError, match="require='attention' is not met.*the function's result"):
        call(twice, "attention")(q + 1, q, q)
    kept = normfuse.fuse(scores, report=str, require="attention", skip="attention")
    with pytest.raises(ValueError, match="must name domains.*did you mean 'attention'"):
        call(scores, "atention")
    with pytest.raises(ValueError, match="must name domains, got True; there are attention"):
        call(scores, True)
    same(kept(q, q, q), scores(q, q, q))


def test_models_require_too():
    model = Counting()
    for wrap in (ours_nnx.fuse(lambda m, x: m(x), report=str, require="attention"),):
        with pytest.raises(ValueError, match="require='attention' is not met.*none was found"):
            wrap(model, X)
    with pytest.raises(ValueError, match="require='loss' is not met"):
        ours_nnx.swap(model, report=str, require=["norm", "loss"])(X)
    same(ours_nnx.swap(model, report=str, require="norm")(X), rms(X, SCALE))
    with pytest.raises(ValueError, match="swap: require must name domains, got 'norms'"):
        ours_nnx.swap(model, require="norms")


def test_what_is_fused_already_is_said():
    once = normfuse.fuse(lambda x: rms(x, SCALE), report=str)
    for twice in (once, jax.jit(once)):
        with pytest.warns(UserWarning, match="is fused already"):
            normfuse.fuse(twice)(X)


def test_a_skip_that_is_found_nowhere_names_the_domains_and_the_nearest():
    q = draw(0, 2, 4, 8)
    said = "skip='atention' is in no row.*mean 'attention'.*the domains are attent"
    with pytest.warns(UserWarning, match=said):
        normfuse.fuse(scores, report=str, skip="atention")(q, q, q)


# ---------------------------------------------------------------- reports


def test_the_last_line_says_that_logits_have_no_loss():
    def odd(x, w):
        z = x @ w
        return jnp.square(jnp.log(jnp.sum(jnp.exp(z * jnp.sin(z)), -1))).mean(), z

    reports = []
    normfuse.fuse(odd, report=reports.append)(X, draw(2, 8, 1024))
    assert str(reports[-1]).splitlines()[-1] == "0 of 1 loss", reports[-1]
    assert reports[-1].rows[0].reason == "its logits are read as a whole"
    normfuse.fuse(lambda x, w: jnp.exp(x).sum(), report=reports.append)(X, draw(2, 8, 1024))
    assert not reports[-1].rows, reports[-1]


def test_rows_fit_the_terminal(monkeypatch):
    reason = "a reason of many words that says why nothing at all could be done about it here"
    report = Report((Row("some/scope file.py:1", "norm 4 x 8", "", reason),))
    whole = str(report)
    monkeypatch.setenv("COLUMNS", "60")
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 60 < max(map(len, whole.splitlines()))
    assert " ".join(whole.split()).count("why nothing") == 1
    assert sorted(str(report).split()) == sorted(whole.split())


def test_a_gradient_that_is_zero_but_for_rounding_is_no_large_error():
    def loss(p, x):
        q, k, v = x @ p["q"], x @ p["k"] + p["bias"], x @ p["v"]
        return jnp.square(jax.nn.softmax(q @ k.T / 3) @ v - 1).mean()

    p = {name: draw(i, 8, 8) for i, name in enumerate("qkv")} | {"bias": jnp.ones(8)}
    found = normfuse.compare(loss, p, X)
    zero = {row.name: row.is_zero for row in found.rows}
    assert [name for name, is_zero in zero.items() if is_zero] == ["d p['bias']"], found
    assert next(line for line in str(found).splitlines() if "bias" in line).split()[-1] == "~0"


def test_a_large_error_is_no_zero():
    def loss(p):
        return jnp.square(p["a"]).sum() + jnp.square(p["b"] + 300 - 300).sum()

    with fuse_cases.quiet():
        found = normfuse.compare(loss, {name: X.astype(jnp.bfloat16) for name in "ab"})
    wrong = {row.name: row.theirs > 0.1 for row in found.rows}
    assert wrong["d p['b']"] and not wrong["d p['a']"]
    assert not any(row.is_zero for row in found.rows) and "~0" not in str(found)
