"""A run's text: reading, splitting and tokenizing it."""

import codecs
import contextlib
import glob
import hashlib
import json
import math
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from . import UsageError
from .arguments import expanded, named, shown
from .config import TrainConfig
from .data import with_target
from .run_dir import RunDir
from .tokenizer import Bytes, Tokenizer, make_tokenizer

HELD_OUT = 0.05
_NOT_TEXT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """A text as tokens."""

    name: str  # its source, for messages
    files: int  # number of files read
    sha256: str  # hash of all its bytes
    tokenizer: Tokenizer
    train: np.ndarray  # tokens to train on, unsigned integers
    held_out: np.ndarray  # tokens of the last 5 % of the bytes
    size: int  # number of bytes
    # With --data.documents, the number of tokens of each document to train on, and held out.
    documents: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def tokens_per_byte(self) -> float:
        return (len(self.train) + len(self.held_out)) / self.size

    def identity(self) -> dict[str, Any]:
        """Returns the identity of the text, which a resumed run must share."""
        identity: dict[str, Any] = {
            "name": self.name,
            "bytes": self.size,
            "sha256": self.sha256,
            "tokenizer": self.tokenizer.identity(),
        }
        if self.documents is not None:
            identity["documents"] = sum(map(len, self.documents))
        return identity


def read(config: TrainConfig) -> Text:
    """Reads a run's text; raises what `load` does."""
    return load(
        config.data.path,
        seq_len=config.seq_len,
        vocab_size=config.model.vocab_size,
        tokenizer=config.data.tokenizer,
        saved=RunDir(config.out_dir).tokenizer if config.out_dir else None,
        documents=config.data.documents,
    )


def load(
    path: str | None,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: str = "byte",
    saved: Path | None = None,
    documents: bool = False,
) -> Text:
    """Reads the text and checks that the model can be trained on it.

    Args:
      path: a file, a directory (every file below it) or a glob, its files in sorted order; None
        for the sources of Python's standard library.
      seq_len: tokens in a sequence; both parts must hold one sequence and its last target.
      vocab_size: every token must be below it.
      tokenizer: "byte", "bpe:N" or a file, as `--data.tokenizer`.
      saved: the file in which a run keeps a tokenizer trained on its text.
      documents: each file is a document, and each line of a `.jsonl` or `.ndjson` file is one, its
        "text". Empty ones are left out. The one that the cut between the parts meets is two.

    Raises:
      UsageError: nothing is there, it cannot be read, it is too short, or a token is too large.
    """
    name, files = _standard_library() if path is None else _find(path)
    with named("--data.path", path):
        texts = [file.read_bytes() for file in files]
    if documents:
        texts = [text for file in zip(files, texts) for text in _documents_of(*file) if text]
    content = b"".join(texts)
    digest = hashlib.sha256(content)
    if documents:
        digest.update(np.array([*map(len, texts)], "<i8").tobytes())
    else:
        texts = [content]
    source = name if path is None else f"--data.path {path}"
    if not content:
        raise UsageError(f"{source} is empty: it must hold text.")
    cut = len(content) - math.floor(len(content) * HELD_OUT)
    encoder = make_tokenizer(tokenizer, _cut(texts, cut)[0], saved)
    while encoder.vocab_size > 256 and 0 < cut < len(content) and content[cut] & 0xC0 == 0x80:
        cut -= 1  # to where a UTF-8 character starts
    before, after = _cut(texts, cut)
    train, lengths = encoder.encode_each(before)
    held_out, held_out_lengths = encoder.encode_each(after)
    each = (lengths, held_out_lengths) if documents else None
    sizes = [int(with_target(n).sum()) for n in each] if each else [len(train), len(held_out)]
    least = seq_len + (not documents)
    if min(sizes) < least:
        what = "tokens that follow another of their document" if documents else "tokens"
        raise UsageError(
            f"{source} has {sum(sizes):,} {what}; --seq-len {seq_len} needs at least "
            f"{math.ceil(least / HELD_OUT):,}, of which {HELD_OUT:.0%} are held out for "
            "validation. Give more text or a shorter --seq-len."
        )
    # A model may leave out bytes that the text does not have.
    is_bytes = isinstance(encoder, Bytes)
    needed = 1 + int(max(train.max(), held_out.max())) if is_bytes else encoder.vocab_size
    if needed > vocab_size:
        raise UsageError(
            f"{source} needs {needed} tokens by --data.tokenizer {encoder.name}, but --model."
            f"vocab-size is {vocab_size}. Give --model.vocab-size {-(-needed // 128) * 128}."
        )
    sha256 = digest.hexdigest()
    return Text(name, len(files), sha256, encoder, train, held_out, len(content), each)


def _documents_of(file: Path, content: bytes) -> Iterator[bytes]:
    """Yields the documents of a file: the texts of JSON lines, or its whole content."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if file.suffix.lower() not in (".jsonl", ".ndjson"):
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        document: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(line.decode())
        if not isinstance(document, dict) or not isinstance(document.get("text"), str):
            raise UsageError(
                f"--data.path: {file}:{number}: with --data.documents a line of a .jsonl file must "
                f'be a JSON object with a string "text", not {shown(line)}. Mend the line, or '
                "leave out --data.documents to train on the file as it is."
            )
        yield document["text"].encode(errors="replace")


def _cut(texts: list[bytes], at: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the texts before and after their byte `at`, without empty ones."""
    ends = np.cumsum([*map(len, texts)])
    i = int(np.searchsorted(ends, at))  # the text that holds the last byte before `at`
    inside = at - (int(ends[i]) - len(texts[i]))
    before, after = [*texts[:i], texts[i][:inside]], [texts[i][inside:], *texts[i + 1 :]]
    return [x for x in before if x], [x for x in after if x]


def _standard_library() -> tuple[str, list[Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in root.rglob("*.py")
        if not _NOT_TEXT.intersection(file.relative_to(root).parts[:-1])
    ]
    name = f"Python {platform.python_version()} standard library"
    return name, sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _find(path: str) -> tuple[str, list[Path]]:
    root = expanded(path, "--data.path")
    with named("--data.path", path):
        paths = [Path(match) for match in glob.glob(str(root), recursive=True)]
        if root.is_dir():
            folders = os.walk(root, onerror=_refuse)  # one that cannot be read is not left out
            paths = [Path(folder, name) for folder, _, names in folders for name in names]
        files = sorted(path for path in {*paths, root} if path.is_file())
    if not files:
        raise UsageError(
            f"--data.path {path} holds and matches no files: give a file, a directory or a quoted "
            "glob, or leave it out for Python's own sources."
        )
    return path, files


def _refuse(error: OSError) -> NoReturn:
    raise error
