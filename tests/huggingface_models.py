"""Small models of `transformers` with random weights, and what it computes with them.

python tests/huggingface_models.py      records them again, in tests/models/huggingface
"""

import pathlib
import sys
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).parent / "models" / "huggingface"
_SHAPE: dict[str, Any] = dict(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
_SCALING = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=0.03,
    high_freq_factor=2.0,
    original_max_position_embeddings=16,
)
# A head_dim that is not hidden_size / num_attention_heads; wavelengths kept, stretched and
# interpolated; biases; normalised heads.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(head_dim=8)),
    "llama31_tied": (
        "Llama",
        dict(head_dim=8, tie_word_embeddings=True, rope_parameters=_SCALING),
    ),
    "qwen2": ("Qwen2", dict(hidden_size=32)),
    "qwen3": ("Qwen3", dict(head_dim=8)),
}


def make(name: str, seed: int = 0):
    """Makes a model in float32 whose weights are bfloat16 numbers, none at its neutral value."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    family, changes = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**_SHAPE | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn_like(parameter)
            neutral = 1.0 if parameter_name.endswith("norm.weight") else 0.0
            parameter.copy_((noise + neutral).bfloat16().float())
    return model


def results(model, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns tokens and their logits, and prompts and their greedy continuations."""
    import torch  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, _SHAPE["vocab_size"], (2, 20))
    prompts = tokens[:, :5]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
        drawn = model.generate(
            torch.from_numpy(prompts), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    return dict(tokens=tokens, logits=logits, prompts=prompts, drawn=drawn[:, 5:].numpy())


def record(name: str):
    model = make(name)
    found = results(model)
    # Shards of 20 kB: several files and an index for some of them.
    model.bfloat16().save_pretrained(FOLDER / name, max_shard_size="20KB")
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(FOLDER / name / "expected.npz", **found)


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        record(each)
