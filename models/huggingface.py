"""Hugging Face checkpoints in and out, for both frameworks.

Llama, Mistral, Qwen2, Qwen3, OLMo 2, Gemma, Gemma 2 and Gemma 3 (text).

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
from typing import Any, NamedTuple, get_args

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
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
_LETTERS = {"sliding_attention": "L", "full_attention": "G"}
_ROPE_SCALING = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
_ROPE_SCALING["original_max_seq_len"] = "original_max_position_embeddings"
_REQUIRED = object()


class _Setting(NamedTuple):
    name: str
    default: Any = _REQUIRED  # its value where config.json lacks it


# Fields of TransformerConfig that every family has.
_FIELDS = {
    "vocab_size": _Setting("vocab_size"),
    "dim": _Setting("hidden_size"),
    "mlp_dim": _Setting("intermediate_size"),
    "num_layers": _Setting("num_hidden_layers"),
    "num_heads": _Setting("num_attention_heads"),
    "num_kv_heads": _Setting("num_key_value_heads", None),  # None: as many as query heads
    "head_dim": _Setting("head_dim", None),  # None: hidden_size / num_attention_heads
    "max_seq_len": _Setting("max_position_embeddings"),
    "norm_eps": _Setting("rms_norm_eps"),
    "rope_theta": _Setting("rope_theta", 10_000.0),
    "tie_embeddings": _Setting("tie_word_embeddings", False),
    "activation": _Setting("hidden_act", "silu"),
}


class _Family(NamedTuple):
    """One `model_type`, by the fields in which it differs from `_FIELDS`."""

    classes: str  # the beginning of its classes' names
    fields: Mapping[str, Any]  # a setting, or the value that no setting changes
    # The layers after which its pattern of local and global ones repeats, the last of them global,
    # where `layer_types` is missing; 0 where all layers are alike.
    period: int = 0


_kv_heads = lambda default: {"num_kv_heads": _Setting("num_key_value_heads", default)}
_WINDOW = {"sliding_window": _Setting("sliding_window", 4096)}
_OLMO2 = {"head_dim": None, "norms": "post", "qk_norm": True, "qk_norm_over": "projection"}
_GEMMA = _kv_heads(16) | {
    "head_dim": _Setting("head_dim", 256),
    "tie_embeddings": _Setting("tie_word_embeddings", True),
    "activation": _Setting("hidden_act", "gelu_pytorch_tanh"),
    "norm_offset": 1.0,
    "scale_embeddings": True,
}
_GEMMA2 = _GEMMA | _kv_heads(4) | _WINDOW
_GEMMA2 |= {
    "activation": _Setting("hidden_activation", "gelu_pytorch_tanh"),
    "norms": "both",
    "query_scale_dim": _Setting("query_pre_attn_scalar", 256),
    "logits_softcap": _Setting("final_logit_softcapping", 30.0),
    "attention_softcap": _Setting("attn_logit_softcapping", 50.0),
}
_GEMMA3 = _GEMMA2 | {
    "qk_norm": True,
    "rope_theta": _Setting("rope_theta", 1_000_000.0),
    "local_rope_theta": _Setting("rope_local_base_freq", 10_000.0),
    "logits_softcap": _Setting("final_logit_softcapping", None),
    "attention_softcap": None,  # it has a setting that `transformers` does not heed
}
# In the order in which `save` looks for one that can express a configuration.
_FAMILIES = {
    "llama": _Family("Llama", {}),
    "mistral": _Family("Mistral", _kv_heads(8) | _WINDOW),
    "qwen2": _Family("Qwen2", _kv_heads(32) | {"head_dim": None, "attention_bias": True}),
    "qwen3": _Family(
        "Qwen3", _kv_heads(32) | {"head_dim": _Setting("head_dim", 128), "qk_norm": True}
    ),
    "olmo2": _Family("Olmo2", _OLMO2),
    "gemma": _Family("Gemma", _GEMMA),
    "gemma2": _Family("Gemma2", _GEMMA2, period=2),
    "gemma3_text": _Family("Gemma3", _GEMMA3, period=6),
}
# Settings that mean another model, where they are set and no field of the family has them.
_OTHERS = "attention_bias mlp_bias use_sliding_window use_bidirectional_attention"
_OTHERS += " attn_logit_softcapping quantization_config"


def load(
    path: str | os.PathLike,
    framework: Framework,
    *,
    mesh: Mesh | None = None,
    sharding: Sharding | None = None,
    **overrides: Any,
) -> tuple[Functional, Params]:
    """Loads a checkpoint folder: `config.json` and one or several safetensors files.

    `model.safetensors` is read where it exists, else the files that the index names. Each device
    reads its own shard of each array, straight from the files. A head of its own that is stored
    with a model whose embeddings are tied is kept, with a warning.

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
    settings = _read_json(folder / _CONFIG)
    try:
        config = from_huggingface(settings)
    except ValueError as error:
        raise _malformed(folder / _CONFIG, str(error)) from None
    stored = _stored(folder)
    if config.tie_embeddings and "tie_embeddings" not in overrides and _has_own_head(stored):
        warnings.warn(
            f"{folder}: the configuration ties the embeddings, but lm_head.weight is not "
            "model.embed_tokens.weight. It is kept: the model is not tied. Write "
            '"tie_word_embeddings": false in config.json, or pass tie_embeddings=True to drop it.',
            stacklevel=2,
        )
        overrides["tie_embeddings"] = False
    config = dataclasses.replace(config, **overrides)
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
        array = stored[_their_name(name, config)]
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
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes a new checkpoint folder that Hugging Face transformers reads.

    It is written beside its place, and renamed when it is complete.

    Args:
      path: the folder, which must not exist, or be empty.
      model: the transformer.
      params: its parameters; every array must be readable from this process.
      dtype: to store; `config.param_dtype` when None.
      max_file_bytes: arrays beyond it go to further files, named in an index.
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
        _write_arrays(new, model, params, np.dtype(dtype), max_file_bytes)
        for name, content in {_CONFIG: json.dumps(config, indent=2), **files}.items():
            (new / name).write_text(content, encoding="utf-8")
        for file in new.iterdir():
            file.chmod((new / _CONFIG).stat().st_mode)  # safetensors' are for their owner alone
        new.rename(folder)


