"""Frameworks: the function in Flax NNX, Flax Linen and Equinox."""

import equinox as eqx
import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rms_norm_cases import Batch, Case

from normfuse import rms_norm

FORWARD, BOTH = {"forward": 1}, {"backward": 1, "forward": 1}


@pytest.fixture
def case():
    return Case("rms_norm")


@pytest.fixture
def batch():
    """Three examples of x, one scale."""
    return Batch("rms_norm", (0, None))


# ---------------------------------------------------------------- Flax NNX


class Norm(nnx.Module):
    def __init__(self, scale):
        self.scale = nnx.Param(jnp.asarray(scale))

    def __call__(self, x):
        return rms_norm(x, self.scale[...])


def nnx_loss(norm, x, ct):
    return jnp.sum(norm(x) * ct)


def test_nnx_jit(case, serve):
    """`nnx.jit`"""
    norm = Norm(case.args[1])
    y = nnx.jit(lambda norm, x: norm(x))(norm, case.args[0])
    case.check(y, case.values())
    graph, state = nnx.split(norm)
    fn = lambda state, x: nnx.merge(graph, state)(x)
    serve(case, fn, state, case.args[0], expected=case.values())


def test_nnx_grad(case, serve):
    """`nnx.grad` and `nnx.value_and_grad`"""
    norm, (dx, dscale) = Norm(case.args[1]), case.gradients()
    args = norm, case.args[0], case.cts[0]
    grads = nnx.grad(nnx_loss)(*args)
    case.check(grads["scale"][...], [dscale])
    grads = nnx.jit(nnx.grad(nnx_loss, argnums=(0, 1)))(*args)
    case.check([grads[1], grads[0]["scale"][...]], [dx, dscale])
    graph, state = nnx.split(norm)

    def fn(state, x, ct):
        value, grads = nnx.value_and_grad(nnx_loss)(nnx.merge(graph, state), x, ct)
        del value
        return grads["scale"][...]

    serve(case, fn, state, case.args[0], case.cts[0], expected=[dscale], calls=BOTH)


def test_nnx_vmap(batch, serve):
    """`nnx.vmap`, and of `nnx.grad`"""
    graph, state = nnx.split(Norm(batch.args[1]))
    fn = lambda state, x: nnx.vmap(Norm.__call__, in_axes=(None, 0))(nnx.merge(graph, state), x)
    serve(batch.case, fn, state, batch.args[0], expected=batch.each("values"))
    scale = [batch.each("gradients")[1]]

    def each(state, x, ct):
        grads = nnx.vmap(nnx.grad(nnx_loss), in_axes=(None, 0, 0))
        return grads(nnx.merge(graph, state), x, ct)["scale"][...]

    args = state, batch.args[0], batch.cts[0]
    batch.case.check(jax.jit(each)(*args), scale)
    serve.record("native + plain")


def test_nnx_scan(batch, serve):
    """`nnx.scan`"""
    graph, state = nnx.split(Norm(batch.args[1]))

    def fn(state, x):
        step = nnx.scan(lambda norm, x: norm(x), in_axes=(None, 0), out_axes=0)
        return step(nnx.merge(graph, state), x)

    serve(batch.case, fn, state, batch.args[0], expected=batch.each("values"))


def test_nnx_remat(case, serve):
    """`nnx.remat`"""
    graph, state = nnx.split(Norm(case.args[1]))

    def fn(state, x, ct):
        grads = nnx.grad(nnx.remat(nnx_loss), argnums=(0, 1))(nnx.merge(graph, state), x, ct)
        return grads[1], grads[0]["scale"][...]

    serve(case, fn, state, case.args[0], case.cts[0], expected=case.gradients(), calls=BOTH)


# ---------------------------------------------------------------- Flax Linen


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return rms_norm(x, self.param("scale", nn.initializers.ones, x.shape[-1:]))


class Step(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        return carry, LinenNorm(name="norm")(x)


def test_linen_apply(case, serve):
    """`init` and `apply`"""
    params = LinenNorm().init(jax.random.key(0), case.args[0])
    assert params["params"]["scale"].shape == (16,)
    params = {"params": {"scale": case.args[1]}}
    serve(case, LinenNorm().apply, params, case.args[0], expected=case.values())


def test_linen_remat(case, serve):
    """`nn.remat`"""
    x, scale = case.args
    fn = lambda x, scale, ct: jax.grad(
        lambda x, scale: jnp.sum(nn.remat(LinenNorm)().apply({"params": {"scale": scale}}, x) * ct),
        (0, 1),
    )(x, scale)
    serve(case, fn, x, scale, case.cts[0], expected=case.gradients(), calls=BOTH)


def test_linen_scan(batch, serve):
    """`nn.scan`"""
    scan = nn.scan(Step, variable_broadcast="params", split_rngs={"params": False})
    x, scale = batch.args

    def fn(x, scale, ct):
        apply = lambda x, scale: scan().apply({"params": {"norm": {"scale": scale}}}, None, x)[1]
        return jax.grad(lambda x, scale: jnp.sum(apply(x, scale) * ct), (0, 1))(x, scale)

    expected = batch.together()
    serve(batch.case, fn, x, scale, batch.cts[0], expected=expected, calls=BOTH)


def test_linen_scan_over_parameters(serve):
    """`nn.scan` over stacked parameters"""
    batch = Batch("rms_norm", (0, 0))
    scan = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True})
    x, scale = batch.args
    fn = lambda x, scale: scan().apply({"params": {"norm": {"scale": scale}}}, None, x)[1]
    serve(batch.case, fn, x, scale, expected=batch.each("values"))


