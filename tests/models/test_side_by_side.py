"""Interleaved parts of a batch: the values of each by itself, in an order half a layer apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse import rms_norm
from normfuse.models.config import PRESETS
from normfuse.models.functional import build
from normfuse.models.side_by_side import pause, side_by_side
from normfuse.train.step import mean_loss


def layers(w, x):
    """Marks where a transformer does, and within what is computed by itself."""
    for _ in range(2):
        h = pause(rms_norm(x, w["scale"], eps=1e-6))
        gate, up = pause((h @ w["gate"], h @ w["up"]))
        down = jax.checkpoint(lambda h: pause(jnp.tanh(h)) @ w["down"])
        x = x + jax.jit(down)(jax.nn.silu(gate) * up)
    return {"mean": jnp.mean(jnp.square(x)), "first": x[:, 0]}


@pytest.fixture
def weights():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"scale": (16,), "gate": (16, 32), "up": (16, 32), "down": (32, 16)}
    return {name: jax.random.normal(k, s) / 4 for (name, s), k in zip(shapes.items(), keys)}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_and_gradients_are_those_of_each_part(weights, count, jit):
    parts = list(jax.random.normal(jax.random.key(1), (count, 4, 16)))

    def loss(run):
        def total(w, parts):
            results = run(lambda x: layers(w, x), parts)
            return sum((i + 1) * r["mean"] + jnp.sum(r["first"]) for i, r in enumerate(results))

        return jit(jax.value_and_grad(total, argnums=(0, 1)))

    found = loss(side_by_side)(weights, parts)
    expected = loss(lambda f, parts: [f(x) for x in parts])(weights, parts)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def ties(program) -> list[tuple[str, ...]]:
    """What has made the operands of each barrier."""
    made = {var: eqn.primitive.name for eqn in program.eqns for var in eqn.outvars}
    barriers = (e for e in program.eqns if e.primitive.name == "optimization_barrier")
    return [tuple(made[var] for var in eqn.invars) for eqn in barriers]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (2, [("cos", "sin"), ("tanh", "cos"), ("exp", "tanh")]),
        (3, [("cos", "sin"), ("tanh", "cos", "sin"), ("exp", "tanh", "cos"), ("exp", "tanh")]),
    ],
)
def test_each_part_is_one_place_behind_the_one_before(count, expected):
    def function(x):
        for step in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp):
            x = pause(step(x))
        return x

    parts = list(jnp.zeros((count, 3)))
    assert ties(jax.make_jaxpr(lambda *x: side_by_side(function, x))(*parts)) == expected


@pytest.mark.parametrize("framework, quantization", [("nnx", None), ("eqx", "fp8")])
def test_the_transformer_is_tied_four_times_a_layer(quantization, framework):
    """Around what is gathered and the first products with it, of attention and MLP alike.

    In FP8 both are codes, in both layouts, and the MLP is one function: three times.
    """
    options = {"num_layers": 3, "remat": "none", "quantization": quantization}
    config = dataclasses.replace(PRESETS["tiny"], **options)
    model = build(framework, config)
    tokens = jax.ShapeDtypeStruct((4, 9), jnp.int32)
    program = jax.make_jaxpr(lambda p, t: mean_loss(model, p, t, parts=2))(model.abstract, tokens)
    found = ties(program)
    if quantization:
        # Codes, then q, k and v, then codes; a part's with those of the part before.
        sizes = [len(operands) for operands in found]
        assert sizes[:-1] == ([2 + 3, 3 + 2, 2 + 2] * config.num_layers)[:-1]
        assert sizes[-1] == 2 + 1  # nothing reads codes of the last norm
        return
    assert len(found) == 4 * config.num_layers  # and the last norm's with what is before it
    assert [len(operands) for operands in found] == [4, 4, 3, 3] * config.num_layers


def test_parts_that_differ_are_refused(weights):
    with pytest.raises(ValueError, match=r"parts\[1\] .*float32\[3,16\].*float32\[4,16\]"):
        side_by_side(lambda x: layers(weights, x), [jnp.zeros((4, 16)), jnp.zeros((3, 16))])
