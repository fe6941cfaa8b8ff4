"""Hugging Face checkpoints of Llama, Qwen2 and Qwen3, in and out, for both frameworks.

model, params = load("path/to/Llama-3.2-1B", "nnx", dtype="bfloat16")
save("path/to/copy", model, params)
"""

import dataclasses
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from . import parameters
from .config import Dtype, RopeScaling, TransformerConfig
from .functional import Framework, Functional, Params, build
from .sharding import Sharding

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them

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

# Fields of TransformerConfig and RopeScaling to theirs.
_FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
}
_OPTIONAL = {"num_kv_heads": None, "head_dim": None, "rope_theta": None, "tie_embeddings": False}
_ROPE_SCALING = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
_ROPE_SCALING["original_max_seq_len"] = "original_max_position_embeddings"
_BIASED = {"llama": False, "qwen2": True, "qwen3": False}  # biases on q, k and v only


def load(
    path: str | os.PathLike,
    framework: Framework,
    *,
    mesh: Mesh | None = None,
    sharding: Sharding | None = None,
    **overrides: Any,
) -> tuple[Functional, Params]:
    """Loads a checkpoint folder: `config.json` and one or several safetensors files.

    Each device reads its own shard of each array, straight from the files. Files are opened only in
    the folder itself: an index that names another place and a link that leads out are refused. (A
    folder of the Hugging Face cache may link to the `blobs` of its own repository.)

    Args:
      path: the folder.
      framework: "nnx" or "eqx".
      mesh: where to put the parameters; None puts them on the default device.
      sharding: how they lie on it; `Sharding()` when None.
      **overrides: fields of `TransformerConfig` that replace the checkpoint's. `param_dtype` is
        float32 unless set, whatever dtype the files hold.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: naming the file and the field, for a file that is damaged or malformed, a model
        that this transformer cannot express, or arrays that are missing, left over or of another
        shape.
    """
    folder = Path(path)
    settings = _read_json(folder, _CONFIG)
    try:
        config = from_huggingface(settings)
    except ValueError as error:
        raise _malformed(folder / _CONFIG, str(error)) from None
    config = dataclasses.replace(config, **overrides)
    stored = _stored(folder)
    _check(folder, config, stored)
    model = build(framework, config, sharding)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = (
        jax.tree.map(lambda _: device, model.abstract)
        if mesh is None
        else model.shardings(model.abstract, mesh)
    )

    def place(tree_path: tuple, leaf: Any, sharding: jax.sharding.Sharding) -> Array:
        name, transposed = parameters.name_of(tree_path)
        array = stored[_their_name(name)]
        turned = name.endswith(".kernel") != transposed  # theirs are (out, in)

        def read(index: Any) -> np.ndarray:
            part = array[index[::-1]].T if turned else array[index]
            return np.asarray(part, config.param_dtype)

        return jax.make_array_from_callback(leaf.shape, sharding, read)

    return model, jax.tree.map_with_path(place, model.abstract, places)


def save(
    path: str | os.PathLike,
    model: Functional,
    params: Params,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 2**30,
) -> None:
    """Writes a checkpoint folder that Hugging Face transformers reads.

    A checkpoint that is there already is replaced when the new one is complete on disk, beside it
    in a subfolder `.saving-*`; other files in the folder are kept. (If the process is killed while
    files are being replaced, the rest of the new checkpoint is in that subfolder.)

    Args:
      path: the folder; made if it does not exist.
      model: the transformer.
      params: its parameters; every array must be readable from this process.
      dtype: to store; `config.param_dtype` when None.
      max_file_bytes: arrays beyond it go to further files, named in an index.

    Raises:
      ValueError: for a configuration that neither Llama, Qwen2 nor Qwen3 can express, or another
        dtype than `TransformerConfig.param_dtype` may have.
      OSError: if the files cannot be written.
    """
    dtype = dtype or model.config.param_dtype
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(map(repr, get_args(Dtype)))}.")
    config = {**to_huggingface(model.config), "torch_dtype": dtype}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    # Not next to the folder, which may be a mounted volume, or its parent read-only.
    new = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        _write(new, config, model.to_dict(params), max_file_bytes)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    # Until its config.json is back, the folder is no checkpoint, rather than a mixture of two.
    for old in (_CONFIG, _INDEX, _SINGLE, "model-*-of-*.safetensors"):
        for file in folder.glob(old):
            file.unlink()
    for file in sorted(new.iterdir(), key=lambda file: file.name == _CONFIG):
        file.replace(folder / file.name)
    new.rmdir()


