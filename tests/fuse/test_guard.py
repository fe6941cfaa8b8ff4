"""Whatever fails while `fuse` looks at a function, it runs as it was, and a row says so."""

import collections
import contextlib
import functools
import importlib
import inspect
import os
import sys

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_cases import draw, rms
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun

import normfuse
from normfuse.layers.fuse import program, sites

fusing = importlib.import_module("normfuse.layers.fuse.fuse")  # its function hides the module

T, E, H = 4, 16, 32
FOLDER = os.path.dirname(sites.__file__) + os.sep


class Planted(Exception):
    pass


@jax.custom_jvp
def own(x):
    return jnp.tanh(x)


own.defjvp(lambda primals, tangents: (own(*primals), 2 * tangents[0]))


def indexing(x):
    return jnp.sin(x).at[..., ::2].set(jnp.cos(x[..., 1::2]))


def loss(p, x, y):
    z = jax.nn.log_softmax(x @ p["head"])
    return -jnp.take_along_axis(z, y[..., None], -1).mean()


def attention(q, k, v, mask):
    s = jnp.einsum("...td,...sd->...ts", q, k) / 4
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)) & mask, s, -1e9)
    return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(s, -1), v)


def mlp(p, x):
    h = rms(own(x @ p["first"]), p["scale"])
    return jnp.tanh((jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]).sum()


def divergence(x, w, v):
    """A loss in rows: with a function of a derivative of its own, a sum, and words by arange."""
    p, q = jax.nn.log_softmax(own(x @ w)), jax.nn.log_softmax((x @ v).reshape(-1, 1024))
    each = jnp.sum(jnp.exp(q) * (q - p), -1) + p[jnp.arange(x.shape[0]), 1]
    return each.sum() + jnp.sum(jax.nn.relu(p))


X = draw(0, 16, T, E)
P = {"first": draw(1, E, E), "gate": draw(2, E, H), "up": draw(3, E, H), "down": draw(4, H, E)}
P |= {"scale": draw(5, E), "head": draw(6, E, 16)}
MASK = jnp.asarray(np.arange(T) < T - 1)
PROGRAMS = {
    "norm": (rms, (X, P["scale"]), None),
    "indexing": (indexing, (X,), None),
    "loss": (loss, (P, X, jnp.zeros(X.shape[:-1], int)), None),
    "attention": (attention, (X, X + 1, X - 1, MASK), None),
    "mlp": (mlp, (P, X), "fp8"),
    "rows": (divergence, (X[0], draw(7, E, 1024), draw(8, E, 1024)), None),
}
WHOLE = "call.py", "leaks.py"
"""Files that call the user's function, and see what it left behind."""
PARTS = "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"
"""Parts of a function, which Python 3.11 calls; closing a generator ignores exceptions."""
# Functions around the guards call the user's function and check its results.
AROUND = {
    "fuse.py": "fused rewritten conclude _name".split(),
    "closure.py": ["is_array", "Closure.__init__"],
}


@contextlib.contextmanager
def calls_seen_by(hook):
    """Gives `hook` the code of each function that is called, until it raises.

    Where it returns False, Python 3.12 does not ask about this code again: a trace takes a quarter.
    """
    if sys.version_info < (3, 12):
        sys.setprofile(lambda frame, event, _: hook(frame.f_code) if event == "call" else None)
        try:
            yield
        finally:
            sys.setprofile(None)
        return
    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID

    def enter(code, _):
        try:
            return None if hook(code) else monitoring.DISABLE
        except Planted:
            monitoring.set_events(tool, 0)
            raise

    monitoring.use_tool_id(tool, "calls")
    monitoring.register_callback(tool, monitoring.events.PY_START, enter)
    monitoring.set_events(tool, monitoring.events.PY_START)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


