"""The text and the order in which it is read."""

import hashlib
import json
import os
import sys
import sysconfig
import types
from pathlib import Path

import numpy as np
import pytest

from normfuse.train import UsageError
from normfuse.train.data import Windows, batches
from normfuse.train.text import load


@pytest.fixture
def numbers(tmp_path):
    """A thousand bytes that tell their position."""
    path = tmp_path / "numbers.txt"
    path.write_bytes(bytes(1 + i % 250 for i in range(1000)))
    return path


def test_last_twentieth_is_held_out(numbers):
    text = load(str(numbers), seq_len=8, vocab_size=256)
    content = np.frombuffer(numbers.read_bytes(), np.uint8)
    np.testing.assert_array_equal(text.train, content[:950])
    np.testing.assert_array_equal(text.held_out, content[950:])
    assert text.sha256 == hashlib.sha256(numbers.read_bytes()).hexdigest()
    assert text.identity() == {
        "name": str(numbers),
        "bytes": 1000,
        "sha256": text.sha256,
        "tokenizer": "byte",
    }


def test_default_text_is_the_standard_library():
    text = load(None, seq_len=128, vocab_size=256)
    assert text.size > 5_000_000  # 10.5 MB on 3.12, 11.1 MB on 3.11
    root = Path(sysconfig.get_paths()["stdlib"])
    assert (root / "json" / "decoder.py").read_bytes() in text.train.tobytes()
    first = sorted(path.relative_to(root).as_posix() for path in root.glob("*.py"))[0]
    assert text.train.tobytes().startswith((root / first).read_bytes()[:100])


def test_directory_and_glob_are_read_in_sorted_order(tmp_path):
    for name, letter in (("b/x.txt", b"b"), ("a.txt", b"a"), ("c.md", b"c")):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(letter * 100)
    folder = load(str(tmp_path / "texts"), seq_len=8, vocab_size=256)
    assert (
        folder.train.tobytes() + folder.held_out.tobytes() == b"a" * 100 + b"b" * 100 + b"c" * 100
    )
    matched = load(str(tmp_path / "texts" / "**" / "*.txt"), seq_len=8, vocab_size=256)
    assert matched.train.tobytes() + matched.held_out.tobytes() == b"a" * 100 + b"b" * 100
    assert (folder.files, matched.files) == (3, 2)


def _whole(text):
    return text.train.tobytes() + text.held_out.tobytes()


def test_documents_are_lines_of_json_rows_and_files(tmp_path, monkeypatch):
    lines = [{"text": "norm\nof a row"}, {"text": "größer\n", "id": 3}, {"text": ""}]
    texts = "norm\nof a row\ngrößer\n".encode()
    sizes = {"seq_len": 0, "vocab_size": 256}
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "x.json").write_text(json.dumps(lines))
    (tmp_path / "lines.json").write_bytes((tmp_path / "x.jsonl").read_bytes())
    for name in ("x.jsonl", "x.json", "lines.json"):
        found = load(str(tmp_path / name), **sizes)
        assert (_whole(found), found.files, found.documents) == (texts, 1, 2)
    found = load(str(tmp_path / "*.json"), **sizes)
    assert (_whole(found), found.files, found.documents) == (2 * texts, 2, 4)
    found = load(str(tmp_path / "*.json*"), **sizes)  # beside others, texts as they are
    assert found.documents == 4
    (tmp_path / "other.ndjson").write_bytes(
        b'\xef\xbb\xbf{"prompt": "scale of the layer for once"}'
    )
    found = load(str(tmp_path / "*.ndjson"), **sizes, field="prompt")
    assert _whole(found) == b"scale of the layer for once\n"
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "state.json").write_text("{}")
    rows = types.SimpleNamespace(load_from_disk=lambda path: lines if path == str(dataset) else 0)
    monkeypatch.setitem(sys.modules, "datasets", rows)
    assert _whole(load(str(dataset), **sizes)) == texts
    rows.load_from_disk = lambda path: {"train": lines, "test": lines}
    with pytest.raises(UsageError, match="holds splits: give the folder of one, of train, test"):
        load(str(dataset), **sizes)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="is a dataset: pip install datasets"):
        load(str(dataset), **sizes)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.jsonl",
            '{"text": "a"}\n{"txt": "b"}',
            """line 2, has no text 'text': b'{"txt": "b"}'""",
        ),
        ("x.jsonl", '{"text": 3}', """line 1, has no text 'text': b'{"text": 3}'"""),
        ("x.jsonl", "\n[1]", r"line 2, has no text 'text': b'\[1\]'"),
        ("x.ndjson", "{a", "line 1, has no text 'text': b'{a'"),
        ("x.jsonl", "\n\n", "is empty"),
        ("x.json", '[{"a": "b"}]', "line 1, has no text 'text': {'a': 'b'}"),
        ("x.json", '{"data": []}', """line 1, has no text 'text': b'{"data": ..}'"""),
        ("x.parquet", "PAR1", "x.parquet is no text: unpack it, .*let `datasets`"),
        ("x.txt.gz", "", "x.txt.gz is no text: unpack it"),
        ("x.png", "\x89PNG\r\n\0", "x.png is no text: .* leave it out by a glob"),
    ],
)
def test_files_without_texts_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        load(str(tmp_path / name), seq_len=1, vocab_size=256)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    """`chmod 0` makes a folder such for all but root."""
    (tmp_path / "texts" / "closed").mkdir(parents=True)
    (tmp_path / "texts" / "open.txt").write_text("x" * 999)
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UsageError, match="texts/closed: Permission denied"):
        load(str(tmp_path / "texts"), seq_len=4, vocab_size=256)


def test_token_beyond_the_vocabulary_is_refused(numbers):
    load(str(numbers), seq_len=8, vocab_size=251)
    with pytest.raises(UsageError, match="needs 251 tokens.*--model.vocab-size is 250"):
        load(str(numbers), seq_len=8, vocab_size=250)


def test_shortest_text_that_suffices(numbers):
    text = load(str(numbers), seq_len=49, vocab_size=256)
    assert len(Windows(text.held_out, 49)) == 1
    with pytest.raises(UsageError, match="1,000 tokens.*at least 1,020"):
        load(str(numbers), seq_len=50, vocab_size=256)


def _all(tokens, first=0, steps=30, seed=0, batch_size=5):
    return list(
        batches(tokens, seq_len=7, batch_size=batch_size, seed=seed, first=first, steps=steps)
    )


def test_batch_depends_on_seed_and_step_only():
    tokens = np.arange(300, dtype=np.uint16)
    whole = _all(tokens)
    assert len(whole) == 30
    for first in (1, 7, 29):
        np.testing.assert_array_equal(_all(tokens, first=first), whole[first:])
    assert not np.array_equal(_all(tokens, seed=1), whole)


def test_every_pass_reads_every_window_once_in_its_own_order():
    tokens = np.arange(7 * 20 + 1, dtype=np.uint16)
    whole = np.concatenate(_all(tokens, steps=8))  # two passes of 20 windows
    starts = whole[:, 0] // 7
    assert sorted(starts[:20]) == sorted(starts[20:]) == list(range(20))
    assert not np.array_equal(starts[:20], starts[20:])
    np.testing.assert_array_equal(np.diff(whole, axis=1), 1)
