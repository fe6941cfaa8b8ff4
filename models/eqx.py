"""The transformer in Equinox.

model = Transformer(PRESETS["tiny"], key=jax.random.key(0))
logits = model(tokens)  # (batch, seq) int -> (batch, seq, vocab) float32
"""

import copy
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import Array

from ..layers.dense.dense import apply as apply_dense
from ..layers.dense.gated import apply_product
from ..layers.dense.gated import mlp as apply_mlp
from ..layers.eqx import Linear, RMSNorm
from ..layers.modules import layers_of
from ..layers.norm import rms_norm
from . import parameters, transformer
from .attention import Cache, KeyValue, Rope
from .config import Activation, TransformerConfig
from .sharding import Sharding

# Equinox's layers take one example and know no compute dtype: `jax.vmap(layer)(x)` would widen
# bfloat16 x to a float32 weight. The operations round the weight to x's dtype, not its gradient.


def _apply_linear(layer: Linear, x: Array) -> Array:
    options = {"activation": layer.activation, "implementation": layer.implementation}
    options["quantization"] = layer.quantization
    return apply_dense(x, layer.weight, layer.bias, contract=1, dtype=x.dtype, **options)


def _apply_norm(norm: Callable[[Array], Array], x: Array) -> Array:
    for _ in x.shape[:-1]:
        norm = jax.vmap(norm)
    return norm(x)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that multiplies by `weight + scale_offset`."""

    scale_offset: float = eqx.field(static=True)

    def __init__(self, shape: int, *, scale_offset: float, **options: Any):
        super().__init__(shape, use_bias=False, **options)
        self.scale_offset = scale_offset

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        """Normalises x, one example; the rest is Equinox's, and unused."""
        options = {"eps": self.eps, "implementation": self.implementation}
        return rms_norm(x, self.weight, scale_offset=self.scale_offset, **options)


def _gated_product(mlp: "MLP", gate: Array, up: Array | None, spec: jax.P | None) -> Array:
    down, options = mlp.down, {"dtype": gate.dtype, "contract": 1, "hidden_sharding": spec}
    options |= {"implementation": down.implementation, "quantization": down.quantization}
    return apply_product(gate, up, down.weight, down.bias, mlp.activation, **options)


def _unquantized(module: eqx.Module) -> eqx.Module:
    is_linear = lambda node: isinstance(node, Linear)

    def plain(node: Any) -> Any:
        if is_linear(node):
            node = copy.copy(node)  # any leaves: None, in a filtered tree
            object.__setattr__(node, "quantization", None)
        return node

    return jax.tree.map(plain, module, is_leaf=is_linear)


def _quantized_mlp(mlp: "MLP", x: Array, spec: jax.P | None) -> Array:
    kernels = {name: part.weight for name, part in layers_of(mlp).items()}
    options = {"quantization": mlp.up.quantization, "implementation": mlp.up.implementation}
    options |= {"dtype": x.dtype, "contract": 1, "hidden_sharding": spec}
    return apply_mlp(x, kernels, {}, activation=mlp.activation, **options)


_OPS = transformer.Ops(
    linear=_apply_linear,
    norm=_apply_norm,
    gated_product=_gated_product,
    quantized_mlp=_quantized_mlp,
    table=lambda layer: layer.weight,
    map_parameters=lambda function, module: function(module),
    unquantized=_unquantized,
    checkpoint=jax.checkpoint,
)


