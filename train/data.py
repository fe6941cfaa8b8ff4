"""The text: reading, splitting and tokenizing it, its batches, and simple models of it.

Documents are packed: every token but a document's last is an input, every one but its first a
target, and all rows hold equally many such pairs. So no token is predicted from another document,
every place of a row has a target, and a document that does not fit continues in the next row,
without the tokens before.

Which windows of the text are in a step's batch depends on the seed and the step only. So a loader
has no state to save: a run resumed at step k asks for batch k, whatever the number of processes
before and after.
"""

import codecs
import errno
import glob
import hashlib
import json
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
from .arguments import expanded, named, read_bytes, shown
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
    files: int  # number of files read
    sha256: str  # hash of all its bytes
    tokenizer: Tokenizer
    train: np.ndarray  # tokens to train on, unsigned integers
    held_out: np.ndarray  # tokens of the last 5 % of the bytes
    widths: np.ndarray  # number of bytes of each held-out token
    raw_train: np.ndarray  # bytes of `train`, uint8
    raw_held_out: np.ndarray  # bytes of `held_out`, uint8
    # With --data.documents, the number of tokens of each document to train on, and held out.
    documents: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.raw_train) + len(self.raw_held_out)

    @property
    def tokens_per_byte(self) -> float:
        return len(self.train) / len(self.raw_train)

    def identity(self) -> dict[str, Any]:
        """Returns the identity of the text, which a resumed run must share."""
        identity: dict[str, Any] = {
            "name": self.name,
            "bytes": len(self),
            "sha256": self.sha256,
            "tokenizer": self.tokenizer.identity(),
        }
        if self.documents is not None:
            identity["documents"] = sum(map(len, self.documents))
        return identity

    def windows(self, seq_len: int) -> "Windows":
        """Returns the rows to train on."""
        return Windows(self.train, seq_len, self.documents and self.documents[0])


def read(config: TrainConfig) -> Text:
    """Reads a run's text; raises what `load` does, and a UsageError for a prompt too long."""
    text = load(
        config.data.path,
        seq_len=config.seq_len,
        vocab_size=config.model.vocab_size,
        tokenizer=config.data.tokenizer,
        saved=RunDir(config.out_dir).tokenizer if config.out_dir else None,
        documents=config.data.documents,
    )
    prompt, limit = prompt_of(config, text), config.model.max_seq_len
    if config.sample.tokens and not 0 < len(text.tokenizer.encode(prompt.encode())[0]) < limit:
        raise UsageError(
            f"--sample.prompt {prompt!r} must be from one token to --model.max-seq-len {limit} - 1 "
            f"tokens of --data.tokenizer {config.data.tokenizer}."
        )
    return text


def prompt_of(config: TrainConfig, text: Text) -> str:
    """Returns the prompt of a run's sample: by default words that the model was not trained on."""
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
    """Returns the longest prompt, in tokens, that leaves as many for its continuation."""
    return config.model.max_seq_len // 2


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
        texts = [read_bytes(file) for file in files]
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
    pieces = (piece for x in _cut(texts, cut)[0] for piece in pieces_at_lines(x, b"\n", _PART))
    made = make_tokenizer(tokenizer, pieces, saved)
    if made.vocab_size > 256:
        cut = _character_start(content, cut)
    before, after = _cut(texts, cut)
    train, _, lengths = made.encode_each(before)
    held_out, widths, held_out_lengths = made.encode_each(after)
    each = (lengths, held_out_lengths) if documents else None
    _check_length(source, train, held_out, seq_len, each)
    _check_vocabulary(source, made, int(max(train.max(), held_out.max())), vocab_size)
    raw = np.frombuffer(content, np.uint8)
    parts = train, held_out, widths, raw[:cut], raw[cut:]
    return Text(name, len(files), digest.hexdigest(), made, *parts, each)


