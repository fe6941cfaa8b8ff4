"""Tokenizers: bytes, or byte-pair encodings of the `tokenizers` package."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from . import UsageError
from .arguments import expanded, named

_PIECE = 1 << 18  # characters encoded at once; the package's results take fifty bytes for each
_BATCH = 8 * _PIECE  # characters encoded in parallel
_END = "<|endoftext|>"


class Bytes:
    """The tokenizer whose tokens are a text's bytes. `Bpe` has the same methods."""

    name, vocab_size = "byte", 256  # the value of `--data.tokenizer`; every token is below the size

    def encode(self, content: bytes) -> np.ndarray:
        """Returns a text's tokens, unsigned integers."""
        return np.frombuffer(content, np.uint8)

    def encode_each(self, documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of all documents, and the number of tokens of each."""
        return self.encode(b"".join(documents)), np.array([*map(len, documents)], np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without those beyond the vocabulary."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def identity(self) -> str:
        """Returns the identity of the tokenizer, which a resumed run must share."""
        return self.name


class Bpe:
    """A tokenizer in Hugging Face's format: the content of a `tokenizer.json`, and its name."""

    def __init__(self, content: str, name: str) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(content)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.name, self.content = name, content
        # Not their number: a file may leave out some.
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, content: bytes) -> np.ndarray:
        return self.encode_each([content])[0]

    def encode_each(self, documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        tokens = [np.zeros(0, dtype)]
        counts = np.zeros(len(documents), np.int64)
        for batch in _batches(documents):
            pieces = [piece for _, piece in batch]
            encodings = self._tokenizer.encode_batch(pieces, add_special_tokens=False)
            for (at, _), encoding in zip(batch, encodings, strict=True):
                tokens.append(np.array(encoding.ids, dtype))
                counts[at] += len(encoding.ids)
        return np.concatenate(tokens), counts

    def decode(self, tokens: Sequence[int]) -> str:
        known = [int(token) for token in tokens if token < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    @classmethod
    def of_bytes(cls) -> "Bpe":
        """Returns the tokenizer whose tokens are bytes, as `Bytes`."""
        import tokenizers as package

        # The characters of the package's byte level: a byte that is a printable one is itself.
        own = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        characters = [chr(byte if byte in own else next(others)) for byte in range(256)]
        vocabulary = {character: byte for byte, character in enumerate(characters)}
        tokenizer = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=[]))
        pieces = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = pieces, package.decoders.ByteLevel()
        return cls(tokenizer.to_str(), Bytes.name)

    def opening(self) -> list[int]:
        """Returns the tokens that the file's template puts before a text: often one, <bos>."""
        encoding = self._tokenizer.encode("a")
        marked = zip(encoding.ids, encoding.special_tokens_mask)
        return [token for token, _ in itertools.takewhile(lambda pair: pair[1], marked)]

    def identity(self) -> str:
        return f"sha256 {hashlib.sha256(self.content.encode()).hexdigest()[:16]}"


Tokenizer = Bytes | Bpe


def make_tokenizer(name: str, content: Iterable[bytes], saved: Path | None = None) -> Tokenizer:
    """Returns the tokenizer that `--data.tokenizer` names.

    Args:
      name: "byte"; "bpe:N", trained on the text to N tokens; or a `tokenizer.json`.
      content: the text to train it on.
      saved: the file of a run's trained tokenizer; read instead of training, if it exists.

    Raises:
      UsageError: the file does not exist or is invalid, or the package is missing.
    """
    if name == "byte":
        return Bytes()
    if (size := _trained_size(name)) is None:
        return read_tokenizer(expanded(name, "--data.tokenizer"))
    if saved is not None and saved.exists():
        return Bpe(read_tokenizer(saved).content, name)
    return Bpe(_trained(size, content), name)


def _trained_size(name: str) -> int | None:
    """Returns the number of tokens of an encoding to train, None for another name's."""
    match = re.fullmatch(r"bpe:([0-9]{1,9})", name)
    return None if match is None else int(match[1])


def read_tokenizer(path: Path, argument: str = "--data.tokenizer") -> Bpe:
    """Reads a `tokenizer.json`, or the one in a folder; messages name it by `argument`.

    Raises:
      UsageError: as `make_tokenizer`.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    with named(argument, path):
        content = path.read_bytes().decode()
    try:
        return Bpe(content, str(path))
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the package raises a bare Exception
        raise UsageError(
            f"{argument} {path} is not a valid tokenizer.json: {error}. Give another one, `byte` "
            "or `bpe:N`; delete that of a run to train it again."
        ) from None


def vocabulary_of(name: str) -> int | None:
    """Returns the vocabulary of a model that reads `--data.tokenizer`'s tokens; None for bytes.

    It is a multiple of 128, which GEMMs and mesh axes divide.

    Raises:
      UsageError: as `make_tokenizer`.
    """
    if name == "byte":
        return None
    if (size := _trained_size(name)) is None:
        size = read_tokenizer(expanded(name, "--data.tokenizer")).vocab_size
    return -(-size // 128) * 128


def _trained(vocab_size: int, content: Iterable[bytes]) -> str:
    """Trains a byte-level BPE; the result depends on the text alone."""
    import tokenizers as package

    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 1
    if vocab_size < least:
        raise UsageError(
            f"--data.tokenizer bpe:{vocab_size} must have at least {least} tokens: all bytes and "
            f"{_END}."
        )
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(alphabet),
        special_tokens=[_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in content for piece in _pieces(text)), trainer)
    return tokenizer.to_str()


def _pieces(content: bytes) -> Iterator[str]:
    """Splits a text into pieces of at most `_PIECE`, after line ends where these are close."""
    text, start = content.decode(errors="replace"), 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _batches(documents: Sequence[bytes]) -> Iterator[list[tuple[int, str]]]:
    """Yields the pieces of all documents, each with its document's number, some at a time."""
    batch, size = [], 0
    for at, document in enumerate(documents):
        for piece in _pieces(document):
            if size + len(piece) > _BATCH:
                yield batch
                batch, size = [], 0
            batch.append((at, piece))
            size += len(piece)
    if batch:
        yield batch