def traced(name, planted=None, last=0):
    """Traces a program with an exception in the n-th call of a function of `layers/fuse`.

    Returns the trace, the report, and how often each function was called.
    """
    function, args, quantization = PROGRAMS[name]
    reports, calls = [], collections.Counter()

    def hook(code):
        if not code.co_filename.startswith(FOLDER) or code.co_name in PARTS:
            return False
        key = os.path.basename(code.co_filename), code.co_qualname, code.co_firstlineno
        calls[key] += not (calls[key] and code.co_flags & inspect.CO_GENERATOR)
        if key == planted and calls[key] == (last or 1):
            raise Planted("by the test")  # JAX's frames pass it on
        return True

    fused = normfuse.fuse(
        lambda *args: function(*args), quantization=quantization, report=reports.append
    )
    leaves, tree = jax.tree.flatten(args)
    with fuse_cases.quiet():
        call = lambda *leaves: fused(*jax.tree.unflatten(tree, leaves))
        with calls_seen_by(hook):
            closed = jax.make_jaxpr(call)(*leaves)
    return lambda: jaxpr_as_fun(closed)(*leaves), reports[-1], calls


def is_around(key):
    file, name, _ = key
    if file in WHOLE:
        return True
    parts = [part for part in name.split(".") if part != "<locals>"]
    around = AROUND.get(file, ())
    return (
        parts[-1] in around
        or name in around
        or (parts[-1] == "<lambda>" and parts[-2:][0] in around)
    )


@functools.cache
def whole(name):
    """The report and the calls of a program's trace, and what its function returns."""
    function, args, _ = PROGRAMS[name]
    return *traced(name)[1:], jax.jit(function)(*args)


FILES = sorted(name for name in os.listdir(FOLDER) if name.endswith(".py"))


@pytest.mark.parametrize("file", FILES)
def test_an_exception_in_every_function(file):
    """Planted in the first call of each function, by turns, and in its last."""
    done = set()
    for name, (_, _, quantization) in PROGRAMS.items():
        unbroken, calls, want = whole(name)
        for key, count in calls.items():
            if key[0] != file or key in done or is_around(key):
                continue
            done.add(key)
            for place in sorted({1, count}):
                values, report, _ = traced(name, key, place)
                said = any("Planted" in row.reason for row in report.rows)
                # Constants that cannot be computed, and closures that cannot be read, are unknown.
                unknown = report == unbroken or key[0] in (
                    "closure.py",
                    "constants.py",
                    "program.py",
                )
                assert said or unknown, (key, place, str(report))
                rtol = 2e-5 if quantization is None else 0.1
                (got,) = values()
                scale = float(jnp.max(jnp.abs(want)))
                np.testing.assert_allclose(
                    got, want, rtol=rtol, atol=rtol * scale, err_msg=f"{key}"
                )
    assert done or file in ("__init__.py", *WHOLE)


@pytest.mark.parametrize("where", ["Program.evaluate", "Program._demand", "program.fitted", "plan"])
def test_effects_happen_once(where, monkeypatch):
    """Though what replaces the function fails on the way."""
    owners = {"Program": program.Program, "program": program, "plan": fusing}
    owner = owners[where.split(".")[0]]
    name = where.split(".")[-1]
    whole, seen, calls = getattr(owner, name), [], []

    def fails(*args, **kwargs):
        calls.append(args)
        if where == "Program._demand" and len(calls) < 4:
            return whole(*args, **kwargs)
        raise Planted("by the test")

    def function(x):
        io_callback(lambda v: seen.append(float(v)), None, x[0], ordered=True)
        y = rms(x, P["scale"])
        io_callback(lambda v: seen.append(round(float(v), 3)), None, y[1], ordered=True)
        return y

    monkeypatch.setattr(owner, name, fails)
    fused = fuse_cases.Fused(function, serves=False, reads=False)
    got = fused(X[0, 0])
    jax.effects_barrier()
    assert len(seen) == 2 and calls and any("Planted" in row.reason for row in fused.rows), seen
    np.testing.assert_allclose(got, rms(X[0, 0], P["scale"]), rtol=1e-6)


def test_errors_in_a_rule_of_the_users_are_theirs():
    """They come from where the function's own equations are evaluated, once more."""

    class Mine(Exception):
        pass

    @jax.custom_vjp
    def clipped(x):
        return jnp.sin(x)

    def forward(x):
        raise Mine("forward")

    clipped.defvjp(forward, lambda _, dy: (dy,))
    calls = []

    def function(x):
        calls.append(x)
        return clipped(rms(x, P["scale"])).sum()

    for quantization in (None, "fp8"):
        fused = fuse_cases.Fused(function, quantization=quantization)
        with pytest.raises(Mine, match="forward"):
            jax.grad(fused)(X)
    assert len(calls) == 2
