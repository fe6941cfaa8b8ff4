"""Small models of `transformers` with random weights, and its results with them.

python tests/huggingface_models.py NAME ...      records them again, in tests/models/huggingface

Weights are drawn from their names, so that a record is a config.json and an expected.npz: names and
shapes of the weights, tokens, logits, greedy text, and the versions that made them. The first four
are stored as `transformers` saves them, in several files.
"""

import json
import pathlib
import sys
import zlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

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
# interpolated; biases; normalised heads; a window shorter than the sequences.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(head_dim=8)),
    "llama31_tied": (
        "Llama",
        dict(head_dim=8, tie_word_embeddings=True, rope_parameters=_SCALING),
    ),
    "qwen2": ("Qwen2", dict(hidden_size=32)),
    "qwen3": ("Qwen3", dict(head_dim=8)),
    "mistral": ("Mistral", dict(head_dim=8, sliding_window=6)),
}
STORED = ("llama", "llama31_tied", "qwen2", "qwen3")


def weight(name: str, shape: Any, seed: int = 0) -> np.ndarray:
    """Returns bfloat16 numbers, none at its neutral value: a norm's is 1."""
    # This generator's numbers are the same in all versions of NumPy.
    draw = np.random.RandomState(zlib.crc32(f"{name} {seed}".encode())).standard_normal(shape)
    return (0.3 * draw + name.endswith("norm.weight")).astype(ml_dtypes.bfloat16)


def write(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a recorded checkpoint; where only its recipe is stored, `folder`."""
    if name in STORED:
        return FOLDER / name
    (folder / "config.json").write_text((FOLDER / name / "config.json").read_text())
    shapes = json.loads(str(np.load(FOLDER / name / "expected.npz")["shapes"]))
    arrays = {key: weight(key, shape) for key, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make(name: str, seed: int = 0):
    """Makes a model in float32; with another seed than 0, other weights."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**_SHAPE | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            drawn = weight(key, tuple(parameter.shape), seed).astype(np.float32)
            parameter.copy_(torch.from_numpy(drawn))
    return model


def results(model, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns tokens and their logits, and prompts and their greedy continuations."""
    import torch  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, _SHAPE["vocab_size"], (2, 20))
    prompts = tokens[:, :5]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
        given = torch.from_numpy(prompts)
        # Without a mask it takes the prompt's tokens that equal pad_token_id for padding.
        options = {"attention_mask": torch.ones_like(given), "eos_token_id": None}
        drawn = model.generate(given, max_new_tokens=12, do_sample=False, **options)
    return dict(tokens=tokens, logits=logits, prompts=prompts, drawn=drawn[:, 5:].numpy())


def record(name: str):
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = make(name)
    found = results(model)
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    found["shapes"] = np.array(json.dumps(shapes))
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    found["versions"] = np.array(versions)
    # Shards of 20 kB: several files and an index for some of them.
    model.bfloat16().save_pretrained(FOLDER / name, max_shard_size="20KB")
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    if name not in STORED:
        for file in FOLDER.glob(f"{name}/model*"):
            file.unlink()
    np.savez_compressed(FOLDER / name / "expected.npz", **found)


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        record(each)
