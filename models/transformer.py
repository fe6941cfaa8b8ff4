"""The transformer's forward pass, written once for Flax nnx and Equinox.

The frameworks' modules hold the parameters; `Ops` is what differs in applying them. A module calls
the function of its own name here, so that a replaced submodule is called in its place.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from ..layers.core.sharding import axes_of
from ..layers.cross_entropy import linear_cross_entropy
from ..layers.dense.fp8 import products_saveable
from ..layers.dense.matmul import shared
from ..layers.quantization import kernel_codes_saveable
from ..native.dtypes import compute_dtype
from ..native.implementation import requested
from .attention import Cache, KeyValue, Rope, attend, rope_table, rotate, soft_capped
from .config import TransformerConfig
from .sharding import GATHERED, Sharding, axes_of_words, constrain, gather_kernels, in_context
from .side_by_side import pause


@dataclasses.dataclass(frozen=True)
class Ops:
    """How a framework applies its layers, to arrays of any leading axes."""

    # Of (layer, x): x times the layer's kernel, plus its bias.
    linear: Callable[[Any, Array], Array]
    norm: Callable[[Any, Array], Array]  # of (layer, x): the last axis of x normalised
    # Of (mlp, gate, up, spec): `down(activation(gate) * up)`, where up may be None, with the spec
    # of the operand of `down` on the mesh in context.
    gated_product: Callable[[Any, Array, Array | None, P | None], Array]
    # Of (mlp, x, spec): the whole MLP, likewise, as one function in FP8.
    quantized_mlp: Callable[[Any, Array, P | None], Array]
    # Of (layer,): the `(vocab, dim)` array of an embedding or of the output projection.
    table: Callable[[Any], Array]
    # Of (function, module): the module with `function` applied to its parameters.
    map_parameters: Callable[[Callable[[Any], Any], Any], Any]
    # Of (module,): the module with every product in the compute dtype.
    unquantized: Callable[[Any], Any]
    checkpoint: Callable[..., Callable]  # `jax.checkpoint`, or the framework's version of it


def forward(
    ops: Ops,
    model: Any,
    tokens: Array,
    cache: Cache | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array, Any]:
    """Scores every next token.

    Args:
      ops: the framework's.
      model: its `Transformer`.
      tokens: `(batch, seq)` integers.
      cache: keys and values of the tokens before these; None without any.
      segment_ids: `(batch, seq)` integers, without a cache: tokens attend to those of equal ids.
    Returns: `(batch, seq, vocab)` float32 logits (float64 for float64), and the cache with these
      tokens added (None without one).

    Raises:
      TypeError: if tokens are no integers.
      ValueError: if they have another shape, or are more than `max_seq_len`.
    """
    x, cache = _hidden(ops, model, tokens, cache, segment_ids)
    logits = constrain(unembed(x, _unembedding(ops, model)), model.sharding.logits)
    return soft_capped(logits, model.config.logits_softcap), cache


def loss(
    ops: Ops,
    model: Any,
    tokens: Array,
    targets: Array,
    segment_ids: Array | None = None,
    **options: Any,
) -> Array:
    """Returns the cross-entropy of the next tokens, in nats, their logits never held as a whole.

    Args:
      ops: the framework's.
      model: its `Transformer`.
      tokens: `(batch, seq)` integers.
      targets: the tokens that follow, of the same shape.
      segment_ids: integers of the same shape; tokens attend to those of equal ids.
      **options: of `normfuse.linear_cross_entropy`.
    """
    x, _ = _hidden(ops, model, tokens, None, segment_ids)
    given = model.config.implementation
    names = (given,) if isinstance(given, str) else given or ()
    # There is no Pallas kernel for it, and none is missed.
    options["implementation"] = tuple(name for name in names if name != "pallas") or None
    options["softcap"] = model.config.logits_softcap
    options.setdefault("quantization", model.config.quantization)
    return linear_cross_entropy(x, _unembedding(ops, model), targets, contract=1, **options)


def _unembedding(ops: Ops, model: Any) -> Array:
    return ops.table(model.embed if model.head is None else model.head)


def _check_tokens(config: TransformerConfig, tokens: Array) -> None:
    """Raises TypeError or ValueError for what are no `(batch, seq)` integers, and for too many."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have the shape (batch, seq), got {tokens.shape}")
    seq, limit = tokens.shape[1], config.max_seq_len
    if seq > limit:
        raise ValueError(f"tokens hold {seq} positions; max_seq_len={limit} allows no more.")


