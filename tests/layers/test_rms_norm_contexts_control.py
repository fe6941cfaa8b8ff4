"""Control flow, rematerialisation and donation."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from reference import Expected
from rms_norm_cases import Batch, Case, stack

pytestmark = pytest.mark.oldest

FORWARD, BOTH = {"forward": 1}, {"backward": 1, "forward": 1}


@pytest.fixture
def batch(case) -> Batch:
    """Three examples of x (and a residual), one scale: what a loop goes over."""
    return Batch(case.op, (0,) * (len(case.args) - 1) + (None,))


def over(batch):
    """What a loop goes over, and the scale it has in common."""
    return batch.args[:-1], batch.args[-1]


def test_scan(batch, serve):
    """`scan`"""
    xs, scale = over(batch)
    fn = lambda xs, scale: jax.lax.scan(lambda _, x: (None, batch.case(*x, scale)), None, xs)[1]
    serve(batch.case, fn, xs, scale, expected=batch.each("values"))


def scan_loss(batch, each, xs, scale, cts):
    """The sum of the losses of what a scan goes over; `each` wraps one of them."""
    step = lambda total, x: (total + each(batch.case.loss)(*x[0], scale, *x[1]), None)
    return jax.lax.scan(step, jnp.float32(0), (xs, cts))[0]


def test_grad_of_scan(batch, serve):
    """`grad(scan)`"""
    fn = jax.grad(functools.partial(scan_loss, batch, lambda f: f), (0, 1))
    serve(batch.case, fn, *over(batch), batch.cts, expected=batch.together(), calls=BOTH)


def test_grad_in_scan(batch, serve):
    """`scan` of a `grad`"""
    xs, scale = over(batch)
    step = lambda _, x: (None, batch.case.grad(*x[0], scale, *x[1]))
    fn = lambda xs, scale, cts: jax.lax.scan(step, None, (xs, cts))[1]
    step = lambda _, x: (None, batch.case.grad(*x[0], batch.args[-1], *x[1]))
    serve(batch.case, fn, xs, scale, batch.cts, expected=batch.each("gradients"), calls=BOTH)


def test_reverse_scan_with_unrolling(batch, serve):
    """`scan`, reversed and unrolled"""
    xs, scale = over(batch)
    step = lambda _, x: (None, batch.case(*x, scale))
    fn = lambda xs: jax.lax.scan(step, None, xs, reverse=True, unroll=3)[1]
    serve(batch.case, fn, xs, expected=batch.each("values"), calls={"forward": 3})


def test_jvp_of_scan(serve):
    """`jvp(scan)`"""
    batch = Batch("rms_norm", (0, None))
    tangent = np.stack([e.tangents[0] for e in batch.examples])
    step = lambda _, x: (None, batch.case(x, batch.args[1]))
    fn = lambda x, t: jax.jvp(lambda x: jax.lax.scan(step, None, x)[1], (x,), (t,))[1]
    still = [e.replace(tangents=(e.tangents[0], 0 * e.tangents[1])) for e in batch.examples]
    expected = [stack([e.pushed()[0] for e in still])]
    serve.partly(batch.case, fn, batch.args[0], tangent, expected=expected)


def test_vmap_of_scan(serve):
    """`vmap(scan)`"""
    batches = [Batch("rms_norm", (0, None), fill=lambda v, k=k: v + k) for k in range(2)]
    batches[1].share(batches[0], (0, None))
    step = lambda scale, x: (scale, batches[0].case(x, scale))
    fn = jax.vmap(lambda xs, scale: jax.lax.scan(step, scale, xs)[1], (0, None))
    expected = [stack([b.each("values")[0] for b in batches])]
    xs = np.stack([b.args[0] for b in batches])
    serve(batches[0].case, fn, xs, batches[0].args[1], expected=expected)


def summed(batch) -> list[Expected]:
    """The sums of every example's results."""
    sums = batch.each("values")
    return [Expected(y.value.sum(0), (np.abs(y.value) + y.size).sum(0), y.length) for y in sums]


