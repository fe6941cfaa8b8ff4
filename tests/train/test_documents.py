"""Packed documents: every token has its own document's context and target, and no other's."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import CONFIG, first_devices

from normfuse.models.functional import build
from normfuse.train import UsageError, step
from normfuse.train.checks import check_resume, make_record
from normfuse.train.config import MeshConfig, preset_config
from normfuse.train.data import Windows, batches, load
from normfuse.train.mesh import batch_sharding, make_sharding, on_devices
from normfuse.train.step import parts_of

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
    # The first row's tokens attend to documents of 2, 2 and 1, the second's to 3 each.
    assert windows.attended() == round((2 + 2 + 1 + 3 + 3 + 3) / 6)


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
    counted = same.sum(axis=2).mean()
    assert windows.attended() == round(counted)


def test_batches_depend_on_seed_and_step_only(rng):
    lengths = _lengths(rng)
    tokens = np.arange(lengths.sum(), dtype=np.uint16)
    given = {"seq_len": 7, "batch_size": 3, "seed": 1, "steps": 9, "documents": lengths}
    whole = list(batches(tokens, first=0, **given))
    assert [rows.shape for rows in whole] == [(3, 3, 7)] * 9
    np.testing.assert_array_equal(list(batches(tokens, first=4, **given)), whole[4:])


# ---------------------------------------------------------------- files


def _texts(folder, files):
    for name, content in files.items():
        (folder / name).write_text(content)
    return str(folder)


def _line(text):
    return json.dumps({"id": 1, "text": text}) + "\n"


def test_files_and_json_lines_are_documents(tmp_path):
    lines = _line("cc" * 50) + "\n" + _line("") + _line("é\n" * 40)
    files = {"a.txt": "a" * 100, "b.txt": "", "c.jsonl": lines, "d.txt": "d" * 100}
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


def test_json_lines_have_several_names_and_may_begin_with_a_mark(tmp_path):
    mark = "\ufeff"
    files = {"a.JSONL": mark + _line("a" * 100) + _line("b" * 100), "b.ndjson": _line("c" * 100)}
    files["d.txt"] = mark + "d" * 100
    text = load(_texts(tmp_path, files), seq_len=4, vocab_size=256, documents=True)
    content = text.train.tobytes() + text.held_out.tobytes()
    assert content == b"".join(letter * 100 for letter in (b"a", b"b", b"c", b"d"))
    assert text.identity()["documents"] == 5  # the cut meets one


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
    assert text.widths.sum() == len(text.raw_held_out)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not JSON", "Expecting value"),
        ("[1]", r"it is \[1\]"),
        ('{"body": "x"}', r"it has only \['body'\]"),
        ('{"text": null}', 'its "text" is None'),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": "\\ud800"', "Expecting ',' delimiter"),
    ],
    ids=["text", "list", "body", "null", "nested", "cut off"],
)
def test_a_line_that_is_no_document_is_refused(tmp_path, line, problem):
    path = tmp_path / "x.jsonl"
    path.write_text(_line("x" * 100) + line + "\n")
    with pytest.raises(
        UsageError, match=rf'x\.jsonl:2: .*a string "text"; (it is )?{problem}.*Mend'
    ):
        load(str(path), seq_len=4, vocab_size=256, documents=True)


def test_bytes_that_are_not_utf8_are_refused_in_json_lines(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UsageError, match="x.jsonl:1: .*can't decode byte 0xff"):
        load(str(tmp_path), seq_len=4, vocab_size=256, documents=True)


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


def _step(model, mesh, microbatches, parts=1):
    options = {"microbatches": microbatches, "mesh": mesh, "parts": parts}
    return jax.jit(lambda params, rows: step.loss_and_gradient(model, params, rows, **options))


def _check_step(run, params, rows, mesh, model):
    """A step's loss and gradient are the means over documents that are alone in their rows."""
    rows, segments = np.asarray(rows), np.asarray(rows)[:, 2]
    parts = [row[:2, row[2] == s] for row in rows for s in range(3)]

    @jax.jit
    @jax.value_and_grad
    def alone(params, tokens, targets):
        return jnp.sum(model.loss(params, tokens, targets, reduction="none")) / segments.size

    loss, gradient = run(params, on_devices(rows, batch_sharding(mesh)))
    lengths = {part.shape[1] for part in parts}
    of_length = [np.stack([p for p in parts if p.shape[1] == n], axis=1) for n in lengths]
    found = [alone(params, *arrays) for arrays in of_length]
    expected, expected_gradient = jax.tree.map(lambda *sums: sum(sums), *found)
    np.testing.assert_allclose(loss, expected, rtol=0, atol=2**-18)
    for a, b in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
        # Sums of 64 tokens in another order, after rotations of other angles.
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-19 * 64**0.5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("framework", "shape", "microbatches", "parts", "remat"),
    [
        ("nnx", (1, 1, 1), 2, 1, "none"),
        pytest.param("eqx", (1, 2, 2), 1, 2, "block"),
    ],
    ids=str,
)
def test_a_step_is_that_of_documents_alone(framework, shape, microbatches, parts, remat, rng):
    mesh = first_devices(*shape)
    with jax.set_mesh(mesh):
        model = _model(framework, mesh, remat=remat)
        params = jax.jit(model.init)(jax.random.key(0))
        _check_step(_step(model, mesh, microbatches, parts), params, _rows(rng), mesh, model)


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_logits_are_those_of_documents_alone(framework, rng):
    config = dataclasses.replace(CONFIG, sliding_window=4, layer_pattern="LG")
    model = build(framework, dataclasses.replace(config, num_layers=2))
    params = model.init(jax.random.key(0))
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (1, SEQ)))
    segments = jnp.asarray([[3] * 6 + [7] * 10])
    packed = model.apply(params, tokens, segments)
    for part in (slice(0, 6), slice(6, SEQ)):
        alone = model.apply(params, tokens[:, part])
        np.testing.assert_allclose(packed[:, part], alone, rtol=0, atol=2**-17)
    with pytest.raises(ValueError, match=r"segment_ids must have the shape of tokens, \(1, 16\)"):
        model.apply(params, tokens, segments[:, 1:])


