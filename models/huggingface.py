"""Hugging Face checkpoints of Llama, Qwen2 and Qwen3, in and out, for both frameworks.

model, params = load("path/to/Llama-3.2-1B", "nnx", dtype="bfloat16")
save("path/to/copy", model, params)
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from . import parameters, tensor_file
from .functional import Framework, Functional, Params, build
from .huggingface_config import from_huggingface, to_huggingface
from .sharding import Sharding

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Canonical module to theirs; the last part is always `weight` or `bias` there.
_MODULES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
    "q_norm": "q_norm",
    "k_norm": "k_norm",
}


def load(
    path: str | os.PathLike,
    framework: Framework,
    *,
    mesh: Mesh | None = None,
    sharding: Sharding | None = None,
    **overrides: Any,
) -> tuple[Functional, Params]:
    """Loads a checkpoint folder: `config.json` beside one or several safetensors files.

    Each device reads its own shard of each array, straight from the files.

    Args:
      path: the folder.
      framework: "nnx" or "eqx".
      mesh: where to put the parameters; None puts them on the default device.
      sharding: how they lie on it; `Sharding()` when None.
      **overrides: fields of `TransformerConfig` other than the checkpoint's. `param_dtype` is
        float32 unless set, whatever dtype the files hold.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: for a model this transformer cannot express, or arrays that are missing, left over
        or of another shape.
    """
    path = Path(path)
    config = from_huggingface(json.loads((path / _CONFIG).read_text()), **overrides)
    model = build(framework, config, sharding)
    stored = _stored(path)
    _check(path, config.tie_embeddings, parameters.shapes(config), stored)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = (
        jax.tree.map(lambda _: device, model.abstract)
        if mesh is None
        else model.shardings(model.abstract, mesh)
    )

    def place(tree_path, leaf, sharding):
        name, transposed = parameters.name_of(tree_path)
        array, is_kernel = stored[_their_name(name)], name.endswith(".kernel")
        array = array.T if is_kernel != transposed else array  # theirs are (out, in)
        read = lambda index: np.asarray(array[index]).astype(config.param_dtype)
        return jax.make_array_from_callback(leaf.shape, sharding, read)

    return model, jax.tree.map_with_path(place, model.abstract, places)


def save(
    path: str | os.PathLike,
    model: Functional,
    params: Params,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 2**30,
):
    """Writes a checkpoint folder that Hugging Face transformers reads.

    Args:
      path: the folder; made if it is not there.
      model: the transformer.
      params: its parameters; every array must be readable from this process.
      dtype: to store; `config.param_dtype` when None.
      max_file_bytes: arrays beyond it go to further files, named in an index.

    Raises:
      ValueError: for a configuration that neither Llama, Qwen2 nor Qwen3 can express.
    """
    path = Path(path)
    config = {**to_huggingface(model.config), "torch_dtype": dtype or model.config.param_dtype}
    path.mkdir(parents=True, exist_ok=True)
    for old in itertools.chain(path.glob("model*.safetensors"), path.glob(_INDEX)):
        old.unlink()  # an index beside a single file would win over it
    values = model.to_dict(params)
    itemsize = np.dtype(config["torch_dtype"]).itemsize
    groups = list(_groups(values, itemsize, max_file_bytes))
    files = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    files = [_SINGLE] if len(groups) == 1 else files
    where = {}
    for file, names in zip(files, groups, strict=True):
        arrays = {}
        for name in names:
            array = np.asarray(values[name]).astype(config["torch_dtype"])
            arrays[_their_name(name)] = array.T if name.endswith(".kernel") else array
        tensor_file.write(path / file, arrays)
        where.update(dict.fromkeys(arrays, file))
    if len(files) > 1:
        total = sum(value.size for value in values.values()) * itemsize
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (path / _INDEX).write_text(json.dumps(index, indent=2))
    (path / _CONFIG).write_text(json.dumps(config, indent=2))


def _their_name(name: str) -> str:
    *modules, kind = name.split(".")
    prefix = ["model"] if modules[0] == "layers" else []
    theirs = [_MODULES.get(module, module) for module in modules]
    return ".".join([*prefix, *theirs, "bias" if kind == "bias" else "weight"])


def _stored(path: Path) -> dict[str, np.ndarray]:
    if (path / _INDEX).exists():
        where = json.loads((path / _INDEX).read_text())["weight_map"]
        files = {file: tensor_file.read(path / file) for file in sorted(set(where.values()))}
        return {name: files[file][name] for name, file in where.items()}
    if not (path / _SINGLE).exists():
        raise FileNotFoundError(f"{path} holds neither {_SINGLE} nor {_INDEX}.")
    return tensor_file.read(path / _SINGLE)


def _check(path: Path, tied: bool, shapes: dict[str, tuple[int, ...]], stored: dict):
    expected = {}
    for name, shape in shapes.items():
        expected[_their_name(name)] = shape[::-1] if name.endswith(".kernel") else shape
    # Old checkpoints store the rotary frequencies; some with tied embeddings store them twice.
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    ignored |= {"lm_head.weight"} if tied else set()
    missing = sorted(set(expected) - set(stored))
    left_over = sorted(set(stored) - set(expected) - ignored)
    for trouble, listed in ("lacks", missing), ("holds more than the model:", left_over):
        if listed:
            more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
            raise ValueError(f"{path} {trouble} {', '.join(listed[:3])}{more}.")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise ValueError(f"{name} must have shape {shape}, {path} has {stored[name].shape}.")


def _groups(values: dict[str, Any], itemsize: int, limit: int) -> Iterator[Iterable[str]]:
    group, size = [], 0
    for name, value in values.items():
        if group and size + value.size * itemsize > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += value.size * itemsize
    yield group
