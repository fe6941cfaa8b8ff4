import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from normfuse.models import eqx as eqx_model
from normfuse.models import nnx as nnx_model
from normfuse.models import parameters
from normfuse.models.config import RopeScaling
from normfuse.models.functional import build

FRAMEWORKS = ["nnx", "eqx"]
GEMMA = {"norm_offset": 1.0, "norms": "both", "scale_embeddings": True, "activation": "gelu_tanh"}
GEMMA |= {"tie_embeddings": True, "sliding_window": 5, "query_scale_dim": 12}
VARIANTS = {
    "grouped": {},
    "tied": {"tie_embeddings": True},
    "qwen2": {"attention_bias": True, "num_kv_heads": 4},
    "qwen3": {"qk_norm": True, "num_kv_heads": 1},
    "olmo2": {"norms": "post", "qk_norm": True, "qk_norm_over": "projection", "activation": "gelu"},
    "gemma2": GEMMA | {"attention_softcap": 2.0, "logits_softcap": 5.0, "layer_pattern": "LG"},
    "gemma3": GEMMA
    | {"qk_norm": True, "local_rope_theta": 50.0, "layer_pattern": "GL"}
    | {"rope_scaling": RopeScaling(factor=4.0, kind="linear"), "rope_theta": 500.0},
    "plain MLP": {"gated": False, "activation": "relu"},
}


def _tokens(config, rng, batch=2, seq=12):
    return rng.integers(0, config.vocab_size, (batch, seq), dtype=np.int32)


@pytest.fixture(scope="module", params=FRAMEWORKS)
def compiled(small, noisy, jit, request):
    """The small model, its parameters, and its logits of `(2, 12)` tokens, compiled once."""
    model = build(request.param, small)
    params = model.from_dict(noisy(small, np.random.default_rng(0)))
    apply = jit(model.apply)
    return model, params, lambda tokens: apply(params, tokens)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_reference_and_each_other(small, scaling, reference, noisy, rng, variant, jit):
    config = dataclasses.replace(small, **VARIANTS[variant])
    if variant == "tied":
        config = dataclasses.replace(config, rope_scaling=scaling)
    values, tokens = noisy(config, rng), _tokens(config, rng)
    expected = np.stack([reference(config, values, row) for row in tokens])
    got = {}
    for framework in FRAMEWORKS:
        model = build(framework, config)
        got[framework] = np.asarray(jit(model.apply)(model.from_dict(values), tokens))
        assert got[framework].dtype == np.float32
        # Some 20 roundings in a row between input and logits, each of 2^-24 relative to the largest
        # value around, and as many again in the length summed: 100 of them cover it.
        error = np.abs(got[framework] - expected).max()
        assert error < 100 * 2**-24 * np.abs(expected).max()
    assert np.abs(got["nnx"] - got["eqx"]).max() < 100 * 2**-24 * np.abs(expected).max()


def test_a_key_gives_the_same_model_however_it_is_made(small, jit):
    config = dataclasses.replace(small, num_layers=1)

    def make(key):
        flax = nnx_model.Transformer(config, rngs=nnx.Rngs(params=key))
        key = nnx.Rngs(params=key).params()
        return {
            "functions": parameters.initial_parameters(config, key),
            "nnx": parameters.to_dict(nnx.to_pure_dict(nnx.state(flax))),
            "eqx": parameters.to_dict(eqx_model.Transformer(config, key=key)),
            **{f"build {f}": parameters.to_dict(build(f, config).init(key)) for f in FRAMEWORKS},
        }

    made = jit(make)(jax.random.key(3))
    expected = made.pop("functions")
    for way, values in made.items():
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(values[name], value, err_msg=f"{way}: {name}")


def test_functional_model_is_the_frameworks_own(compiled, rng, jit):
    model, params, apply = compiled
    own = model.model(params)
    assert isinstance(own, nnx.Module if model.framework == "nnx" else eqx.Module)
    tokens = _tokens(model.config, rng)
    got, expected = jit(own.__call__)(tokens), apply(tokens)
    # One has its parameters as constants, so rounds elsewhere; as in the test above.
    assert np.abs(got - expected).max() < 100 * 2**-24 * np.abs(expected).max()


def test_a_token_changes_no_logits_before_it(compiled):
    _, _, apply = compiled
    tokens = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    tokens[1, 9] = 40
    before, after = apply(tokens)
    np.testing.assert_array_equal(before[:9], after[:9])
    assert (before[9:] != after[9:]).any(axis=-1).all()


