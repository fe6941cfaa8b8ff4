"""Checkpoint folders from anywhere: one line names the file and the field, or the arrays are right.

Never a traceback of another kind, never another array, never a file that an index names elsewhere.
"""

import json
import os
import re
import shutil
import string
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normfuse.models.config import TransformerConfig
from normfuse.models.functional import build
from normfuse.models.huggingface import load, save

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def values(noisy):
    return noisy(_CONFIGURATION, np.random.default_rng(0))


# No two arrays of one layer but gate and up have the same shape.
_CONFIGURATION = TransformerConfig(
    vocab_size=12,
    dim=6,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=10,
    max_seq_len=16,
    tie_embeddings=True,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, values):
    """A checkpoint in two files; next to it a file that is none of its own."""
    folder = tmp_path_factory.mktemp("models") / "checkpoint"
    model = build("eqx", _CONFIGURATION)
    save(folder, model, model.from_dict(values), max_file_bytes=1000)
    assert sorted(path.name for path in folder.iterdir())[1:3] == [FIRST, FIRST.replace("1-", "2-")]
    shutil.copy(folder / FIRST, folder.parent / "other.safetensors")
    return folder


@pytest.fixture
def folder(checkpoint, tmp_path):
    shutil.copytree(checkpoint.parent, tmp_path / "models")
    return tmp_path / "models" / "checkpoint"


def _split(content):
    """A file's header and its data."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def _join(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# ---------------------------------------------------------------- kinds of damage, each an edit


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def config(**changes):
    def edit(folder):
        settings = json.loads((folder / CONFIG).read_text()) | changes
        kept = {key: value for key, value in settings.items() if value is not ...}
        (folder / CONFIG).write_text(json.dumps(kept))

    return edit


def index(file):
    """The last norm's entry in the index."""

    def edit(folder):
        content = json.loads((folder / INDEX).read_text())
        content["weight_map"][NORM] = file
        (folder / INDEX).write_text(json.dumps(content))

    return edit


def place(name, make):
    """Replaces a file of the folder by what `make` makes at its path."""

    def edit(folder):
        (folder / name).unlink()
        make(folder / name)

    return edit


def header(change):
    """Changes the first file's header: its two first arrays in the order of their bytes."""

    def edit(folder):
        entries, data = _split((folder / FIRST).read_bytes())
        meta = entries.pop("__metadata__")
        first, second = sorted(entries.values(), key=lambda entry: entry["data_offsets"])[:2]
        changed = change(entries, first, second)
        content = {"__metadata__": meta, **entries} if changed is None else changed
        (folder / FIRST).write_bytes(_join(content, data))

    return edit


def gemma(**changes):
    """The configuration of a Gemma 3 with these changes."""
    found = {"model_type": "gemma3_text", "query_pre_attn_scalar": 4, "sliding_window": 4}
    return config(**found | changes)


_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALING["original_max_position_embeddings"] = 8
_NOT_READ = "is not a safetensors file, or is damaged"

