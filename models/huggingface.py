"""Hugging Face checkpoints in and out, for both frameworks: Llama, Mistral, Qwen2 and Qwen3.

model, params = load("path/to/Llama-3.2-1B", "nnx", dtype="bfloat16")
save("path/to/copy", model, params)
"""

import dataclasses
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

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
_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names

# Canonical module to theirs; the last part is always `weight` or `bias` there.
_MODULES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
}
_ROPE_SCALING = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
_ROPE_SCALING["original_max_seq_len"] = "original_max_position_embeddings"

# Fields of TransformerConfig: their setting in config.json, and its value where that is missing.
_REQUIRED = object()
_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", _REQUIRED),
    "dim": ("hidden_size", _REQUIRED),
    "mlp_dim": ("intermediate_size", _REQUIRED),
    "num_layers": ("num_hidden_layers", _REQUIRED),
    "num_heads": ("num_attention_heads", _REQUIRED),
    "num_kv_heads": ("num_key_value_heads", None),  # None: as many as query heads
    "head_dim": ("head_dim", None),  # None: hidden_size / num_attention_heads
    "max_seq_len": ("max_position_embeddings", _REQUIRED),
    "norm_eps": ("rms_norm_eps", _REQUIRED),
    "rope_theta": ("rope_theta", 10_000.0),
    "tie_embeddings": ("tie_word_embeddings", False),
}
# Each `model_type`: the name of its classes, and the fields that have another setting or default
# than in `_FIELDS`, or a value that no setting changes. In the order in which `save` looks for one
# that can express a configuration.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": (
        "Mistral",
        {"num_kv_heads": ("num_key_value_heads", 8), "sliding_window": ("sliding_window", 4096)},
    ),
    "qwen2": (
        "Qwen2",
        {"num_kv_heads": ("num_key_value_heads", 32), "head_dim": None, "attention_bias": True},
    ),
    "qwen3": (
        "Qwen3",
        {"num_kv_heads": ("num_key_value_heads", 32), "head_dim": ("head_dim", 128)}
        | {"qk_norm": True},
    ),
}
# Settings that mean another model where they are set.
_OTHERS = "attention_bias mlp_bias use_sliding_window quantization_config".split()


def load(
    path: str | os.PathLike,
    framework: Framework | None = None,
    *,
    mesh: Mesh | None = None,
    sharding: Sharding | None = None,
    **overrides: Any,
) -> tuple[Functional, Params]:
    """Loads a checkpoint folder: `config.json` and one or several safetensors files.

    `model.safetensors` is read where it exists, else the files that the index names. Each device
    reads its own shard of each array, straight from the files.

        model, params = load("path/to/Llama-3.2-1B", "eqx", dtype="bfloat16")
        logits = model(params, tokens)  # as model.apply

    Args:
      path: the folder.
      framework: "nnx" or "eqx"; it must be given.
      mesh: where to put the parameters; None puts them on the default device.
      sharding: how they lie on it; `Sharding()` when None.
      **overrides: fields of `TransformerConfig` that replace the checkpoint's. `param_dtype` is
        float32 unless set, whatever dtype the files hold; `tie_embeddings=True` leaves out a stored
        head.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: for another framework, or naming the file and the field, for a file that is
        damaged or malformed, a model that this transformer cannot express, or arrays that are
        missing, left over or of another shape.

    Warns:
      UserWarning: where the stored head differs from the embeddings that the configuration ties it
        to: it stays a head of its own, as in transformers 5.
    """
    config, stored = opened(Path(path), **overrides)
    model = build(cast(Framework, framework), config, sharding)
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


def opened(folder: Path, **overrides: Any) -> tuple[TransformerConfig, dict[str, Any]]:
    """Returns the configuration that `load` gives a folder's model, and its arrays by names."""
    settings = _read_json(folder / _CONFIG)
    try:
        config = from_huggingface(settings)
    except ValueError as error:
        raise _malformed(folder / _CONFIG, str(error)) from None
    stored = _stored(folder)
    config = dataclasses.replace(config, **overrides)
    if config.tie_embeddings and "tie_embeddings" not in overrides and _has_own_head(stored):
        warnings.warn(
            f"{folder}: lm_head.weight is not model.embed_tokens.weight, so it stays a head of its "
            f"own, although {_CONFIG} says tie_word_embeddings. Pass tie_embeddings=False to keep "
            "it, True to leave it out.",
            stacklevel=3,
        )
        config = dataclasses.replace(config, tie_embeddings=False)
    _check(folder, config, stored)
    return config, stored


