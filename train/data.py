"""The text: found, read as bytes, named by its SHA-256, and split into training and held-out."""

import glob
import hashlib
import math
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normfuse.train.errors import UsageError

HELD_OUT = 0.05
_NOT_TEXT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """A text as tokens. The byte is the token, so nats per token are nats per byte.

    Attributes:
      name: where it comes from, for people.
      files: how many files it was read from.
      sha256: of all its bytes.
      train: uint8 tokens to train on.
      held_out: the last 5 %, uint8.
    """

    name: str
    files: int
    sha256: str
    train: np.ndarray
    held_out: np.ndarray

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out)

    def identity(self) -> dict:
        """Gives what a resumed run must find again."""
        return {"name": self.name, "bytes": len(self), "sha256": self.sha256}


def load(path: str | None, *, seq_len: int, vocab_size: int) -> Text:
    """Reads the text and checks that the model can be trained on it.

    Args:
      path: a file, a directory (every file below it) or a glob, its files in sorted order; None
        for the sources of Python's standard library.
      seq_len: tokens in a sequence; both parts must hold one sequence and its last target.
      vocab_size: every token must be below it.

    Raises:
      UsageError: nothing is there, it cannot be read, it is too short, or a byte is no token.
    """
    name, files = _standard_library() if path is None else _find(path)
    try:
        content = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UsageError(f"--data.path {path} cannot be read: {error}") from None
    tokens = np.frombuffer(content, np.uint8)
    source = "--data.path " + path if path else name
    _check_length(source, len(tokens), seq_len)
    if (largest := int(tokens.max())) >= vocab_size:
        raise UsageError(
            f"{source} holds the token {largest}, but --model.vocab-size {vocab_size} allows only "
            f"those below {vocab_size}: bytes need 256."
        )
    cut = len(tokens) - math.floor(len(tokens) * HELD_OUT)
    digest = hashlib.sha256(content).hexdigest()
    return Text(name, len(files), digest, tokens[:cut], tokens[cut:])


def looks_binary(text: Text) -> bool:
    """Tells whether the text holds zero bytes: bytes can still be learned, but are hardly text."""
    return bool((text.train[:65_536] == 0).any())


def _check_length(source: str, length: int, seq_len: int):
    if length == 0:
        raise UsageError(f"{source} is empty: it must hold text.")
    needed = math.ceil((seq_len + 1) / HELD_OUT)
    if length < needed:
        raise UsageError(
            f"{source} has {length:,} tokens; --seq-len {seq_len} needs at least {needed:,}, of "
            f"which {HELD_OUT:.0%} are held out for validation. Give more text or a shorter "
            f"--seq-len (at most {max(math.floor(length * HELD_OUT) - 1, 0)})."
        )


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
    root = Path(path).expanduser()
    if root.is_dir():
        files = sorted(file for file in root.rglob("*") if file.is_file())
        return path, _some(path, files, "holds no files")
    if root.exists():
        return path, [root]
    matches = [Path(match) for match in glob.glob(str(root), recursive=True)]
    files = sorted(file for file in matches if file.is_file())
    return path, _some(path, files, "does not exist and matches nothing")


def _some(path: str, files: list[Path], otherwise: str) -> list[Path]:
    if not files:
        raise UsageError(
            f"--data.path {path} {otherwise}: give a file, a directory or a quoted glob, or leave "
            "it out for Python's own sources."
        )
    return files
