"""The transformer in Equinox.

model = Transformer(PRESETS["tiny"], key=jax.random.key(0))
logits = model(tokens)  # (batch, seq) int -> (batch, seq, vocab) float32
"""

from typing import Any

import equinox as eqx
import jax
from jax import Array

from ..layers.eqx import Linear as _Linear
from ..layers.eqx import RMSNorm as _RMSNorm
from ..layers.norm import rms_norm
from . import parameters, transformer
from .config import TransformerConfig
from .sharding import Sharding

# Equinox's layers take one example and know no compute dtype: `jax.vmap(layer)(x)` would widen
# bfloat16 x to a float32 weight. These round the weight to x's dtype, not its gradient.


class Linear(_Linear):
    """A linear layer for arrays `(*rows, in_features)`, in the dtype of its input."""

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """Multiplies the last axis of x by the weight; `key` is ignored."""
        return self.multiply(x, lambda: x)

    def unserved(self, x: Array) -> str:
        """Returns "": the operation serves all that a transformer has."""
        return ""

    def compute_dtype(self, *arrays: Array | None) -> Any:
        """Returns the dtype of x."""
        assert arrays[0] is not None
        return arrays[0].dtype


class RMSNorm(_RMSNorm):
    """RMSNorm of the last axis."""

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        """Normalises the last axis of x; the rest is Equinox's, and unused."""
        return rms_norm(x, self.weight, eps=self.eps, implementation=self.implementation)


class Attention(transformer.Attention, eqx.Module):
    """Grouped-query attention with rotary embedding."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    config: TransformerConfig = eqx.field(static=True)
    sharding: Sharding = eqx.field(static=True)


class MLP(transformer.MLP, eqx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    gate: Linear
    up: Linear
    down: Linear
    implementation: Any = eqx.field(static=True)
    quantization: Any = eqx.field(static=True)
    sharding: Sharding = eqx.field(static=True)
    layer = Linear


class Block(transformer.Block, eqx.Module):
    """Attention, then MLP; each reads the residual stream, normalised, and adds to it."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP
    sharding: Sharding = eqx.field(static=True)


class _Layers:
    attention, mlp, block = Attention, MLP, Block

    def __init__(self, config: TransformerConfig, key: Array):
        self.config, self.key = config, key
        self.options: dict[str, Any] = {"dtype": config.param_dtype}
        self.options["implementation"] = config.implementation

    def linear(self, n: int, m: int, use_bias: bool = False) -> Linear:
        options: dict[str, Any] = {**self.options, "quantization": self.config.quantization}
        options["key"] = self.key
        return Linear(in_features=n, out_features=m, use_bias=use_bias, **options)

    def norm(self, n: int) -> RMSNorm:
        return RMSNorm((n,), eps=self.config.norm_eps, use_bias=False, **self.options)

    def embedding(self) -> eqx.nn.Embedding:
        c = self.config
        return eqx.nn.Embedding(c.vocab_size, c.dim, dtype=c.param_dtype, key=self.key)


class Transformer(transformer.Transformer, eqx.Module):
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
    # In an `eqx.Module`'s own body, so that bound methods are pytrees.
    loss, decode = transformer.Transformer.loss, transformer.Transformer.decode

    def __init__(self, config: TransformerConfig, sharding: Sharding | None = None, *, key: Array):
        self.config, self.sharding = config, sharding or Sharding()
        make = lambda: transformer.parts(_Layers(config, key), self.sharding)
        values = parameters.initial_parameters(config, key)
        for name, part in parameters.from_dict(jax.eval_shape(make), values).items():
            setattr(self, name, part)