def _write_arrays(
    folder: Path, model: Functional, params: Params, dtype: np.dtype, limit: int
) -> None:
    """Writes the safetensors files; where there are several, their index too."""
    values = model.to_dict(params)
    groups, size = [[]], 0
    for name, value in values.items():
        size += value.size * dtype.itemsize
        if groups[-1] and size > limit:
            groups.append([])
            size = value.size * dtype.itemsize
        groups[-1].append(name)
    where = {}
    for i, names in enumerate(groups, 1):
        file = f"model-{i:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else _SINGLE
        arrays = {}
        for name in names:
            array = np.asarray(values[name]).astype(dtype)
            array = array.T if name.endswith(".kernel") else array
            arrays[_their_name(name, model.config)] = np.ascontiguousarray(array)
        try:
            save_file(arrays, folder / file, metadata={"format": "pt"})  # else readers refuse
        except SafetensorError as error:
            raise OSError(f"{folder / file} cannot be written: {error}") from None
        where |= dict.fromkeys(arrays, file)
    if len(groups) > 1:
        total = sum(value.size for value in values.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2))


def _their_name(name: str, config: TransformerConfig) -> str:
    *modules, kind = name.split(".")
    prefix = ["model"] if modules[0] == "layers" else []
    # After attention's output where that is not normalised, which has the name otherwise.
    before_mlp = "post_attention" if config.norms == "pre" else "pre_feedforward"
    known = _MODULES | {"mlp_norm": f"{before_mlp}_layernorm"}
    theirs = [known.get(module, module) for module in modules]
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


def _has_own_head(stored: dict[str, Any]) -> bool:
    """Returns True for a head that is not the embedding; older files store a tied one twice."""
    both = [stored.get(f"{name}.weight") for name in ("lm_head", "model.embed_tokens")]
    return None not in both and not np.array_equal(*(array[:] for array in both))


