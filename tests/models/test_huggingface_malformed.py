"""Checkpoint folders from anywhere: one line names the file and the field.

Never a traceback of another kind, never another array, never a file that an index names elsewhere.
"""

import json
import math
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from normfuse.models.config import TransformerConfig
from normfuse.models.functional import build
from normfuse.models.huggingface import from_huggingface, load, save

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
NORM = "model.norm.weight"
# No two arrays of one layer but gate and up have the same shape.
SIZES = dict(vocab_size=12, dim=6, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
CONFIGURATION = TransformerConfig(**SIZES, mlp_dim=10, max_seq_len=16, tie_embeddings=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, noisy):
    """A checkpoint in two files; next to it a file that is none of its own."""
    folder = tmp_path_factory.mktemp("models") / "checkpoint"
    model = build("eqx", CONFIGURATION)
    params = model.from_dict(noisy(CONFIGURATION, np.random.default_rng(0)))
    save(folder, model, params)
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = list(arrays), {}
    for i, part in enumerate((names[:-1], names[-1:]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: arrays[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    shutil.copy(folder / FIRST, folder.parent / "other.safetensors")
    return folder


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def edited(name, change):
    """Changes the JSON of a file."""

    def edit(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def config(**changes):
    return edited(CONFIG, lambda settings: settings.update(changes))


def index(file):
    return edited(INDEX, lambda content: content["weight_map"].update({NORM: file}))


def header(**changes):
    """Changes the entry of the array whose bytes come first."""

    def edit(folder):
        content = (folder / FIRST).read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8:end])
        arrays = [entry for name, entry in entries.items() if name != "__metadata__"]
        min(arrays, key=lambda entry: entry["data_offsets"]).update(changes)
        text = json.dumps(entries).encode()
        (folder / FIRST).write_bytes(struct.pack("<Q", len(text)) + text + content[end:])

    return edit


NOT_READ = "is not a safetensors file, or is damaged"
MALFORMED = [
    (lambda folder: (folder / CONFIG).unlink(), CONFIG, "No such file"),
    (write(CONFIG, b"{dim: 6}"), CONFIG, "is not valid JSON"),
    (write(CONFIG, b"[" * 200_000), CONFIG, "is not valid JSON"),
    (write(CONFIG, b"[1]"), CONFIG, "must hold a JSON object, not a list"),
    (write(CONFIG, b'{"model_type": "llama"}'), CONFIG, "vocab_size is missing"),
    (config(model_type=["llama"]), CONFIG, "model_type=['llama']"),
    (config(model_type="\x1b[31m\n"), CONFIG, r"model_type='\x1b[31m\n'"),
    (config(hidden_size=None), CONFIG, "hidden_size=None must be an integer"),
    (config(num_hidden_layers=10**9), CONFIG, "num_hidden_layers=1000000000"),
    (config(num_attention_heads=0, head_dim=None), CONFIG, "num_attention_heads=0"),
    (config(num_key_value_heads=3), CONFIG, "be a multiple of num_key_value_heads=3"),
    (config(vocab_size=2**31), CONFIG, "vocab_size=2147483648 must be"),
    (config(rms_norm_eps=float("nan")), CONFIG, "rms_norm_eps=nan must be finite"),
    (config(rope_theta=None), CONFIG, "rope_theta=None must be finite"),
    (config(rope_scaling={"rope_type": "llama3"}), CONFIG, "lacks factor"),
    (config(rope_scaling={"rope_type": ["x"]}), CONFIG, "rope_type=['x']"),
    (config(tie_word_embeddings="no"), CONFIG, "tie_word_embeddings='no' must be"),
    (config(layer_types=1), CONFIG, "layer_types=1"),
    (config(hidden_act=["silu"]), CONFIG, "hidden_act=['silu'] must be 'silu'"),
    (write(INDEX, b"{"), INDEX, "is not valid JSON"),
    (write(INDEX, b"{}"), INDEX, "weight_map=None must be an object"),
    (write(INDEX, b'{"weight_map": {}}'), CONFIG, "but the folder has 0 arrays"),
    (lambda folder: (folder / INDEX).unlink(), INDEX, "holds neither model.safetensors nor"),
    (index(1), INDEX, f"'{NORM}' in 1"),
    (index("."), INDEX, f"'{NORM}' in '.'"),
    (index(".."), "..", "is not a file"),
    (index("../other.safetensors"), INDEX, f"'{NORM}' in '../other"),
    (index("a\0b"), INDEX, f"'{NORM}' in 'a"),
    (index("a.safetensors"), "a.safetensors", "No such file"),
    (index(FIRST), INDEX, f"'{NORM}' in '{FIRST}'; it is not"),
    (write(FIRST, b""), FIRST, NOT_READ),
    (write(FIRST, b"\x10" + 7 * b"\0" + 16 * b"?"), FIRST, NOT_READ),
    (write(FIRST, struct.pack("<Q", 2**63) + b"{}"), FIRST, NOT_READ),
    (header(data_offsets=[8, 4]), FIRST, NOT_READ),
    (header(shape=[3]), FIRST, NOT_READ),
    (header(dtype="X32"), FIRST, NOT_READ),
    (header(dtype="I32"), FIRST, "as I32; F64, F32, F16"),
    (header(shape=[6, 12]), "checkpoint", "must have shape (12, 6), the file has (6, 12)"),
]


def test_one_line_names_the_file_and_the_field(checkpoint, tmp_path):
    for i, (edit, file, trouble) in enumerate(MALFORMED):
        folder = tmp_path / str(i) / "checkpoint"
        shutil.copytree(checkpoint.parent, folder.parent)
        edit(folder)
        with pytest.raises((ValueError, OSError)) as error:
            load(folder, "eqx")
        message = str(error.value)
        assert file in message and trouble in message, (i, trouble)
        assert str(folder) in message and message.isprintable() and len(message) < 1200


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0"])
def test_files_of_another_length_are_refused(checkpoint, tmp_path, change):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (folder / FIRST).write_bytes(change((folder / FIRST).read_bytes()))
    with pytest.raises(ValueError, match=f"{FIRST}: {NOT_READ}"):
        load(folder, "eqx")


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_any_value_of_a_setting_is_read_or_explained(checkpoint, family):
    settings = json.loads((checkpoint / CONFIG).read_text()) | {"model_type": family}
    settings |= {"sliding_window": 4, "layer_types": ["sliding_attention"], "rope_parameters": {}}
    for name in settings:
        for value in (None, True, -1, 0, 1.5, math.nan, 10**400, "", "x", [], [[1]], {"a": 1}):
            try:
                assert isinstance(from_huggingface(settings | {name: value}), TransformerConfig)
            except ValueError as error:
                assert str(error), (name, value)
