"""A run's text: reading, splitting and tokenizing it."""

import glob
import hashlib
import math
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from . import UsageError
from .arguments import expanded, named
from .documents import is_dataset, read
from .tokenizer import Bytes, Tokenizer, make_tokenizer

HELD_OUT = 0.05
_NOT_TEXT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """A text as tokens."""

    name: str  # its source, for messages
    files: int  # number of files read
    documents: int  # number of documents in them
    sha256: str  # hash of all its bytes
    tokenizer: Tokenizer
    train: np.ndarray  # tokens to train on, unsigned integers
    held_out: np.ndarray  # tokens of the last 5 % of the bytes
    size: int  # number of bytes

    @property
    def tokens_per_byte(self) -> float:
        return (len(self.train) + len(self.held_out)) / self.size

    def identity(self) -> dict[str, Any]:
        """Returns the identity of the text, which a resumed run must share."""
        return {
            "name": self.name,
            "bytes": self.size,
            "sha256": self.sha256,
            "tokenizer": self.tokenizer.identity(),
        }


def load(
    path: str | None,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: str = "byte",
    field: str = "text",
    special: bool = False,
) -> Text:
    """Reads the text and checks that the model can be trained on it.

    The tokenizer's special tokens, as <bos>, are put around each document: each line of JSON
    Lines, row of a dataset, or of several files each. One file of text is a stream without them.

    Args:
      path: a file, a directory (every file below it) or a glob, its files in sorted order, or a
        dataset's folder; None for the sources of Python's standard library.
      seq_len: tokens in a sequence; both parts must hold one sequence and its last target.
      vocab_size: every token must be below it.
      tokenizer: "byte" or a file, as `--data.tokenizer`.
      field: has the text in objects of JSON Lines and rows of a dataset.
      special: takes one file of text for a document.

    Raises:
      UsageError: nothing is there, it cannot be read, it is too short, or a token is too large.
    """
    name, files = _standard_library() if path is None else _find(path)
    with named("--data.path", path):
        alone = {file.suffix.lower() for file in files} == {".json"}
        documents = [text for file in files for text in read(file, field, alone)]
    content = b"".join(documents)
    source = name if path is None else f"--data.path {path}"
    if not content:
        raise UsageError(f"{source} is empty: it must hold text.")
    cut = len(content) - math.floor(len(content) * HELD_OUT)
    encoder = make_tokenizer(tokenizer)
    encoder.special = special or len(documents) > 1
    while encoder.vocab_size > 256 and 0 < cut < len(content) and content[cut] & 0xC0 == 0x80:
        cut -= 1  # to where a UTF-8 character starts
    train, held_out = map(encoder.encode_documents, _split(documents, cut))
    if min(len(train), len(held_out)) <= seq_len:
        raise UsageError(
            f"{source} has {len(train) + len(held_out):,} tokens; --seq-len {seq_len} needs at "
            f"least {math.ceil((seq_len + 1) / HELD_OUT):,}, of which {HELD_OUT:.0%} are held out "
            "for validation. Give more text or a shorter --seq-len."
        )
    # A model may leave out bytes that the text does not have.
    is_bytes = isinstance(encoder, Bytes)
    needed = 1 + int(max(train.max(), held_out.max())) if is_bytes else encoder.vocab_size
    if needed > vocab_size:
        more = f"Give --model.vocab-size {-(-needed // 128) * 128}."
        more = "The folder's model is of another tokenizer." if special else more
        raise UsageError(
            f"{source} needs {needed} tokens by --data.tokenizer {encoder.name}, but --model."
            f"vocab-size is {vocab_size}. {more}"
        )
    sha256 = hashlib.sha256(content).hexdigest()
    return Text(name, len(files), len(documents), sha256, encoder, train, held_out, len(content))


def _split(documents: list[bytes], size: int) -> tuple[list[bytes], list[bytes]]:
    """Splits documents after `size` bytes; one that is cut becomes two."""
    before, after = [], []
    for text in documents:
        before += [text[:size]] if text[:size] else []
        after += [text[size:]] if text[size:] else []
        size = max(size - len(text), 0)
    return before, after


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
    if is_dataset(root):
        return path, [root]
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