MALFORMED = {
    # the configuration
    "no config": (lambda folder: (folder / CONFIG).unlink(), CONFIG, "No such file"),
    "config is no JSON": (write(CONFIG, b"{dim: 6}"), CONFIG, "is not valid JSON"),
    "config is deep": (write(CONFIG, b"[" * 200_000), CONFIG, "is not valid JSON"),
    "config twice": (write(CONFIG, b'{"a": 1, "a": 2}'), CONFIG, "'a' occurs twice"),
    "config is a list": (write(CONFIG, b"[1]"), CONFIG, "must hold a JSON object, not a list"),
    "config is a FIFO": (place(CONFIG, os.mkfifo), CONFIG, "is not a regular file"),
    "no family": (config(model_type=...), CONFIG, "model_type=None"),
    "family is a list": (config(model_type=["llama"]), CONFIG, "model_type=['llama']"),
    "no width": (config(hidden_size=...), CONFIG, "hidden_size is missing"),
    "width is null": (config(hidden_size=None), CONFIG, "hidden_size=None must be an integer"),
    "too many layers": (config(num_hidden_layers=10**9), CONFIG, "num_hidden_layers=1000000000"),
    "no heads": (config(num_attention_heads=0, head_dim=None), CONFIG, "num_attention_heads=0"),
    "heads do not divide": (
        config(num_key_value_heads=3),
        CONFIG,
        "num_attention_heads=2 must be a multiple of num_key_value_heads=3",
    ),
    "more tokens than int32": (config(vocab_size=2**31), CONFIG, "vocab_size=2147483648 must be"),
    "eps is NaN": (config(rms_norm_eps=float("nan")), CONFIG, "rms_norm_eps=nan must be finite"),
    "theta is null": (config(rope_theta=None), CONFIG, "rope_theta=None must be finite"),
    "rope lacks": (config(rope_scaling={"rope_type": "llama3"}), CONFIG, "lacks factor"),
    "rope type is a list": (config(rope_scaling={"rope_type": ["x"]}), CONFIG, "rope_type=['x']"),
    "tied is text": (config(tie_word_embeddings="no"), CONFIG, "tie_word_embeddings='no' must be"),
    "layer types a number": (config(layer_types=1), CONFIG, "layer_types=1"),
    "layer type unknown": (gemma(layer_types=["chunked"]), CONFIG, "layer_types=['chunked'] must"),
    "pattern is zero": (
        gemma(sliding_window_pattern=0),
        CONFIG,
        "sliding_window_pattern=0 must be",
    ),
    "window is null": (gemma(sliding_window=None), CONFIG, "sliding_window=None, but layers are"),
    "query scale is zero": (
        gemma(query_pre_attn_scalar=0),
        CONFIG,
        "query_pre_attn_scalar=0 must be finite, above 0",
    ),
    "local theta is null": (
        gemma(rope_parameters={"full_attention": {}, "sliding_attention": {"rope_theta": "x"}}),
        CONFIG,
        "rope_local_base_freq='x' must be finite, above 0",
    ),
    "local rope is scaled": (
        gemma(rope_parameters={"full_attention": {}, "sliding_attention": _SCALING}),
        CONFIG,
        "must be of rope_type 'default'",
    ),
    "activation is a list": (
        config(hidden_act=["silu"]),
        CONFIG,
        "hidden_act=['silu'] must be one",
    ),
    "escapes": (config(model_type="\x1b[31m\n"), CONFIG, r"model_type='\x1b[31m\n'"),
    # the index
    "index is no JSON": (write(INDEX, b"{"), INDEX, "is not valid JSON"),
    "index without a map": (write(INDEX, b"{}"), INDEX, "weight_map=None must be an object"),
    "entry is a number": (index(1), INDEX, f"'{NORM}' in 1"),
    "entry is the folder": (index("."), INDEX, f"'{NORM}' in '.'"),
    "entry in the parent": (index("../other.safetensors"), INDEX, f"'{NORM}' in '../other"),
    "entry with a zero": (index("a\0b"), INDEX, f"'{NORM}' in 'a"),
    "entry of a missing file": (index("a.safetensors"), "a.safetensors", "No such file"),
    "entry with a long name": (index("a" * 300), "a" * 300, "File name too long"),
    "entry of the other file": (index(FIRST), INDEX, f"'{NORM}' in '{FIRST}'; it is not"),
    "map lacks": (write(INDEX, b'{"weight_map": {}}'), CONFIG, "but the folder has 0 arrays"),
    # the arrays
    "file is a FIFO": (place(FIRST, os.mkfifo), FIRST, "is not a regular file"),
    "file is empty": (write(FIRST, b""), FIRST, _NOT_READ),
    "file is no header": (write(FIRST, b"\x10" + 7 * b"\0" + 16 * b"?"), FIRST, _NOT_READ),
    "header is beyond": (write(FIRST, struct.pack("<Q", 2**63) + b"{}"), FIRST, _NOT_READ),
    "header is a list": (header(lambda *_: [1]), FIRST, _NOT_READ),
    "no offsets": (header(lambda e, a, b: a.pop("data_offsets")), FIRST, _NOT_READ),
    "doubled offsets": (
        header(lambda e, a, b: b.update(data_offsets=a["data_offsets"], shape=a["shape"])),
        FIRST,
        _NOT_READ,
    ),
    "overlapping offsets": (
        header(lambda e, a, b: b["data_offsets"].__setitem__(0, b["data_offsets"][0] - 4)),
        FIRST,
        _NOT_READ,
    ),
    "negative offsets": (
        header(lambda e, a, b: a.update(data_offsets=[-i for i in a["data_offsets"][::-1]])),
        FIRST,
        _NOT_READ,
    ),
    "descending offsets": (
        header(lambda e, a, b: a["data_offsets"].reverse()),
        FIRST,
        _NOT_READ,
    ),
    "another shape": (header(lambda e, a, b: a.update(shape=[3])), FIRST, _NOT_READ),
    "unknown dtype": (header(lambda e, a, b: a.update(dtype="X32")), FIRST, _NOT_READ),
    "integers": (header(lambda e, a, b: a.update(dtype="I32")), FIRST, "as I32; F64, F32, F16"),
    "turned shape": (
        header(lambda e, a, b: a["shape"].reverse() or b["shape"].reverse()),
        "checkpoint",
        "must have shape",
    ),
}