def _check(folder: Path, config: TransformerConfig, stored: dict[str, Any]) -> None:
    if config.num_layers > len(stored):  # else as many names would be made as it says
        text = f"num_hidden_layers={config.num_layers}, but the folder has {len(stored)} arrays."
        raise _malformed(folder / _CONFIG, text)
    expected = {}
    for name, shape in parameters.shapes(config).items():
        expected[_their_name(name, config)] = shape[::-1] if name.endswith(".kernel") else shape
    # Old checkpoints store the rotary frequencies; some with tied embeddings store them twice.
    ignored = "lm_head.weight" if config.tie_embeddings else ""
    shapes = {
        name: tuple(array.get_shape())
        for name, array in stored.items()
        if name != ignored and not name.endswith("rotary_emb.inv_freq")
    }
    for name in sorted(expected | shapes):
        if (ours := expected.get(name, "none")) != (theirs := shapes.get(name, "none")):
            raise _malformed(folder, f"{name} must have shape {ours}, the file has {theirs}.")


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
    family = _FAMILIES[kind]
    fields: dict[str, Any] = _FIELDS | family.fields
    names = {ours: of.name for ours, of in fields.items() if isinstance(of, _Setting)}
    for name in _OTHERS.split():
        if settings.get(name) and name not in names.values() and not fields.get(name):
            raise ValueError(f"{name}={settings[name]!r}: this transformer has no such thing.")
    for ours, theirs in names.items():
        fields[ours] = settings.get(theirs, fields[ours].default)
        if fields[ours] is _REQUIRED:
            raise ValueError(f"{theirs} is missing.")
    dim, heads = fields["dim"], fields["num_heads"]
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = heads
    if fields["head_dim"] is None:  # sizes that do not divide are refused for themselves
        fields["head_dim"] = dim // heads if type(dim) is type(heads) is int and heads else dim
    if (name := fields["activation"]) not in list(_ACTIVATIONS):
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise ValueError(f"{names['activation']}={name!r} must be one of {known}.")
    # Gemma's first configurations say "gelu" and mean its approximation.
    approximate = kind == "gemma" and name == "gelu"
    fields["activation"] = "gelu_tanh" if approximate else _ACTIVATIONS[name]
    try:
        fields |= _rope(settings)
        fields |= _pattern(settings, family, fields)
        config = TransformerConfig(**fields)
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
    for kind in _FAMILIES:
        settings = _settings(config, kind)
        try:
            read = from_huggingface(settings, **{name: getattr(config, name) for name in _RUN})
        except ValueError:  # head_dim is none of its widths
            continue
        ours, theirs = vars(_canonical(config)), vars(_canonical(read))
        misfits[kind] = [f"{name}={ours[name]!r}" for name in ours if ours[name] != theirs[name]]
        if not misfits[kind]:
            return settings
    nearest = min(misfits, key=lambda kind: len(misfits[kind]))
    raise ValueError(
        f"no Hugging Face family has this configuration; {nearest} is nearest, but has no "
        f"{' and no '.join(misfits[nearest])}."
    )


_RUN = "dtype param_dtype remat attention implementation quantization".split()  # in no family


def _canonical(c: TransformerConfig) -> TransformerConfig:
    """Returns the configuration in which equal models are equal."""
    letters = "".join("GL"[c.is_local(i)] for i in range(c.num_layers))
    window = c.sliding_window if "L" in letters else None
    theta = c.local_rope_theta
    if theta == c.rope_theta and c.rope_scaling is None:
        theta = None
    return dataclasses.replace(
        c,
        query_scale_dim=c.query_scale_dim or c.head_dim,
        qk_norm_over=c.qk_norm_over if c.qk_norm else "head",
        sliding_window=window,
        layer_pattern="L" if window is None else _shortest(letters),
        local_rope_theta=None if window is None else theta,
    )


def _settings(c: TransformerConfig, kind: str) -> dict[str, Any]:
    """Returns a family's settings with as much of the configuration as they express."""
    family = _FAMILIES[kind]
    fields: dict[str, Any] = _FIELDS | family.fields
    values = vars(c) | {
        "activation": next(name for name, ours in _ACTIVATIONS.items() if ours == c.activation),
        "query_scale_dim": c.query_scale_dim or c.head_dim,
        "local_rope_theta": c.local_rope_theta or c.rope_theta,
    }
    if family.period:  # they have no layers without a window; of all tokens, it is none
        values["sliding_window"] = c.sliding_window or c.max_seq_len
    settings = {
        "architectures": [f"{family.classes}ForCausalLM"],
        "model_type": kind,
        **{of.name: values[ours] for ours, of in fields.items() if isinstance(of, _Setting)},
        "torch_dtype": c.param_dtype,
    }
    if "attention_bias" not in fields:
        settings["attention_bias"] = False
    if family.period:
        names = {letter: name for name, letter in _LETTERS.items()}
        settings["layer_types"] = [names["GL"[c.is_local(i)]] for i in range(c.num_layers)]
    if c.rope_scaling is not None:
        linear = c.rope_scaling.kind == "linear"
        scaling = {"factor": "factor"} if linear else _ROPE_SCALING
        settings["rope_scaling"] = {"rope_type": c.rope_scaling.kind}
        settings["rope_scaling"] |= {
            theirs: getattr(c.rope_scaling, ours) for ours, theirs in scaling.items()
        }
    return settings


