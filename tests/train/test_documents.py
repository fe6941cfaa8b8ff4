"""Packed documents: every token has its own document's context and target, and no other's."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_model import CONFIG, first_devices

from normfuse.models.functional import build
from normfuse.train import UsageError
from normfuse.train.config import MeshConfig
from normfuse.train.data import Windows
from normfuse.train.mesh import batch_sharding, make_sharding, on_devices
from normfuse.train.step import parts_of
from normfuse.train.text import load

SEQ = 16


# ---------------------------------------------------------------- rows


def test_rows_hold_pairs_of_a_documents_tokens():
    tokens = np.array([10, 20, 21, 22, 30, 31, 40, 41, 42, 43, 44, 45], np.uint16)
    windows = Windows(tokens, 3, np.array([1, 3, 0, 2, 6]))  # one token is no pair
    assert len(windows) == 2
    np.testing.assert_array_equal(windows[0], [[20, 21, 30], [21, 22, 31], [0, 0, 1]])
    # A document that does not fit goes on in the next row; the two pairs left fill no row.
    np.testing.assert_array_equal(windows[1], [[40, 41, 42], [41, 42, 43], [0, 0, 0]])
    assert windows[1].dtype == np.int32


def _lengths(rng, count=60):
    return rng.integers(0, 12, count)


def test_a_pass_reads_every_pair_once_and_none_of_two_documents(rng):
    lengths = _lengths(rng)
    document = np.repeat(np.arange(len(lengths)), lengths)
    tokens = np.arange(len(document))  # a token is its own place
    windows = Windows(tokens, 7, lengths)
    read = np.stack([windows[i] for i in rng.permutation(len(windows))])
    inputs, targets, segments = parts_of(read)
    np.testing.assert_array_equal(targets, inputs + 1)
    np.testing.assert_array_equal(document[targets], document[inputs])
    same = document[inputs][:, :, None] == document[inputs][:, None, :]
    np.testing.assert_array_equal(segments[:, :, None] == segments[:, None, :], same)
    pairs = [i for i in tokens[:-1] if document[i] == document[i + 1]]
    np.testing.assert_array_equal(np.sort(inputs.ravel()), pairs[: inputs.size])
    assert 0 <= len(pairs) - inputs.size < 7


# ---------------------------------------------------------------- files


def _texts(folder, files):
    for name, content in files.items():
        (folder / name).write_text(content)
    return str(folder)


def _line(text):
    return json.dumps({"id": 1, "text": text}) + "\n"


def test_files_and_json_lines_are_documents(tmp_path):
    mark = "\ufeff"  # is left out
    lines = mark + _line("cc" * 50) + "\n" + _line("") + _line("é\n" * 40)
    files = {"a.txt": "a" * 100, "b.txt": "", "c.NDJSON": lines, "d.txt": mark + "d" * 100}
    text = load(_texts(tmp_path, files), seq_len=4, vocab_size=256, documents=True)
    content = b"a" * 100 + b"c" * 100 + "é\n".encode() * 40 + b"d" * 100
    assert text.train.tobytes() + text.held_out.tobytes() == content
    # The last twentieth is held out, wherever it begins.
    assert [x.tolist() for x in text.documents] == [[100, 100, 120, 79], [21]]
    assert text.identity()["documents"] == 5
    moved = {"a.txt": "a" * 99, "b.txt": "a"}  # the same bytes, cut elsewhere
    other = load(_texts(tmp_path, moved), seq_len=4, vocab_size=256, documents=True)
    assert other.train.tobytes() == text.train.tobytes() and other.sha256 != text.sha256
    plain = load(str(tmp_path), seq_len=4, vocab_size=256)
    assert plain.documents is None and b'"id": 1' in plain.train.tobytes()


def test_no_token_spans_documents(tmp_path):
    """Joined, "ab" at a border would be one token of this tokenizer."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(_line("abab" * 5 + "a") + _line("b" + "abab" * 5) for _ in range(200)))
    options = {"seq_len": 4, "vocab_size": 384, "tokenizer": "bpe:258"}
    text = load(str(path), documents=True, **options)
    starts = np.cumsum([0, *text.documents[0]])
    for i, (start, end) in enumerate(zip(starts, starts[1:])):
        found = text.tokenizer.decode(text.train[start:end])
        assert found == ("b" + "abab" * 5 if i % 2 else "abab" * 5 + "a")[: len(found)]
        assert len(found) == 21 or end == len(text.train)