def _hidden(
    ops: Ops, model: Any, tokens: Array, cache: Cache | None, segments: Array | None
) -> tuple[Array, Any]:
    """The normalised output of the last block, `(batch, seq, dim)`, and the cache."""
    config, sharding = model.config, model.sharding
    _check_tokens(config, tokens)
    if segments is not None:
        if segments.shape != tokens.shape:
            raise ValueError(
                f"segment_ids must have the shape of tokens, {tokens.shape}, got {segments.shape}"
            )
        segments = constrain(segments, sharding.tokens)
    start: Any = 0 if cache is None else cache.length
    past = [None] * len(model.layers) if cache is None else cache.layers
    locality = [config.is_local(i) for i in range(len(model.layers))]
    ropes = {local: rope_table(config, start, tokens.shape[1], local) for local in set(locality)}
    # Documents need no positions of their own: the rotation of a score is their difference.
    ropes = {local: rope._replace(segments=segments) for local, rope in ropes.items()}
    x = embed(tokens, ops.table(model.embed), config.dtype, sharding)
    x = x * config.dim**0.5 if config.scale_embeddings else x

    def run(layer: Any, *inputs: Any) -> Any:
        if cache is not None and config.quantization is not None:
            # A scale from several tokens would let a token's logits depend on later ones.
            layer = ops.unquantized(layer)
        if sharding.keep_gathered and config.remat != "none" and config.quantization is None:
            gather = functools.partial(gather_kernels, dtype=config.dtype, sharding=sharding)
            layer = ops.map_parameters(gather, layer)
        return layer(*inputs)

    run = _remat(run, config, ops.checkpoint)
    present = []
    for layer, layer_past, local in zip(model.layers, past, locality, strict=True):
        x, layer_present = run(layer, x, ropes[local], layer_past)
        present.append(layer_present)
    x = constrain(_norm(ops, model.norm, x), sharding.block_input)
    return x, cache and Cache(tuple(present), start + tokens.shape[1])


def block(
    ops: Ops, module: Any, x: Array, rope: Rope, cache: KeyValue | None
) -> tuple[Array, KeyValue | None]:
    """Applies attention, then the MLP: each reads the residual stream and adds to it.

    What they read is normalised (`norms="pre"`), what they add ("post"), or both.

    Returns: the new x, `(batch, seq, dim)`, and the layer's cache.
    """
    sharding = module.sharding
    h = constrain(_norm(ops, module.attention_norm, x), sharding.block_input)
    h, cache = module.attention(h, rope, cache)
    x = x + _post_norm(ops, module.attention_post_norm, constrain(h, sharding.residual))
    h = module.mlp(constrain(_norm(ops, module.mlp_norm, x), sharding.block_input))
    return x + _post_norm(ops, module.mlp_post_norm, constrain(h, sharding.residual)), cache