def _pattern(
    settings: Mapping[str, Any], family: _Family, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The shortest pattern of local and global layers; no window where none is local."""
    types, window = settings.get("layer_types"), fields.get("sliding_window")
    letters = alike = "G" if window is None else "L"
    if types is not None:
        known = isinstance(types, list) and all(kind in list(_LETTERS) for kind in types)
        letters = "".join(_LETTERS[kind] for kind in types) if known else ""
        if not letters or len(letters) != fields["num_layers"]:
            rule = f"must be {fields['num_layers']} of {', '.join(map(repr, _LETTERS))}"
            raise ValueError(f"layer_types={types!r} {rule}.")
    elif family.period:
        period = settings.get("sliding_window_pattern", family.period)
        if type(period) is not int or not 1 <= period <= 1000:
            raise ValueError(
                f"sliding_window_pattern={period!r} must be an integer from 1 to 1000."
            )
        letters = "L" * (period - 1) + "G"
    pattern = _shortest(letters)
    if not family.period and pattern != alike:
        raise ValueError(f"layer_types={types!r}: {family.classes} has layers of one kind only.")
    if "L" not in pattern:
        return {"sliding_window": None, "local_rope_theta": None}
    if window is None:
        raise ValueError("sliding_window=None, but layers are of type 'sliding_attention'.")
    return {"layer_pattern": pattern}


def _shortest(letters: str) -> str:
    """Returns the shortest pattern that gives these letters when it is repeated."""
    repeated = lambda n: all(a == b for a, b in zip(letters, letters[n:], strict=False))
    return letters[: next(n for n in range(1, len(letters) + 1) if repeated(n))]


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Version 5 of transformers moved theta and scaling into one dictionary, and for Gemma 3 into
    # one for each kind of layer.
    newer, older = (settings.get(name) for name in ("rope_parameters", "rope_scaling"))
    both = isinstance(newer, dict) and isinstance(older, dict)
    if newer and older and not (both and older.items() <= newer.items()):
        # Version 5 would take the older one, version 4 knows no other.
        raise ValueError(f"rope_scaling={older!r} and rope_parameters={newer!r}: leave out one.")
    name = "rope_parameters" if newer else "rope_scaling"
    rope = newer or older or {}
    fields = {}
    if isinstance(rope, dict) and not _LETTERS.keys().isdisjoint(rope):
        local = rope.get("sliding_attention") or {}
        name, rope = f"{name}: full_attention", rope.get("full_attention")
        if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
            raise ValueError(f"sliding_attention={local!r} must be of rope_type 'default'.")
        fields = {"local_rope_theta": local["rope_theta"]} if "rope_theta" in local else {}
    if not isinstance(rope, dict):
        raise ValueError(f"{name}={rope!r} must be an object.")
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    for part in settings, rope:
        if (fraction := part.get("partial_rotary_factor")) not in (None, 1):
            raise ValueError(f"partial_rotary_factor={fraction!r}: heads are rotated as a whole.")
    without = None if "factor" in rope else "default"  # a factor of no type is not ignored
    kind = rope.get("rope_type", rope.get("type", without))
    if kind == "default":
        return fields
    if kind not in ("linear", "llama3"):
        raise ValueError(f"rope_type={kind!r} must be 'default', 'linear' or 'llama3'.")
    names = {"factor": "factor"} if kind == "linear" else _ROPE_SCALING
    missing = [theirs for theirs in names.values() if theirs not in rope]
    if missing:
        raise ValueError(f"{name} lacks {missing[0]}.")
    scaling = {ours: rope[theirs] for ours, theirs in names.items()}
    return fields | {"rope_scaling": RopeScaling(**scaling, kind=kind)}
