"""Documents: the texts in files, in JSON Lines, and in datasets of Hugging Face's `datasets`."""

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import UsageError
from .arguments import shown

_NO_TEXT = "7z arrow avro bz2 feather gz lz4 npy npz parquet tar tgz xz zip zst".split()


def is_dataset(folder: Path) -> bool:
    """Returns whether `datasets` has saved this folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def read(path: Path, field: str, alone: bool) -> Iterable[bytes]:
    """Reads the documents of a file or a dataset: the `field` of each object, or the file itself.

    Raises:
      UsageError: it is no text, or an object has none.
      OSError, ValueError: it cannot be read.
    """
    kind = path.suffix.lower()[1:]
    if path.is_dir():
        return _texts(path, _rows(path), field)
    content = b"\0" if kind in _NO_TEXT else path.read_bytes()
    if b"\0" in content:
        cure = "unpack it, write it as UTF-8, let `datasets` save it, or leave it out by a glob"
        raise UsageError(f"--data.path {path} is no text: {cure}.")
    if kind == "json" and alone and content.lstrip()[:1] == b"[":
        return _texts(path, json.loads(content), field)
    if kind in ("jsonl", "ndjson") or (kind == "json" and alone):  # among others it may be code's
        return _texts(path, content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), field)
    return [content]


def _rows(folder: Path) -> Iterable[Any]:
    try:
        datasets: Any = importlib.import_module("datasets")
        dataset = datasets.load_from_disk(str(folder))
    except ImportError:
        cure = "pip install datasets, or save it as JSON Lines"
        raise UsageError(f"--data.path {folder} is a dataset: {cure}.") from None
    if isinstance(dataset, dict):
        splits = ", ".join(dataset)
        raise UsageError(f"--data.path {folder} holds splits: give the folder of one, of {splits}.")
    return dataset


def _texts(path: Path, lines: Iterable[Any], field: str) -> Iterator[bytes]:
    for number, line in enumerate(lines, 1):
        try:
            empty = isinstance(line, bytes) and not line.strip()
            document: Any = json.loads(line) if isinstance(line, bytes) and not empty else line
            text = "" if empty else document[field]
            ended = text if text.endswith("\n") or not text else text + "\n"
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            cure = "Each must be a JSON object with the text in the field that --data.field names"
            raise UsageError(
                f"--data.path {path}, line {number}, has no text {field!r}: {shown(line)}. {cure}."
            ) from None
        if text:
            yield ended.encode(errors="replace")