def _write(
    folder: Path, config: dict[str, Any], values: Mapping[str, Array], max_file_bytes: int
) -> None:
    (folder / _CONFIG).write_text(json.dumps(config, indent=2))
    mode = (folder / _CONFIG).stat().st_mode
    dtype = np.dtype(config["torch_dtype"])
    groups = list(_groups(values, dtype.itemsize, max_file_bytes))
    where = {}
    for i, names in enumerate(groups, 1):
        several = len(groups) > 1
        file = folder / (f"model-{i:05}-of-{len(groups):05}.safetensors" if several else _SINGLE)
        arrays = {}
        for name in names:
            array = np.asarray(values[name]).astype(dtype)
            array = array.T if name.endswith(".kernel") else array
            arrays[_their_name(name)] = np.ascontiguousarray(array)
        try:
            save_file(arrays, file, metadata={"format": "pt"})  # without it, readers refuse
        except SafetensorError as error:
            raise OSError(f"{file} cannot be written: {error}") from None
        file.chmod(mode)  # the library makes files that only their owner reads
        where.update(dict.fromkeys(arrays, file.name))
    if len(groups) > 1:
        total = sum(value.size for value in values.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2))
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _groups(values: Mapping[str, Any], itemsize: int, limit: int) -> Iterator[list[str]]:
    group, size = [], 0
    for name, value in values.items():
        if group and size + value.size * itemsize > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += value.size * itemsize
    yield group


def _their_name(name: str) -> str:
    *modules, kind = name.split(".")
    prefix = ["model"] if modules[0] == "layers" else []
    theirs = [_MODULES.get(module, module) for module in modules]
    return ".".join([*prefix, *theirs, "bias" if kind == "bias" else "weight"])


# ---------------------------------------------------------------- reading untrusted files


def _malformed(file: Path, trouble: str) -> ValueError:
    """One line, whatever the file holds."""
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in trouble)
    return ValueError(f"{file}: {printable if len(printable) <= 500 else printable[:500] + '…'}")