def save(
    path: str | os.PathLike,
    model: Functional,
    params: Params,
    *,
    dtype: str | None = None,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes a new checkpoint folder that Hugging Face transformers reads, its arrays in one file.

    It is written beside its place, and renamed when it is complete.

    Args:
      path: the folder, which must not exist, or be empty.
      model: the transformer.
      params: its parameters; every array must be readable from this process.
      dtype: to store; `config.param_dtype` when None.
      files: further files of the folder, text by name: a tokenizer.json.

    Raises:
      FileExistsError: if the folder holds anything.
      ValueError: for a configuration that no family can express, or another dtype than
        `TransformerConfig.param_dtype` may have.
      OSError: if the files cannot be written.
    """
    dtype = dtype or model.config.param_dtype
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(map(repr, get_args(Dtype)))}.")
    config = {**to_huggingface(model.config), "torch_dtype": dtype}
    folder = Path(os.path.abspath(path))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already: save to a new folder, or remove it first.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
        new = Path(beside, "new")
        new.mkdir()
        arrays = {}
        for name, value in model.to_dict(params).items():
            array = np.asarray(value).astype(np.dtype(dtype))
            array = array.T if name.endswith(".kernel") else array
            arrays[_their_name(name)] = np.ascontiguousarray(array)
        try:
            save_file(arrays, new / _SINGLE, metadata={"format": "pt"})  # else readers refuse
        except SafetensorError as error:
            raise OSError(f"{new / _SINGLE} cannot be written: {error}") from None
        for name, content in {_CONFIG: json.dumps(config, indent=2), **files}.items():
            (new / name).write_text(content, encoding="utf-8")
        for file in new.iterdir():
            file.chmod((new / _CONFIG).stat().st_mode)  # safetensors' are for their owner alone
        new.rename(folder)


def _their_name(name: str) -> str:
    *modules, kind = name.split(".")
    prefix = ["model"] if modules[0] == "layers" else []
    theirs = [_MODULES.get(module, module) for module in modules]
    return ".".join([*prefix, *theirs, "bias" if kind == "bias" else "weight"])


# ---------------------------------------------------------------- reading untrusted files


def _malformed(file: Path, trouble: str) -> ValueError:
    """One line, whatever the file holds."""
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in trouble)
    return ValueError(f"{file}: {printable[:500]}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _malformed(file, f"is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise _malformed(file, f"must hold a JSON object, not a {type(value).__name__}.")
    return value


def _stored(folder: Path) -> dict[str, Any]:
    """Every array of the checkpoint by its name there, to be sliced: nothing is read yet."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists():
        return _open(single)
    if not index.exists():
        raise FileNotFoundError(f"{folder} holds neither {_SINGLE} nor {_INDEX}.")
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict):
        raise _malformed(index, f"weight_map={where!r} must be an object.")
    files: dict[Any, dict[str, Any]] = {}
    for name, file in where.items():
        if not isinstance(file, str) or not file.isprintable() or Path(file).name != file:
            text = f"weight_map has {name!r} in {file!r}, which must be the name of a file here."
            raise _malformed(index, text)
        files[file] = files.get(file) or _open(folder / file)
        if name not in files[file]:
            raise _malformed(index, f"weight_map has {name!r} in {file!r}; it is not.")
    return {name: files[file][name] for name, file in where.items()}


