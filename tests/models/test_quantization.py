"""The transformer in FP8: the blocks' products alone, in training alone."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse.models.attention import Cache
from normfuse.models.config import PRESETS
from normfuse.models.functional import build
from normfuse.native.jaxpr import inner

SMALL = dataclasses.replace(
    PRESETS["tiny"], num_layers=2, dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128
)
FP8 = dataclasses.replace(SMALL, quantization="fp8")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 24)))


@pytest.fixture(scope="module")
def params():
    """Canonical names to arrays, the same for every model here."""
    model = build("nnx", SMALL)
    values = model.to_dict(model.init(jax.random.key(0)))
    rng = np.random.default_rng(1)
    noisy = lambda a: a + jnp.asarray(0.05 * rng.standard_normal(a.shape), a.dtype)
    return {name: noisy(value) for name, value in values.items()}


def primitives(jaxpr, found=None):
    found = collections.Counter() if found is None else found
    for eqn in jaxpr.eqns:
        kernel = not getattr(eqn.params.get("spec"), "rows", True)
        found[eqn.primitive.name + " of a kernel" * kernel] += 1
        for program in inner(eqn):
            primitives(program, found)
    return found


def loss(model):
    return lambda params, tokens: jnp.mean(jnp.square(model.apply(params, tokens)))


def both_ways(config, params, framework="nnx"):
    model = build(framework, config)
    gradient = jax.jit(jax.value_and_grad(loss(model)))
    value, found = gradient(model.from_dict(params), TOKENS)
    return value, model.to_dict(found)


def distance(a, b):
    a, b = (np.concatenate([np.ravel(v) for v in jax.tree.leaves(t)]) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_both_frameworks_compute_the_same_and_nearly_the_unquantized(framework, params):
    exact, plain = both_ways(SMALL, params, framework), both_ways(SMALL, params)
    assert distance(exact, plain) < 1e-5
    got, want = both_ways(FP8, params, framework), both_ways(FP8, params)
    # The frameworks' products sum in another order, and a number may get the next code.
    assert distance(got, want) < 0.02
    assert 0.005 < distance(got[1], plain[1]) < 0.15


def test_the_gradient_of_the_loss_is_quantized_too(params):
    """Its value keeps its bits."""
    model = build("nnx", FP8)

    def run(**options):
        cost = lambda params: model.loss(params, TOKENS, TOKENS, **options)
        return jax.jit(jax.value_and_grad(cost))(model.from_dict(params))

    (value, found), (plain, exact) = run(), run(quantization=None)
    assert value == plain
    assert 0.01 < distance(found, exact) < 0.1


def test_generation_is_not_quantized(params):
    decoded = {}
    for config in SMALL, FP8:
        model = build("nnx", config)
        cache = Cache.empty(config, 2, 24)
        decoded[config] = jax.jit(model.decode)(model.from_dict(params), TOKENS, cache)[0]
    np.testing.assert_array_equal(decoded[FP8], decoded[SMALL])


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_every_product_of_a_block_and_no_other_is_quantized(framework, params):
    model = build(framework, FP8)
    program = jax.make_jaxpr(jax.grad(loss(model)))(model.from_dict(params), TOKENS)
    found, layers = primitives(program.jaxpr), FP8.num_layers
    assert found["normfuse_fp8_product"] == 3 * 7 * layers  # each with both gradients
    assert found["normfuse_quantize_array of a kernel"] == 7 * layers
    assert found["normfuse_quantize_hidden"] == layers
    assert found["normfuse_quantize_hidden_gradients"] == layers
    assert found["normfuse_attention"] == layers
    assert found["dot_general"] == 3  # the logits
    # A block's norms write codes, which all products after them read.
    assert found["normfuse_quantize_norm_array"] == 2 * layers
    assert found["normfuse_norm_gradient"] == 2 * layers + 1
    # What attention's output reads, and the gradients of q, k, v, the output and the MLP.
    assert found["normfuse_quantize_array"] == 6 * layers


@pytest.mark.parametrize("framework, remat", [("nnx", "dots"), ("eqx", "block")])
def test_remat_quantizes_no_kernel_twice_and_changes_nothing(framework, remat, params):
    config = dataclasses.replace(FP8, remat=remat)
    counts = {}
    for one in (FP8, config):
        model = build(framework, one)
        jaxpr = jax.make_jaxpr(jax.grad(loss(model)))(model.from_dict(params), TOKENS)
        counts[one.remat] = primitives(jaxpr.jaxpr)
    plain, again = counts["none"], counts[remat]
    for name, more in (("normfuse_fp8_product", remat == "block"), ("normfuse_attention", True)):
        assert (again[name] > plain[name]) == more
    key = "normfuse_quantize_array of a kernel"
    assert again[key] == plain[key] == 7 * FP8.num_layers
    assert distance(both_ways(config, params, framework), both_ways(FP8, params, framework)) < 0.01
