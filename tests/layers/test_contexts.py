"""Calls, control flow and derivatives"""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from rms_norm_cases import Batch, Case, stack

NATIVE = {"backward": 2, "forward": 3}  # by reverse mode twice, and by forward mode


def first(tree):
    return jax.tree.map(lambda a: a[0], tree)


def each(loop):
    """The context of a loop over one element of every operand."""
    lead = lambda args: [jnp.asarray(a)[None] for a in args]
    return lambda f: lambda *args: first(loop(lambda xs: f(*xs), lead(args)))


def scan(f, xs):
    return jax.lax.scan(lambda _, x: (None, f(x)), None, xs)[1]


def nothing(f):
    """Zeros, like the results of `f`."""
    zeros = lambda y: jnp.zeros(y.shape, y.dtype)
    return lambda *args: jax.tree.map(zeros, jax.eval_shape(f, *args))


def while_loop(f):
    def run(*args):
        body = lambda state: (state[0] + 1, f(*args))
        start = jnp.int32(0), nothing(f)(*args)
        return jax.lax.while_loop(lambda state: state[0] < 1, body, start)[1]

    return run


def custom_vjp(f):
    rule = jax.custom_vjp(lambda *args: f(*args))
    rule.defvjp(lambda *args: (f(*args), args), lambda args, cts: jax.vjp(f, *args)[1](cts))
    return rule


def remat(policy=None):
    def wrap(f):
        named = lambda *args: jax.tree.map(lambda y: checkpoint_name(y, "y"), f(*args))
        return jax.checkpoint(named, policy=policy)

    return wrap


policies = jax.checkpoint_policies
AGAIN = {"backward": 2, "forward": 4}  # the forward kernel runs again in the backward pass
CONTEXTS = {
    "`jit`": (lambda f: f, NATIVE),
    "inside a function with a `custom_vjp`": (custom_vjp, NATIVE),
    "`scan`": (each(scan), NATIVE),
    "`scan` over a `checkpoint`": (each(lambda f, xs: scan(jax.checkpoint(f), xs)), AGAIN),
    "`while_loop`": (while_loop, {"backward": 1, "forward": 2}),
    "`cond`, one branch without the op": (
        lambda f: lambda *args: jax.lax.cond(jnp.sum(args[0]) < jnp.inf, f, nothing(f), *args),
        NATIVE,
    ),
    "`checkpoint`": (remat(), AGAIN),
    "`checkpoint`, names saved": (remat(policies.save_only_these_names("y")), AGAIN),
}
NO_REVERSE, NO_FORWARD = ["`while_loop`"], ["inside a function with a `custom_vjp`"]


def both(f, cts):
    def run(*args):
        out, pullback = jax.vjp(f, *args)
        return out, pullback(cts)

    return run


def in_context(case, name, **options):
    """A program of three sets of operands, and its results.

    They are derivatives of the context in reverse mode, the context of derivatives in reverse mode,
    and derivatives of the context in forward mode, as far as the context has them.
    """
    wrap, _ = CONTEXTS[name]
    f = functools.partial(case, **options)
    cts = tuple(map(jnp.asarray, case.cts))
    parts = [(wrap(both(f, cts)), [*case.values(), *case.gradients()])]
    if name not in NO_REVERSE:
        parts.append((both(wrap(f), cts), [*case.values(), *case.gradients()]))
    if name not in NO_FORWARD:
        push = lambda *args: jax.jvp(wrap(f), args, case.tangents)
        parts.append((push, [*case.values(), *case.pushed()]))
    # operands of their own, so that XLA does not find one call twice
    fn = lambda *operands: [part(*args) for (part, _), args in zip(parts, operands)]
    return fn, [case.args] * len(parts), [e for _, expected in parts for e in expected]


@pytest.mark.parametrize("name", CONTEXTS)
def test_context(name, case, serve):
    fn, operands, expected = in_context(case, name)
    serve(case, fn, *operands, expected=expected, calls=CONTEXTS[name][1], title=name)


