"""The decoder-only transformer, written once for Flax nnx and Equinox.

`normfuse.models.nnx` and `normfuse.models.eqx` make modules of these classes and give them their
framework's layers. A module calls its parts, so that a replaced one is called in their place.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from ..layers.core.arguments import requested
from ..layers.core.sharding import axes_of
from ..layers.cross_entropy import linear_cross_entropy
from ..layers.dense.fp8 import products_saveable
from ..layers.dense.matmul import shared
from ..layers.modules import gated_mlp
from ..layers.quantization import kernel_codes_saveable
from ..native.dtypes import compute_dtype
from .attention import Cache, KeyValue, Rope, attend, rope_table, rotate
from .config import TransformerConfig
from .sharding import Sharding, axes_of_words, constrain, in_context


def parts(layers: Any, sharding: Sharding) -> dict[str, Any]:
    """Makes the parts of a `Transformer` by name.

    `layers` has the configuration and makes a framework's layers, whose parameters are placeholders
    for `initial_parameters`: `linear(n, m, use_bias)` for arrays `(*rows, n)`, `norm(n)`,
    `embedding()`; and its classes `attention`, `mlp` and `block`.
    """
    c = layers.config
    return {
        "embed": layers.embedding(),
        "layers": [layers.block(layers, sharding) for _ in range(c.num_layers)],
        "norm": layers.norm(c.dim),
        "head": None if c.tie_embeddings else layers.linear(c.dim, c.vocab_size),
    }


class Transformer:
    """The call, the loss and the decoding of both frameworks' `Transformer`.

    Attributes:
      embed, layers, norm, head: its parts; head is None where embeddings are tied.
      checkpoint: the framework's `jax.checkpoint`.
    """

    config: TransformerConfig
    sharding: Sharding
    embed: Any
    layers: Any
    norm: Any
    head: Any
    checkpoint: Callable[..., Callable[..., Any]] = staticmethod(jax.checkpoint)

    def __call__(self, tokens: Array, segment_ids: Array | None = None) -> Array:
        """Maps `(batch, seq)` integers to `(batch, seq, vocab)` float32 logits.

        With `segment_ids`, integers of the same shape, tokens attend only to those of equal ids.

        Raises:
          TypeError: if tokens are no integers.
          ValueError: if they have another shape, or are more than `max_seq_len`.
        """
        return _logits(self, _hidden(self, tokens, None, segment_ids)[0])

    def loss(
        self, tokens: Array, targets: Array, segment_ids: Array | None = None, **options: Any
    ) -> Array:
        """Returns the cross-entropy of the tokens that follow, as `Functional.loss` does."""
        x, _ = _hidden(self, tokens, None, segment_ids)
        options["implementation"] = self.config.implementation
        options.setdefault("quantization", self.config.quantization)
        return linear_cross_entropy(x, _unembedding(self), targets, contract=1, **options)

    def decode(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Scores `(batch, seq)` tokens that follow those in the cache, and adds them to it.

        Where the cache has no room for all of them the logits are NaN.

        Raises:
          ValueError: for a quantized model: a scale of several tokens would let a token's logits
            depend on later ones.
        """
        if self.config.quantization is not None:
            raise ValueError(
                f"decode: the model has quantization={self.config.quantization!r}; build it with "
                "quantization=None, which has the same parameters, as Functional.decode does"
            )
        x, present = _hidden(self, tokens, cache, None)
        fits = jnp.reshape(present.length, (-1, 1, 1)) <= cache.layers[0].keys.shape[1]
        return _or_nan(fits, _logits(self, x)), present


def _logits(model: Transformer, x: Array) -> Array:
    return constrain(unembed(x, _unembedding(model)), model.sharding.logits)


def _unembedding(model: Transformer) -> Array:
    return _table(model.embed if model.head is None else model.head)


def _table(layer: Any) -> Array:
    """Returns the `(vocab, dim)` array of an embedding or of an output projection."""
    if hasattr(layer, "weight"):  # Equinox's
        return layer.weight
    return layer.embedding[...] if hasattr(layer, "embedding") else layer.kernel[...].T


