"""Tokenizers: bytes, or Hugging Face's `tokenizer.json`, of the `tokenizers` package."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from . import UsageError
from .arguments import expanded, named

_PIECE = 1 << 18  # characters encoded at once; the package's results take fifty bytes for each
_BATCH = 8  # pieces encoded in parallel


class Bytes:
    """The tokenizer whose tokens are a text's bytes. `Bpe` has the same methods."""

    name, vocab_size = "byte", 256  # the value of `--data.tokenizer`; every token is below the size
    special = False  # puts special tokens around documents and before prompts

    def encode(self, content: bytes) -> np.ndarray:
        """Returns a text's tokens, unsigned integers."""
        return np.frombuffer(content, np.uint8)

    def encode_documents(self, documents: Sequence[bytes]) -> np.ndarray:
        """Returns the tokens of texts, each between its special tokens."""
        return self.encode(b"".join(documents))

    def opening(self) -> list[int]:
        """Returns the special tokens before a document and a prompt: often one, <bos>."""
        return []

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without those beyond the vocabulary."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def identity(self) -> str:
        """Returns the identity of the tokenizer, which a resumed run must share."""
        return self.name


class Bpe:
    """A tokenizer in Hugging Face's format: the content of a `tokenizer.json`, and its name."""

    special = True

    def __init__(self, content: str, name: str) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(content)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode("a \U0010ffff")  # it may have no token for what is unknown
        self.name, self.content = name, content
        encoding = self._tokenizer.encode("a")  # with what the file's template puts around it
        marked = zip(encoding.ids, encoding.special_tokens_mask)
        before = [x for x, _ in itertools.takewhile(lambda pair: pair[1], marked)]
        ids = [x for x, mark in zip(encoding.ids, encoding.special_tokens_mask) if mark]
        self._template = before, ids[len(before) :]
        # Not their number: a file may leave out some.
        self.vocab_size: int = 1 + max([-1, *self._tokenizer.get_vocab().values(), *encoding.ids])

    def encode(self, content: bytes) -> np.ndarray:
        return self._encode([content], [], [])

    def encode_documents(self, documents: Sequence[bytes]) -> np.ndarray:
        if self.special and any(self._template):
            return self._encode(documents, *self._template)
        return self.encode(b"".join(documents))

    def _encode(self, texts: Sequence[bytes], before: list[int], after: list[int]) -> np.ndarray:
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        tokens = [np.zeros(0, dtype)]
        pieces = itertools.chain.from_iterable(_pieces(x.decode(errors="replace")) for x in texts)
        while batch := list(itertools.islice(pieces, _BATCH)):
            parts = [part for part, *_ in batch]
            encodings = self._tokenizer.encode_batch(parts, add_special_tokens=False)
            for (_, begins, ends), encoding in zip(batch, encodings):
                tokens.append(np.array([*before * begins, *encoding.ids, *after * ends], dtype))
        return np.concatenate(tokens)

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
        return self._template[0] if self.special else []

    def for_prompts(self) -> str:
        """Returns a `tokenizer.json` that puts `opening` before a text, and nothing after it."""
        import tokenizers

        if self._template == (self.opening(), []):
            return self.content
        changed = tokenizers.Tokenizer.from_str(self.content)
        marks = [(changed.id_to_token(token), token) for token in self.opening()]
        template = [*(name for name, _ in marks), "$A"]
        process = tokenizers.processors.TemplateProcessing(template, special_tokens=marks)
        changed.post_processor = process
        return changed.to_str()

    def identity(self) -> str:
        special = ", with special tokens" if self.special and any(self._template) else ""
        return f"sha256 {hashlib.sha256(self.content.encode()).hexdigest()[:16]}{special}"


Tokenizer = Bytes | Bpe


def make_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that `--data.tokenizer` names: "byte", or a `tokenizer.json`.

    Raises:
      UsageError: the file does not exist or is invalid, or the package is missing.
    """
    if name == "byte":
        return Bytes()
    return read_tokenizer(expanded(name, "--data.tokenizer"))


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
    except (ModuleNotFoundError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the package raises a bare Exception, or a panic of Rust
        raise UsageError(
            f"{argument} {path} is not a valid tokenizer.json: {error}. Give another, or `byte`."
        ) from None


def _pieces(text: str) -> Iterator[tuple[str, bool, bool]]:
    """Splits a text into pieces of at most `_PIECE`, after line ends where these are close.

    Yields: each piece, and whether the text begins and ends with it.
    """
    start = 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end], start == 0, end == len(text)
        start = end
