"""Calls and derivatives."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads
from reference import Expected
from rms_norm_cases import Case

pytestmark = pytest.mark.oldest

FORWARD, BOTH = {"forward": 1}, {"backward": 1, "forward": 1}


def test_jit(case, serve):
    """`jit`"""
    serve(case, case, *case.args, expected=case.values())


def test_rstd(serve):
    """`rms_norm_with_rstd`, and gradients through both results"""
    case = Case("rms_norm_with_rstd")
    serve(case, case, *case.args, expected=case.values())
    serve.partly(case, case.grad, *case.args, expected=case.gradients(), calls=BOTH)


def test_eager(case, serve):
    """without `jit`"""
    strict = functools.partial(case, implementation="native")
    case.check(strict(*case.args), case.values())
    out, pullback = jax.vjp(strict, *case.args)
    case.check(out, case.values())
    case.check(pullback(case.cts), case.gradients())
    serve.record("native")


def test_disable_jit(case, serve):
    """`jax.disable_jit`"""
    with jax.disable_jit():
        case.check(case(*case.args, implementation="native"), case.values())
        case.check(case.grad(*case.args, implementation="native"), case.gradients())
    serve.record("native")


def test_grad(case, serve):
    """`grad`"""
    serve(case, case.grad, *case.args, expected=case.gradients(), calls=BOTH)


def test_grad_by_one_operand(case, serve):
    """`grad` by one operand, the others frozen"""
    for i, expected in enumerate(case.gradients()):
        serve(case, jax.grad(case.loss, i), *case.args, expected=[expected], calls=BOTH)


def test_value_and_grad(case, serve):
    """`value_and_grad`"""
    terms = [y.value * ct for y, ct in zip(case.values(), case.cts)]
    loss = Expected(sum(t.sum() for t in terms), sum(np.abs(t).sum() for t in terms), terms[0].size)
    fn = jax.value_and_grad(case.loss, case.argnums)
    serve(case, fn, *case.args, expected=[loss, *case.gradients()], calls=BOTH)


def test_jvp(case, serve):
    """`jvp`"""
    fn = lambda args, tangents: jax.jvp(case, args, tangents)
    expected = [*case.values(), *case.pushed()]
    serve.partly(case, fn, case.args, case.tangents, expected=expected)


def test_jvp_of_rstd(serve):
    """`jvp` of `rms_norm_with_rstd`"""
    case = Case("rms_norm_with_rstd")
    fn = lambda args, tangents: jax.jvp(case, args, tangents)
    expected = [*case.values(), *case.pushed()]
    serve.partly(case, fn, case.args, case.tangents, expected=expected)


def test_jvp_along_one_operand(case, serve):
    """`jvp` along one operand, the others fixed"""
    for i, tangent in enumerate(case.tangents):
        zeros = [np.zeros_like(t) for t in case.tangents]
        expected = case.replace(tangents=(*zeros[:i], tangent, *zeros[i + 1 :])).pushed()

        def along(arg, tangent, i=i):
            fn = lambda arg: case(*case.args[:i], arg, *case.args[i + 1 :])
            return jax.jvp(fn, (arg,), (tangent,))[1]

        serve.partly(case, along, case.args[i], tangent, expected=expected)


def test_linearize(case, serve):
    """`linearize`"""

    def fn(args, tangents):
        out, pushforward = jax.linearize(case, *args)
        return out, pushforward(*tangents)

    expected = [*case.values(), *case.pushed()]
    serve.partly(case, fn, case.args, case.tangents, expected=expected)


def test_linear_transpose(case, serve):
    """`linear_transpose` of a linearised function"""

    def fn(args, cts):
        _, pushforward = jax.linearize(case, *args)
        return jax.linear_transpose(pushforward, *args)(cts)

    serve(case, fn, case.args, case.cts, expected=case.gradients(), calls=BOTH)


def test_linear_transpose_of_a_pullback(case, serve):
    """`linear_transpose` of a pullback: the tangent again"""

    def fn(args, tangents):
        out, pullback = jax.vjp(case, *args)
        return jax.linear_transpose(pullback, out)(tangents)

    serve.partly(case, fn, case.args, case.tangents, expected=case.pushed())


# ---------------------------------------------------------------- Jacobians and higher orders


@pytest.fixture
def small() -> Case:
    """An x of two rows of five, so that a whole Jacobian is a small matrix."""
    return Case("residual_rms_norm", (2, 5), eps=0.1)


def jacobians(case) -> list[Expected]:
    """∂result/∂operand for every result and operand, a basis vector at a time."""
    found = [[[] for _ in case.args] for _ in case.values()]
    for i, arg in enumerate(case.args):
        for j in range(arg.size):
            tangents = [np.zeros_like(a) for a in case.args]
            tangents[i].flat[j] = 1
            for blocks, column in zip(found, case.replace(tangents=tuple(tangents)).pushed()):
                blocks[i].append(np.broadcast_arrays(column.value, column.size))
    stacked = [
        (np.moveaxis(np.array(b), 0, -1), a.shape) for r in found for b, a in zip(r, case.args)
    ]
    return [
        Expected(*(part.reshape(*part.shape[:-1], *shape) for part in parts), 5)
        for parts, shape in stacked
    ]


def second(case, cotangent, x) -> np.ndarray:
    """The Hessian of Σ cotangent · y by the normalised array, by complex steps."""
    gradient = lambda x: reference.pull(cotangent, x, case.scale, eps=0.1)[0]
    basis = np.eye(x.size).reshape(-1, *x.shape)
    return np.stack([reference.complex_step(gradient, x, e) for e in basis], -1).reshape(
        x.shape * 2
    )


def dense(value, length=1):
    """An expectation whose errors are of its largest element's size."""
    return Expected(value, np.full(value.shape, np.abs(value).max()), length)