@pytest.mark.parametrize(
    "line",
    [b"not JSON", b"[1]", b'{"body": "x"}', b'{"text": null}', b"[" * 100_000, b'{"text": "\xff"}'],
    ids=["text", "list", "body", "null", "nested", "not UTF-8"],
)
def test_a_line_that_is_no_document_is_refused(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(_line("x" * 100).encode() + line + b"\n")
    with pytest.raises(UsageError, match=r'x\.jsonl:2: .*a string "text", not b.*Mend'):
        load(str(path), seq_len=4, vocab_size=256, documents=True)


def test_documents_too_short_for_a_row_are_refused(tmp_path):
    one = {f"{i}.txt": "x" for i in range(500)}
    with pytest.raises(UsageError, match="has 0 tokens that follow another.*--seq-len 4 needs"):
        load(_texts(tmp_path, one), seq_len=4, vocab_size=256, documents=True)
    path = tmp_path / "0.txt"
    path.write_text("")
    with pytest.raises(UsageError, match="is empty: it must hold text"):
        load(str(path), seq_len=4, vocab_size=256, documents=True)


# ---------------------------------------------------------------- no leak


def _model(framework, mesh, **changes):
    config = dataclasses.replace(CONFIG, num_layers=2, **changes)
    return build(framework, config, make_sharding(MeshConfig(), mesh, 4))


def _rows(rng):
    """Four rows of three documents each, of 3, 6 and 7 tokens in another order in each row."""
    borders = np.array([[3, 9], [6, 9], [7, 10], [3, 10]])
    segments = (np.arange(SEQ) >= borders[:, :1]).astype(np.int32)
    segments += np.arange(SEQ) >= borders[:, 1:]
    tokens = rng.integers(0, CONFIG.vocab_size, (2, 4, SEQ))
    return np.stack([*tokens, segments], axis=1).astype(np.int32)


def _check_no_leak(model, params, mesh, rows):
    """A document's losses are those it has alone, and other documents do not change them."""
    each = jax.jit(
        lambda params, rows: model.loss(params, *parts_of(rows), reduction="none"),
    )
    losses = lambda rows: np.asarray(each(params, on_devices(rows, batch_sharding(mesh))))
    found, segments = losses(rows), rows[:, 2]
    for document in range(3):
        changed, own = rows.copy(), segments == document
        changed[:, 0] = np.where(own, rows[:, 0], (rows[:, 0] + 1) % CONFIG.vocab_size)
        np.testing.assert_array_equal(losses(changed)[own], found[own])
        # Alone, at the front of its row: its positions count nothing.
        alone = rows.copy()
        for row, mine in zip(alone, own):
            row[:] = np.concatenate([row[:, mine], row[:, ~mine]], axis=1)
            row[2] = np.arange(SEQ) >= mine.sum()
        moved = losses(alone)
        for before, after, mine in zip(found, moved, own):
            # Rotations of other angles: roundings of scores below 16, and of losses below 8.
            np.testing.assert_allclose(after[: mine.sum()], before[mine], rtol=0, atol=2**-17)


@pytest.mark.parametrize(
    ("framework", "remat", "shape"),
    [
        ("nnx", "none", (1, 1, 1)),
        ("nnx", "block", (1, 2, 2)),
        pytest.param("eqx", "block", (1, 1, 1)),
    ],
    ids=str,
)
def test_no_document_sees_another(framework, remat, shape, rng):
    mesh = first_devices(*shape)
    with jax.set_mesh(mesh):
        model = _model(framework, mesh, remat=remat)
        params = jax.jit(model.init)(jax.random.key(0))
        _check_no_leak(model, params, mesh, _rows(rng))


# ---------------------------------------------------------------- runs
