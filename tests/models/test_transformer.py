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
from normfuse.models.functional import build
from normfuse.models.transformer import unembed

FRAMEWORKS = ["nnx", "eqx"]


def _tokens(config, rng, batch=2, seq=12):
    return rng.integers(0, config.vocab_size, (batch, seq), dtype=np.int32)


@pytest.fixture(scope="module", params=FRAMEWORKS)
def compiled(small, noisy, jit, request):
    """The small model, its parameters, and its logits of `(2, 12)` tokens, compiled once."""
    model = build(request.param, small)
    params = model.from_dict(noisy(small, np.random.default_rng(0)))
    apply = jit(model.apply)
    return model, params, lambda tokens: apply(params, tokens)


def test_frameworks_compute_the_same(small, noisy, rng, jit):
    """What they compute is compared with `transformers` in test_huggingface.py."""
    values, tokens = noisy(small, rng), _tokens(small, rng)
    found = {}
    for framework in FRAMEWORKS:
        model = build(framework, small)
        loss = lambda params, model=model: jnp.mean(model.apply(params, tokens) ** 2)
        value, gradient = jit(jax.value_and_grad(loss))(model.from_dict(values))
        found[framework] = {"loss": value, **model.to_dict(gradient)}
    for name, value in found["nnx"].items():
        # Some 20 roundings in a row, each of 2^-24 relative to the largest value around, and as
        # many again in the length summed: 100 of them cover it, twice for the way back.
        limit = 200 * 2**-24 * np.abs(value).max()
        assert np.abs(found["eqx"][name] - value).max() < limit, name


def test_logits_and_their_gradient_are_products(rng):
    """Of the operands' dtype and summed in float32; that of the table keeps its sums."""
    x, table = (rng.standard_normal(shape).astype("f4") for shape in ((2, 3, 8), (5, 8)))
    dlogits = rng.standard_normal((2, 3, 5)).astype("f4")
    for dtype, unit in ("float32", 2**-24), ("bfloat16", 2**-8):
        logits, back = jax.vjp(unembed, jnp.asarray(x, dtype), table)
        found = [logits, *back(dlogits)]
        expected = [x @ table.T, dlogits @ table, np.einsum("bsv,bsd->vd", dlogits, x)]
        assert [a.dtype for a in found] == ["float32", dtype, "float32"]
        for a, b in zip(found, expected, strict=True):
            assert np.abs(np.asarray(a, "f4") - b).max() < 8 * unit * np.abs(b).max()


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


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters(
    small, equations, noisy, rng, jit
):
    config = dataclasses.replace(small, dtype="bfloat16")
    model = build("nnx", config)
    values, tokens = noisy(config, rng), _tokens(config, rng)
    params = model.from_dict(values)
    loss = lambda params: jnp.sum(model.apply(params, tokens) ** 2)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params)
    found = list(equations(jaxpr.jaxpr))
    every = [eqn for eqn in found if eqn.primitive.name == "dot_general"]
    # CPUs have no product of bfloat16 that gives float32: there kernels' gradients are of float32.
    dots = [eqn for eqn in every if eqn.invars[0].aval.dtype == jax.numpy.bfloat16]
    assert len(dots) == 3 * (7 * small.num_layers + 1)
    assert len(every) == len(dots) + 7 * small.num_layers
    attentions = [eqn for eqn in found if eqn.primitive.name == "normfuse_attention"]
    assert len(attentions) == small.num_layers
    for eqn in dots + attentions:
        assert {str(v.aval.dtype) for v in eqn.invars} == {"bfloat16"}
    gradient = jax.eval_shape(jax.grad(loss), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
    logits = np.asarray(jit(model.apply)(params, tokens))
    assert logits.dtype == np.float32
    expected = jit(build("nnx", small).apply)(params, tokens)
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
    model = make(("pallas", "xla"))  # products have no such kernel
    ours = {"normfuse_norm": 9, "normfuse_product": 14}
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


@pytest.mark.parametrize("outside", [48, -1])
def test_tokens_outside_the_vocabulary_are_not_taken_for_others(compiled, rng, outside):
    model, _, apply = compiled
    tokens = _tokens(model.config, rng)
    tokens[0, 2] = outside
    logits = apply(tokens)
    assert jnp.isnan(logits[0]).any(axis=-1)[2:].all() and jnp.isfinite(logits[1]).all()
    few = np.asarray(tokens) % 8  # a dtype that does not reach the vocabulary's end
    np.testing.assert_array_equal(apply(jnp.asarray(few, jnp.int4)), apply(few))


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
