"""The text: reading, splitting and tokenizing it, its batches, and simple models of it.

Which windows of the text are in a step's batch depends on the seed and the step only. So a loader
has no state to save: a run resumed at step k asks for batch k, whatever the number of processes
before and after.
"""

import errno
import glob
import hashlib
import math
import os
import platform
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grain
import numpy as np

from . import UsageError
from .arguments import expanded, named, read_bytes
from .config import TrainConfig
from .run_dir import RunDir
from .tokenizer import Bytes, Tokenizer, make_tokenizer, pieces_at_lines

HELD_OUT = 0.05
_PROMPT = 32  # characters of a sample's prompt
_CHUNK = 1 << 22  # bytes whose pairs are counted at once
_PART = 1 << 24  # bytes that a tokenizer is trained on at once: it copies them several times
_NOT_TEXT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """A text as tokens."""

    name: str  # its source, for messages
    files: int  # how many it was read from
    sha256: str  # of all its bytes
    tokenizer: Tokenizer
    train: np.ndarray  # tokens to train on, unsigned integers
    held_out: np.ndarray  # tokens of the last 5 % of the bytes
    widths: np.ndarray  # number of bytes of each held-out token
    raw_train: np.ndarray  # bytes of `train`, uint8
    raw_held_out: np.ndarray  # bytes of `held_out`, uint8

    def __len__(self) -> int:
        return len(self.raw_train) + len(self.raw_held_out)

    @property
    def tokens_per_byte(self) -> float:
        return len(self.train) / len(self.raw_train)

    def identity(self) -> dict[str, Any]:
        """Returns what identifies the text: a resumed run must have the same."""
        return {
            "name": self.name,
            "bytes": len(self),
            "sha256": self.sha256,
            "tokenizer": self.tokenizer.identity(),
        }


def read(config: TrainConfig) -> Text:
    """Reads a run's text; raises what `load` does, and a UsageError for a prompt too long."""
    text = load(
        config.data.path,
        seq_len=config.seq_len,
        vocab_size=config.model.vocab_size,
        tokenizer=config.data.tokenizer,
        saved=RunDir(config.out_dir).tokenizer if config.out_dir else None,
    )
    prompt, limit = prompt_of(config, text), config.model.max_seq_len
    if config.sample.tokens and not 0 < len(text.tokenizer.encode(prompt.encode())[0]) < limit:
        raise UsageError(
            f"--sample.prompt {prompt!r} must be from one token to --model.max-seq-len {limit} - 1 "
            f"tokens of --data.tokenizer {config.data.tokenizer}."
        )
    return text


