"""The transformer's configuration: its shape, its precision, and the presets.

Nothing here imports JAX, so that a command line can check a configuration without delay.
"""

import dataclasses
import math
from typing import Any, Literal, get_args, get_origin

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Remat = Literal["none", "block", "dots"]
AttentionImplementation = Literal["auto", "xla", "cudnn"]
Implementation = Literal["native", "pallas", "xla"]
Quantization = Literal["fp8"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary wavelengths for sequences beyond the length trained on.

    As in Llama 3.1 those above `original_max_seq_len / low_freq_factor` grow by `factor`, those
    below `original_max_seq_len / high_freq_factor` stay, and those between are interpolated.

    Raises:
      ValueError: naming the field, its value and the rule it breaks.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        _check(_in_float32(self.factor, 1), "factor", self.factor, "must be at least 1, and finite")
        both = (self.low_freq_factor, self.high_freq_factor)
        ordered = all(_in_float32(factor, 0) for factor in both) and 0 < both[0] < both[1]
        _check(ordered, "low_freq_factor, high_freq_factor", both, "must be positive and ascending")
        _check_size("original_max_seq_len", self.original_max_seq_len)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, gated MLP.

    By default Llama's. The other fields make it Qwen's or Mistral's.

    Attributes:
      vocab_size: number of tokens.
      dim: width of the residual stream.
      num_layers: number of blocks.
      num_heads: query heads; a multiple of `num_kv_heads`.
      num_kv_heads: key and value heads (`num_heads`: multi-head, 1: multi-query attention).
      head_dim: width of one head, even; `num_heads * head_dim` need not be `dim`.
      mlp_dim: hidden width of the MLP.
      max_seq_len: longest sequence accepted.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: scaling of them, or None.
      norm_eps: added to the mean square in every RMSNorm.
      qk_norm: normalise each head's queries and keys (Qwen3).
      tie_embeddings: the embedding is also the output projection.
      attention_bias: biases on the query, key and value projections (Qwen2).
      sliding_window: how many tokens each attends to, itself included (Mistral); None: all before.
      dtype: compute dtype: residual stream, GEMM operands, norms' results. Logits are float32
        (float64 when this is float64).
      param_dtype: dtype the parameters are stored in.
      remat: what the backward pass recomputes: "none"; "block", everything inside a block;
        "dots", everything but the GEMMs' results.
      attention: what computes attention, as in `normfuse.attention`. "auto" takes cuDNN on NVIDIA
        GPUs where it serves, else "xla", blocks of queries and keys.
      implementation: of every operation of normfuse in the model: the norms (alone and with the
        residual added), the linear layers and the MLP's gated product, as in `normfuse.rms_norm`,
        `dense` and `gated_product`. None takes the best here. A single name is strict: "native"
        raises NotImplementedError on CPUs, which have no kernel for the gated product, where
        `("native", "xla")` runs. Attention has `attention`; embedding and logits are JAX's.
      quantization: "fp8" multiplies in FP8 in the blocks' linear layers, forward and backward, as
        in `normfuse.dense`, and in the products of the loss's gradient; the embedding, norms,
        attention, logits and the loss stay in `dtype`, and so does generation
        (`Transformer.decode`). The parameters are the same. None: everything in `dtype`.

    Raises:
      ValueError: naming the field, its value and the rule it breaks.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tie_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"
    remat: Remat = "none"
    attention: AttentionImplementation = "auto"
    implementation: Implementation | tuple[Implementation, ...] | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        heads, kv_heads = self.num_heads, self.num_kv_heads
        rule = f"must be a multiple of num_kv_heads={kv_heads}: each key head serves equally many"
        _check(heads % kv_heads == 0, "num_heads", heads, rule)
        even = self.head_dim % 2 == 0
        _check(even, "head_dim", self.head_dim, "must be even: rotary embedding turns pairs")
        eps, theta, scaling = self.norm_eps, self.rope_theta, self.rope_scaling
        _check(_in_float32(eps, 0), "norm_eps", eps, "must be finite and not negative")
        above = _in_float32(theta, 1) and theta != 1
        _check(above, "rope_theta", theta, "must be finite, above 1")
        if self.sliding_window is not None:
            _check_size("sliding_window", self.sliding_window)
        known = scaling is None or isinstance(scaling, RopeScaling)
        _check(known, "rope_scaling", scaling, "must be a RopeScaling or None")
        for field in dataclasses.fields(self):
            if field.type is bool or get_origin(field.type) is Literal:
                allowed = get_args(field.type) or (True, False)
                _one_of(field.name, getattr(self, field.name), allowed)
        _one_of("quantization", self.quantization, (None, *get_args(Quantization)))
        if self.quantization is not None and self.dtype == "float64":
            rule = "cannot go with dtype='float64': FP8 products have a narrower compute dtype"
            raise ValueError(f"quantization={self.quantization!r} {rule}.")
        chosen = self.implementation
        for name in chosen if isinstance(chosen, tuple) else () if chosen is None else (chosen,):
            _one_of("implementation", name, get_args(Implementation))


_SIZES = "vocab_size dim num_layers num_heads num_kv_heads head_dim mlp_dim max_seq_len".split()
_LARGEST = 3.4028234663852886e38  # float32's


def _check(valid: bool, name: str, value: object, rule: str) -> None:
    if not valid:
        raise ValueError(f"{name}={value!r} {rule}.")


def _check_size(name: str, size: Any) -> None:
    whole = isinstance(size, int) and not isinstance(size, bool)
    _check(whole and size >= 1, name, size, "must be an integer of at least 1")
    _check(size < 2**31, name, size, "must be below 2**31")


def _in_float32(value: Any, least: float) -> bool:
    """Returns whether it is a number of at least `least` that float32 holds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and least <= value <= _LARGEST


def _one_of(name: str, value: object, allowed: tuple) -> None:
    same = any(isinstance(value, type(choice)) and value == choice for choice in allowed)
    _check(same, name, value, f"must be one of {', '.join(map(repr, allowed))}")


PRESETS: dict[str, TransformerConfig] = {
    # vocab_size, dim, num_layers, num_heads, num_kv_heads, head_dim, mlp_dim, max_seq_len
    # 0.7 M parameters: reads bytes, trains in a minute on two CPU cores.
    "tiny": TransformerConfig(256, 128, 3, 4, 4, 32, 384, 1024, tie_embeddings=True),
    # 124 M and 360 M: the depth and width of GPT-2 small and medium. GPT-2's vocabulary is rounded
    # up to a multiple of 128 so that GEMMs and mesh axes divide it.
    "small": TransformerConfig(50_304, 768, 12, 12, 12, 64, 2048, 2048, tie_embeddings=True),
    "medium": TransformerConfig(50_304, 1024, 24, 16, 16, 64, 2816, 2048, tie_embeddings=True),
    # 1.2 B and 8.0 B: the shapes of Llama 3.2 1B and Llama 3 8B.
    "1b": TransformerConfig(
        128_256, 2048, 16, 32, 8, 64, 8192, 8192, rope_theta=500_000.0, tie_embeddings=True
    ),
    "8b": TransformerConfig(128_256, 4096, 32, 32, 8, 128, 14_336, 8192, rope_theta=500_000.0),
}


def shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Lists every parameter's canonical name with its shape, in the order of computation."""
    c = config
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    block: dict[str, tuple[int, ...]] = {"attention_norm.scale": (c.dim,)}
    for name, width in ("q", heads), ("k", kv_heads), ("v", kv_heads):
        block[f"attention.{name}.kernel"] = (c.dim, width)
        block |= {f"attention.{name}.bias": (width,)} if c.attention_bias else {}
    for name in ("q_norm", "k_norm") if c.qk_norm else ():
        block[f"attention.{name}.scale"] = (c.head_dim,)
    block["attention.o.kernel"] = (heads, c.dim)
    block["mlp_norm.scale"] = (c.dim,)
    for name in "gate", "up":
        block[f"mlp.{name}.kernel"] = (c.dim, c.mlp_dim)
    block["mlp.down.kernel"] = (c.mlp_dim, c.dim)
    every: dict[str, tuple[int, ...]] = {"embed.embedding": (c.vocab_size, c.dim)}
    for i in range(c.num_layers):
        every |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    every["norm.scale"] = (c.dim,)
    return every if c.tie_embeddings else every | {"head.kernel": (c.dim, c.vocab_size)}


def num_parameters(config: TransformerConfig) -> int:
    """Counts every parameter, a tied embedding once."""
    return sum(map(math.prod, shapes(config).values()))
