"""The cost of `fuse` where a function is traced: by calls, not by a clock."""

import collections
import cProfile
import functools
import importlib
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax import lax

from normfuse import fuse
from normfuse.layers.core.op import Op
from normfuse.layers.fuse.closure import origins_of

fusing = importlib.import_module("normfuse.layers.fuse.fuse")  # its function hides the module

DIM, LAYERS = 80, 3  # a width that no other test has, so that JAX knows none of its programs


def rms(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def loss(layers, x):
    for p in layers:
        y = rms(x, p["norm"])
        q, k, v = (y @ p[name] for name in "qkv")
        scores = (q @ k.mT).astype(jnp.float32) * DIM**-0.5
        x = x + jax.nn.softmax(scores, -1).astype(x.dtype) @ v + p["bias"]
        y = rms(x, p["mlp norm"])
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


def arguments(layers, rows):
    array = jax.ShapeDtypeStruct
    one = {name: array((DIM, DIM), jnp.bfloat16) for name in ("q", "k", "v", "gate", "up", "down")}
    one |= {name: array((DIM,), jnp.float32) for name in ("norm", "mlp norm")}
    one |= {"bias": array((DIM,), jnp.bfloat16)}
    return [one] * layers, array((rows, 16, DIM), jnp.bfloat16)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_equal_layers_are_traced_once(quantization, monkeypatch):
    """JAX traces the definition of each operation once, however many layers have it."""
    counts, plain = collections.Counter(), Op.plain

    def spy(self, spec, *operands):
        counts[self.name] += 1
        return plain(self, spec, *operands)

    monkeypatch.setattr(Op, "plain", spy)

    def definitions(layers, rows):  # other rows: other programs
        reports = []
        fused = fuse(loss, quantization=quantization, report=reports.append)
        counts.clear()
        jax.make_jaxpr(jax.grad(fused))(*arguments(layers, rows))
        served = collections.Counter(row.domain for row in reports[0].fused)
        assert (served["norm"], served["mlp"]) == (2 * layers, layers)
        assert served["codes"] == (2 * layers if quantization else 0)
        del counts["shared"]  # copies of an input, one for each product that reads it
        return dict(counts)

    many = definitions(LAYERS + 2, rows=5)
    assert many == definitions(LAYERS, rows=7)
    assert many or quantization is None  # types are known without definitions


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_reading_and_matching_call_few_functions_for_an_equation(quantization):
    """About 200, in FP8 225, however many layers there are; before 3.12 with comprehensions."""

    def calls(layers):
        closed = jax.make_jaxpr(loss)(*arguments(layers, 2))
        origins = origins_of(arguments(layers, 2), {})
        with cProfile.Profile() as profile:
            program = fusing.Program(closed, origins=origins)
            fusing.plan(program, quantization, ())
        return sum(each.callcount for each in profile.getstats()) / len(program.equations)

    few, many = calls(LAYERS), calls(8 * LAYERS)
    assert many <= 1.02 * few
    assert many <= (230 if sys.version_info >= (3, 12) else 260)


def test_rules_of_derivatives_are_traced_at_little_cost():
    """A gradient through relus (`custom_jvp`) takes at most 1.6 times as many calls as without."""

    def calls(wrap, n):
        def chain(x):
            for _ in range(n):
                x = jax.nn.relu(x + 1)
            return x.sum()

        with cProfile.Profile() as profile:
            jax.make_jaxpr(jax.grad(wrap(chain)))(X)
        return sum(each.callcount for each in profile.getstats())

    fused = lambda chain: fuse(chain, report=str)
    calls(fused, 2)
    plain, ours = (calls(wrap, 60) - calls(wrap, 20) for wrap in (lambda f: f, fused))
    assert ours <= 1.6 * plain, (ours, plain)


def test_rules_within_rules_cost_what_their_program_is_long():
    """Sixteen calls of a user's own function, within others' rules, cost as calls in a row do."""

    @jax.custom_jvp
    def own(x):
        return x * 1.5

    own.defjvp(lambda p, t: (own(*p), t[0] * 2))

    def twice(function):
        outer = jax.custom_jvp(lambda x: function(function(x)))
        outer.defjvp(lambda p, t: (outer(*p), function(t[0])))
        return outer

    def calls(depth):
        function = own
        for _ in range(depth):
            function = twice(function)
        return planned(lambda x: function(x).sum(), X)[0]

    calls(1)
    assert calls(4) <= 16 * calls(0) + 1000


# ---------------------------------------------------------------- linear in a program's length


def planned(function, *args):
    """Returns how many functions are called to read a program and to choose its sites."""
    closed, calls = jax.make_jaxpr(function)(*args), 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"
        assert calls < 1e6, "it would not end"

    sys.setprofile(count)
    try:
        program = fusing.Program(closed, origins=origins_of(args, {}))
        fusing.plan(program, None, ())
    finally:
        sys.setprofile(None)
    return calls, program


def is_linear(chain, *args):
    """Checks that 200 steps take no more calls for each than 100 do, and no recursion."""
    of = lambda n: functools.partial(chain, n)
    (part, _), (whole, program) = planned(of(100), *args), planned(of(200), *args)
    assert whole <= 2.3 * part + 1000, (part, whole)
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack()) + 120)
        planned(of(200), *args)
    finally:
        sys.setrecursionlimit(limit)
    assert len(program.equations) >= 100  # equal equations are one


