"""The transformer in Equinox.

    model = Transformer(PRESETS["tiny"], key=jax.random.key(0))
    logits = model(tokens)  # (batch, seq) int -> (batch, seq, vocab) float32

Equinox's layers see one example: `_normalise` maps them over batch and sequence.
"""

from typing import Any

import equinox as eqx
import jax
from jax import Array

from ..layers.dense.dense import apply as apply_dense
from ..layers.dense.gated import apply_product
from ..layers.eqx import Linear, RMSNorm
from ..layers.rms_norm import add_rms_norm
from . import parameters
from .attention import Cache, KeyValue, Rope, attend, rope_table, rotate
from .config import TransformerConfig
from .gathered import NAME, gathered
from .remat import remat
from .sharding import Sharding, constrain, in_context
from .side_by_side import pause
from .vocabulary import embed, unembed


class Attention(eqx.Module):
    """Grouped-query attention with rotary embedding, and with normalised heads if `qk_norm`."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    config: TransformerConfig = eqx.field(static=True)
    sharding: Sharding = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, key: Array):
        c = config
        self.config, self.sharding = config, sharding
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q = _linear(c, c.dim, heads, use_bias=c.attention_bias, key=key)
        self.k = _linear(c, c.dim, kv_heads, use_bias=c.attention_bias, key=key)
        self.v = _linear(c, c.dim, kv_heads, use_bias=c.attention_bias, key=key)
        self.o = _linear(c, heads, c.dim, key=key)
        self.q_norm = _norm(c, c.head_dim) if c.qk_norm else None
        self.k_norm = _norm(c, c.head_dim) if c.qk_norm else None

    def __call__(self, x: Array, rope: Rope, cache: KeyValue | None, start: Array | int):
        width = self.config.head_dim
        split = lambda x: x.reshape(*x.shape[:2], x.shape[2] // width, width)
        # (batch, seq, heads, head_dim)
        q, k, v = (split(_project(linear, x)) for linear in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normalise(self.q_norm, q), _normalise(self.k_norm, k)
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (constrain(x, self.sharding.heads) for x in (q, k, v))
        out, cache = attend(q, k, v, cache, start, self.config.attention)
        out = constrain(out, self.sharding.heads)
        return _project(self.o, out.reshape(*x.shape[:2], out.shape[2] * width)), cache


class MLP(eqx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    gate: Linear
    up: Linear
    down: Linear
    sharding: Sharding = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, key: Array):
        self.sharding = sharding
        self.gate = _linear(config, config.dim, config.mlp_dim, key=key)
        self.up = _linear(config, config.dim, config.mlp_dim, key=key)
        self.down = _linear(config, config.mlp_dim, config.dim, key=key)

    def __call__(self, x: Array) -> Array:
        # (batch, seq, mlp_dim)
        gate, up = pause([_project(linear, x) for linear in (self.gate, self.up)])
        options = {"dtype": x.dtype, "implementation": None, "contract": 1}
        options["hidden_sharding"] = in_context(self.sharding.hidden)
        return apply_product(gate, up, self.down.weight, None, "silu", **options)


class Block(eqx.Module):
    """Attention, then MLP; each reads the normalised residual stream and adds to it."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP
    sharding: Sharding = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, key: Array):
        self.sharding = sharding
        self.attention_norm = _norm(config, config.dim)
        self.attention = Attention(config, sharding, key=key)
        self.mlp_norm = _norm(config, config.dim)
        self.mlp = MLP(config, sharding, key=key)

    def __call__(
        self, x: Array, more: Array | None, rope: Rope, cache: KeyValue | None, start: Array | int
    ):
        """Of the stream x + more; `more`, what the block before adds, goes into the norm's pass.

        Returns the new x and more, both (batch, seq, dim), and the cache.
        """
        h, x = _add_and_normalise(self.attention_norm, x, more)
        h, cache = self.attention(constrain(h, self.sharding.block_input), rope, cache, start)
        h, x = _add_and_normalise(self.mlp_norm, x, constrain(h, self.sharding.residual))
        h = self.mlp(constrain(h, self.sharding.block_input))
        return x, constrain(h, self.sharding.residual), cache