def _hidden(
    model: Transformer, tokens: Array, cache: Cache | None, segments: Array | None
) -> tuple[Array, Any]:
    """Returns the normalised output of the last block, `(batch, seq, dim)`, and the cache."""
    config, sharding = model.config, model.sharding
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have the shape (batch, seq), got {tokens.shape}")
    seq, limit = tokens.shape[1], config.max_seq_len
    if seq > limit:
        raise ValueError(f"tokens hold {seq} positions; max_seq_len={limit} allows no more.")
    if segments is not None:
        if segments.shape != tokens.shape:
            raise ValueError(
                f"segment_ids must have the shape of tokens, {tokens.shape}, got {segments.shape}"
            )
        segments = constrain(segments, sharding.tokens)
    start: Any = 0 if cache is None else cache.length
    past = [None] * len(model.layers) if cache is None else cache.layers
    # Documents need no positions of their own: the rotation of a score is their difference.
    rope = rope_table(config, start, seq)._replace(segments=segments)
    x = embed(tokens, _table(model.embed), config.dtype, sharding)
    run = _remat(lambda layer, *inputs: layer(*inputs), config, model.checkpoint)
    present = []
    for layer, layer_past in zip(model.layers, past, strict=True):
        x, layer_present = run(layer, x, rope, layer_past)
        present.append(layer_present)
    x = constrain(model.norm(x), sharding.block_input)
    return x, cache and Cache(tuple(present), start + seq)


def _remat(function: Callable, config: TransformerConfig, checkpoint: Callable) -> Callable:
    """Returns the function of one block, whose backward recomputes what `config.remat` says.

    "none" keeps everything. "block" keeps a block's inputs. "dots" also keeps the results of the
    products with weights, but not attention's scores, so that no GEMM runs twice. FP8 codes of
    kernels are kept by both.
    """
    if config.remat == "none":
        return function
    policies = jax.checkpoint_policies
    saveable = [kernel_codes_saveable]
    if config.remat == "dots":
        saveable += [policies.dots_with_no_batch_dims_saveable, products_saveable]
    return checkpoint(function, policy=functools.reduce(policies.save_from_both_policies, saveable))


class Block:
    """Attention, then MLP; each reads the residual stream, normalised, and adds to it."""

    def __init__(self, layers: Any, sharding: Sharding):
        self.sharding, dim = sharding, layers.config.dim
        self.attention_norm, self.mlp_norm = layers.norm(dim), layers.norm(dim)
        self.attention = layers.attention(layers, sharding)
        self.mlp = layers.mlp(layers, sharding)

    def __call__(
        self, x: Array, rope: Rope, cache: KeyValue | None
    ) -> tuple[Array, KeyValue | None]:
        """Returns the new x, `(batch, seq, dim)`, and the layer's cache."""
        place = self.sharding
        h, cache = self.attention(constrain(self.attention_norm(x), place.block_input), rope, cache)
        x = x + constrain(h, place.residual)
        h = self.mlp(constrain(self.mlp_norm(x), place.block_input))
        return x + constrain(h, place.residual), cache