def _refused(folder):
    with pytest.raises((ValueError, OSError)) as error:
        load(folder, "eqx")
    return str(error.value)


@pytest.mark.parametrize("kind", MALFORMED)
def test_one_line_names_the_file_and_the_field(folder, kind):
    edit, file, trouble = MALFORMED[kind]
    edit(folder)
    message = _refused(folder)
    assert file in message and trouble in message
    assert str(folder) in message and message.isprintable() and len(message) < 1200


@pytest.mark.parametrize("damage", ["cut", "longer"])
def test_files_of_another_length_are_refused(folder, damage):
    content = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(content[:-1] if damage == "cut" else content + b"\0")
    assert re.search(f"{FIRST}: {_NOT_READ}", _refused(folder))


def _assert_loads(folder, values):
    model, params = load(folder, "eqx")
    for name, value in model.to_dict(params).items():
        np.testing.assert_array_equal(value, values[name])


# ---------------------------------------------------------------- any damage

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.integers()
    | st.floats()
    | st.text(string.printable, max_size=5)
    | st.sampled_from(
        [FIRST, "../other.safetensors", "F32", "BF16", "I32", "llama3", "qwen3", "gemma2"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def _places(value, path=()):
    """Paths of everything within a JSON value."""
    yield path
    items = enumerate(value) if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else items:
        yield from _places(inner, (*path, key))


@st.composite
def _edits(draw, contents):
    """A file's name, and its content with a value replaced or removed, or a few bytes changed."""
    name = draw(st.sampled_from(sorted(contents)))
    content = contents[name]
    is_header = name == FIRST
    if draw(st.booleans()):
        value, data = _split(content) if is_header else (json.loads(content), b"")
        *path, last = draw(st.sampled_from([path for path in _places(value) if path]))
        inner = value
        for key in path:
            inner = inner[key]
        if draw(st.booleans()):
            inner[last] = draw(_JSON)
        else:
            del inner[last]
        return name, _join(value, data) if is_header else json.dumps(value).encode()
    # Within the header: that other bytes of the data are other values, no header can tell.
    end = 8 + struct.unpack("<Q", content[:8])[0] if is_header else len(content)
    at = draw(st.integers(0, end - 1))
    return name, content[:at] + draw(st.binary(max_size=3)) + content[
        at + draw(st.integers(0, 3)) :
    ]


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_damage_is_explained_or_harmless(checkpoint, values, data):
    contents = {name: (checkpoint / name).read_bytes() for name in (CONFIG, INDEX, FIRST)}
    name, content = data.draw(_edits(contents))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "checkpoint"
        shutil.copytree(checkpoint, folder)
        (folder / name).write_bytes(content)
        try:
            _assert_loads(folder, values)
        except (ValueError, OSError) as error:
            assert str(folder) in str(error) and str(error).isprintable()