# ---------------------------------------------------------------- Pallas


@pytest.mark.parametrize("name", ["`scan`", "`cond`, one branch without the op", "`checkpoint`"])
def test_pallas_in_contexts(name):
    case = Case("rms_norm")
    fn, operands, expected = in_context(case, name, implementation="pallas")
    compiled = jax.jit(fn).lower(*operands).compile()
    case.check(compiled(*operands), expected)
    assert hlo.served(compiled) == "pallas"


def test_vmap_of_pallas():
    cases = Case("rms_norm"), Case("rms_norm", seed=1)
    args = [np.stack(pair) for pair in zip(*(case.args for case in cases))]
    run = jax.jit(jax.vmap(functools.partial(cases[0], implementation="pallas")))
    expected = [stack(pair) for pair in zip(*(case.values() for case in cases))]
    cases[0].check(run(*args), expected)


# ---------------------------------------------------------------- without `jit`


@pytest.mark.parametrize("disabled", [False, True], ids=["eager", "disable_jit"])
def test_eager(case, serve, disabled):
    """without `jit`, and with `jax.disable_jit`"""
    strict = functools.partial(case, implementation="native")
    with jax.disable_jit(disabled):
        out, pullback = jax.vjp(strict, *case.args)
        case.check(out, case.values())
        case.check(pullback(tuple(map(jnp.asarray, case.cts))), case.gradients())
    serve.record("native")


def test_donation(case, serve):
    """donated operands"""
    args = tuple(jnp.asarray(a) for a in case.args)
    text, _ = serve(case, case, *args, expected=case.values(), donate_argnums=(0, 1))
    assert [a.is_deleted() for a in args] == [True, True, False]
    assert "input_output_alias" in text


# ---------------------------------------------------------------- derivatives


def test_statistics(serve):
    """`rms_norm_with_rstd`, and derivatives of both results"""
    case = Case("rms_norm_with_rstd")
    fn, operands, expected = in_context(case, "`jit`")
    serve(case, fn, *operands, expected=expected, calls=NATIVE, plain=True)


def test_one_operand(case, serve):
    """`grad` and `jvp` by one operand, the others fixed"""
    expected, parts = [], []
    for i, gradient in enumerate(case.gradients()):
        parts.append(lambda *args, i=i: jax.grad(case.loss, i)(*args))
        zeros = [np.zeros_like(t) for t in case.tangents]
        zeros[i] = case.tangents[i]

        def along(*args, i=i):
            one = lambda arg: case(*args[:i], arg, *args[i + 1 :])
            return jax.jvp(one, (args[i],), (case.tangents[i],))[1]

        parts.append(along)
        expected += [gradient, *case.replace(tangents=tuple(zeros)).pushed()]
    fn = lambda *args: [part(*args) for part in parts]
    serve(case, fn, *case.args, expected=expected, calls=None, plain=True)


def test_linear_transpose(case, serve):
    """`linear_transpose` of a linearised function, and of a pullback"""

    def fn(args, again):
        _, pushforward = jax.linearize(case, *args)
        pulled = jax.linear_transpose(pushforward, *args)(tuple(map(jnp.asarray, case.cts)))
        out, pullback = jax.vjp(case, *again)
        return pulled, jax.linear_transpose(pullback, out)(case.tangents)

    expected = [*case.gradients(), *case.pushed()]
    calls = {"backward": 1, "forward": 2}
    serve(case, fn, case.args, case.args, expected=expected, calls=calls, plain=True)


FLOAT64 = {name: "float64" for name in ("x", "residual", "scale", "bias")}