def test_every_parameter_has_a_gradient(small, noisy, rng, jit):
    config = dataclasses.replace(small, qk_norm=True, attention_bias=True)
    model = build("eqx", config)
    params, tokens = model.from_dict(noisy(config, rng)), _tokens(config, rng)
    loss = lambda params: jnp.mean(jax.nn.logsumexp(model.apply(params, tokens), axis=-1))
    gradient = parameters.to_dict(jit(jax.grad(loss))(params))
    for name, value in gradient.items():
        if name != "embed.embedding":  # tokens that do not occur have none
            assert np.count_nonzero(value) > 0.9 * value.size, name
    seen = np.unique(tokens)
    assert np.count_nonzero(gradient["embed.embedding"]) == seen.size * config.dim


def test_gradient_matches_differences_of_the_reference(small, reference, noisy, rng, jit):
    model = build("nnx", small)
    values, tokens = noisy(small, rng), _tokens(small, rng, batch=1)
    direction = {name: rng.standard_normal(value.shape) for name, value in values.items()}
    weights = rng.standard_normal((tokens.shape[1], small.vocab_size))
    loss = lambda params: jnp.sum(model.apply(params, tokens)[0] * weights)
    gradient = parameters.to_dict(jit(jax.grad(loss))(model.from_dict(values)))
    got = sum(np.vdot(direction[name], gradient[name]) for name in values)

    def shifted(step):
        moved = {name: values[name] + step * direction[name] for name in values}
        return np.sum(reference(small, moved, tokens[0]) * weights)

    # Central differences: an error of h^2 relative, 1e-10, and 1e-16 / h of cancellation.
    expected = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
    size = sum(np.sum(np.abs(direction[name] * gradient[name])) for name in values)
    assert abs(got - expected) < 100 * 2**-24 * size


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters(
    small, reference, equations, noisy, rng, jit
):
    config = dataclasses.replace(small, dtype="bfloat16")
    model = build("nnx", config)
    values, tokens = noisy(config, rng), _tokens(config, rng)
    params = model.from_dict(values)
    loss = lambda params: jnp.sum(model.apply(params, tokens) ** 2)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params)
    found = list(equations(jaxpr.jaxpr))
    dots = [eqn for eqn in found if eqn.primitive.name == "dot_general"]
    assert len(dots) == 3 * (7 * small.num_layers + 1)
    attentions = [eqn for eqn in found if eqn.primitive.name == "normfuse_attention"]
    assert len(attentions) == small.num_layers
    for eqn in dots + attentions:
        assert {str(v.aval.dtype) for v in eqn.invars} == {"bfloat16"}
    gradient = jax.eval_shape(jax.grad(loss), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
    logits = np.asarray(jit(model.apply)(params, tokens))
    assert logits.dtype == np.float32
    expected = np.stack([reference(config, values, row) for row in tokens])
    # Float32's limit with a rounding of 2^-9, and the root of 100, as errors add up at random.
    assert np.sqrt(np.mean((logits - expected) ** 2)) < 10 * 2**-9 * np.abs(expected).max()


def test_remat_repeats_what_it_says_and_changes_no_gradient(small, noisy, rng, jit):
    config = dataclasses.replace(small, num_layers=1)
    tokens, values = _tokens(config, rng), noisy(config, rng)
    gradients, products = {}, {}
    for mode in "none", "block", "dots":
        model = build("eqx", dataclasses.replace(config, remat=mode))
        params = model.from_dict(values)
        loss = lambda params, model=model: jnp.mean(model.apply(params, tokens) ** 2)
        lowered = jit(jax.grad(loss)).lower(params)
        products[mode] = lowered.as_text().count("dot_general")
        gradients[mode] = parameters.to_dict(lowered.compile()(params))
    # A block has 7 products with weights and 2 within attention. Recomputing it all repeats every
    # one but the last, whose result only the next block needs; "dots" repeats the scores only.
    assert products["block"] - products["none"] == 8
    assert products["dots"] - products["none"] == 2
    for name, value in gradients["none"].items():
        # The same sums in an order that fusion may change: a few roundings.
        limit = 20 * 2**-24 * np.abs(value).max()
        assert np.abs(gradients["block"][name] - value).max() <= limit
        assert np.abs(gradients["dots"][name] - value).max() <= limit


def test_implementation_reaches_every_op(small, equations, jit):
    """Two layers have nine norms, twelve linear layers and two gated products.

    Attention has an option of its own.
    """
    config, tokens = dataclasses.replace(small, qk_norm=True), jnp.zeros((2, 8), jnp.int32)
    make = lambda name: build("nnx", dataclasses.replace(config, implementation=name))

    def counts(program):
        names = [eqn.primitive.name for eqn in equations(program.jaxpr)]
        return {name: names.count(name) for name in names if name.startswith("normfuse_")}

    model = make("xla")
    gradient = jax.grad(lambda params: model.apply(params, tokens).sum())
    attentions = {"normfuse_attention": 2, "normfuse_attention_gradients": 2}
    assert counts(jax.make_jaxpr(gradient)(model.abstract)) == attentions
    model = make(("pallas", "xla"))  # there is no such kernel for the gated product
    ours = {"normfuse_norm": 9, "normfuse_dense_layer": 12, "normfuse_product": 2}
    ours |= {"normfuse_shared": 2, "normfuse_attention": 2}  # the former is the x of q, k and v
    assert counts(jax.make_jaxpr(model.apply)(model.abstract, tokens)) == ours
    model = make(("native", "xla"))
    lowered = jit(model.apply).lower(model.abstract, tokens)
    assert lowered.as_text().count("@normfuse_norm_forward") == 9
    model = make("native")
    assert counts(jax.make_jaxpr(model.apply)(model.abstract, tokens))["normfuse_epilogue"] == 2
    if jax.default_backend() == "cpu":  # has no kernel for the gated product
        with pytest.raises(NotImplementedError, match="implementation='native' cannot serve"):
            jit(model.apply).lower(model.abstract, tokens)


def test_implementations_agree(small, noisy, rng, jit):
    config = dataclasses.replace(small, num_layers=1, qk_norm=True, attention_bias=True)
    values, tokens = noisy(config, rng), _tokens(config, rng, seq=4)
    got = {}
    for name in "xla", ("pallas", "xla"), ("native", "xla"):
        model = build("eqx", dataclasses.replace(config, implementation=name))
        got[name] = jit(model.apply)(model.from_dict(values), tokens)
    expected = got.pop("xla")
    for name, logits in got.items():
        error = np.abs(logits - expected).max()  # bounded as in the first test
        assert error < 100 * 2**-24 * np.abs(expected).max(), name


def test_empty_batch(small, noisy, rng, jit):
    model = build("nnx", small)
    total = lambda params: jnp.sum(model.apply(params, jnp.zeros((0, 4), jnp.int32)))
    value, gradient = jit(jax.value_and_grad(total))(model.from_dict(noisy(small, rng)))
    assert value == 0 and all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("outside", [48, -1])
def test_tokens_outside_the_vocabulary_are_not_taken_for_others(compiled, rng, outside):
    model, _, apply = compiled
    tokens = _tokens(model.config, rng)
    tokens[0, 2] = outside
    logits = apply(tokens)
    assert jnp.isnan(logits[0]).any(axis=-1)[2:].all() and jnp.isfinite(logits[1]).all()


@pytest.mark.parametrize(
    "tokens, error, message",
    [
        (np.zeros((1, 65), np.int32), ValueError, "tokens hold 65 positions; max_seq_len=64"),
        (np.zeros(5, np.int32), ValueError, r"shape \(batch, seq\), got \(5,\)"),
        (np.zeros((1, 5), np.float32), TypeError, "tokens must be integers, got float32"),
    ],
)
@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_modules_check_their_tokens(small, framework, tokens, error, message):
    functional = build(framework, small)
    run = lambda params: functional.model(params)(tokens)
    with pytest.raises(error, match=message):
        jax.eval_shape(run, functional.abstract)


def test_unknown_framework_is_rejected(small):
    with pytest.raises(ValueError, match="framework='torch' must be one of 'nnx', 'eqx'"):
        build("torch", small)


class _NoMLP(nnx.Module):
    def __call__(self, x):
        return jnp.zeros_like(x)


def test_a_replaced_submodule_is_called_in_its_place(compiled, rng, jit):
    model, params, apply = compiled
    own, tokens = model.model(params), _tokens(model.config, rng)
    if model.framework == "nnx":
        for layer in own.layers:
            layer.mlp = _NoMLP()
    else:
        without = [eqx.nn.Lambda(jnp.zeros_like) for _ in own.layers]
        own = eqx.tree_at(lambda own: [layer.mlp for layer in own.layers], own, without)
    values = model.to_dict(params)
    zero = {name: 0 * value for name, value in values.items() if "down" in name}
    expected = jit(model.apply)(model.from_dict(values | zero), tokens)
    got = jit(own.__call__)(tokens)
    assert np.abs(got - expected).max() < 100 * 2**-24 * np.abs(expected).max()
    assert np.abs(apply(tokens) - expected).max() > 0.1
