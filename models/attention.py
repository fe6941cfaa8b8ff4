"""Rotary embedding and causal attention, shared by the Flax and the Equinox transformer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..layers.attention import attention
from ..layers.attention.blocks import square
from ..layers.attention.spec import Spec, numbers
from ..native.dtypes import compute_dtype
from .config import AttentionImplementation, RopeScaling, TransformerConfig


class Rope(NamedTuple):
    """The places of one call's tokens: their rotation, and what they attend to."""

    # cos, sin: of the angles, `([batch,] seq, head_dim / 2)` float32 each.
    cos: Array
    sin: Array
    start: Array | int  # position of the first token: a scalar, or `(batch,)`
    segments: Array | None = None  # `(batch, seq)` integers: each token's document


class KeyValue(NamedTuple):
    """One layer's past keys and values, `(batch, length, num_kv_heads, head_dim)` each."""

    keys: Array
    values: Array


class Cache(NamedTuple):
    """Keys and values of the tokens that a transformer has read: a plain pytree."""

    layers: tuple[KeyValue, ...]  # past keys and values of each layer, of fixed length
    # Int32, the number of positions filled: a scalar, or `(batch,)` for each sequence.
    length: Array

    @classmethod
    def empty(cls, config: TransformerConfig, batch_size: int, length: int) -> "Cache":
        """Returns a cache with room for `length` tokens of each of `batch_size` sequences."""
        shape = (batch_size, length, config.num_kv_heads, config.head_dim)
        zeros = lambda: jnp.zeros(shape, config.dtype)
        layers = tuple(KeyValue(zeros(), zeros()) for _ in range(config.num_layers))
        return cls(layers, jnp.int32(0))


def rope_table(config: TransformerConfig, start: Array | int, seq: int) -> Rope:
    """Tabulates the angles `position * theta^(-2i / head_dim)` of positions `start`, `start + 1`, …

    `start` may be `(batch,)`, for sequences of different lengths.

    References: Su et al., RoFormer, arXiv:2104.09864.
    """
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = jnp.multiply.outer(_positions(start, seq).astype(jnp.float32), frequencies)
    return Rope(jnp.cos(angles), jnp.sin(angles), start)


def _positions(start: Array | int, seq: int) -> Array:
    return jnp.add.outer(jnp.asarray(start), jnp.arange(seq, dtype=jnp.int32))  # ([batch,] seq)


def _scaled(frequencies: Array, scaling: RopeScaling) -> Array:
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # over the trained length
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = jnp.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotate(x: Array, rope: Rope) -> Array:
    """Rotates the pairs `(x[i], x[i + head_dim / 2])` of every head, in float32.

    Pairs lie half a head apart, as in Hugging Face's Llama, so that its weights keep their order.
    (The original interleaves them: `(x[2i], x[2i + 1])`.)

    Args:
      x: `(batch, seq, heads, head_dim)`.
      rope: of the `seq` positions, for all sequences or for each.
    Returns: an array of the shape and dtype of `x`.
    """
    of_heads = lambda t: t[:, :, None] if t.ndim == 3 else t[None, :, None]  # alike for all
    cos, sin = of_heads(rope.cos), of_heads(rope.sin)
    first, second = jnp.split(x.astype(compute_dtype(x.dtype)), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(
    q: Array,
    k: Array,
    v: Array,
    cache: KeyValue | None,
    start: Array | int,
    implementation: AttentionImplementation,
    *,
    window: int | None = None,
    segments: Array | None = None,
) -> tuple[Array, KeyValue | None]:
    """Computes causal attention over this call's tokens and, with a cache, all before them.

    Args:
      q: `(batch, seq, num_heads, head_dim)`, already rotated.
      k: `(batch, seq, num_kv_heads, head_dim)`, already rotated; each head serves
        `num_heads / num_kv_heads` query heads.
      v: as `k`.
      cache: past keys and values, of which the first `start` positions are filled; or None.
      start: position of the first token: a scalar, or `(batch,)` for each sequence.
      implementation: of `normfuse.attention`, for calls without a cache: "xla" or "cudnn", "auto"
        for the best here.
      window: how many tokens each attends to, itself included; all when None.
      segments: `(batch, seq)` integers, without a cache; tokens attend to those of their own.
    Returns: `(batch, seq, num_heads, head_dim)` in the dtype of `q`, and the cache with this
      call's keys and values. Scores and softmax are float32 (float64 for float64).
    """
    if cache is not None:
        cache = KeyValue(_add(cache.keys, k, start), _add(cache.values, v, start))
        return _attend_past(q, cache.keys, cache.values, start, window), cache
    served_by = None if implementation == "auto" else implementation
    options: dict[str, Any] = {"window": window, "segment_ids": segments}
    return attention(q, k, v, causal=True, implementation=served_by, **options), None


def _add(past: Array, new: Array, start: Array | int) -> Array:
    if jnp.ndim(start) == 0:
        return jax.lax.dynamic_update_slice(past, new, (0, start, 0, 0))
    each = lambda past, new, start: jax.lax.dynamic_update_slice(past, new, (start, 0, 0))
    return jax.vmap(each)(past, new, start)


def _attend_past(q: Array, k: Array, v: Array, start: Array | int, window: int | None) -> Array:
    positions = _positions(start, q.shape[1])[..., None]
    keys = jnp.expand_dims(jnp.arange(k.shape[1]), range(positions.ndim - 1))
    seen = keys <= positions  # ([batch,] seq, length)
    if window is not None:
        seen &= keys > positions - window
    of_heads = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    d = numbers(of_heads.ndim)
    mask = "mask", (*d.batch[: seen.ndim - 2], d.length, d.keys)
    spec = Spec(q.shape[3] ** -0.5, extras=(mask,))
    return square(spec, of_heads, k, v, seen)[0].reshape(q.shape)
