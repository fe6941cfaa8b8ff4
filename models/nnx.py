"""The transformer in Flax nnx.

model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
logits = model(tokens)  # (batch, seq) int -> (batch, seq, vocab) float32
"""

from typing import Any

from flax import nnx
from jax import Array

from ..layers.nnx import GatedMLP, Linear, RMSNorm
from ..layers.rms_norm import add_rms_norm
from ..native.dtypes import rounded
from . import parameters
from .attention import Cache, KeyValue, Rope, attend, rope_table, rotate
from .config import TransformerConfig
from .gathered import NAME, gathered
from .remat import remat
from .sharding import Sharding, constrain, in_context
from .side_by_side import pause
from .vocabulary import embed, unembed

_BLANK = nnx.initializers.zeros_init()  # until `parameters.initial_parameters` are filled in


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding, and with normalised heads if `qk_norm`."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, rngs: nnx.Rngs):
        c = config
        self.config, self.sharding = config, sharding
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q = _linear(c, c.dim, heads, use_bias=c.attention_bias, rngs=rngs)
        self.k = _linear(c, c.dim, kv_heads, use_bias=c.attention_bias, rngs=rngs)
        self.v = _linear(c, c.dim, kv_heads, use_bias=c.attention_bias, rngs=rngs)
        self.o = _linear(c, heads, c.dim, rngs=rngs)
        self.q_norm = _norm(c, c.head_dim, rngs=rngs) if c.qk_norm else None
        self.k_norm = _norm(c, c.head_dim, rngs=rngs) if c.qk_norm else None

    def __call__(self, x: Array, rope: Rope, cache: KeyValue | None, start: Array | int):
        width = self.config.head_dim
        split = lambda x: x.reshape(*x.shape[:2], x.shape[2] // width, width)
        q, k, v = (
            split(self.q(x)),
            split(self.k(x)),
            split(self.v(x)),
        )  # (batch, seq, heads, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (constrain(x, self.sharding.heads) for x in (q, k, v))
        out, cache = attend(q, k, v, cache, start, self.config.attention)
        out = constrain(out, self.sharding.heads)
        return self.o(out.reshape(*x.shape[:2], out.shape[2] * width)), cache


class MLP(GatedMLP):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, rngs: nnx.Rngs):
        self.sharding = sharding
        super().__init__(
            config.dim,
            config.mlp_dim,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            kernel_init=_BLANK,
            rngs=rngs,
        )

    def __call__(self, x: Array) -> Array:
        gate, up = pause((self.gate(x), self.up(x)))
        return self.combine(gate, up, in_context(self.sharding.hidden))


class Block(nnx.Module):
    """Attention, then MLP; each reads the normalised residual stream and adds to it."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, rngs: nnx.Rngs):
        self.sharding = sharding
        self.attention_norm = _norm(config, config.dim, rngs=rngs)
        self.attention = Attention(config, sharding, rngs=rngs)
        self.mlp_norm = _norm(config, config.dim, rngs=rngs)
        self.mlp = MLP(config, sharding, rngs=rngs)

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


class Transformer(nnx.Module):
    """Decoder-only transformer: `model(tokens)` scores every next token.

    Args:
      config: shape and precision.
      sharding: where activations lie when called under `jax.set_mesh`; without one, unused.
      rngs: its `params` key seeds `normfuse.models.parameters.initial_parameters`; the Equinox
        transformer starts from the same values for the same key.
    """

    def __init__(
        self, config: TransformerConfig, sharding: Sharding | None = None, *, rngs: nnx.Rngs
    ):
        sharding = sharding or Sharding()
        self.config, self.sharding = config, sharding
        key = rngs.params()
        self.embed = nnx.Embed(
            config.vocab_size,
            config.dim,
            param_dtype=config.param_dtype,
            embedding_init=_BLANK,
            rngs=rngs,
        )
        self.layers = nnx.List(
            [Block(config, sharding, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = _norm(config, config.dim, rngs=rngs)
        head = None
        if not config.tie_embeddings:
            head = _linear(config, config.dim, config.vocab_size, rngs=rngs)
        self.head = head
        values = parameters.initial_parameters(config, key)
        nnx.update(self, parameters.from_dict(nnx.to_pure_dict(nnx.state(self)), values))

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
        x = embed(tokens, self.embed.embedding[...], self.config.dtype, self.sharding)
        keep = self.sharding.keep_gathered and self.config.remat != "none"
        run = _gather_and_run if keep else Block.__call__
        block = remat(run, self.config.remat, nnx.remat, [NAME])
        more, present = None, []
        for layer, layer_past in zip(self.layers, past, strict=True):
            x, more, layer_present = block(layer, x, more, rope, layer_past, start)
            present.append(layer_present)
            if self.config.remat != "none":  # of what a block reads one array is kept
                x, more = x + more, None
        x = constrain(_add_and_normalise(self.norm, x, more)[0], self.sharding.block_input)
        table = self.embed.embedding[...] if self.head is None else self.head.kernel[...].T
        logits = constrain(unembed(x, table), self.sharding.logits)
        return logits, cache and Cache(tuple(present), start + tokens.shape[1])


def _gather_and_run(layer: Block, *inputs):
    """A block whose kernels are gathered once, for both ways."""
    graphdef, state = nnx.split(layer)
    dtype = layer.attention.config.dtype
    return nnx.merge(graphdef, gathered(nnx.to_pure_dict(state), dtype, layer.sharding))(*inputs)


def _linear(
    config: TransformerConfig, width_in: int, width_out: int, *, rngs: nnx.Rngs, **options
) -> Linear:
    return Linear(
        width_in,
        width_out,
        **{"use_bias": False, **options},
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=_BLANK,
        rngs=rngs,
    )


def _add_and_normalise(norm: RMSNorm, x: Array, more: Array | None) -> tuple[Array, Array]:
    """`(norm(x + more), x + more)`, in one pass over them each way."""
    if more is None:
        return pause(norm(x)), x
    assert norm.scale is not None
    options = {"eps": norm.epsilon, "implementation": norm.implementation}
    h, x = add_rms_norm(more, x, rounded(norm.scale[...], x.dtype), **options)
    return pause(h), x


def _norm(config: TransformerConfig, width: int, *, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(
        width,
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        implementation=config.implementation,
        rngs=rngs,
    )