def test_linen_vmap(batch, serve):
    """`nn.vmap`"""
    mapped = nn.vmap(LinenNorm, variable_axes={"params": None}, split_rngs={"params": False})
    x, scale = batch.args

    def fn(x, scale, ct):
        apply = lambda x, scale: mapped().apply({"params": {"scale": scale}}, x)
        return jax.grad(lambda x, scale: jnp.sum(apply(x, scale) * ct), (0, 1))(x, scale)

    expected = batch.together()
    serve(batch.case, fn, x, scale, batch.cts[0], expected=expected, calls=BOTH)


# ---------------------------------------------------------------- Equinox


class EqxNorm(eqx.Module):
    weight: jax.Array
    eps: float = 1e-6

    def __call__(self, x):
        return rms_norm(x, self.weight, eps=self.eps)


def eqx_loss(norm, x, ct):
    return jnp.sum(norm(x) * ct)


def eqx_calls(fn, *args):
    """The kernels in an `eqx.filter_jit`ted function."""
    return hlo.calls(eqx.filter_jit(fn).lower(*args).compile().compiled)


def test_eqx_filter_jit(case, serve):
    """`eqx.filter_jit`"""
    norm = EqxNorm(jnp.asarray(case.args[1]))
    case.check(eqx.filter_jit(norm)(case.args[0]), case.values())
    assert eqx_calls(norm, case.args[0]) == FORWARD
    serve.record("native")


def test_eqx_filter_grad(case, serve):
    """`eqx.filter_grad` and `eqx.filter_value_and_grad`"""
    norm = EqxNorm(jnp.asarray(case.args[1]))
    args = norm, case.args[0], case.cts[0]
    grads = eqx.filter_grad(eqx_loss)(*args)
    case.check(grads.weight, [case.gradients()[1]])
    assert eqx_calls(eqx.filter_value_and_grad(eqx_loss), *args) == BOTH
    serve.record("native")


def test_eqx_filter_vmap(batch, serve):
    """`eqx.filter_vmap`, and of `eqx.filter_grad`"""
    norm = EqxNorm(jnp.asarray(batch.args[1]))
    mapped = eqx.filter_vmap(norm)
    batch.case.check(mapped(batch.args[0]), batch.each("values"))
    assert eqx_calls(mapped, batch.args[0]) == FORWARD
    each = eqx.filter_vmap(eqx.filter_grad(eqx_loss), in_axes=(None, 0, 0))
    args = norm, batch.args[0], batch.cts[0]
    batch.case.check(each(*args).weight, [batch.each("gradients")[1]])
    serve.record("native + plain")


def test_eqx_filter_vmap_over_modules(serve):
    """`eqx.filter_vmap` over an ensemble"""
    batch = Batch("rms_norm", (0, 0))
    norms = eqx.filter_vmap(EqxNorm)(jnp.asarray(batch.args[1]))
    mapped = eqx.filter_vmap(lambda norm, x: norm(x), in_axes=(eqx.if_array(0), 0))
    batch.case.check(mapped(norms, batch.args[0]), batch.each("values"))
    assert eqx_calls(mapped, norms, batch.args[0]) == FORWARD
    serve.record("native + plain")


def test_eqx_filter_jvp(case, serve):
    """`eqx.filter_jvp`"""
    norm, tangent = (EqxNorm(jnp.asarray(a[1])) for a in (case.args, case.tangents))
    fn = lambda norm, x: norm(x)
    primals, tangents = (norm, jnp.asarray(case.args[0])), (tangent, jnp.asarray(case.tangents[0]))
    tangents = (eqx.tree_at(lambda n: n.eps, tangents[0], None), tangents[1])
    _, dy = eqx.filter_jvp(fn, primals, tangents)
    case.check(dy, case.pushed())
    serve.record("native + plain")


def test_eqx_filter_checkpoint(case, serve):
    """`eqx.filter_checkpoint`"""
    norm = EqxNorm(jnp.asarray(case.args[1]))
    loss = eqx.filter_checkpoint(eqx_loss)
    args = norm, case.args[0], case.cts[0]
    case.check(eqx.filter_grad(loss)(*args).weight, [case.gradients()[1]])
    assert eqx_calls(eqx.filter_grad(loss), *args) == BOTH
    serve.record("native")


def test_eqx_scan_over_modules(serve):
    """`scan` over stacked modules"""
    batch = Batch("rms_norm", (0, 0))
    norms = eqx.filter_vmap(EqxNorm)(jnp.asarray(batch.args[1]))
    arrays, static = eqx.partition(norms, eqx.is_array)

    def fn(arrays, x):
        step = lambda _, layer: (None, eqx.combine(layer[0], static)(layer[1]))
        return jax.lax.scan(step, None, (arrays, x))[1]

    serve(batch.case, fn, arrays, batch.args[0], expected=batch.each("values"))


def test_eqx_while_loop_checkpointed(batch, serve):
    """`eqx.internal.while_loop`, differentiated"""
    loop = eqx.internal.while_loop
    x, scale = batch.args

    def loss(x, scale, ct):
        def body(state):
            i, total = state
            return i + 1, total + jnp.sum(rms_norm(x[i], scale) * ct[i])

        done = lambda state: state[0] < 3
        return loop(done, body, (0, jnp.float32(0)), max_steps=3, kind="checkpointed")[1]

    got = jax.jit(jax.grad(loss, (0, 1)))(
        jnp.asarray(x), jnp.asarray(scale), jnp.asarray(batch.cts[0])
    )
    batch.case.check([np.asarray(g) for g in got], batch.together())
    serve.record("native")