def _file(folder: Path, name: str) -> Path:
    """The path of a regular file of the folder.

    A link may lead to a file of the folder or, in `snapshots/REVISION` of the Hugging Face cache,
    to the `blobs` that all revisions of a repository share.
    """
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if target.parent not in (home, blobs):
        raise _malformed(folder / name, f"is a link out of the folder, to {target}.")
    if not stat.S_ISREG(target.stat().st_mode):
        raise _malformed(folder / name, "is not a regular file.")
    return folder / name


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    file = _file(folder, name)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key!r} occurs twice")
            found[key] = value
        return found

    try:
        value = json.loads(file.read_bytes(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _malformed(file, f"is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise _malformed(file, f"must hold a JSON object, not a {type(value).__name__}.")
    return value


def _stored(folder: Path) -> dict[str, Any]:
    """Every array of the checkpoint by its name there, to be sliced: nothing is read yet."""
    if not (folder / _INDEX).exists():
        if not (folder / _SINGLE).exists():
            raise FileNotFoundError(f"{folder} holds neither {_SINGLE} nor {_INDEX}.")
        return _open(_file(folder, _SINGLE))
    where = _read_json(folder, _INDEX).get("weight_map")
    if not isinstance(where, dict):
        raise _malformed(folder / _INDEX, f"weight_map={where!r} must be an object.")
    for name, file in where.items():
        plain = isinstance(file, str) and file.isprintable() and not {"/", "\\"} & set(file)
        if not plain or file in ("", ".", ".."):
            text = f"weight_map has {name!r} in {file!r}, which must be the name of a file here."
            raise _malformed(folder / _INDEX, text)
    files = {file: _open(_file(folder, file)) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in files[file]:
            raise _malformed(folder / _INDEX, f"weight_map has {name!r} in {file!r}; it is not.")
    return {name: files[file][name] for name, file in where.items()}


def _open(file: Path) -> dict[str, Any]:
    try:
        handle = safe_open(file, framework="np")
        arrays = {name: handle.get_slice(name) for name in handle.keys()}
    except OSError as error:
        raise OSError(f"{file} cannot be read: {error}") from None
    except SafetensorError as error:
        raise _malformed(file, f"is not a safetensors file, or is damaged: {error}.") from None
    for name, array in arrays.items():
        if array.get_dtype() not in _DTYPES:
            kinds = ", ".join(_DTYPES)
            raise _malformed(file, f"holds {name} as {array.get_dtype()}; {kinds} can be read.")
    return arrays


def _check(folder: Path, config: TransformerConfig, stored: dict[str, Any]) -> None:
    if config.num_layers > len(stored):  # else as many names would be made as it says
        text = f"num_hidden_layers={config.num_layers}, but the folder has {len(stored)} arrays."
        raise _malformed(folder / _CONFIG, text)
    expected = {}
    for name, shape in parameters.shapes(config).items():
        expected[_their_name(name)] = shape[::-1] if name.endswith(".kernel") else shape
    # Old checkpoints store the rotary frequencies; some with tied embeddings store them twice.
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    ignored |= {"lm_head.weight"} if config.tie_embeddings else set()
    missing = sorted(set(expected) - set(stored))
    left_over = sorted(set(stored) - set(expected) - ignored)
    for trouble, names in ("lacks", missing), ("holds more than the model:", left_over):
        if names:
            raise _malformed(folder, f"{trouble} {parameters.listed(names)}.")
    for name, shape in expected.items():
        if (found := tuple(stored[name].get_shape())) != shape:
            raise _malformed(folder, f"{name} must have shape {shape}, the file has {found}.")


# ---------------------------------------------------------------- config.json


def from_huggingface(settings: Mapping[str, Any], **overrides: Any) -> TransformerConfig:
    """Reads a Llama, Qwen2 or Qwen3 configuration.

    Args:
      settings: the contents of `config.json`.
      **overrides: fields of `TransformerConfig` to set otherwise: dtype, remat, max_seq_len, …

    Raises:
      ValueError: naming the setting that is missing or malformed, or that this transformer does not
        have.
    """
    kind = settings.get("model_type")
    if kind not in list(_BIASED):  # a list: kind may be anything, hashable or not
        raise ValueError(f"model_type={kind!r} must be one of {', '.join(map(repr, _BIASED))}.")
    _refuse_unknown(settings)
    for ours, theirs in _FIELDS.items():
        if theirs not in settings and ours not in _OPTIONAL:
            raise ValueError(f"{theirs} is missing.")
    fields = {ours: settings.get(theirs, _OPTIONAL.get(ours)) for ours, theirs in _FIELDS.items()}
    dim, heads = fields["dim"], fields["num_heads"]
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = heads
    if fields["head_dim"] is None:  # sizes that do not divide are refused for themselves
        fields["head_dim"] = dim // heads if type(dim) is type(heads) is int and heads else dim
    try:
        fields |= _rope(settings)
        config = TransformerConfig(**fields, qk_norm=kind == "qwen3", attention_bias=_BIASED[kind])
    except ValueError as error:
        names = _FIELDS | _ROPE_SCALING
        theirs = lambda match: names[match[1]] + "="
        raise ValueError(re.sub(rf"\b({'|'.join(names)})=", theirs, str(error))) from None
    return dataclasses.replace(config, **overrides)


def to_huggingface(config: TransformerConfig) -> dict[str, Any]:
    """Writes the configuration as its family does: Llama, Qwen2 (biases) or Qwen3 (`qk_norm`).

    Raises:
      ValueError: for a configuration that none of them can express.
    """
    c = config
    if c.attention_bias and c.qk_norm:
        raise ValueError("no Hugging Face family has both attention_bias and qk_norm.")
    kind = "qwen3" if c.qk_norm else "qwen2" if c.attention_bias else "llama"
    settings = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **{theirs: getattr(c, ours) for ours, theirs in _FIELDS.items()},
        "hidden_act": "silu",
        "torch_dtype": c.param_dtype,
        "use_cache": True,
    }
    if kind != "qwen2":
        settings["attention_bias"] = False
    elif c.num_heads * c.head_dim != c.dim:
        raise ValueError(
            f"Qwen2 has no head_dim of its own: num_heads={c.num_heads} times "
            f"head_dim={c.head_dim} must be dim={c.dim}."
        )
    if c.rope_scaling is not None:
        scaling = {theirs: getattr(c.rope_scaling, ours) for ours, theirs in _ROPE_SCALING.items()}
        settings["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return settings


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    layer_types = settings.get("layer_types") or []
    full = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    unknown = {
        "hidden_act": settings.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": settings["model_type"] != "qwen2" and settings.get("attention_bias"),
        "mlp_bias": settings.get("mlp_bias"),
        "use_sliding_window": settings.get("use_sliding_window"),
        "layer_types": not full,
        "quantization_config": settings.get("quantization_config"),
    }
    for name, is_unknown in unknown.items():
        if is_unknown:
            raise ValueError(f"{name}={settings.get(name)!r}: this transformer has no such thing.")


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Version 5 of transformers moved theta and scaling into one dictionary.
    name = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    rope = settings.get(name) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{name}={rope!r} must be an object.")
    theta = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} must be 'default' or 'llama3'.")
    missing = [theirs for theirs in _ROPE_SCALING.values() if theirs not in rope]
    if missing:
        raise ValueError(f"{name} lacks {missing[0]}.")
    scaling = RopeScaling(**{ours: rope[theirs] for ours, theirs in _ROPE_SCALING.items()})
    return {"rope_theta": theta, "rope_scaling": scaling}