@pytest.mark.parametrize("op", ["residual_rms_norm", "rms_norm_with_rstd", "residual_layer_norm"])
def test_second_derivatives(op, serve):
    """`jacfwd` and `jacrev` of each other"""
    with jax.enable_x64(True):
        case = Case(op, (2, 5), eps=0.1, scale_offset=0.5, **FLOAT64)
        of = lambda a, b, f: a(b(f, case.argnums), case.argnums)
        modes = [jax.jacfwd, jax.jacrev]

        @jax.jit
        def run(args):
            plain = lambda *args: case.loss(*args, implementation="xla")
            ours = [of(a, b, lambda *args: case.loss(*args))(*args) for a in modes for b in modes]
            return of(jax.jacfwd, jax.jacrev, plain)(*args), ours

        want, found = run(case.args)
        for one in found:
            for got, exact in zip(*map(jax.tree.leaves, (one, want)), strict=True):
                np.testing.assert_allclose(got, exact, rtol=1e-12, atol=1e-12)
    serve.record("native + plain")


# ---------------------------------------------------------------- batches

OVER = {
    "rms_norm": [(2, None), (-2, None), (None, 1), (3, 0)],
    "residual_rms_norm": [(0, 0, None), (None, 3, None), (0, 1, 1), (None, 2, 0)],
    "layer_norm": [(1, None, None), (None, 0, 0)],
}


@pytest.mark.parametrize(
    "op, in_axes", [(op, in_axes) for op, every in OVER.items() for in_axes in every], ids=str
)
def test_vmap(op, in_axes, serve):
    """`vmap` over any operand and axis, of the op and of its gradient, and the gradient of it"""
    batch = Batch(op, in_axes, bias="float32" if op == "layer_norm" else None)
    case, axes = batch.case, (*in_axes, *(0 for _ in batch.cts))

    def fn(one, two, three, cts):
        total = lambda *args: jnp.sum(jax.vmap(case.loss, axes)(*args, *cts))
        return (
            jax.vmap(case, in_axes)(*one),
            jax.vmap(case.grad, axes)(*two, *cts),
            jax.grad(total, case.argnums)(*three),
        )

    expected = [*batch.each("values"), *batch.each("gradients"), *batch.together()]
    args, calls = [batch.args] * 3, {"backward": 2, "forward": 3}
    serve(case, fn, *args, batch.cts, expected=expected, calls=calls, plain=True)


def test_vmap_of_linear_functions(serve):
    """`vmap` of a pullback over cotangents, and of a `jvp` over tangents"""
    batch = Batch("residual_rms_norm", (None, None, None))
    case = batch.case
    tangents = tuple(np.stack(t) for t in zip(*(e.tangents for e in batch.examples)))

    def fn(args, again, cts, tangents):
        pulled = jax.vmap(jax.vjp(case, *args)[1])(cts)
        return pulled, jax.vmap(lambda *t: jax.jvp(case, again, t)[1])(*tangents)

    expected = [*batch.each("gradients"), *batch.each("pushed")]
    args = batch.args, batch.args, batch.cts, tangents
    calls = {"backward": 1, "forward": 2}
    serve(case, fn, *args, expected=expected, calls=calls, plain=True)


@pytest.mark.parametrize("outer, inner", [((1, None), (2, None)), ((0, 0), (1, 0))], ids=str)
def test_vmap_twice(outer, inner, serve):
    """`vmap(vmap)`, and of the gradient"""
    batches = [Batch("rms_norm", inner, size=2, fill=lambda v, k=k: v + k / 8) for k in range(3)]
    for batch in batches[1:]:
        batch.share(batches[0], outer)
    args = tuple(
        arrays[0] if axis is None else np.stack(arrays, axis)
        for arrays, axis in zip(zip(*(b.args for b in batches)), outer)
    )
    cts, case = np.stack([b.cts[0] for b in batches]), batches[0].case
    values = jax.vmap(jax.vmap(case, inner), outer)
    grads = jax.vmap(jax.vmap(case.grad, (*inner, 0)), (*outer, 0))
    fn = lambda one, two, cts: (values(*one), grads(*two, cts))
    every = [[*b.each("values"), *b.each("gradients")] for b in batches]
    expected = [stack(column) for column in zip(*every)]
    calls = {"backward": 1, "forward": 2}
    serve(case, fn, args, args, cts, expected=expected, calls=calls, plain=True)
