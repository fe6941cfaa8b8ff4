"""Tokens: bytes, and byte-pair encodings whose tokens are as many bytes as they say."""

import json

import numpy as np
import pytest

from normfuse.train.cli import main, parse
from normfuse.train.metrics import NATS_PER_BIT
from normfuse.train.text import load
from normfuse.train.tokenizer import Bpe, Bytes, make_tokenizer, read_tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the norm of a row\n\tdivides  the row; größer, 大きい 🙂\r\nand the scale scales  \n" * 40


@pytest.fixture(scope="module")
def trained():
    return make_tokenizer("bpe:300", [TEXT.encode()])


def test_bytes_are_their_own_tokens():
    assert Bytes().encode("né".encode()).tolist() == [110, 195, 169]
    assert Bytes().decode([110, 195, 169, 256]) == "né"


def test_a_tokenizer_of_bytes_is_bytes():
    every = bytes(range(256)) + TEXT.encode()
    tokenizer = Bpe.of_bytes()
    assert tokenizer.vocab_size == 256
    tokens = tokenizer.encode(TEXT.encode())
    assert bytes(tokens.tolist()) == TEXT.encode()
    assert tokenizer.decode(list(every)) == Bytes().decode(every)


def test_the_vocabulary_reaches_to_the_largest_token(tmp_path):
    """Some files leave out numbers: as many tokens as the file has are not all below it."""
    model = tokenizers.models.WordLevel({"a": 0, "norm": 900, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = read_tokenizer(tmp_path)
    assert found.vocab_size == 901
    assert found.decode(found.encode(b"a norm")) == "a norm"
    assert parse(["train", "--data.tokenizer", str(tmp_path)]).model.vocab_size == 1024


def test_trained_encoding_is_lossless_and_shorter(trained):
    tokens = trained.encode(TEXT.encode())
    assert trained.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT.encode()) / 2 and tokens.dtype == np.uint16
    assert tokens.max() < trained.vocab_size <= 300


def test_training_is_the_same_every_time(trained):
    assert make_tokenizer("bpe:300", [TEXT.encode()]).identity() == trained.identity()
    assert make_tokenizer("bpe:290", [TEXT.encode()]).identity() != trained.identity()


def test_long_texts_are_cut_at_line_ends_and_lose_nothing(trained, monkeypatch):
    from normfuse.train import tokenizer

    whole = trained.encode(TEXT.encode())
    monkeypatch.setattr(tokenizer, "_PIECE", 100)
    pieces = trained.encode(TEXT.encode())
    assert trained.decode(pieces) == TEXT
    assert len(pieces) < 1.1 * len(whole)
    no_line_end = "x" * 1000
    assert trained.decode(trained.encode(no_line_end.encode())) == no_line_end


def test_held_out_text_is_the_same_bytes_whatever_the_tokens(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("é" * 4999)  # the cut at 95 % of 9998 bytes is in a character
    as_bytes = load(str(path), seq_len=8, vocab_size=256)
    as_pairs = load(str(path), seq_len=4, vocab_size=300, tokenizer="bpe:270")
    assert len(as_bytes.held_out) == 499
    assert as_pairs.tokenizer.decode(as_pairs.held_out) == "é" * 250
    assert as_pairs.tokens_per_byte == (len(as_pairs.train) + len(as_pairs.held_out)) / 9998
    assert as_pairs.identity()["tokenizer"].startswith("sha256 ")


def test_the_vocabulary_follows_the_tokenizer_unless_given(train, tmp_path):
    """A multiple of 128; by whatever way either is given."""
    of = lambda *words: parse(["train", *words]).model.vocab_size
    file = tmp_path / "tokenizer.json"
    file.write_text(make_tokenizer("bpe:270", [b"the norm of a row"]).content)
    assert of() == 256 and of("--preset", "small") == 50_304
    assert of("--data.tokenizer", "bpe:300") == of("--data.tokenizer=bpe:257") == 384
    assert of("--preset", "small", "--data.tokenizer", "bpe:16384") == 16_384
    assert of("--data.tokenizer", str(file)) == 384
    assert of("--data.tokenizer", "bpe:300", "--model.vocab_size=512") == 512
    yaml = tmp_path / "run.yaml"
    yaml.write_text("data.tokenizer: bpe:300\n")
    assert of("--config", str(yaml)) == 384
    yaml.write_text("data.tokenizer: bpe:300\nmodel.vocab_size: 304\n")
    assert of("--config", str(yaml)) == 304
    code, _, error = train(**{"data.tokenizer": "bpe:300", "model.vocab-size": 256})
    assert code == 2 and "by --data.tokenizer bpe:300" in error
    assert "Give --model.vocab-size 384" in error


def test_run_on_pairs_counts_bits_per_byte_and_goes_on(train, text_file, tmp_path, lines, capsys):
    options = {
        "data.tokenizer": "bpe:300",
        "model.vocab-size": 304,
        "steps": 2,
    }
    code, out, err = train(**options)
    assert (code, err) == (0, "")
    run = tmp_path / "run"
    text = load(str(text_file), seq_len=16, vocab_size=304, tokenizer="bpe:300")
    last = lines(run)[-1]
    expected = last["val_loss"] / NATS_PER_BIT * text.tokens_per_byte
    assert last["val_bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert f"{expected:.3f} bits/byte" in out

    assert json.loads((run / "text.json").read_text())["tokens_per_byte"] == text.tokens_per_byte
    assert train(**options)[0] == 0  # with the saved tokenizer
    code, _, err = train(**options | {"data.tokenizer": "byte"})
    assert code == 2 and "text.tokenizer saved sha256 " in err and "now byte" in err
    assert main(["generate", str(run), "--prompt", "the row", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("the row")