def test_jacfwd(small, serve):
    """`jacfwd`"""
    serve.partly(small, jax.jacfwd(small, small.argnums), *small.args, expected=jacobians(small))


def test_jacrev(small, serve):
    """`jacrev`"""
    fn = jax.jacrev(small, small.argnums)
    serve.partly(small, fn, *small.args, expected=jacobians(small), calls=BOTH)


def test_hessian(small, serve):
    """`hessian`"""
    expected = dense(second(small, small.cts[0], reference.wide(small.h)), 100)
    serve.partly(small, jax.hessian(small.loss), *small.args, expected=[expected])


@pytest.mark.parametrize("outer, inner", ["fr", "rf", "ff", "rr"])
def test_second_derivatives_in_every_order(small, serve, outer, inner):
    """`jacfwd` and `jacrev` of each other"""
    jac = {"f": jax.jacfwd, "r": jax.jacrev}
    expected = dense(second(small, small.cts[0], reference.wide(small.h)), 100)
    got = jax.jit(jac[outer](jac[inner](small.loss)))(*small.args)
    small.check([got], [expected])
    serve.record("native + plain")


def test_mixed_second_derivatives(small, serve):
    """second derivatives by x and scale"""
    by_scale = lambda x: reference.pull(small.cts[0], x, small.scale, eps=0.1)[1]
    x = reference.wide(small.h)
    basis = np.eye(x.size).reshape(-1, *x.shape)
    columns = np.stack([reference.complex_step(by_scale, x, e) for e in basis], -1)
    expected = dense(columns.reshape(5, *x.shape), 100)
    fn = jax.jacfwd(jax.grad(small.loss, len(small.args) - 1), 0)
    serve.partly(small, fn, *small.args, expected=[expected])


def test_third_derivative(small, serve):
    """third derivatives"""
    x, step = reference.wide(small.h), 1e-5  # central differences are good to step² here
    at = lambda x: second(small, small.cts[0], x)
    basis = np.eye(x.size).reshape(-1, *x.shape)
    columns = [(at(x + step * e) - at(x - step * e)) / (2 * step) for e in basis]
    expected = dense(np.stack(columns, -1).reshape(x.shape * 3), 1000)
    got = jax.jit(jax.jacfwd(jax.jacfwd(jax.jacrev(small.loss))))(*small.args)
    small.check([got], [expected])
    serve.record("native + plain")


@pytest.mark.parametrize("mode", ["fwd", "rev"])
@pytest.mark.parametrize("op", ["residual_rms_norm", "rms_norm_with_rstd"])
def test_check_grads(op, mode, serve):
    """`check_grads` to second order, in float64"""
    with jax.enable_x64(True):
        case = Case(op, (2, 5), x="float64", residual="float64", scale="float64", scale_offset=0.5)
        check_grads(case, case.args, order=2, modes=[mode], rtol=1e-5, atol=1e-5)
    serve.record("native + plain")


# ---------------------------------------------------------------- other wrappers


def test_custom_vjp_around(case, serve):
    """inside a function with a `custom_vjp`"""

    @jax.custom_vjp
    def double(*args):
        return case.loss(*args)

    def backward(args, ct):
        return tuple(2 * ct * g for g in case.grad(*args))

    double.defvjp(lambda *args: (double(*args), args), backward)
    expected = [Expected(2 * g.value, 2 * g.size, g.length) for g in case.gradients()]
    fn = jax.grad(double, case.argnums)
    serve(case, fn, *case.args, expected=expected, calls=BOTH)


def test_checkify(case, serve):
    """`checkify`"""
    from jax.experimental import checkify

    checked = checkify.checkify(case, errors=checkify.float_checks)
    error, out = jax.jit(checked)(*case.args)
    error.throw()
    case.check(out, case.values())
    text = hlo.text(jax.jit(checked).lower(*case.args).compile())
    assert hlo.calls(text) == FORWARD
    serve.record("native")


def test_debug_nans(case, serve):
    """`jax_debug_nans`"""
    with jax.debug_nans(True):
        case.check(jax.jit(case)(*case.args), case.values())
        with pytest.raises(FloatingPointError):
            jax.jit(case)(np.full_like(case.args[0], np.nan), *case.args[1:])
    serve.record("native")


def test_evaluated_jaxpr(case, serve):
    """`make_jaxpr`, evaluated"""
    jaxpr = jax.make_jaxpr(case.grad)(*case.args)
    fn = lambda *args: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)
    serve(case, fn, *case.args, expected=case.gradients(), calls=BOTH)


def test_strict_promotion(serve):
    """`numpy_dtype_promotion("strict")`, scale and result of other dtypes than x"""
    case = Case(
        "residual_rms_norm", x="bfloat16", residual="bfloat16", scale="float16", dtype="float16"
    )
    with jax.numpy_dtype_promotion("strict"):
        out, pullback = jax.vjp(case, *case.args)
        case.check(out, case.values())
        case.check(pullback(tuple(jnp.asarray(ct) for ct in case.cts)), case.gradients())
    serve.record("native")
