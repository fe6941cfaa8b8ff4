"""One x of several products: the order in which their gradients are added, in every context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse.layers.dense.matmul import chained, shared


def both(x):
    """The same function with `shared` and without; one of the three is linear."""
    of = lambda a, b, c: jnp.sin(a) * jnp.cos(b) + 3 * c
    return of(*shared(x, 3)), of(x, x, x)


def test_sums_grow_on_the_right():
    """So that each product is on the left of its addition."""
    x = jnp.ones(3)
    pull = lambda x, dys: jax.vjp(lambda x: shared(x, 3), x)[1](dys)
    additions = jax.make_jaxpr(pull)(x, [x, x, x]).eqns[-2:]
    assert [eqn.primitive.name for eqn in additions] == ["add", "add"]
    first, second = additions
    assert second.invars[1] is first.outvars[0]
    assert [float(part) for part in pull(x, [x, 2 * x, 4 * x])[0]] == [7.0] * 3
    assert chained([x]) is x


def test_what_is_not_used_has_no_part_in_the_sum():
    x = jnp.ones(3)
    assert "add" not in str(jax.make_jaxpr(jax.grad(lambda x: shared(x, 3)[1].sum()))(x))
    assert shared(x, 1)[0] is x


def test_a_scan_keeps_one_x_for_all():
    """Not one for each product, as for a result of a primitive."""

    def stacked(of):
        def layer(x, w):
            a, b, c = of(x)
            return jnp.tanh(a @ w + b @ w + c @ w), None

        loss = lambda x, ws: jax.lax.scan(layer, x, ws)[0].sum()
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((4, 8)), jnp.ones((5, 8, 8)))
        forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        return [out.aval.shape for out in forward.outvars].count((5, 4, 8))

    assert stacked(lambda x: shared(x, 3)) == stacked(lambda x: [x] * 3)


@pytest.mark.parametrize(
    "derivative, transform",
    [(jax.jacfwd, jax.vmap), (jax.jacrev, jax.checkpoint), (jax.hessian, jax.jit)],
)
def test_derivatives_are_those_of_x_itself(rng, derivative, transform):
    x = jnp.asarray(rng.standard_normal((2, 4)), jnp.float32)
    ours, plain = (transform(derivative(lambda x, i=i: both(x)[i].sum()))(x) for i in (0, 1))
    np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-6)
