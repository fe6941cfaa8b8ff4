"""Interleaved parts of a batch: the values of each by itself, in an order half a layer apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse.models.config import PRESETS
from normfuse.models.functional import build
from normfuse.models.side_by_side import pause, side_by_side
from normfuse.train.step import mean_loss


def ties(program) -> list[tuple[str, ...]]:
    """The primitives that computed the operands of each barrier."""
    names = {var: eqn.primitive.name for eqn in program.eqns for var in eqn.outvars}
    barriers = (e for e in program.eqns if e.primitive.name == "optimization_barrier")
    return [tuple(names[var] for var in eqn.invars) for eqn in barriers]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, []),
        (2, [("cos", "sin"), ("tanh", "cos"), ("exp", "tanh")]),
        (3, [("cos", "sin"), ("tanh", "cos", "sin"), ("exp", "tanh", "cos"), ("exp", "tanh")]),
    ],
)
def test_each_part_is_one_place_behind_the_part_before(count, expected):
    def function(x):
        for step in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp):
            x = pause(step(x))
        return x

    parts = list(jnp.arange(3.0 * count).reshape(count, 3))
    run = lambda parts: side_by_side(function, parts)
    np.testing.assert_array_equal(run(parts), [function(part) for part in parts])
    assert ties(jax.make_jaxpr(run)(parts)) == expected


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_a_transformer_in_parts_has_the_loss_and_gradient_of_the_whole(framework, rng, jit):
    model = build(framework, dataclasses.replace(PRESETS["tiny"], num_layers=2, dim=64))
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jnp.asarray(rng.integers(0, 256, (4, 17)))
    run = lambda parts: jit(jax.value_and_grad(lambda p: mean_loss(model, p, tokens, parts)))
    whole, halves = (run(parts)(params) for parts in (1, 2))
    for a, b in zip(jax.tree.leaves(halves), jax.tree.leaves(whole), strict=True):
        # 100 float32 roundings of the largest number
        np.testing.assert_allclose(a, b, rtol=0, atol=100 * 2**-24 * np.abs(b).max())
    found = ties(jax.make_jaxpr(lambda p: mean_loss(model, p, tokens, 2))(params))
    # Attention, the MLP and the end each gather kernels, and multiply by them first.
    assert [len(operands) for operands in found] == [4, 4, 3, 3] * model.config.num_layers