def _documents_of(file: Path, content: bytes) -> Iterator[bytes]:
    """Yields the documents of a file: the texts of JSON lines, or its whole content."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if file.suffix.lower() not in (".jsonl", ".ndjson"):
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        found: Any = None
        try:
            found = json.loads(line.decode())
            problem = "" if isinstance(found, dict) else f"it is {shown(found)}"
            if not problem and not isinstance(found.get("text"), str):
                problem = (
                    f'its "text" is {shown(found["text"])}'
                    if "text" in found
                    else (f"it has only {shown(list(found))}")
                )
        except (ValueError, RecursionError) as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if problem:
            raise UsageError(
                f"--data.path: {file}:{number}: with --data.documents a line of a .jsonl file must "
                f'be a JSON object with a string "text"; {problem}. Mend the line, or leave out '
                "--data.documents to train on the file as it is."
            )
        yield found["text"].encode(errors="replace")


def _cut(texts: list[bytes], at: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the texts before and after their byte `at`, without empty ones."""
    ends = np.cumsum([*map(len, texts)])
    i = int(np.searchsorted(ends, at))  # the text that holds the last byte before `at`
    inside = at - (int(ends[i]) - len(texts[i]))
    before, after = [*texts[:i], texts[i][:inside]], [texts[i][inside:], *texts[i + 1 :]]
    return [x for x in before if x], [x for x in after if x]


class Windows(grain.sources.RandomAccessDataSource):
    """Consecutive windows of `seq_len` tokens, each with the token that follows it.

    `documents`, the number of tokens of each, packs them: then a window is `seq_len` inputs, the
    targets that follow them in their documents, and the number of each one's document.
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, documents: np.ndarray | None = None
    ) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self._ends = None if documents is None else np.cumsum(_with_target(documents))

    def _count(self) -> int:
        """The number of targets."""
        if self._ends is None:
            return len(self._tokens) - 1
        return int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return self._count() // self._seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns `(seq_len + 1,)` int32 tokens; `(3, seq_len)` of documents (`step.parts_of`)."""
        start = int(index) * self._seq_len
        if self._ends is None:
            return self._tokens[start : start + self._seq_len + 1].astype(np.int32)
        pairs = np.arange(start, start + self._seq_len)
        document = np.searchsorted(self._ends, pairs, side="right")
        at = pairs + document  # every document before has had a token that is no input
        rows = self._tokens[at], self._tokens[at + 1], document - document[0]
        return np.stack([row.astype(np.int32) for row in rows])

    def attended(self) -> int:
        """Returns the number of tokens in a row that share a token's document, on average."""
        if self._ends is None:
            return self._seq_len
        count = len(self) * self._seq_len
        rows = np.arange(0, count + 1, self._seq_len)
        lengths = np.diff(np.unique(np.concatenate([rows, self._ends[self._ends < count]])))
        return round(float(np.square(lengths, dtype=np.float64).sum()) / count)


def _with_target(documents: np.ndarray) -> np.ndarray:
    """Returns the number of (input, target) pairs of each document: its tokens less one."""
    return documents[documents > 0] - 1


def batches(
    tokens: np.ndarray,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    first: int,
    steps: int,
    documents: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Yields the batches of steps `first` (from 0) to `steps - 1`, read ahead in threads.

    Every pass over the text has its own order; a batch may span two passes.

    Yields: `(batch_size, seq_len + 1)` int32: inputs are all but the last column, targets all but
      the first. With `documents`, the number of tokens of each, `(batch_size, 3, seq_len)`: inputs,
      targets and segment ids.
    """
    windows = Windows(tokens, seq_len, documents)
    passes = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
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


def _check_length(
    source: str,
    train: np.ndarray,
    held_out: np.ndarray,
    seq_len: int,
    documents: tuple[np.ndarray, np.ndarray] | None,
) -> None:
    if documents is None:
        what, extra, sizes = "tokens", 1, (len(train), len(held_out))
    else:
        what, extra = "tokens that follow another of their document", 0
        sizes = [int(_with_target(n).sum()) for n in documents]
    if min(sizes) < seq_len + extra:
        needed, longest = math.ceil((seq_len + extra) / HELD_OUT), min(sizes) - extra
        shorter = f" or a shorter --seq-len (at most {longest})" if longest > 0 else ""
        raise UsageError(
            f"{source} has {sum(sizes):,} {what}; --seq-len {seq_len} needs at least {needed:,}, "
            f"of which {HELD_OUT:.0%} are held out for validation. Give more text{shorter}."
        )


def _check_vocabulary(source: str, tokenizer: Tokenizer, largest: int, vocab_size: int) -> None:
    if isinstance(tokenizer, Bytes):
        if largest >= vocab_size:
            raise UsageError(
                f"{source} holds the token {largest}, but --model.vocab-size {vocab_size} allows "
                f"only those below {vocab_size}: bytes need 256."
            )
    elif (needed := tokenizer.vocab_size) > vocab_size:
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