# ---------------------------------------------------------------- runs


@pytest.fixture
def documents(text_file, tmp_path):
    """The text's lines as JSON lines, twenty in each document."""
    lines = text_file.read_text().splitlines()
    groups = ["\n".join(lines[i : i + 20]) for i in range(0, len(lines), 20)]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(map(_line, groups)))
    return {"data.path": path, "data.documents": True}


def test_a_run_resumes_with_the_losses_of_the_unbroken(
    interrupted, train, documents, options, losses, lines, tmp_path
):
    code, out, err = train(**options | documents | {"out-dir": tmp_path / "whole"})
    assert (code, err) == (0, "") and re.search(r"\b5\d documents, ", out)
    assert "after step 3 of 6" in interrupted(**documents)
    code, out, err = train(**options)  # without its documents
    assert code == 2 and "trained with --data.documents, now it is --data.no-documents" in err
    assert train(**options | documents)[0] == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    checks = lambda name: [x["val_loss"] for x in lines(tmp_path / name) if "val_loss" in x]
    assert set(checks("run")) == set(checks("whole"))


def test_documents_may_not_be_other_ones():
    config, text = preset_config("tiny"), {"tokenizer": "byte", "sha256": "f0", "bytes": 9}
    text["name"] = "x"
    saved = text | {"documents": 3}
    assert check_resume(make_record(config, saved), config, saved) == []
    with pytest.raises(UsageError, match=r"--data\.no-documents, now it is --data\.documents"):
        check_resume(make_record(config, text), config, saved)
    with pytest.raises(UsageError, match="saved x, 3 documents, 9 bytes"):
        check_resume(make_record(config, saved), config, saved | {"sha256": "f1"})