def test_fori_loop(batch, serve):
    """`fori_loop`"""

    def fn(xs, scale):
        start = [jnp.zeros_like(y) for y in batch.case(*[x[0] for x in xs], scale)]
        body = lambda i, acc: [a + y for a, y in zip(acc, batch.case(*[x[i] for x in xs], scale))]
        return jax.lax.fori_loop(0, 3, body, start)

    serve(batch.case, fn, *over(batch), expected=summed(batch))


def test_while_loop(batch, serve):
    """`while_loop`"""

    def fn(xs, scale, n):
        def body(state):
            i, acc = state
            y = batch.case(*[jax.lax.dynamic_index_in_dim(x, i, 0, False) for x in xs], scale)
            return i + 1, [a + b for a, b in zip(acc, y)]

        start = [jnp.zeros(batch.case.h.shape, jnp.float32) for _ in batch.cts]
        return jax.lax.while_loop(lambda state: state[0] < n, body, (0, start))[1]

    serve(batch.case, fn, *over(batch), 3, expected=summed(batch))


def test_forward_mode_through_while_loop(serve):
    """`jvp(while_loop)`"""
    case = Case("rms_norm")

    def fn(x, t, n):
        body = lambda state: (state[0] + 1, case(state[1], case.args[1])[0])
        loop = lambda x: jax.lax.while_loop(lambda state: state[0] < n, body, (0, x))[1]
        return jax.jvp(loop, (x,), (t,))[1]

    once = case.replace(tangents=(case.tangents[0], 0 * case.tangents[1]))
    serve.partly(case, fn, case.args[0], case.tangents[0], 1, expected=once.pushed())


def test_cond(case, serve):
    """`cond`"""
    fn = lambda flag, *args: jax.lax.cond(flag, case, lambda *args: case(*args, eps=1.0), *args)
    other = case.replace(options={"eps": 1.0})
    both = {"forward": 2}
    serve(case, fn, True, *case.args, expected=case.values(), calls=both)
    serve(case, fn, False, *case.args, expected=other.values(), calls=both)


def test_grad_of_cond(case, serve):
    """`grad(cond)`, one branch without the op"""
    n = len(case.args)
    zero = lambda *args: jnp.float32(0)
    loss = lambda flag, *args: jax.lax.cond(flag, case.loss, zero, *args)
    fn = jax.grad(loss, tuple(range(1, n + 1)))
    serve(case, fn, True, *case.args, *case.cts, expected=case.gradients(), calls=BOTH)


def test_vmapped_cond(serve):
    """`vmap(cond)`: a select, both branches run"""
    batch = Batch("rms_norm", (0, None))
    branch = lambda flag, x: jax.lax.cond(
        flag, lambda x: batch.case(x, batch.args[1])[0], lambda x: x, x
    )
    x = batch.args[0]
    (y,) = batch.each("values")
    chosen = np.array([True, False, True])
    pick = chosen[:, None, None, None]
    expected = Expected(np.where(pick, y.value, x), np.where(pick, y.size, 0), y.length)
    serve(batch.case, jax.vmap(branch), chosen, x, expected=[expected])


def test_switch(serve):
    """`switch`"""
    case = Case("rms_norm")
    branches = [functools.partial(case, eps=eps) for eps in (0.1, 1.0, 10.0)]
    fn = lambda i, *args: jax.lax.switch(i, branches, *args)
    expected = case.replace(options={"eps": 1.0}).values()
    serve(case, fn, 1, *case.args, expected=expected, calls={"forward": 3})


@pytest.mark.parametrize("batch_size", [None, 2])
def test_map(batch, serve, batch_size):
    """`lax.map`, with and without `batch_size`"""
    xs, scale = over(batch)
    fn = lambda xs: jax.lax.map(lambda x: batch.case(*x, scale), xs, batch_size=batch_size)
    calls = {"forward": 1 if batch_size is None else 2}  # the last batch is smaller
    serve(batch.case, fn, xs, expected=batch.each("values"), calls=calls)


def test_associative_scan(serve):
    """`associative_scan`"""
    case = Case("rms_norm", (4, 2, 16), scale=None)
    combine = lambda a, b: a + case(b)[0]
    text = hlo.text(
        jax.jit(lambda x: jax.lax.associative_scan(combine, x)).lower(*case.args).compile()
    )
    assert hlo.calls(text)["forward"] > 1
    serve.record("native")