class Transformer(eqx.Module):
    """Decoder-only transformer: `model(tokens)` scores every next token.

    Args:
      config: shape and precision.
      sharding: where activations lie when called under `jax.set_mesh`; without one, unused.
      key: seeds `normfuse.models.parameters.initial_parameters`; the Flax transformer starts from
        the same values for the same key.
    """

    embed: eqx.nn.Embedding
    layers: list[Block]
    norm: RMSNorm
    head: Linear | None
    config: TransformerConfig = eqx.field(static=True)
    sharding: Sharding = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, sharding: Sharding | None = None, *, key: Array):
        self.config, self.sharding = config, sharding or Sharding()
        c = config
        blank = lambda: {
            "embed": eqx.nn.Embedding(c.vocab_size, c.dim, dtype=c.param_dtype, key=key),
            "layers": [Block(c, self.sharding, key=key) for _ in range(c.num_layers)],
            "norm": _norm(c, c.dim),
            "head": None if c.tie_embeddings else _linear(c, c.dim, c.vocab_size, key=key),
        }
        values = parameters.initial_parameters(c, key)
        for name, part in parameters.from_dict(jax.eval_shape(blank), values).items():
            setattr(self, name, part)

    def __call__(self, tokens: Array) -> Array:
        """Maps `(batch, seq)` integers to `(batch, seq, vocab)` float32 logits."""
        logits, _ = self._forward(tokens, None)
        return logits

    def decode(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Scores `(batch, seq)` tokens that follow those in the cache, and adds them to it."""
        return self._forward(tokens, cache)

    def _forward(self, tokens: Array, cache: Cache | None) -> tuple[Array, Any]:
        start: Any = 0 if cache is None else cache.length
        past = [None] * len(self.layers) if cache is None else cache.layers
        rope = rope_table(self.config, start, tokens.shape[1])
        x = embed(tokens, self.embed.weight, self.config.dtype, self.sharding)
        keep = self.sharding.keep_gathered and self.config.remat != "none"
        run = _gather_and_run if keep else Block.__call__
        block = remat(run, self.config.remat, names=[NAME])
        more, present = None, []
        for layer, layer_past in zip(self.layers, past, strict=True):
            x, more, layer_present = block(layer, x, more, rope, layer_past, start)
            present.append(layer_present)
            if self.config.remat != "none":  # of what a block reads one array is kept
                x, more = x + more, None
        x = constrain(_add_and_normalise(self.norm, x, more)[0], self.sharding.block_input)
        table = self.embed.weight if self.head is None else self.head.weight
        logits = constrain(unembed(x, table), self.sharding.logits)
        return logits, cache and Cache(tuple(present), start + tokens.shape[1])


def _gather_and_run(layer: Block, *inputs):
    """A block whose kernels are gathered once, for both ways."""
    return gathered(layer, layer.attention.config.dtype, layer.sharding)(*inputs)


def _project(linear: Linear, x: Array) -> Array:
    # Not jax.vmap(linear)(x): Equinox knows no compute dtype and would turn bfloat16 x and a
    # float32 weight into float32. `dense` rounds the weight to x's dtype, but not its gradient.
    options = {"activation": linear.activation, "dtype": x.dtype, "implementation": None}
    return apply_dense(x, linear.weight, linear.bias, contract=1, **options)


def _normalise(norm: RMSNorm, x: Array) -> Array:
    for _ in x.shape[:-1]:
        norm = jax.vmap(norm)
    return norm(x)


def _add_and_normalise(norm: RMSNorm, x: Array, more: Array | None) -> tuple[Array, Array]:
    """`(norm(x + more), x + more)`, in one pass over them each way."""
    if more is None:
        return pause(_normalise(norm, x)), x
    options = {"eps": norm.eps, "implementation": norm.implementation}
    h, x = add_rms_norm(more, x, norm.weight, **options)
    return pause(h), x


def _linear(
    config: TransformerConfig, width_in: int, width_out: int, *, key: Array, **options
) -> Linear:
    options = {"use_bias": False, "dtype": config.param_dtype, **options}
    return Linear(width_in, width_out, **options, key=key)


def _norm(config: TransformerConfig, width: int) -> RMSNorm:
    return RMSNorm(
        width,
        eps=config.norm_eps,
        use_bias=False,
        dtype=config.param_dtype,
        implementation=config.implementation,
    )
