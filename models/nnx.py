"""The transformer in Flax nnx.

model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
logits = model(tokens)  # (batch, seq) int -> (batch, seq, vocab) float32
"""

from typing import Any

from flax import nnx

from ..layers.nnx import Linear, RMSNorm
from . import parameters, transformer
from .config import TransformerConfig
from .sharding import Sharding

_ZEROS = nnx.initializers.zeros_init()  # until `parameters.initial_parameters` replace them


class Attention(transformer.Attention, nnx.Module):
    """Grouped-query attention with rotary embedding."""


class MLP(transformer.MLP, nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    layer = Linear


class Block(transformer.Block, nnx.Module):
    """Attention, then MLP; each reads the residual stream, normalised, and adds to it."""


class _Layers:
    attention, mlp, block = Attention, MLP, Block

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        self.options: dict[str, Any] = {"param_dtype": config.param_dtype, "rngs": rngs}
        self.ours = {"dtype": config.dtype, "implementation": config.implementation}

    def linear(self, n: int, m: int, use_bias: bool = False) -> Linear:
        options: dict[str, Any] = {**self.options, **self.ours}
        options["quantization"] = self.config.quantization
        return Linear(n, m, use_bias=use_bias, kernel_init=_ZEROS, **options)

    def norm(self, n: int) -> RMSNorm:
        return RMSNorm(n, epsilon=self.config.norm_eps, **self.options, **self.ours)

    def embedding(self) -> nnx.Embed:
        c = self.config
        return nnx.Embed(c.vocab_size, c.dim, embedding_init=_ZEROS, **self.options)


class Transformer(transformer.Transformer, nnx.Module):
    """Decoder-only transformer: `model(tokens)` scores every next token.

    Args:
      config: shape and precision.
      sharding: where activations lie when called under `jax.set_mesh`; unused without a mesh.
      rngs: its `params` key seeds `normfuse.models.parameters.initial_parameters`; the Equinox
        transformer starts from the same values for the same key.
    """

    checkpoint = staticmethod(nnx.remat)

    def __init__(
        self, config: TransformerConfig, sharding: Sharding | None = None, *, rngs: nnx.Rngs
    ):
        self.config, self.sharding = config, sharding or Sharding()
        key = rngs.params()
        for name, part in transformer.parts(_Layers(config, rngs), self.sharding).items():
            setattr(self, name, nnx.List(part) if isinstance(part, list) else part)
        values = parameters.initial_parameters(config, key)
        nnx.update(self, parameters.from_dict(nnx.to_pure_dict(nnx.state(self)), values))
