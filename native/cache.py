"""Compiled kernels, kept in memory and in a folder so that each is compiled once per machine.

The folder is `NORMFUSE_CACHE_DIR`, or `normfuse` in the user's cache folder. Images are code that
will run on the GPU, so a folder that someone else owns or can write to is not used. Each entry is
one file, written under another name and renamed, and checked against its SHA-256 when read; any
number of processes may share the folder.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping

from . import compiler
from .compiler import Image, Source

FORMAT = 1  # of the entries; a change makes old ones unreachable
MAX_BYTES = 256 << 20
_STALE_SECONDS = 3600.0  # a temporary file this old was left by a process that died
_SUFFIX = ".image"

_lock = threading.Lock()
_memory: dict[str, Image] = {}
_in_progress: dict[str, threading.Lock] = {}
_warned: set[str] = set()


class Refused(OSError):
    """The cache folder cannot be trusted or used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kernel on disk."""

    path: pathlib.Path
    source: str
    arch: str
    macros: dict[str, str]
    compiler: str
    bytes: int
    used: float


def get(source: Source, macros: Mapping[str, str | int], arch: str) -> Image:
    """The image of `source` for `arch`, compiled only if it is neither in memory nor on disk.

    Threads asking for one image at the same time compile it once; processes may each compile it.

    Raises:
      CompilerMissing, CompileError, ValueError: as `compiler.compile_image`.
    """
    described = [dataclasses.astuple(source), compiler.options(macros, arch), compiler.version()]
    head = {
        "source": source.name,
        "arch": arch,
        "macros": {name: str(value) for name, value in macros.items()},
        "compiler": ".".join(map(str, compiler.version())),
    }
    return fetch(described, head, lambda: compiler.compile_image(source, macros, arch))


def fetch(described: object, head: dict, make: Callable[[], Image]) -> Image:
    """The image that `described` determines, made only if it is neither in memory nor on disk.

    Args:
      described: whatever decides what the image is, as JSON can write it.
      head: what `entries` shows: "source", "arch", "macros" and "compiler".
      make: compiles it.
    """
    key = hashlib.sha256(json.dumps([FORMAT, described]).encode()).hexdigest()
    with _lock:
        if key in _memory:
            return _memory[key]
        compiling = _in_progress.setdefault(key, threading.Lock())
    with compiling:
        image = _memory.get(key)
        if image is None:
            image = _memory[key] = _load_or_make(key, head, make)
    with _lock:
        _in_progress.pop(key, None)
    return image


def directory() -> pathlib.Path:
    """Where images are kept; the folder need not exist."""
    named = os.environ.get("NORMFUSE_CACHE_DIR")
    if named:
        return pathlib.Path(named)
    import platformdirs

    return pathlib.Path(platformdirs.user_cache_dir("normfuse", appauthor=False))


def check(folder: pathlib.Path) -> None:
    """Makes `folder`, mode 0700, if it is missing.

    Raises:
      Refused: if it cannot be made, is not a folder, or others own it or can write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise Refused(f"kernel cache {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise Refused(f"kernel cache {folder}: not a folder")
    if status.st_uid != os.geteuid():
        raise Refused(
            f"kernel cache {folder}: owned by user {status.st_uid}, not by you ({os.geteuid()}); "
            "set NORMFUSE_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(
            f"kernel cache {folder}: mode {stat.S_IMODE(status.st_mode):04o} lets others write "
            f"code that would run as yours; `chmod 700 {folder}`"
        )


def entries() -> list[Entry]:
    """Every readable entry of the folder, the one used last first."""
    found = []
    for path in _files(_SUFFIX):
        try:
            head, image = _split(path.read_bytes())
            described = {name: head[name] for name in ("source", "arch", "macros", "compiler")}
            used = path.stat().st_mtime
        except (OSError, ValueError, KeyError):
            continue
        found.append(Entry(path=path, bytes=len(image), used=used, **described))
    return sorted(found, key=lambda entry: -entry.used)


def clear() -> int:
    """Forgets every image, in memory and on disk; returns how many files went.

    Raises:
      Refused: if the folder is not ours to clear.
    """
    with _lock:
        _memory.clear()
    if not directory().exists():
        return 0
    check(directory())
    paths = _files(_SUFFIX) + _files(".tmp")
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _load_or_make(key: str, head: dict, make: Callable[[], Image]) -> Image:
    folder = _usable_directory()
    path = folder / f"{key}{_SUFFIX}" if folder else None
    image = _read(path) if path else None
    if image is None:
        image = make()
        if path:
            _write(path, {"format": FORMAT, **head, "sha256": image.digest}, image)
    return image


def _usable_directory() -> pathlib.Path | None:
    folder = directory()
    try:
        check(folder)
    except Refused as error:
        _warn_once(str(error))
        return None
    return folder


def _warn_once(reason: str) -> None:
    with _lock:
        if reason in _warned:
            return
        _warned.add(reason)
    warnings.warn(
        f"{reason}. Kernels are compiled again in every process.", RuntimeWarning, stacklevel=2
    )


def _read(path: pathlib.Path) -> Image | None:
    """The image in `path`; None if there is none, or one that was damaged."""
    try:
        head, data = _split(path.read_bytes())
    except (OSError, ValueError):
        return None
    image = Image(data)
    if image.digest != head.get("sha256"):
        return None
    try:
        os.utime(path)  # what is evicted first is what was used longest ago
    except OSError:
        pass
    return image


def _split(raw: bytes) -> tuple[dict, bytes]:
    line, newline, data = raw.partition(b"\n")
    head = json.loads(line)
    if not newline or not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError("not an entry")
    return head, data


def _write(path: pathlib.Path, head: dict, image: Image) -> None:
    """Puts the entry in place at once or not at all; a full or read-only disk only warns."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(head).encode() + b"\n" + image.data)
            os.replace(name, path)
        except BaseException:
            pathlib.Path(name).unlink(missing_ok=True)
            raise
        _evict(path.parent)
    except OSError as error:
        _warn_once(f"kernel cache {path.parent}: {error.strerror}")


def _evict(folder: pathlib.Path) -> None:
    """Removes what was used longest ago until the folder is within bounds."""
    now = time.time()
    kept = []
    for entry in os.scandir(folder):
        try:
            status = entry.stat()
            if entry.name.endswith(".tmp") and now - status.st_mtime > _STALE_SECONDS:
                os.unlink(entry.path)
            elif entry.name.endswith(_SUFFIX):
                kept.append((status.st_mtime, status.st_size, entry.path))
        except FileNotFoundError:  # another process was faster
            continue
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= MAX_BYTES:
            return
        pathlib.Path(path).unlink(missing_ok=True)
        total -= size


def _files(suffix: str) -> list[pathlib.Path]:
    try:
        return [path for path in directory().iterdir() if path.name.endswith(suffix)]
    except OSError:
        return []
