"""Hugging Face checkpoints in and out, for both frameworks.

Llama, Mistral, Qwen2, Qwen3, OLMo 2, Gemma, Gemma 2 and Gemma 3 (text).

model, params = load("path/to/Llama-3.2-1B", "nnx", dtype="bfloat16")
save("path/to/copy", model, params)
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
_SAVING = ".saving-*"  # a checkpoint on its way into the folder; complete if it has a config.json
_STALE_SECONDS = 86400.0  # for file systems whose locks do not show a writer
_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names

# Canonical module to theirs; the last part is always `weight` or `bias` there.
_MODULES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "attention_post_norm": "post_attention_layernorm",
    "mlp": "mlp",
    "mlp_post_norm": "post_feedforward_layernorm",
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
_OPTIONAL = {"num_kv_heads", "head_dim", "rope_theta", "tie_embeddings"}
_ROPE_SCALING = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
_ROPE_SCALING["original_max_seq_len"] = "original_max_position_embeddings"
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


@dataclasses.dataclass(frozen=True)
class _Family:
    """What one `model_type` is, beyond what all have."""

    classes: str  # the beginning of its classes' names
    # Fields of TransformerConfig that no setting of its changes.
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Further fields, each with its setting and the value where that is missing.
    varied: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"  # the setting's name
    # Defaults of fields of TransformerConfig. Without one there are as many heads of keys as of
    # queries, each `hidden_size / num_attention_heads` wide.
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    # False where `head_dim` is always `hidden_size / num_attention_heads`.
    own_head_dim: bool = True
    # The layers after which its pattern of local and global ones repeats, the last of them global,
    # where `layer_types` is missing; 0 where all layers are alike.
    period: int = 0


_GEMMA = {"norm_offset": 1.0, "scale_embeddings": True}
_WINDOW = {"sliding_window": ("sliding_window", 4096)}
_GEMMA2 = {
    "query_scale_dim": ("query_pre_attn_scalar", 256),
    "logits_softcap": ("final_logit_softcapping", 30.0),
    "attention_softcap": ("attn_logit_softcapping", 50.0),
}
_GEMMA3 = _GEMMA2 | {"logits_softcap": ("final_logit_softcapping", None)}
_GEMMA3 |= {"local_rope_theta": ("rope_local_base_freq", 10_000.0)}
del _GEMMA3["attention_softcap"]  # a setting that `transformers` does not heed
_OLMO2 = {"norms": "post", "qk_norm": True, "qk_norm_over": "projection"}
_GEMMA_DEFAULTS: dict[str, Any] = {"head_dim": 256, "tie_embeddings": True}
_NEWER = _GEMMA_DEFAULTS | {"num_kv_heads": 4, "activation": "hidden_activation"}

# In the order in which `save` looks for one that can express a configuration.
_FAMILIES = {
    "llama": _Family("Llama"),
    "mistral": _Family("Mistral", {}, _WINDOW, num_kv_heads=8),
    "qwen2": _Family("Qwen2", {"attention_bias": True}, num_kv_heads=32, own_head_dim=False),
    "qwen3": _Family("Qwen3", {"qk_norm": True}, num_kv_heads=32, head_dim=128),
    "olmo2": _Family("Olmo2", _OLMO2, own_head_dim=False),
    "gemma": _Family("Gemma", _GEMMA, num_kv_heads=16, **_GEMMA_DEFAULTS),
    "gemma2": _Family("Gemma2", _GEMMA | {"norms": "both"}, _GEMMA2 | _WINDOW, period=2, **_NEWER),
    "gemma3_text": _Family(
        "Gemma3",
        _GEMMA | {"norms": "both", "qk_norm": True},
        _GEMMA3 | _WINDOW,
        rope_theta=1_000_000.0,
        period=6,
        **_NEWER,
    ),
}


def load(
    path: str | os.PathLike,
    framework: Framework,
    *,
    mesh: Mesh | None = None,
    sharding: Sharding | None = None,
    **overrides: Any,
) -> tuple[Functional, Params]:
    """Loads a checkpoint folder: `config.json` and one or several safetensors files.

    A checkpoint whose `save` was cut off while it replaced another is read from where its files
    are. Each device reads its own shard of each array, straight from the files. Files are opened
    only in the folder itself: an index that names another place and a link that leads out are
    refused. (A folder of the Hugging Face cache may link to the `blobs` of its own repository.)

    Args:
      path: the folder.
      framework: "nnx" or "eqx".
      mesh: where to put the parameters; None puts them on the default device.
      sharding: how they lie on it; `Sharding()` when None.
      **overrides: fields of `TransformerConfig` that replace the checkpoint's. `param_dtype` is
        float32 unless set, whatever dtype the files hold.

    Raises:
      FileNotFoundError: if a file is missing, or somebody saves to the folder now.
      ValueError: naming the file and the field, for a file that is damaged or malformed, a model
        that this transformer cannot express, or arrays that are missing, left over or of another
        shape.
    """
    folder = Path(path)
    homes = _homes(folder)
    settings = _read_json(homes[0], _CONFIG)
    try:
        config = from_huggingface(settings)
    except ValueError as error:
        raise _malformed(homes[0] / _CONFIG, str(error)) from None
    config = dataclasses.replace(config, **overrides)
    stored = _stored(homes)
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
) -> None:
    """Writes a checkpoint folder that Hugging Face transformers reads.

    A checkpoint that is there already is replaced when the new one is complete on disk, beside it
    in a subfolder `.saving-*`; other files in the folder are kept. If the process is killed while
    files are being replaced, the rest of the new checkpoint is in that subfolder, where `load`
    finds it. What killed saves have left is removed by the next.

    Args:
      path: the folder; made if it does not exist.
      model: the transformer.
      params: its parameters; every array must be readable from this process.
      dtype: to store; `config.param_dtype` when None.
      max_file_bytes: arrays beyond it go to further files, named in an index.

    Raises:
      ValueError: for a configuration that no family can express, or another dtype than
        `TransformerConfig.param_dtype` may have.
      OSError: if the files cannot be written.
    """
    dtype = dtype or model.config.param_dtype
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(map(repr, get_args(Dtype)))}.")
    config = {**to_huggingface(model.config), "torch_dtype": dtype}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.closing(_Lock(folder, wait=True)):  # nobody takes a new subfolder for stale
            _remove_left_over(folder, complete=(folder / _CONFIG).exists())
            # Not next to the folder, which may be a mounted volume, or its parent read-only.
            new = Path(tempfile.mkdtemp(prefix=_SAVING.rstrip("*"), dir=folder))
            stack.enter_context(contextlib.closing(_Lock(new)))
        try:
            their_name = lambda name: _their_name(name, model.config)
            _write(new, config, model.to_dict(params), their_name, max_file_bytes)
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
    _remove_left_over(folder, complete=True)


class _Lock:
    """flock(2) on a folder, which the system releases when the process ends, however it does.

    Attributes:
      taken: whether this is the one that has it; None on a file system without locks.
    """

    def __init__(self, folder: Path, *, wait: bool = False) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW * (not wait) | os.O_CLOEXEC
        self._file, self.taken = os.open(folder, flags), True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB * (not wait))
        except BlockingIOError:
            self.taken = False
        except OSError:
            self.taken = None

    def close(self) -> None:
        os.close(self._file)


def _being_saved(folder: Path) -> list[Path]:
    """Returns the subfolders that saves have written to, or still do."""
    return [path for path in folder.glob(_SAVING) if path.is_dir() and not path.is_symlink()]


def _remove_left_over(folder: Path, complete: bool) -> None:
    """Removes what killed saves have left; of whole checkpoints only if the folder has its own."""
    for path in _being_saved(folder):
        with contextlib.suppress(OSError), contextlib.closing(_Lock(path)) as lock:
            old = lock.taken is None and time.time() - path.stat().st_mtime > _STALE_SECONDS
            if (lock.taken or old) and (complete or not (path / _CONFIG).exists()):
                shutil.rmtree(path, ignore_errors=True)


def _write(
    folder: Path,
    config: dict[str, Any],
    values: Mapping[str, Array],
    their_name: Callable[[str], str],
    max_file_bytes: int,
) -> None:
    last = folder / f"{_CONFIG}.part"
    last.write_text(json.dumps(config, indent=2))
    mode = last.stat().st_mode
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
            arrays[their_name(name)] = np.ascontiguousarray(array)
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
    last.rename(folder / _CONFIG)  # complete


def _groups(values: Mapping[str, Any], itemsize: int, limit: int) -> Iterator[list[str]]:
    group, size = [], 0
    for name, value in values.items():
        if group and size + value.size * itemsize > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += value.size * itemsize
    yield group


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


def _homes(folder: Path) -> list[Path]:
    """Returns the folders that hold a checkpoint's files; the first that has one has the new one.

    They are the folder itself, and before it the subfolder of a save that was cut off while it
    replaced an older checkpoint. Files move one by one, config.json last, once all old ones are
    gone: what is no longer in the subfolder is in the folder.
    """
    if (folder / _CONFIG).exists() or not (left := _being_saved(folder)):
        return [folder]
    whole = [path for path in left if (path / _CONFIG).exists()]
    for path in left:
        with contextlib.closing(_Lock(path)) as lock:
            if lock.taken is False:
                raise FileNotFoundError(f"{folder} is being saved to. Load it when that has ended.")
    if not whole:
        raise FileNotFoundError(
            f"{folder} holds no {_CONFIG}: its save was cut off before it was complete. What there "
            f"is of it is in {left[0].name}, and the next save there removes it."
        )
    return [max(whole, key=lambda path: (path / _CONFIG).stat().st_mtime), folder]


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


def _stored(homes: list[Path]) -> dict[str, Any]:
    """Every array of the checkpoint by its name there, to be sliced: nothing is read yet."""
    for home in homes:
        if (home / _INDEX).exists():
            return _indexed(homes, home)
        if (home / _SINGLE).exists():
            return _open(_file(home, _SINGLE))
    raise FileNotFoundError(f"{homes[-1]} holds neither {_SINGLE} nor {_INDEX}.")


def _indexed(homes: list[Path], home: Path) -> dict[str, Any]:
    where = _read_json(home, _INDEX).get("weight_map")
    if not isinstance(where, dict):
        raise _malformed(home / _INDEX, f"weight_map={where!r} must be an object.")
    for name, file in where.items():
        plain = isinstance(file, str) and file.isprintable() and not {"/", "\\"} & set(file)
        if not plain or file in ("", ".", ".."):
            text = f"weight_map has {name!r} in {file!r}, which must be the name of a file here."
            raise _malformed(home / _INDEX, text)
    has = lambda file: next((home for home in homes if (home / file).exists()), home)
    files = {file: _open(_file(has(file), file)) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in files[file]:
            raise _malformed(home / _INDEX, f"weight_map has {name!r} in {file!r}; it is not.")
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
        expected[_their_name(name, config)] = shape[::-1] if name.endswith(".kernel") else shape
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
    _refuse_unknown(settings, family)
    for ours, theirs in _FIELDS.items():
        if theirs not in settings and ours not in _OPTIONAL:
            raise ValueError(f"{theirs} is missing.")
    default = lambda ours: getattr(family, ours, None)
    fields = {ours: settings.get(theirs, default(ours)) for ours, theirs in _FIELDS.items()}
    dim, heads = fields["dim"], fields["num_heads"]
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = heads
    if fields["head_dim"] is None:  # sizes that do not divide are refused for themselves
        fields["head_dim"] = dim // heads if type(dim) is type(heads) is int and heads else dim
    fields |= {ours: settings.get(*theirs) for ours, theirs in family.varied.items()}
    fields["activation"] = _activation(settings, family)
    names = {ours: theirs for ours, (theirs, _) in family.varied.items()} | _FIELDS | _ROPE_SCALING
    try:
        fields |= _rope(settings)
        fields |= _pattern(settings, family, fields)
        config = TransformerConfig(**fields, **family.fixed)
    except ValueError as error:
        theirs = lambda match: names[match[1]] + "="
        raise ValueError(re.sub(rf"\b({'|'.join(names)})=", theirs, str(error))) from None
    return dataclasses.replace(config, **overrides)


def to_huggingface(config: TransformerConfig) -> dict[str, Any]:
    """Writes the configuration as the first family does that can express it.

    Raises:
      ValueError: for a configuration that none of them can express.
    """
    c = config
    misfits = {kind: _misfit(c, family) for kind, family in _FAMILIES.items()}
    kind = next((kind for kind, misfit in misfits.items() if not misfit), None)
    if kind is None:
        nearest = min(misfits, key=lambda kind: len(misfits[kind]))
        raise ValueError(
            f"no Hugging Face family has this configuration; {nearest} is nearest, but has no "
            f"{' and no '.join(misfits[nearest])}."
        )
    family = _FAMILIES[kind]
    settings = {
        "architectures": [f"{family.classes}ForCausalLM"],
        "model_type": kind,
        **{theirs: getattr(c, ours) for ours, theirs in _FIELDS.items()},
        **{theirs: getattr(c, ours) for ours, (theirs, _) in family.varied.items()},
        family.activation: next(theirs for theirs, a in _ACTIVATIONS.items() if a == c.activation),
        "torch_dtype": c.param_dtype,
        "use_cache": True,
    }
    if kind != "qwen2":
        settings["attention_bias"] = False
    if "query_scale_dim" in family.varied and c.query_scale_dim is None:
        settings["query_pre_attn_scalar"] = c.head_dim
    if family.period:
        kinds = {letter: name for name, letter in _LETTERS.items()}
        letters = ["L" if c.is_local(i) else "G" for i in range(c.num_layers)]
        settings["layer_types"] = [kinds[letter] for letter in letters]
        # They have no layers without a window; of all tokens, it is none.
        settings["sliding_window"] = c.sliding_window or c.max_seq_len
        if "local_rope_theta" in family.varied:
            settings["rope_local_base_freq"] = c.local_rope_theta or c.rope_theta
    if c.rope_scaling is not None:
        linear = c.rope_scaling.kind == "linear"
        names = {"factor": "factor"} if linear else _ROPE_SCALING
        scaling = {theirs: getattr(c.rope_scaling, ours) for ours, theirs in names.items()}
        settings["rope_scaling"] = {"rope_type": c.rope_scaling.kind, **scaling}
    return settings


# Fields about computing, which no family has.
_RUN = set("dtype param_dtype remat attention implementation quantization".split())
_RUN |= {"rope_scaling", "activation", "layer_pattern"}  # any family has any of them


def _misfit(c: TransformerConfig, family: _Family) -> list[str]:
    """Fields of the configuration, with their values, that a family cannot express."""
    default = {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
    default |= family.fixed
    free = {*_FIELDS, *family.varied, *_RUN}
    misfits = {name for name in default if name not in free and getattr(c, name) != default[name]}
    if c.query_scale_dim == c.head_dim:
        misfits -= {"query_scale_dim"}
    if family.classes == "Gemma" and c.activation == "gelu":  # see `_activation`
        misfits |= {"activation"}
    if not c.qk_norm and not default["qk_norm"]:
        misfits -= {"qk_norm_over"}
    local = {c.is_local(i) for i in range(c.num_layers)}
    if local == {False}:
        misfits -= {"sliding_window", "local_rope_theta"}
    elif True in local and False in local and not family.period:
        misfits |= {"layer_pattern"}
    if True in local and c.rope_scaling and "local_rope_theta" in family.varied:
        misfits |= {"local_rope_theta"} if c.local_rope_theta is None else set()
    if not family.own_head_dim and c.num_heads * c.head_dim != c.dim:
        misfits |= {"head_dim"}
    return [f"{name}={getattr(c, name)!r}" for name in sorted(misfits)]


def _refuse_unknown(settings: Mapping[str, Any], family: _Family) -> None:
    capped = "attention_softcap" in family.varied
    unknown = {
        "attention_bias": not family.fixed.get("attention_bias") and settings.get("attention_bias"),
        "mlp_bias": settings.get("mlp_bias"),
        "use_sliding_window": settings.get("use_sliding_window"),
        "use_bidirectional_attention": settings.get("use_bidirectional_attention"),
        "attn_logit_softcapping": not capped and settings.get("attn_logit_softcapping"),
        "quantization_config": settings.get("quantization_config"),
    }
    for name, is_unknown in unknown.items():
        if is_unknown:
            raise ValueError(f"{name}={settings.get(name)!r}: this transformer has no such thing.")


def _activation(settings: Mapping[str, Any], family: _Family) -> str:
    gemma = "scale_embeddings" in family.fixed
    name = settings.get(family.activation, "gelu_pytorch_tanh" if gemma else "silu")
    if name not in list(_ACTIVATIONS):
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise ValueError(f"{family.activation}={name!r} must be one of {known}.")
    # Gemma's first configurations say "gelu" and mean its approximation.
    return "gelu_tanh" if family.classes == "Gemma" and name == "gelu" else _ACTIVATIONS[name]


def _pattern(
    settings: Mapping[str, Any], family: _Family, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The shortest pattern of local and global layers; no window where none is local."""
    types, window = settings.get("layer_types"), fields.get("sliding_window")
    alike = "G" if window is None else "L"
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
    else:
        letters = alike
    pattern = _shortest(letters)
    if not family.period and pattern != alike:
        raise ValueError(f"layer_types={types!r}: {family.classes} has layers of one kind only.")
    if "L" not in pattern:
        return {"sliding_window": None, "local_rope_theta": None}
    if window is None:
        raise ValueError("sliding_window=None, but layers are of type 'sliding_attention'.")
    return {"layer_pattern": pattern}


