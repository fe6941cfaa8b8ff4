"""The transformer in Flax nnx.

model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
logits = model(tokens)  # (batch, seq) int -> (batch, seq, vocab) float32
"""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from ..layers.nnx import GatedMLP, Linear, RMSNorm
from ..layers.norm import rms_norm
from ..native.dtypes import rounded
from . import parameters, transformer
from .attention import Cache, KeyValue, Rope
from .config import TransformerConfig
from .sharding import Sharding

_ZEROS = nnx.initializers.zeros_init()  # until `parameters.initial_parameters` replace them


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that multiplies by `scale + scale_offset`, in the dtype of its input."""

    def __init__(self, num_features: int, *, scale_offset: float, **options: Any):
        super().__init__(num_features, **options)
        self.scale_offset = scale_offset

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalises the last axis of x."""
        assert mask is None and self.scale is not None
        options = {"eps": self.epsilon, "implementation": self.implementation}
        return rms_norm(
            x, rounded(self.scale[...], x.dtype), scale_offset=self.scale_offset, **options
        )


def _table(layer: nnx.Embed | Linear) -> Array:
    return layer.embedding[...] if isinstance(layer, nnx.Embed) else layer.kernel[...].T


def _map_parameters(function: Callable[[Any], Any], module: nnx.Module) -> nnx.Module:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, function(nnx.to_pure_dict(state)))


def _unquantized(module: nnx.Module) -> nnx.Module:
    module = nnx.merge(*nnx.split(module))  # other objects with the same parameters
    for _, node in nnx.iter_graph(module):
        if isinstance(node, Linear | GatedMLP):
            node.quantization = None
    return module


_OPS = transformer.Ops(
    linear=lambda layer, x: layer(x),
    norm=lambda layer, x: layer(x),
    gated_product=lambda mlp, gate, up, spec: mlp.combine(gate, up, spec),
    quantized_mlp=lambda mlp, x, spec: mlp.apply(x, spec),
    table=_table,
    map_parameters=_map_parameters,
    unquantized=_unquantized,
    checkpoint=nnx.remat,
)


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding, over a window if `local`."""

    def __init__(
        self, config: TransformerConfig, sharding: Sharding, local: bool = False, *, rngs: nnx.Rngs
    ):
        c = config
        self.config, self.sharding, self.local = config, sharding, local
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        quantized = {"quantization": c.quantization, "rngs": rngs}
        project = lambda m: _linear(c, c.dim, m, use_bias=c.attention_bias, **quantized)
        self.q, self.k, self.v = project(heads), project(kv_heads), project(kv_heads)
        self.o = _linear(c, heads, c.dim, **quantized)
        width = lambda features: c.head_dim if c.qk_norm_over == "head" else features
        self.q_norm = _norm(c, width(heads), rngs=rngs) if c.qk_norm else None
        self.k_norm = _norm(c, width(kv_heads), rngs=rngs) if c.qk_norm else None

    def __call__(
        self, x: Array, rope: Rope, cache: KeyValue | None
    ) -> tuple[Array, KeyValue | None]:
        """See `transformer.attention`."""
        return transformer.attention(_OPS, self, x, rope, cache)


class MLP(GatedMLP):
    """`down(activation(gate(x)) * up(x))`; without a gate, `down(activation(up(x)))`."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, rngs: nnx.Rngs):
        self.sharding = sharding
        options = _options(config) | {"quantization": config.quantization, "kernel_init": _ZEROS}
        options["activation"] = config.activation
        super().__init__(config.dim, config.mlp_dim, **options, rngs=rngs)
        if not config.gated:
            del self.gate  # an attribute that holds a module may not become None
            self.gate = None
        for linear in filter(None, (self.gate, self.up, self.down)):
            linear.implementation = self.implementation

    def __call__(self, x: Array) -> Array:
        """See `transformer.mlp`."""
        return transformer.mlp(_OPS, self, x)


class Block(nnx.Module):
    """Attention, then MLP; each reads the residual stream and adds to it, normalised."""

    def __init__(
        self, config: TransformerConfig, sharding: Sharding, local: bool = False, *, rngs: nnx.Rngs
    ):
        self.sharding = sharding
        norm = lambda exists: _norm(config, config.dim, rngs=rngs) if exists else None
        before, after = config.norms != "post", config.norms != "pre"
        self.attention_norm, self.attention_post_norm = norm(before), norm(after)
        self.attention = Attention(config, sharding, local, rngs=rngs)
        self.mlp_norm, self.mlp_post_norm = norm(before), norm(after)
        self.mlp = MLP(config, sharding, rngs=rngs)

    def __call__(
        self, x: Array, rope: Rope, cache: KeyValue | None
    ) -> tuple[Array, KeyValue | None]:
        """See `transformer.block`."""
        return transformer.block(_OPS, self, x, rope, cache)


class Transformer(nnx.Module):
    """Decoder-only transformer: `model(tokens)` scores every next token.

    Args:
      config: shape and precision.
      sharding: where activations lie when called under `jax.set_mesh`; unused without a mesh.
      rngs: its `params` key seeds `normfuse.models.parameters.initial_parameters`; the Equinox
        transformer starts from the same values for the same key.
    """

    def __init__(
        self, config: TransformerConfig, sharding: Sharding | None = None, *, rngs: nnx.Rngs
    ):
        c = config
        self.config, self.sharding = config, sharding or Sharding()
        key = rngs.params()
        options = {"param_dtype": c.param_dtype, "embedding_init": _ZEROS}
        self.embed = nnx.Embed(c.vocab_size, c.dim, **options, rngs=rngs)
        block = lambda i: Block(c, self.sharding, c.is_local(i), rngs=rngs)
        self.layers = nnx.List([block(i) for i in range(c.num_layers)])
        self.norm = _norm(c, c.dim, rngs=rngs)
        self.head = None if c.tie_embeddings else _linear(c, c.dim, c.vocab_size, rngs=rngs)
        values = parameters.initial_parameters(c, key)
        nnx.update(self, parameters.from_dict(nnx.to_pure_dict(nnx.state(self)), values))

    def __call__(self, tokens: Array, segment_ids: Array | None = None) -> Array:
        """Maps `(batch, seq)` integers to `(batch, seq, vocab)` float32 logits.

        With `segment_ids`, integers of the same shape, tokens attend only to those of equal ids.
        """
        return transformer.forward(_OPS, self, tokens, segment_ids=segment_ids)[0]

    def loss(
        self, tokens: Array, targets: Array, segment_ids: Array | None = None, **options: Any
    ) -> Array:
        """Returns the cross-entropy of the tokens that follow; see `transformer.loss`."""
        return transformer.loss(_OPS, self, tokens, targets, segment_ids, **options)

    def decode(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Scores `(batch, seq)` tokens that follow those in the cache, and adds them to it."""
        return transformer.forward(_OPS, self, tokens, cache)


def _options(config: TransformerConfig) -> dict[str, Any]:
    return {
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
        "implementation": config.implementation,
    }


def _linear(config: TransformerConfig, n: int, m: int, **options: Any) -> Linear:
    options = {"use_bias": False, "kernel_init": _ZEROS} | _options(config) | options
    return Linear(n, m, **options)


def _norm(config: TransformerConfig, n: int, *, rngs: nnx.Rngs) -> RMSNorm:
    options = {"epsilon": config.norm_eps, "rngs": rngs} | _options(config)
    if config.norm_offset:
        return OffsetRMSNorm(n, scale_offset=config.norm_offset, **options)
    return RMSNorm(n, **options)
