import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from normfuse.models.attention import Cache
from normfuse.models.functional import build
from normfuse.models.generate import _draw, generate
from normfuse.models.sharding import BATCH, Sharding

# Five tokens, padded to eight: what padding leaves in the cache must not be seen later.
PROMPTS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(scope="module", params=["nnx", "eqx"])
def model(small, request):
    return build(request.param, dataclasses.replace(small, num_layers=1))


@pytest.fixture(scope="module")
def params(model, noisy):
    return model.from_dict(noisy(model.config, np.random.default_rng(0)))


# One of them fills the padding, and one is a single token.
RAGGED = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7], [2, 7, 1]]


@pytest.fixture(scope="module")
def apply(model, jit):
    """The whole model's logits; for `(4, 16)` tokens compiled once."""
    return jit(model.apply)


def test_decoding_piece_by_piece_gives_the_logits_of_the_whole(model, params, apply, rng, jit):
    tokens = rng.integers(0, model.config.vocab_size, (4, 16), np.int32)
    whole, decode = apply(params, tokens), jit(model.decode)
    cache, pieces = Cache.empty(model.config, 4, 20), []
    for part in np.split(tokens, [5, 6, 7], axis=1):
        logits, cache = decode(params, part, cache)
        pieces.append(logits)
    assert cache.length == 16
    assert np.isnan(decode(params, tokens[:, :5], cache)[0]).all()  # it has room for 4
    error = np.abs(np.concatenate(pieces, axis=1) - whole).max()
    assert error < 50 * 2**-24 * np.abs(whole).max()  # other shapes, so other orders of summation


@pytest.mark.parametrize("prompts", [PROMPTS, RAGGED, [[7]]], ids=["equal", "ragged", "one"])
def test_greedy_text_is_that_of_the_whole_model_again_and_again(model, params, apply, prompts):
    """Each row's is that of its prompt alone, whatever the lengths of the others."""
    got = generate(model, params, prompts, 8, temperature=0)
    padded = np.zeros((4, 16), np.int32)  # later tokens do not change a position's logits
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = prompt
    rows, lengths = np.arange(len(prompts)), np.array([len(prompt) for prompt in prompts])
    for at in lengths + np.arange(8)[:, None]:
        logits = apply(params, padded)[rows, at - 1]
        runner_up, best = np.sort(logits, axis=-1)[:, -2:].T
        assert (best - runner_up > 1e-4).all()  # no tie that rounding could decide
        padded[rows, at] = np.argmax(logits, axis=-1)
    expected = padded[rows[:, None], lengths[:, None] + np.arange(8)]
    np.testing.assert_array_equal(got, expected)
    assert len({tuple(row) for row in got.tolist()}) == len(prompts)


def test_sequence_parallelism_decodes_single_tokens(model, params, eight_devices):
    mesh = jax.make_mesh((2, 2, 2), (*BATCH, "tensor"), axis_types=(AxisType.Auto,) * 3)
    parallel = build(model.framework, model.config, Sharding.sequence_parallel())
    with jax.set_mesh(mesh):  # two prompts on four devices for rows, then one token on two
        placed = jax.device_put(params, parallel.shardings(params, mesh))
        found = generate(parallel, placed, PROMPTS, 8, temperature=0)
    np.testing.assert_array_equal(found, generate(model, params, PROMPTS, 8, temperature=0))


def test_seed_decides_the_text(model, params):
    # Shapes and lengths as above: nothing is compiled anew.
    text = lambda seed: generate(model, params, PROMPTS, 8, seed=seed, temperature=2.0)
    np.testing.assert_array_equal(text(0), text(0))
    assert (text(0) != text(1)).any() and (text(0)[0] != text(0)[1]).any()
    assert text(0).min() >= 0 and text(0).max() < model.config.vocab_size
    even = generate(model, params, PROMPTS, 8, seed=0, temperature=1e6)  # whatever came before
    assert (even[:, 1:] != even[:, :-1]).any()  # each step draws by itself


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.0, 1.0, None), (1.0, 1.0, 1), (1.0, 1e-6, None)]
)
def test_of_equally_likely_tokens_the_first_is_taken(temperature, top_p, top_k):
    """By `top_k=1`, and by a `top_p` that one token reaches, as without a draw."""
    logits = jnp.asarray([[0.0, 2.0, 1.0, 2.0], [3.0, 0.0, 3.0, 3.0]])
    draw = lambda key: _draw(logits, key, jnp.float32(temperature), jnp.float32(top_p), top_k)
    drawn = jax.vmap(draw)(jax.random.split(jax.random.key(0), 50))
    np.testing.assert_array_equal(drawn, [[1, 0]] * 50)


LOGITS = np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32)


def _shares(temperature=1.0, top_p=1.0, top_k=None, draws=4000):
    keys = jax.random.split(jax.random.key(0), draws)
    draw = lambda key: _draw(
        jnp.asarray(LOGITS)[None], key, jnp.float32(temperature), jnp.float32(top_p), top_k
    )[0]
    return np.bincount(jax.jit(jax.vmap(draw))(keys), minlength=4) / draws


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 10**30}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, np.array([16, 9, 4, 1]) / 30),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
    ],
    ids=str,
)
def test_draws_have_the_probabilities_asked_for(options, expected):
    # Four standard deviations of a share among 4000 draws are at most 0.032; zero is zero.
    got = _shares(**options)
    np.testing.assert_allclose(got, expected, atol=0.032)
    assert (got[np.asarray(expected) == 0] == 0).all()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([[1, 2]], {"num_tokens": "5"}, "num_tokens=5 must be an integer of at least 1"),
        ([[1, 2]], {"num_tokens": 63}, "exceed max_seq_len=64"),
        ([1, 2], {}, "prompt must be integers of shape (batch, seq)"),
        ([[]], {}, "prompt must be integers of shape (batch, seq)"),
        ([[1.0]], {}, "got float64"),
        ([], {}, "got nothing"),
        ([[1], []], {}, "of shape (0,)"),
        ([[1, 2], [47, 48, 3]], {}, "prompt holds tokens from 1 to 48; vocab_size=48 has 0 to 47"),
        ([[1], [2] * 61], {}, "a prompt of 61 tokens"),
        ([[1]], {"num_tokens": 10**30}, f"num_tokens={10**30} exceed max_seq_len"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0 must be finite"),
        ([[1]], {"temperature": np.nan}, "temperature=nan must be finite"),
        ([[1]], {"top_k": 2.5}, "top_k=2.5 must be None or an integer above 0"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0 must be above 0"),
    ],
)
def test_generate_rejects(small, prompt, options, message):
    model = build("nnx", small)
    with pytest.raises(ValueError) as error:
        generate(model, model.abstract, prompt, **{"num_tokens": 4, **options})
    assert message in str(error.value)