X, KEEP = jnp.ones((16, 16)), jnp.eye(16, dtype=bool)


def scores(x, keep):
    return jnp.sum(jax.nn.softmax(jnp.where(keep, x @ x, -1e9)) @ x)


def repeated(step, end):
    """A chain of steps from x, its first rows and a mask, and what reads the last of them."""

    def chain(n, x, keep):
        state = x, x[:1], x[1:2], keep, keep.T
        for _ in range(n):
            state = step(*state)
        return end(x, *state)

    return chain


logits = lambda x, h, a, *_: jnp.sum(jax.nn.logsumexp((x @ h) * a, -1))
GROWING = {
    "h + tanh": (lambda h, a, b, m, k: (h + 0.1 * jnp.tanh(h), a, b, m, k), logits),
    "h · tanh + h": (lambda h, a, b, m, k: (h * jnp.tanh(h) + h, a, b, m, k), logits),
    "a rolled kernel": (lambda h, a, b, m, k: (jnp.roll(h, 1, 0), a, b, m, k), logits),
    "squares of a factor": (lambda h, a, b, m, k: (h, a * a, b, m, k), logits),
    "products of two factors": (lambda h, a, b, m, k: (h, a * b, a, m, k), logits),
    "a mask and its transpose": (
        lambda h, a, b, m, k: (h, a, b, m & m.T, k),
        lambda x, h, a, b, m, k: scores(x, m),
    ),
    "a mask or another": (
        lambda h, a, b, m, k: (h, a, b, m | k, m),
        lambda x, h, a, b, m, k: scores(x, ~m),
    ),
    "a mask and another": (
        lambda h, a, b, m, k: (h, a, b, m & k, m),
        lambda x, h, a, b, m, k: scores(x, m),
    ),
    "relu": (lambda h, a, b, m, k: (jax.nn.relu(h + 1), a, b, m, k), logits),
    "softmax": (lambda h, a, b, m, k: (jax.nn.softmax(h), a, b, m, k), logits),
    "dropout": (
        lambda h, a, b, m, k: (
            jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, h.shape), h * 2, 0) @ h,
            *(a, b, m, k),
        ),
        logits,
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_programs_whose_facts_grow(name):
    """Each doubled the work with every step, or printed the same call again."""
    is_linear(repeated(*GROWING[name]), X, KEEP)