def attention(
    ops: Ops, module: Any, x: Array, rope: Rope, cache: KeyValue | None
) -> tuple[Array, KeyValue | None]:
    """Applies grouped-query attention with rotary embedding to `(batch, seq, dim)`."""
    linears = module.q, module.k, module.v
    plain = requested(module.config.implementation)[:1] == ["xla"]
    each = [x] * 3 if plain else shared(x, 3)
    # Each device computes its heads: FP8 products gather the codes of x for that.
    place = lambda y: constrain(y, P(*module.sharding.heads[:3]))
    projections = [place(ops.linear(linear, x)) for linear, x in zip(linears, each)]
    config, sharding = module.config, module.sharding

    def heads(y: Array, norm: Any = None) -> Array:  # (batch, seq, heads, head_dim)
        if norm is not None and config.qk_norm_over == "projection":
            y = ops.norm(norm, y)
        y = y.reshape(*y.shape[:2], y.shape[2] // config.head_dim, config.head_dim)
        return ops.norm(norm, y) if norm is not None and config.qk_norm_over == "head" else y

    q, k, v = map(heads, projections, (module.q_norm, module.k_norm, None))
    q, k = rotate(q, rope), rotate(k, rope)
    q, k, v = (constrain(x, sharding.heads) for x in (q, k, v))
    options: dict[str, Any] = {"scale": (config.query_scale_dim or config.head_dim) ** -0.5}
    options |= {"softcap": config.attention_softcap}
    options |= {"window": config.sliding_window if module.local else None}
    options["segments"] = rope.segments
    out, cache = attend(q, k, v, cache, rope.start, config.attention, **options)
    out = constrain(out, sharding.heads)
    merged = out.reshape(*out.shape[:2], out.shape[2] * config.head_dim)
    return ops.linear(module.o, merged), cache


def mlp(ops: Ops, module: Any, x: Array) -> Array:
    """Applies the MLP, gated or not, to `(batch, seq, dim)`."""
    spec = in_context(module.sharding.hidden)
    if module.up.quantization is not None:
        return ops.quantized_mlp(module, x, spec)
    if module.gate is None:
        return ops.gated_product(module, pause(ops.linear(module.up, x)), None, spec)
    gate, up = pause((ops.linear(module.gate, x), ops.linear(module.up, x)))
    return ops.gated_product(module, gate, up, spec)


def _norm(ops: Ops, norm: Any, x: Array) -> Array:
    return pause(x if norm is None else ops.norm(norm, x))


def _post_norm(ops: Ops, norm: Any, x: Array) -> Array:
    return x if norm is None else ops.norm(norm, x)


def _remat(function: Callable, config: TransformerConfig, checkpoint: Callable) -> Callable:
    """`function` of one block with its backward recomputing what `config.remat` says.

    "none" keeps everything. "block" keeps a block's inputs. "dots" also keeps the results of the
    products with weights, but not attention's scores, so that no GEMM runs twice. Kernels that
    `gather_kernels` gathered are kept by both, and so are the FP8 codes of kernels.
    """
    if config.remat == "none":
        return function
    policies = jax.checkpoint_policies
    kept = [policies.save_only_these_names(GATHERED), kernel_codes_saveable]
    if config.remat == "dots":
        kept += [policies.dots_with_no_batch_dims_saveable, products_saveable]
    return checkpoint(function, policy=functools.reduce(policies.save_from_both_policies, kept))


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _look_up(tokens: Array, table: Array, dtype: str, sharding: Sharding, words: P) -> Array:
    """The table's rows, rounded before they move between devices, not after.

    In bfloat16 the table's pieces (FSDP) and the sum over the vocabulary's parts then take half the
    bytes. The gradient sums a token's occurrences in float32 (float64), and is the table's dtype.
    """
    parts, every = constrain(table.astype(dtype), words), _without(sharding, words)
    x = jnp.take(parts, constrain(tokens, every.tokens), axis=0, mode="clip")
    # Summed over the parts before it is split along the rows or the sequence, with nothing between:
    # XLA makes one reduce-scatter of a sum and the slice of it.
    x = constrain(constrain(x, every.block_input), sharding.residual)
    known = (tokens >= 0) & (tokens < table.shape[0])
    return jnp.where(known[..., None], x, jnp.nan)


def _without(sharding: Sharding, words: P) -> Sharding:
    """Returns the sharding of rows that are there on every device with a part of the words."""
    return functools.reduce(Sharding.without, axes_of(words[0]), sharding)


def _look_up_forward(
    tokens: Array, table: Array, dtype: str, sharding: Sharding, words: P
) -> tuple[Array, tuple[Array, Array]]:
    return _look_up(tokens, table, dtype, sharding, words), (tokens, table)


def _look_up_backward(
    dtype: str, sharding: Sharding, words: P, residuals: tuple[Array, Array], dx: Array
) -> tuple[None, Array]:
    del dtype
    tokens, table = residuals
    every = _without(sharding, words)
    tokens, dx = constrain(tokens, every.tokens), constrain(dx, every.block_input)
    zeros = constrain(jnp.zeros(table.shape, compute_dtype(table.dtype)), words)
    sums = zeros.at[tokens].add(dx.astype(zeros.dtype), mode="drop")
    return None, constrain(sums.astype(table.dtype), words)


_look_up.defvjp(_look_up_forward, _look_up_backward)


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
    wide = compute_dtype(a.dtype)
    return jnp.einsum(equation, a, b, preferred_element_type=wide)


unembed.defvjp(_unembed_forward, _unembed_backward)
