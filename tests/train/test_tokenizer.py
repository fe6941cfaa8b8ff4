"""Tokens: bytes, and byte-pair encodings whose tokens are as many bytes as they say."""

import json

import numpy as np
import pytest

from normfuse.train.cli import main, parse
from normfuse.train.metrics import NATS_PER_BIT
from normfuse.train.text import load
from normfuse.train.tokenizer import Bpe, Bytes, read_tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the norm of a row\n\tdivides  the row; größer, 大きい 🙂\r\nand the scale scales  \n" * 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The file of an encoding of 300 tokens."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, show_progress=False)
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


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


def test_an_encoding_is_lossless_and_shorter(trained):
    tokenizer = read_tokenizer(trained)
    tokens = tokenizer.encode(TEXT.encode())
    assert tokenizer.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT.encode()) / 2 and tokens.dtype == np.uint16
    assert tokens.max() < tokenizer.vocab_size <= 300


def test_long_texts_are_cut_at_line_ends_and_lose_nothing(trained, monkeypatch):
    from normfuse.train import tokenizer

    encoding = read_tokenizer(trained)
    whole = encoding.encode(TEXT.encode())
    monkeypatch.setattr(tokenizer, "_PIECE", 100)
    pieces = encoding.encode(TEXT.encode())
    assert encoding.decode(pieces) == TEXT
    assert len(pieces) < 1.1 * len(whole)
    no_line_end = "x" * 1000
    assert encoding.decode(encoding.encode(no_line_end.encode())) == no_line_end


def test_held_out_text_is_the_same_bytes_whatever_the_tokens(tmp_path, trained):
    path = tmp_path / "text.txt"
    path.write_text("é" * 4999)  # the cut at 95 % of 9998 bytes is in a character
    as_bytes = load(str(path), seq_len=8, vocab_size=256)
    encoded = load(str(path), seq_len=4, vocab_size=300, tokenizer=str(trained))
    assert len(as_bytes.held_out) == 499
    assert encoded.tokenizer.decode(encoded.held_out) == "é" * 250
    assert encoded.tokens_per_byte == (len(encoded.train) + len(encoded.held_out)) / 9998
    assert encoded.identity()["tokenizer"].startswith("sha256 ")


def test_the_vocabulary_follows_the_tokenizer_unless_given(train, tmp_path, trained):
    """A multiple of 128; by whatever way either is given."""
    of = lambda *words: parse(["train", *words]).model.vocab_size
    assert of() == 256 and of("--preset", "small") == 50_304
    assert of("--data.tokenizer", str(trained)) == of(f"--data.tokenizer={trained}") == 384
    assert of("--data.tokenizer", str(trained), "--model.vocab_size=512") == 512
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"data.tokenizer: {trained}\n")
    assert of("--config", str(yaml)) == 384
    yaml.write_text(f"data.tokenizer: {trained}\nmodel.vocab_size: 304\n")
    assert of("--config", str(yaml)) == 304
    code, _, error = train(**{"data.tokenizer": trained, "model.vocab-size": 256})
    assert code == 2 and f"by --data.tokenizer {trained}" in error
    assert "Give --model.vocab-size 384" in error


def test_tokenizers_that_cannot_serve_are_explained(train, tmp_path):
    words = tmp_path / "words.json"  # without a token for others
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save(str(words))
    code, _, error = train(**{"data.tokenizer": words})
    assert code == 2 and f"{words} is not a valid tokenizer.json: WordLevel error" in error


def test_run_on_tokens_counts_bits_per_byte_and_goes_on(
    train, trained, text_file, tmp_path, lines, capsys
):
    options = {"data.tokenizer": trained, "model.vocab-size": 304, "steps": 2}
    code, out, err = train(**options)
    assert (code, err) == (0, "")
    run = tmp_path / "run"
    text = load(str(text_file), seq_len=16, vocab_size=304, tokenizer=str(trained))
    last = lines(run)[-1]
    expected = last["val_loss"] / NATS_PER_BIT * text.tokens_per_byte
    assert last["val_bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert f"{expected:.3f} bits/byte" in out

    assert json.loads((run / "text.json").read_text())["tokens_per_byte"] == text.tokens_per_byte
    saved = {"data.tokenizer": run / "tokenizer.json"}
    assert train(**options | saved)[0] == 0
    code, _, err = train(**options | {"data.tokenizer": "byte"})
    assert code == 2 and "text.tokenizer saved sha256 " in err and "now byte" in err
    assert main(["generate", str(run), "--prompt", "the row", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("the row")