def _shortest(letters: str) -> str:
    """The shortest pattern that gives these letters when it is repeated."""
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
    found = {}
    if isinstance(rope, dict) and not _LETTERS.keys().isdisjoint(rope):
        local = rope.get("sliding_attention") or {}
        name, rope = f"{name}: full_attention", rope.get("full_attention")
        if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
            raise ValueError(f"sliding_attention={local!r} must be of rope_type 'default'.")
        found = {"local_rope_theta": local["rope_theta"]} if "rope_theta" in local else {}
    if not isinstance(rope, dict):
        raise ValueError(f"{name}={rope!r} must be an object.")
    if "rope_theta" in rope:
        found["rope_theta"] = rope["rope_theta"]
    for part in settings, rope:
        if (fraction := part.get("partial_rotary_factor")) not in (None, 1):
            raise ValueError(f"partial_rotary_factor={fraction!r}: heads are rotated as a whole.")
    without = None if "factor" in rope else "default"  # a factor of no type is not ignored
    kind = rope.get("rope_type", rope.get("type", without))
    if kind == "default":
        return found
    if kind not in ("linear", "llama3"):
        raise ValueError(f"rope_type={kind!r} must be 'default', 'linear' or 'llama3'.")
    names = {"factor": "factor"} if kind == "linear" else _ROPE_SCALING
    missing = [theirs for theirs in names.values() if theirs not in rope]
    if missing:
        raise ValueError(f"{name} lacks {missing[0]}.")
    scaling = {ours: rope[theirs] for ours, theirs in names.items()}
    return found | {"rope_scaling": RopeScaling(**scaling, kind=kind)}