def prompt_of(config: TrainConfig, text: Text) -> str:
    """Returns what a run's sample continues: by default words that the model was not trained on."""
    if config.sample.prompt is not None:
        return config.sample.prompt
    lines = text.raw_held_out[:4096].tobytes().decode(errors="replace").splitlines()
    line = next(filter(str.strip, lines[1:]), lines[0])  # the first may begin within a word
    prompt = line[:_PROMPT] or "\n"
    if len(line) > _PROMPT and (words := prompt[: max(prompt.rfind(" "), 0)]).strip():
        prompt = words
    while len(prompt) > 1 and len(text.tokenizer.encode(prompt.encode())[0]) > _room(config):
        prompt = prompt[: len(prompt) // 2]
    return prompt


def _room(config: TrainConfig) -> int:
    """Returns how many tokens of a prompt leave as many for its continuation."""
    return config.model.max_seq_len // 2


def load(
    path: str | None,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: str = "byte",
    saved: Path | None = None,
) -> Text:
    """Reads the text and checks that the model can be trained on it.

    Args:
      path: a file, a directory (every file below it) or a glob, its files in sorted order; None
        for the sources of Python's standard library.
      seq_len: tokens in a sequence; both parts must hold one sequence and its last target.
      vocab_size: every token must be below it.
      tokenizer: "byte", "bpe:N" or a file, as `--data.tokenizer`.
      saved: the file in which a run keeps a tokenizer trained on its text.

    Raises:
      UsageError: nothing is there, it cannot be read, it is too short, or a token is too large.
    """
    name, files = _standard_library() if path is None else _find(path)
    with named("--data.path", path):
        content = b"".join(map(read_bytes, files))
    source = name if path is None else f"--data.path {path}"
    if not content:
        raise UsageError(f"{source} is empty: it must hold text.")
    cut = len(content) - math.floor(len(content) * HELD_OUT)
    made = make_tokenizer(tokenizer, pieces_at_lines(content[:cut], b"\n", _PART), saved)
    if made.vocab_size > 256:
        cut = _character_start(content, cut)
    train, _ = made.encode(content[:cut])
    held_out, widths = made.encode(content[cut:])
    _check_length(source, train, held_out, seq_len)
    _check_vocabulary(source, made, int(max(train.max(), held_out.max())), vocab_size)
    raw = np.frombuffer(content, np.uint8)
    digest = hashlib.sha256(content).hexdigest()
    return Text(name, len(files), digest, made, train, held_out, widths, raw[:cut], raw[cut:])


class Windows(grain.sources.RandomAccessDataSource):
    """Consecutive windows of `seq_len` tokens, each with the token that follows it."""

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns `(seq_len + 1,)` int32 tokens."""
        start = int(index) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].astype(np.int32)


def batches(
    tokens: np.ndarray, *, seq_len: int, batch_size: int, seed: int, first: int, steps: int
) -> Iterator[np.ndarray]:
    """Yields the batches of steps `first` (from 0) to `steps - 1`, read ahead in threads.

    Every pass over the text has its own order; a batch may span two passes.

    Yields: `(batch_size, seq_len + 1)` int32: inputs are all but the last column, targets all but
      the first.
    """
    passes = grain.MapDataset.source(Windows(tokens, seq_len)).seed(seed).shuffle().repeat()
    wanted = passes.slice(slice(first * batch_size, steps * batch_size)).batch(batch_size)
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(wanted.to_iter_dataset(read))


def reference_bits_per_byte(text: Text) -> dict[str, float]:
    """Returns the bits per byte of three simple models on the held-out text, to judge a loss by.

    `unigram` knows how often each byte occurs in the training text, `bigram` how often it follows
    each other byte (both with one added to every count); `zlib` is the held-out text compressed by
    itself at level 9.
    """
    counts = np.bincount(text.raw_train, minlength=256) + 1.0
    unigram = -np.log2(counts / counts.sum())[text.raw_held_out].mean()
    pairs = np.ones(256 * 256)
    for start in range(0, len(text.raw_train) - 1, _CHUNK):
        chunk = text.raw_train[start : start + _CHUNK + 1]
        pairs += np.bincount(_pairs(chunk), minlength=256 * 256)
    table = pairs.reshape(256, 256)
    bits = -np.log2(table / table.sum(axis=1, keepdims=True)).ravel()
    bigram = bits[_pairs(text.raw_held_out)].mean()
    packed = len(zlib.compress(text.raw_held_out.tobytes(), 9))
    return {
        "unigram": float(unigram),
        "bigram": float(bigram),
        "zlib": 8 * packed / len(text.raw_held_out),
    }


def _pairs(tokens: np.ndarray) -> np.ndarray:
    return tokens[:-1].astype(np.int64) * 256 + tokens[1:]


def _character_start(content: bytes, at: int) -> int:
    """Returns where the UTF-8 character at `at` starts."""
    while at > 0 and content[at] & 0xC0 == 0x80:
        at -= 1
    return at


def looks_binary(text: Text) -> bool:
    """Returns whether the text holds zero bytes: a model can learn them, but text has none."""
    return bool((text.raw_train[:65_536] == 0).any())


def _check_length(source: str, train: np.ndarray, held_out: np.ndarray, seq_len: int) -> None:
    if min(len(train), len(held_out)) < seq_len + 1:
        length, needed = len(train) + len(held_out), math.ceil((seq_len + 1) / HELD_OUT)
        shorter = f" or a shorter --seq-len (at most {len(held_out) - 1})"
        raise UsageError(
            f"{source} has {length:,} tokens; --seq-len {seq_len} needs at least {needed:,}, of "
            f"which {HELD_OUT:.0%} are held out for validation. Give more text"
            f"{shorter if len(held_out) > 1 else ''}."
        )


def _check_vocabulary(source: str, tokenizer: Tokenizer, largest: int, vocab_size: int) -> None:
    if isinstance(tokenizer, Bytes):
        if largest >= vocab_size:
            raise UsageError(
                f"{source} holds the token {largest}, but --model.vocab-size {vocab_size} allows "
                f"only those below {vocab_size}: bytes need 256."
            )
    elif (needed := max(tokenizer.vocab_size, largest + 1)) > vocab_size:
        raise UsageError(
            f"--data.tokenizer {tokenizer.name} has {needed} tokens, but --model.vocab-size is "
            f"{vocab_size}. Give --model.vocab-size {-(-needed // 128) * 128}."
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
    root = expanded(path, "--data.path")
    with named("--data.path", path):
        if root.is_dir():
            return path, _some(path, sorted(_files_below(root)), "holds no files")
        if root.exists():
            return path, [root]
        matches = [Path(match) for match in glob.glob(str(root), recursive=True)]
        _check_folders(root)
        files = sorted(filter(_is_file, matches))
    return path, _some(path, files, "does not exist and matches nothing")


def _files_below(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> NoReturn:
        raise error  # a folder that cannot be read is not left out

    for folder, _, names in os.walk(root, onerror=fail):
        yield from filter(_is_file, (Path(folder, name) for name in names))


def _is_file(path: Path) -> bool:
    """Returns whether a path is a regular file; OSError in a folder without permission."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _check_folders(pattern: Path) -> None:
    """Raises an OSError for a folder on a pattern's way that `glob` has left out as unreadable."""
    for part in pattern.parents:
        for match in glob.glob(str(part), recursive=True):
            if os.path.isdir(match) and not os.access(match, os.R_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), match)


def _some(path: str, files: list[Path], otherwise: str) -> list[Path]:
    if not files:
        raise UsageError(
            f"--data.path {path} {otherwise}: give a file, a directory or a quoted glob, or leave "
            "it out for Python's own sources."
        )
    return files
