"""A Hugging Face `config.json` and our configuration, each from the other."""

from typing import Any

from .config import RopeScaling, TransformerConfig

_BIASED = {"llama": False, "qwen2": True, "qwen3": False}  # biases on q, k and v only
_ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}


def from_huggingface(config: dict[str, Any], **overrides: Any) -> TransformerConfig:
    """Reads a Llama, Qwen2 or Qwen3 configuration.

    Args:
      config: the contents of `config.json`.
      **overrides: fields of `TransformerConfig` to set otherwise: dtype, remat, max_seq_len, …

    Raises:
      ValueError: naming the setting that this transformer does not have.
    """
    kind = config.get("model_type")
    if kind not in _BIASED:
        raise ValueError(f"model_type={kind!r} must be one of {', '.join(map(repr, _BIASED))}.")
    _refuse_unknown(config)
    heads = config["num_attention_heads"]
    fields = dict(
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp_dim=config["intermediate_size"],
        max_seq_len=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        qk_norm=kind == "qwen3",
        attention_bias=_BIASED[kind],
        tie_embeddings=config.get("tie_word_embeddings", False),
        **_rope(config),
    )
    return TransformerConfig(**{**fields, **overrides})


def to_huggingface(config: TransformerConfig) -> dict[str, Any]:
    """Writes the configuration as its family does: Llama, Qwen2 (biases) or Qwen3 (`qk_norm`).

    Raises:
      ValueError: for a configuration that none of them can express.
    """
    c = config
    if c.attention_bias and c.qk_norm:
        raise ValueError("no Hugging Face family has both attention_bias and qk_norm.")
    kind = "qwen3" if c.qk_norm else "qwen2" if c.attention_bias else "llama"
    result = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_seq_len,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": c.tie_embeddings,
        "torch_dtype": c.param_dtype,
        "use_cache": True,
    }
    if kind != "qwen2":
        result["attention_bias"] = False
    elif c.num_heads * c.head_dim != c.dim:
        raise ValueError(
            f"Qwen2 has no head_dim of its own: num_heads={c.num_heads} times "
            f"head_dim={c.head_dim} must be dim={c.dim}."
        )
    if c.rope_scaling is not None:
        scaling = {theirs: getattr(c.rope_scaling, ours) for ours, theirs in _ROPE_SCALING.items()}
        result["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return result


def _refuse_unknown(config: dict[str, Any]):
    unknown = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": config["model_type"] != "qwen2" and config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "use_sliding_window": config.get("use_sliding_window"),
        "layer_types": set(config.get("layer_types") or ()) - {"full_attention"},
        "quantization_config": config.get("quantization_config"),
    }
    for name, is_unknown in unknown.items():
        if is_unknown:
            raise ValueError(f"{name}={config.get(name)!r}: this transformer has no such thing.")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    # Version 5 of transformers moved theta and scaling into one dictionary.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} must be 'default' or 'llama3'.")
    fields = {ours: rope[theirs] for ours, theirs in _ROPE_SCALING.items()}
    return {"rope_theta": theta, "rope_scaling": RopeScaling(**fields)}
