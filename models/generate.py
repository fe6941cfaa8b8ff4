"""Sampling text: one pass over the prompt, then one token at a time with cached keys."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .attention import Cache
from .functional import Functional, Params


def generate(
    model: Functional,
    params: Params,
    prompt: ArrayLike | Sequence[Sequence[int] | np.ndarray],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Continues each prompt by `num_tokens` tokens.

    Args:
      model: the transformer.
      params: its parameters.
      prompt: `(batch, seq)` integers, or a sequence of at least one integer for each row. With
        different lengths, a row's likeliest text is still that of its prompt alone.
      num_tokens: how many to add.
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: draw from the k likeliest tokens only; of equally likely ones the first come first.
      top_p: draw from the likeliest tokens that together have at least this probability.
      seed: the same seed draws the same text.
    Returns: `(batch, num_tokens)` int32 on the host.

    Raises:
      ValueError: naming the argument, if it is out of range or the text would outgrow
        `max_seq_len`.

    References: Holtzman et al., The Curious Case of Neural Text Degeneration (top-p),
      arXiv:1904.09751.
    """
    rows = _rows(prompt)
    lengths = np.array([len(row) for row in rows], np.int32)
    vocab, limit = model.config.vocab_size, model.config.max_seq_len
    lowest, highest = min(row.min() for row in rows), max(row.max() for row in rows)
    for valid, message in (
        (
            0 <= lowest and highest < vocab,
            f"prompt holds tokens from {lowest} to {highest}; "
            f"vocab_size={vocab} has 0 to {vocab - 1}. Is it the right tokenizer?",
        ),
        (_counts(num_tokens), f"num_tokens={num_tokens} must be an integer of at least 1."),
        (
            _counts(num_tokens) and num_tokens <= limit - lengths.max(),
            f"a prompt of {lengths.max()} tokens and num_tokens={num_tokens} exceed "
            f"max_seq_len={limit}. Shorten either.",
        ),
        (0 <= temperature < np.inf, f"temperature={temperature} must be finite and not negative."),
        (top_k is None or _counts(top_k), f"top_k={top_k} must be None or an integer above 0."),
        (top_p is None or 0 < top_p <= 1, f"top_p={top_p} must be above 0 and at most 1, or None."),
    ):
        if not valid:
            raise ValueError(message)
    # Padded to a power of two, so that prompts of many lengths share few programs.
    padded = min(1 << (int(lengths.max()) - 1).bit_length(), limit)
    tokens = np.stack([np.pad(row.astype(np.int32), (0, padded - len(row))) for row in rows])
    filled = lengths[0] if (lengths == lengths[0]).all() else lengths  # one place in the cache
    run = _compiled(model, num_tokens, top_k)
    limits = np.float32(temperature), np.float32(1.0 if top_p is None else top_p)
    return np.asarray(run(params, tokens, filled, *limits, jax.random.key(seed)))


@functools.lru_cache(maxsize=8)
def _compiled(model: Functional, num_tokens: int, top_k: int | None) -> Callable[..., Array]:
    def run(params, tokens, filled, temperature, top_p, key):
        batch, padded = tokens.shape
        cache = Cache.empty(model.config, batch, padded + num_tokens)
        logits, cache = model.decode(params, tokens, cache)
        last = logits[jnp.arange(batch), filled - 1]
        # The padding's keys and values lie beyond a row's own tokens, and are overwritten before
        # anything attends to them.
        cache = cache._replace(length=filled)

        def add(state: tuple, key: Array) -> tuple:
            logits, cache = state  # logits: (batch, vocab)
            token = _draw(logits, key, temperature, top_p, top_k)
            logits, cache = model.decode(params, token[:, None], cache)
            return (logits[:, 0], cache), token

        return jax.lax.scan(add, (last, cache), jax.random.split(key, num_tokens))[1].T

    return jax.jit(run)


def _draw(logits: Array, key: Array, temperature: Array, top_p: Array, top_k: int | None) -> Array:
    likeliest = jnp.argmax(logits, axis=-1)
    logits = logits / jnp.maximum(temperature, 1e-6)
    order = jnp.argsort(logits, axis=-1, descending=True)  # the first of equal ones before others
    descending = jnp.take_along_axis(logits, order, axis=-1)
    vocab = logits.shape[-1]
    among = jnp.arange(vocab) < min(top_k or vocab, vocab)
    probabilities = jax.nn.softmax(jnp.where(among, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # the sum over all likelier tokens
    nothing = jnp.full_like(logits, -jnp.inf)
    kept = jnp.where(among & (before < top_p), descending, nothing)
    logits = jnp.put_along_axis(nothing, order, kept, axis=-1, inplace=False)
    drawn = jax.random.categorical(key, logits, axis=-1)
    return jnp.where(temperature == 0, likeliest, drawn).astype(jnp.int32)


def _counts(number: Any) -> bool:
    return hasattr(number, "__index__") and number >= 1


def _rows(prompt: Any) -> list[np.ndarray]:
    prompts = prompt if isinstance(prompt, list | tuple) else np.atleast_1d(prompt)
    rows = [np.asarray(row) for row in prompts]
    bad = lambda row: row.ndim != 1 or row.size == 0 or not np.issubdtype(row.dtype, np.integer)
    wrong = next((f"{row.dtype} of shape {row.shape}" for row in rows if bad(row)), None)
    if wrong or not rows:
        raise ValueError(
            "prompt must be integers of shape (batch, seq), or rows of any lengths from 1; got "
            f"{wrong or 'nothing'} for a row."
        )
    return rows