FLOATS = (
    "abs neg exp log log1p sqrt rsqrt tanh logistic erf erfc sign floor square sin stop_gradient"
).split()
STEPS = {name: getattr(lax, name) for name in FLOATS}
STEPS |= {
    "add": lambda h: h + h[::-1],
    "sub": lambda h: h - X,
    "mul": lambda h: h * h.T,
    "div": lambda h: 1 / (h + 2),
    "a number added": lambda h: h + 1.5,
    "a number multiplied": lambda h: h * 1.5,
    "max": lambda h: jnp.maximum(h, 0) + 1,
    "min": lambda h: jnp.minimum(h, h.T),
    "pow": lambda h: h**1.5,
    "integer_pow": lambda h: h**3,
    "reduce_sum": lambda h: h - jnp.sum(h, -1, keepdims=True),
    "reduce_max": lambda h: h - jnp.max(h, -1, keepdims=True),
    "mean of squares": lambda h: h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6),
    "dot_general": lambda h: h @ X,
    "transpose": lambda h: h.T + 1,
    "reshape": lambda h: h.reshape(4, 4, 16).reshape(16, 16) * 2,
    "concatenate": lambda h: jnp.concatenate([h[8:], h[:8]]),
    "convert_element_type": lambda h: h.astype(jnp.bfloat16).astype(jnp.float32),
    "select_n": lambda h: jnp.where(KEEP, h, 0),
    "select_n, by itself": lambda h: jnp.where(h > 0, h, h.T),
    "gather": lambda h: h[jnp.argmax(h, -1)],
    "scatter": lambda h: h.at[::2].set(h[1::2]),
    "dynamic_slice": lambda h: jnp.roll(h, h[0, 0].astype(jnp.int32)),
    "cumsum": lambda h: jnp.cumsum(h, -1),
    "sort": lambda h: jnp.sort(h, -1),
    "scan": lambda h: lax.scan(lambda c, y: (c + y, c), h[0], h)[1],
    "remat": jax.checkpoint(lambda h: jnp.tanh(h) @ h),
    "cond": lambda h: lax.cond(h[0, 0] > 0, jnp.tanh, jnp.exp, h),
}


@pytest.mark.parametrize("name, start", half(STEPS, ["x", "constants", "integers"]))
def test_chains_of_one_primitive(name, start):
    """200 steps of each take linear time, from an argument, from constants and from positions."""

    def chain(n, x, keep):
        h = x if start == "x" else jnp.asarray(np.linspace(0, 1, x.size, dtype=np.float32))
        h = h.reshape(x.shape)
        if start == "integers":
            h = (jnp.arange(16)[:, None] + jnp.arange(16)).astype(jnp.float32)
        for _ in range(n):
            h = STEPS[name](h)
        return logits(x, h, x[:1]) + scores(x, (h > 0) & keep)

    is_linear(chain, X, KEEP)


@pytest.mark.parametrize("kind", ["integers", "booleans", "indices"])
def test_chains_of_integers(kind):
    def chain(n, x, keep):
        i = jnp.arange(16)
        for _ in range(n):
            i = jnp.concatenate([i[8:] + 1, i[:8] - 1]) if kind == "indices" else jnp.flip(i) + 1
            keep = keep & (i[:, None] >= i) if kind == "booleans" else keep
        return scores(x, keep | (i[:, None] > i)) + jnp.sum(x[i % 16])

    is_linear(chain, X, KEEP)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_are_read_in_linear_time(seed):
    """Each step combines two of the last values; a mask and logits read the end."""
    unary = [f for name, f in STEPS.items() if name not in ("scan", "remat", "cond", "sort")]

    def chain(n, x, keep):
        rng, values, masks = np.random.default_rng(seed), [x, x.T], [keep, keep.T]
        for _ in range(n):
            a, b = (values[-1 - rng.integers(min(len(values), 4))] for _ in range(2))
            p, q = (masks[-1 - rng.integers(min(len(masks), 4))] for _ in range(2))
            match rng.integers(6):
                case 0:
                    masks.append(rng.choice([jnp.logical_and, jnp.logical_or])(p, q.T))
                case 1:
                    masks.append(jnp.where(p, a > b, q))
                case 2 | 3:
                    values.append(rng.choice([jnp.add, jnp.multiply, jnp.subtract])(a, b))
                case _:
                    values.append(unary[rng.integers(len(unary))](a))
        return logits(x, values[-1], values[-2][:1]) + scores(x, masks[-1])

    is_linear(chain, X, KEEP)