def _open(file: Path) -> dict[str, Any]:
    if file.exists() and not file.is_file():
        raise _malformed(file, "is not a file.")
    try:
        handle = safe_open(file, framework="np")
        arrays = {name: handle.get_slice(name) for name in handle.keys()}
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
    shapes = {
        name: tuple(array.get_shape())
        for name, array in stored.items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if config.tie_embeddings:
        shapes.pop("lm_head.weight", None)
    for name in sorted(expected | shapes):
        if (ours := expected.get(name, "none")) != (theirs := shapes.get(name, "none")):
            raise _malformed(folder, f"{name} must have shape {ours}, the file has {theirs}.")


def _has_own_head(stored: dict[str, Any]) -> bool:
    """True where the files hold a head that is not a copy of the embeddings."""
    head, embedding = (stored.get(_their_name(f"{name}.")) for name in ("head", "embed"))
    if head is None or embedding is None:
        return False
    return head.get_shape() != embedding.get_shape() or not np.array_equal(head[:], embedding[:])


# ---------------------------------------------------------------- config.json


def from_huggingface(settings: Mapping[str, Any], **overrides: Any) -> TransformerConfig:
    """Reads a family's configuration.

    Args:
      settings: the contents of `config.json`.
      **overrides: fields of `TransformerConfig` to set otherwise: dtype, remat, max_seq_len, …

    Raises:
      ValueError: naming the setting that is missing or malformed, or that this transformer does not
        have.
    """
    kind = settings.get("model_type")
    if kind not in list(_FAMILIES):  # a list: kind may be anything, hashable or not
        raise ValueError(f"model_type={kind!r} must be one of {', '.join(map(repr, _FAMILIES))}.")
    fields: dict[str, Any] = _FIELDS | _FAMILIES[kind][1]
    for name in _OTHERS:
        if settings.get(name) and name not in fields:
            raise ValueError(f"{name}={settings[name]!r}: this transformer has no such thing.")
    if settings.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act={settings['hidden_act']!r} must be 'silu'.")
    names = _names(fields)
    for field, setting in names.items():
        fields[field] = settings.get(setting, fields[field][1])
        if fields[field] is _REQUIRED:
            raise ValueError(f"{setting} is missing.")
    dim, heads = fields["dim"], fields["num_heads"]
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = heads
    if fields["head_dim"] is None:  # sizes that do not divide are refused for themselves
        fields["head_dim"] = dim // heads if type(dim) is type(heads) is int and heads else dim
    alike = "full_attention" if fields.get("sliding_window") is None else "sliding_attention"
    types = settings.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(x == alike for x in types)):
        raise ValueError(f"layer_types={types!r} must all be {alike!r}.")
    try:
        config = TransformerConfig(**fields | _rope(settings))
    except ValueError as error:
        names |= _ROPE_SCALING
        theirs = lambda match: names[match[1]] + "="
        raise ValueError(re.sub(rf"\b({'|'.join(names)})=", theirs, str(error))) from None
    return dataclasses.replace(config, **overrides)


def to_huggingface(config: TransformerConfig) -> dict[str, Any]:
    """Writes the configuration as the first family does that can express it.

    Raises:
      ValueError: for a configuration that none of them can express.
    """
    misfits: dict[str, list[str]] = {}
    ours = vars(config)
    for kind in _FAMILIES:
        settings = _settings(config, kind)
        try:
            read = from_huggingface(settings, **{name: ours[name] for name in _RUN})
        except ValueError:  # head_dim is none of its widths
            continue
        theirs = vars(read)
        misfits[kind] = [f"{name}={ours[name]!r}" for name in ours if ours[name] != theirs[name]]
        if not misfits[kind]:
            return settings
    nearest = min(misfits, key=lambda kind: len(misfits[kind]))
    raise ValueError(
        f"no Hugging Face family has this configuration; {nearest} is nearest, but has no "
        f"{' and no '.join(misfits[nearest])}."
    )


_RUN = "dtype param_dtype remat attention implementation quantization".split()  # in no family


def _names(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings by the fields that they set."""
    return {field: setting[0] for field, setting in fields.items() if isinstance(setting, tuple)}


def _settings(config: TransformerConfig, kind: str) -> dict[str, Any]:
    """Returns a family's settings with as much of the configuration as they express."""
    classes, own = _FAMILIES[kind]
    settings = {
        "architectures": [f"{classes}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        **{name: getattr(config, field) for field, name in _names(_FIELDS | own).items()},
        "torch_dtype": config.param_dtype,
    }
    if "attention_bias" not in own:
        settings["attention_bias"] = False
    if (scaling := config.rope_scaling) is not None:
        values = {theirs: getattr(scaling, ours) for ours, theirs in _ROPE_SCALING.items()}
        settings["rope_scaling"] = {"rope_type": "llama3", **values}
    return settings


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Version 5 of transformers moved theta and scaling into one dictionary.
    newer, older = (settings.get(name) for name in ("rope_parameters", "rope_scaling"))
    both = isinstance(newer, dict) and isinstance(older, dict)
    if newer and older and not (both and older.items() <= newer.items()):
        # Version 5 would take the older one, version 4 knows no other.
        raise ValueError(f"rope_scaling={older!r} and rope_parameters={newer!r}: leave out one.")
    name = "rope_parameters" if newer else "rope_scaling"
    rope = newer or older or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{name}={rope!r} must be an object.")
    fields = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    for part in settings, rope:
        if (fraction := part.get("partial_rotary_factor")) not in (None, 1):
            raise ValueError(f"partial_rotary_factor={fraction!r}: heads are rotated as a whole.")
    without = None if "factor" in rope else "default"  # a factor of no type is not ignored
    kind = rope.get("rope_type", rope.get("type", without))
    if kind == "default":
        return fields
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} must be 'default' or 'llama3'.")
    missing = [theirs for theirs in _ROPE_SCALING.values() if theirs not in rope]
    if missing:
        raise ValueError(f"{name} lacks {missing[0]}.")
    scaling = {ours: rope[theirs] for ours, theirs in _ROPE_SCALING.items()}
    return fields | {"rope_scaling": RopeScaling(**scaling)}
