"""What OLMo 2 and Gemma add to the transformer, where it is computed in other ways.

Values are checked against `transformers` in test_huggingface.py; here against those, decoding,
losses and FP8.
"""

import dataclasses

import jax
import numpy as np
import pytest

from normfuse.layers.core.activations import SCALARS
from normfuse.models.attention import Cache
from normfuse.models.config import Activation
from normfuse.models.functional import build

OLMO2 = {"norms": "post", "qk_norm": True, "qk_norm_over": "projection"}
# Windows of 3 tokens, in the first of two layers.
GEMMA = {"norms": "both", "norm_offset": 1.0, "scale_embeddings": True, "activation": "gelu_tanh"}
GEMMA |= {"attention_softcap": 2.0, "logits_softcap": 5.0, "query_scale_dim": 12, "qk_norm": True}
GEMMA |= {"sliding_window": 3, "layer_pattern": "LG", "local_rope_theta": 50.0}
GEMMA |= {"tie_embeddings": True}
FAMILIES = [("nnx", OLMO2), ("eqx", GEMMA)]
IDS = ["olmo2", "gemma"]


@pytest.fixture(scope="module", params=FAMILIES, ids=IDS)
def computed(small, noisy, jit, request):
    """A model, its parameters, tokens, and their logits."""
    framework, changes = request.param
    model, rng = build(framework, dataclasses.replace(small, **changes)), np.random.default_rng(0)
    params = model.from_dict(noisy(model.config, rng))
    tokens = rng.integers(0, model.config.vocab_size, (4, 16), np.int32)
    return model, params, tokens, np.asarray(jit(model.apply)(params, tokens))


def _assert_close(found, expected, roundings=100):
    # So many roundings of the largest number, as in test_transformer.py.
    assert np.abs(found - expected).max() < roundings * 2**-24 * np.abs(expected).max()


def test_decoding_rows_of_several_lengths_gives_the_logits_of_the_whole(computed, jit):
    model, params, tokens, whole = computed
    decode = jit(model.decode)
    logits, cache = decode(params, tokens[:, :6], Cache.empty(model.config, 4, 12))
    _assert_close(logits, whole[:, :6])
    lengths = np.array([3, 6, 1, 5])  # windows begin elsewhere in each row
    rows = np.stack([row[length:][:3] for row, length in zip(tokens, lengths)])
    logits, _ = decode(params, rows, cache._replace(length=lengths))
    _assert_close(logits, np.stack([row[length:][:3] for row, length in zip(whole, lengths)]))


def test_loss_is_that_of_the_logits(computed, jit):
    model, params, tokens, logits = computed
    targets = np.roll(tokens, 1, axis=1)
    loss = jit(lambda params: model.loss(params, tokens, targets, reduction="none"))(params)
    shares = logits - np.log(np.exp(logits.astype(float)).sum(-1, keepdims=True))
    _assert_close(-loss, np.take_along_axis(shares, targets[..., None], -1)[..., 0])


@pytest.mark.parametrize("framework, activation", [("nnx", "squared_relu"), ("eqx", "gelu_tanh")])
def test_fp8_is_near_and_generation_has_none(small, noisy, rng, framework, activation, jit):
    """A plain MLP, whose product with `down` follows an activation alone.

    It is computed layer by layer where the slope of the activation has no bound.
    """
    sizes = {"dim": 32, "mlp_dim": 64, "num_layers": 1}  # FP8 products take multiples of 16
    config = dataclasses.replace(small, gated=False, activation=activation, **sizes)
    values = noisy(config, rng)
    tokens = rng.integers(0, config.vocab_size, (2, 8), np.int32)
    logits = {}
    for quantization in None, "fp8":
        model = build(framework, dataclasses.replace(config, quantization=quantization))
        params = model.from_dict(values)
        logits[quantization] = np.asarray(jit(model.apply)(params, tokens))
        decoded, _ = jit(model.decode)(params, tokens, Cache.empty(config, 2, 8))
        _assert_close(decoded, logits[None])
    error = np.linalg.norm(logits["fp8"] - logits[None]) / np.linalg.norm(logits[None])
    # An operand of a product errs by at most 2^-4, by 2^-5 / sqrt(3) on average; two operands, and
    # four products that lie behind each other, add up at random; three standard deviations.
    assert 1e-3 < error < 3 * np.sqrt(2 * 4) * 2**-5 / np.sqrt(3)


def test_every_activation_is_one_of_the_operations(small):
    assert set(Activation.__args__) <= set(SCALARS)


def test_a_new_model_starts_from_scales_of_one(small):
    model = build("nnx", dataclasses.replace(small, norms="both", norm_offset=1.0))
    values = model.to_dict(jax.jit(model.init)(jax.random.key(0)))
    scales = [value for name, value in values.items() if "scale" in name]
    assert len(scales) == 9 and not np.any(np.concatenate(scales))