class Attention(eqx.Module):
    """Grouped-query attention with rotary embedding, over a window if `local`."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    config: TransformerConfig = eqx.field(static=True)
    sharding: Sharding = eqx.field(static=True)
    local: bool = eqx.field(static=True)

    def __init__(
        self, config: TransformerConfig, sharding: Sharding, local: bool = False, *, key: Array
    ):
        c = config
        self.config, self.sharding, self.local = config, sharding, local
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        quantized = {"quantization": c.quantization, "key": key}
        project = lambda m: _linear(c, c.dim, m, use_bias=c.attention_bias, **quantized)
        self.q, self.k, self.v = project(heads), project(kv_heads), project(kv_heads)
        self.o = _linear(c, heads, c.dim, **quantized)
        width = lambda features: c.head_dim if c.qk_norm_over == "head" else features
        self.q_norm = _norm(c, width(heads)) if c.qk_norm else None
        self.k_norm = _norm(c, width(kv_heads)) if c.qk_norm else None

    def __call__(
        self, x: Array, rope: Rope, cache: KeyValue | None
    ) -> tuple[Array, KeyValue | None]:
        """See `transformer.attention`."""
        return transformer.attention(_OPS, self, x, rope, cache)


class MLP(eqx.Module):
    """`down(activation(gate(x)) * up(x))`; without a gate, `down(activation(up(x)))`."""

    gate: Linear | None
    up: Linear
    down: Linear
    activation: Activation = eqx.field(static=True)
    sharding: Sharding = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, key: Array):
        self.activation, self.sharding = config.activation, sharding
        quantized = {"quantization": config.quantization, "key": key}
        into = lambda: _linear(config, config.dim, config.mlp_dim, **quantized)
        self.gate, self.up = into() if config.gated else None, into()
        self.down = _linear(config, config.mlp_dim, config.dim, **quantized)

    def __call__(self, x: Array) -> Array:
        """See `transformer.mlp`."""
        return transformer.mlp(_OPS, self, x)


class Block(eqx.Module):
    """Attention, then MLP; each reads the residual stream and adds to it, normalised."""

    attention_norm: RMSNorm | None
    attention: Attention
    attention_post_norm: RMSNorm | None
    mlp_norm: RMSNorm | None
    mlp: MLP
    mlp_post_norm: RMSNorm | None
    sharding: Sharding = eqx.field(static=True)

    def __init__(
        self, config: TransformerConfig, sharding: Sharding, local: bool = False, *, key: Array
    ):
        self.sharding = sharding
        norm = lambda exists: _norm(config, config.dim) if exists else None
        before, after = config.norms != "post", config.norms != "pre"
        self.attention_norm, self.attention_post_norm = norm(before), norm(after)
        self.attention = Attention(config, sharding, local, key=key)
        self.mlp_norm, self.mlp_post_norm = norm(before), norm(after)
        self.mlp = MLP(config, sharding, key=key)

    def __call__(
        self, x: Array, rope: Rope, cache: KeyValue | None
    ) -> tuple[Array, KeyValue | None]:
        """See `transformer.block`."""
        return transformer.block(_OPS, self, x, rope, cache)


class Transformer(eqx.Module):
    """Decoder-only transformer: `model(tokens)` scores every next token.

    Its leaves are in `embed`, `layers`, `norm` and, unless embeddings are tied, `head`.

    Args:
      config: shape and precision.
      sharding: where activations lie when called under `jax.set_mesh`; unused without a mesh.
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
        c = config
        self.config, self.sharding = config, sharding or Sharding()
        shapes = lambda: {
            "embed": eqx.nn.Embedding(c.vocab_size, c.dim, dtype=c.param_dtype, key=key),
            "layers": [
                Block(c, self.sharding, c.is_local(i), key=key) for i in range(c.num_layers)
            ],
            "norm": _norm(c, c.dim),
            "head": None if c.tie_embeddings else _linear(c, c.dim, c.vocab_size, key=key),
        }
        values = parameters.initial_parameters(c, key)
        for name, part in parameters.from_dict(jax.eval_shape(shapes), values).items():
            setattr(self, name, part)

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


def _linear(config: TransformerConfig, n: int, m: int, **options: Any) -> Linear:
    shared: dict[str, Any] = {"use_bias": False, "dtype": config.param_dtype}
    shared |= {"implementation": config.implementation}
    return Linear(n, m, **shared | options)


def _norm(config: TransformerConfig, n: int) -> RMSNorm:
    options = {"dtype": config.param_dtype, "implementation": config.implementation}
    if config.norm_offset:
        return OffsetRMSNorm(n, eps=config.norm_eps, scale_offset=config.norm_offset, **options)
    return RMSNorm(n, eps=config.norm_eps, use_bias=False, **options)