class Attention:
    """Grouped-query attention with rotary embedding."""

    def __init__(self, layers: Any, sharding: Sharding):
        c = self.config = layers.config
        self.sharding = sharding
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        project = lambda features: layers.linear(c.dim, features, c.attention_bias)
        self.q, self.k, self.v = project(heads), project(kv_heads), project(kv_heads)
        self.o = layers.linear(heads, c.dim)
        self.q_norm = layers.norm(c.head_dim) if c.qk_norm else None
        self.k_norm = layers.norm(c.head_dim) if c.qk_norm else None

    def __call__(
        self, x: Array, rope: Rope, cache: KeyValue | None
    ) -> tuple[Array, KeyValue | None]:
        """Returns attention's output, `(batch, seq, dim)`, and the layer's cache."""
        c, sharding = self.config, self.sharding
        each = [x] * 3 if requested(c.implementation)[:1] == ["xla"] else shared(x, 3)
        # Each device computes its heads: FP8 products gather the codes of x for that.
        place = lambda y: constrain(y, P(*sharding.heads[:3]))
        projections = [place(linear(x)) for linear, x in zip((self.q, self.k, self.v), each)]

        def heads(y: Array, norm: Any) -> Array:  # (batch, seq, heads, head_dim)
            y = y.reshape(*y.shape[:2], y.shape[2] // c.head_dim, c.head_dim)
            return y if norm is None else norm(y)

        q, k, v = map(heads, projections, (self.q_norm, self.k_norm, None))
        q, k, v = (constrain(x, sharding.heads) for x in (rotate(q, rope), rotate(k, rope), v))
        options = {"window": c.sliding_window, "segments": rope.segments}
        out, cache = attend(q, k, v, cache, rope.start, c.attention, **options)
        out = constrain(out, sharding.heads)
        return self.o(out.reshape(*out.shape[:2], out.shape[2] * c.head_dim)), cache


class MLP:
    """`down(silu(gate(x)) * up(x))`."""

    layer: type  # the class of its layers
    activation = "silu"

    def __init__(self, layers: Any, sharding: Sharding):
        self.sharding, c = sharding, layers.config
        self.implementation, self.quantization = c.implementation, c.quantization
        self.gate, self.up = (layers.linear(c.dim, c.mlp_dim) for _ in range(2))
        self.down = layers.linear(c.mlp_dim, c.dim)

    def __call__(self, x: Array) -> Array:
        """Applies the MLP to `(batch, seq, dim)`."""
        spec = in_context(self.sharding.hidden)
        return gated_mlp(self, x, self.layer, hidden_sharding=spec)


# ---------------------------------------------------------------- tokens to vectors, and to logits


def embed(tokens: Array, table: Array, dtype: str, sharding: Sharding) -> Array:
    """Looks up each token's vector.

    Args:
      tokens: `(batch, seq)` integers. A token outside the vocabulary gives NaN, never another
        token's vector.
      table: `(vocab, dim)`.
      dtype: of the result.
      sharding: of the table, the tokens and the result.
    Returns: `(batch, seq, dim)`.
    """
    # Each device looks up its part of the vocabulary. Rows move between devices, or the table.
    words = axes_of_words(sharding, tokens.size, table.shape[0])
    tokens = constrain(tokens, sharding.tokens)
    return _look_up(tokens, table, dtype, sharding, P(words or None, None))


def _or_nan(valid: Array, x: Array) -> Array:
    """Returns x, and 0 / 0 where it is not valid: to `jax.debug_nans` the constant is an error."""
    return jnp.where(valid, x, (one := valid.astype(x.dtype)) / one)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _look_up(tokens: Array, table: Array, dtype: str, sharding: Sharding, words: P) -> Array:
    """The table's rows, rounded before they move between devices, not after.

    In bfloat16 the table's pieces (FSDP) and the sum over the vocabulary's parts then take half the
    bytes. The gradient sums a token's occurrences in float32 (float64), and is the table's dtype.
    """
    known, x = _known_rows(tokens, table.astype(dtype), dtype, sharding, words)
    return _or_nan(known, x)


@_look_up.defjvp
def _(dtype: str, sharding: Sharding, words: P, primals: Any, tangents: Any) -> Any:
    (tokens, table), (_, dtable) = primals, tangents
    wide = dtable.astype(compute_dtype(table.dtype))
    known, dx = _known_rows(tokens, wide, dtype, sharding, words)
    return _look_up(tokens, table, dtype, sharding, words), jnp.where(known, dx, 0)


def _known_rows(
    tokens: Array, table: Array, dtype: str, sharding: Sharding, words: P
) -> tuple[Array, Array]:
    """Returns which tokens are known, `(batch, seq, 1)`, and their rows of a table, in `dtype`."""
    # Rows are on every device with a part of the words.
    every = functools.reduce(Sharding.without, axes_of(words[0]), sharding)
    parts, indices = constrain(table, words), constrain(tokens, every.tokens)
    x = jnp.take(parts, indices, axis=0, mode="clip").astype(dtype)
    known = (tokens >= 0) & (tokens <= min(table.shape[0] - 1, jnp.iinfo(tokens.dtype).max))
    # Summed over the parts before it is split along the rows or the sequence, with nothing between:
    # XLA makes one reduce-scatter of a sum and the slice of it.
    return known[..., None], constrain(constrain(x, every.block_input), sharding.residual)


@jax.custom_vjp
def unembed(x: Array, table: Array) -> Array:
    """Scores every token of the vocabulary: `logits = x @ table.T`.

    The products take operands of x's dtype and are summed in float32, which is also the logits'
    dtype (float64 for float64). So are the two GEMMs of the backward: the float32 cotangent is
    rounded to x's dtype first, or they would run at float32's speed, an eighth of bfloat16's. The
    table's gradient keeps its float32 sums.

    Args:
      x: `(batch, seq, dim)`.
      table: `(vocab, dim)`.
    Returns: `(batch, seq, vocab)`.
    """
    return _product("bsd,vd->bsv", x, table.astype(x.dtype))


def _unembed_forward(x: Array, table: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    operand = table.astype(x.dtype)  # once, so that FSDP gathers it once for both ways
    return _product("bsd,vd->bsv", x, operand), (x, table, operand)


def _unembed_backward(residuals: tuple[Array, Array, Array], dlogits: Array) -> tuple[Array, Array]:
    x, table, operand = residuals
    dlogits = dlogits.astype(x.dtype)
    dx = jnp.einsum("bsv,vd->bsd", dlogits, operand)
    return dx, _product("bsv,bsd->vd", dlogits, x).astype(table.dtype)


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=compute_dtype(a.dtype))


unembed.defvjp(_unembed_forward, _unembed_backward)