# ---------------------------------------------------------------- rematerialisation

policies = jax.checkpoint_policies
POLICIES = {  # and whether the forward kernel runs again
    "nothing_saveable": (policies.nothing_saveable, True),
    "everything_saveable": (policies.everything_saveable, False),
    "dots_saveable": (policies.dots_saveable, True),
    "dots_with_no_batch_dims_saveable": (policies.dots_with_no_batch_dims_saveable, True),
    "save_only_these_names": (policies.save_only_these_names("y"), True),
    "save_any_names_but_these": (policies.save_any_names_but_these("other"), True),
    "save_anything_except_these_names": (policies.save_anything_except_these_names("y"), False),
    "save_from_both_policies": (
        policies.save_from_both_policies(policies.dots_saveable, policies.everything_saveable),
        False,
    ),
    "save_and_offload_only_these_names": (
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["y"],
            names_which_can_be_offloaded=[],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        True,
    ),
    "offload_dot_with_no_batch_dims": (
        policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        True,
    ),
    "default": (None, True),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_remat(case, serve, policy):
    """`checkpoint` with each policy"""
    chosen, again = POLICIES[policy]
    if jax.config.values.get("jax_remat3") and policy == "save_anything_except_these_names":
        again = True  # it is asked about the undifferentiated norm, which has no statistics to keep

    @functools.partial(jax.checkpoint, policy=chosen)
    def block(*args):
        out = case(*args)
        return [checkpoint_name(jnp.sin(y), "y") for y in out]

    def fn(args, cts):
        out, pullback = jax.vjp(block, *args)
        return out, pullback(list(cts))

    values = [y.value for y in case.values()]
    through = [(np.cos(v) * ct).astype(np.float32) for v, ct in zip(values, case.cts)]
    grads = case.replace(cts=tuple(through)).gradients()
    # the cosine's rounding, and y's own error in it, belong to the cotangents
    wider = [Expected(g.value, 4 * (g.size + np.abs(g.value).max()), g.length) for g in grads]
    sines = [Expected(np.sin(v), np.abs(v) + 1) for v in values]
    calls = {"backward": 1, "forward": 1 + again}
    serve(case, fn, case.args, case.cts, expected=[*sines, *wider], calls=calls)


def test_remat_in_scan(batch, serve):
    """`scan` over a `checkpoint`"""
    fn = jax.value_and_grad(functools.partial(scan_loss, batch, jax.checkpoint), (0, 1))
    grads = lambda *args: fn(*args)[1]
    serve(batch.case, grads, *over(batch), batch.cts, expected=batch.together(), calls=BOTH)
    text = hlo.text(jax.jit(fn).lower(*over(batch), batch.cts).compile())
    assert hlo.calls(text) == {"backward": 1, "forward": 2}


def test_jvp_of_remat(case, serve):
    """`jvp(checkpoint)`"""
    fn = lambda args, tangents: jax.jvp(jax.checkpoint(case), args, tangents)[1]
    serve.partly(case, fn, case.args, case.tangents, expected=case.pushed())


# ---------------------------------------------------------------- donation


def test_donation(case, serve):
    """donated operands"""
    args = tuple(jnp.asarray(a) for a in case.args)
    donated = jax.jit(case, donate_argnums=tuple(range(len(case.cts))))
    got = donated(*args)
    case.check(got, case.values())
    assert [a.is_deleted() for a in args[: len(case.cts)]] == [True] * len(case.cts)
    text = hlo.text(donated.lower(*case.args).compile())
    assert hlo.calls(text) == FORWARD and "input_output_alias" in text
    serve.record("native")


def test_donation_of_what_is_read_again(serve):
    """donated operands that the gradient reads too"""
    case = Case("rms_norm")
    fn = jax.jit(lambda x, scale, ct: case.grad(x, scale, ct)[0] + x, donate_argnums=0)
    dx = case.gradients()[0]
    got = fn(jnp.asarray(case.args[0]), case.args[1], case.cts[0])
    case.check(
        [got], [Expected(dx.value + case.args[0], dx.size + np.abs(case.args[0]), dx.length)]
    )
    serve.record("native")
