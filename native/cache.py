"""Compiled kernels, kept in memory and in a folder so that each is compiled once per machine.

The folder is `NORMFUSE_CACHE_DIR`, or `normfuse` in the user's cache folder. Images are code that
will run, so a folder or a file that anyone but the user and root could have written is not used.
Each entry is one file, written under another name and renamed. It carries its own key and SHA-256,
which are checked when it is read; any number of processes may share the folder.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shlex
import stat
import tempfile
import threading
import time
from collections.abc import Callable

from .implementation import warn

FORMAT = 2  # each entry's version; a change makes old ones unreachable
MAX_BYTES = 256 << 20
_STALE_SECONDS = 3600.0  # a temporary file this old was left by a process that died
_SUFFIX = ".image"
_CURE = "set NORMFUSE_CACHE_DIR to a folder of your own"


@dataclasses.dataclass(frozen=True)
class Image:
    """Compiled kernels: a cubin, PTX text, or a shared library."""

    data: bytes

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


_lock = threading.Lock()
_memory: dict[str, Image] = {}
_in_progress: dict[str, threading.Lock] = {}
_compiled: list[str] = []  # the keys of images that this process has made
_warned: set[str] = set()


class Refused(OSError):
    """The cache folder cannot be trusted or used; the message says why and what to do."""


def fetch(described: object, make: Callable[[], Image]) -> Image:
    """Returns the image that `described` (JSON) determines; made if neither memory nor disk has it.

    Threads asking for one image at the same time make it once; processes may each make it.
    """
    key = hashlib.sha256(json.dumps([FORMAT, described]).encode()).hexdigest()
    with _lock:
        if key in _memory:
            return _memory[key]
        compiling = _in_progress.setdefault(key, threading.Lock())
    with compiling:
        image = _memory.get(key)
        if image is None:
            folder = usable()
            path = folder / f"{key}{_SUFFIX}" if folder else None
            image = _read(path) if path else None
            if image is None:
                image = make()
                _compiled.append(key)
                if path:
                    _write(path, image)
            _memory[key] = image
    with _lock:
        _in_progress.pop(key, None)
    return image


def compilations() -> int:
    return len(_compiled)


def directory() -> pathlib.Path:
    """Returns the folder of the images, which may not exist; Refused without a home folder."""
    named = os.environ.get("NORMFUSE_CACHE_DIR")
    if not named:
        import platformdirs

        named = platformdirs.user_cache_dir("normfuse", appauthor=False)
    try:
        return pathlib.Path(named).expanduser()
    except RuntimeError:
        raise Refused(f"kernel cache {named}: there is no such home folder; {_CURE}") from None


def usable(part: str = "") -> pathlib.Path | None:
    """Returns the cache folder, or the folder `part` in it; None and one warning if it is refused.

    This is the one rule for every folder that code is loaded from. Code in `part` is loaded without
    this module, so the files there must pass too.
    """
    try:
        folder = check(directory())
        return _check_files(check(folder / part)) if part else folder
    except Refused as error:
        _warn_once(str(error))
        return None


def check(folder: pathlib.Path) -> pathlib.Path:
    """Makes `folder`, mode 0700, if it is missing; returns it without symbolic links.

    Raises Refused if it cannot be made or is not a folder, and if anybody but the user and root
    owns it, can write to it or can replace it. Groups are trusted with the folders above it: on
    many systems each user has a group.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        real = folder.resolve(strict=True)
        status = real.stat()
        above = [(parent, parent.stat()) for parent in real.parents]
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links, before Python 3.13
        raise Refused(f"kernel cache {folder}: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise Refused(f"kernel cache {folder}: not a folder")
    if status.st_uid not in _trusted():
        raise Refused(
            f"kernel cache {folder}: owned by user {status.st_uid}, not by you ({os.geteuid()}); "
            + _CURE
        )
    if _others_can_write(status):
        raise Refused(
            f"kernel cache {folder}: mode {stat.S_IMODE(status.st_mode):04o} lets others write "
            f"code that would run as yours; `chmod 700 {shlex.quote(str(folder))}`"
        )
    for parent, status in above:
        mode = stat.S_IMODE(status.st_mode)
        open_to_all = mode & stat.S_IWOTH and not mode & stat.S_ISVTX
        if open_to_all or status.st_uid not in _trusted():
            raise Refused(
                f"kernel cache {folder}: {parent} (mode {mode:04o}, owned by user "
                f"{status.st_uid}) lets others replace it; {_CURE}"
            )
    return real


def _check_files(folder: pathlib.Path) -> pathlib.Path:
    """Returns `folder`; raises Refused if others can reach and write to something in it."""
    if not folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return folder
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = pathlib.Path(parent, name)
            status = path.lstat()
            if status.st_uid not in _trusted() or _others_can_write(status):
                raise Refused(
                    f"kernel cache {folder}: {path} (mode {stat.S_IMODE(status.st_mode):04o}, "
                    f"owned by user {status.st_uid}) can be written to by others; remove it"
                )
    return folder


def _trusted() -> tuple[int, ...]:
    """Returns the users whose code may run as this one's."""
    return 0, os.geteuid()


def _others_can_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def sizes() -> list[int]:
    try:
        return [status.st_size for _, status in _files(directory(), _SUFFIX)]
    except Refused:
        return []


def clear() -> int:
    """Forgets every image, in memory and on disk; returns how many files went.

    Raises Refused if the folder is not ours to clear.
    """
    with _lock:
        _memory.clear()
    folder = directory()
    if not folder.exists():
        return 0
    paths = [path for path, _ in _files(check(folder), _SUFFIX, ".tmp")]
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _warn_once(reason: str) -> None:
    with _lock:
        if reason in _warned:
            return
        _warned.add(reason)
    warn(f"{reason}. Kernels are compiled again in every process.")


def _read(path: pathlib.Path) -> Image | None:
    """Returns the image in `path`; None if there is none, or if it is damaged or of another key.

    It reads no file that others could have written, and waits for no pipe or device.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return None
            if status.st_uid not in _trusted() or _others_can_write(status):
                return None
            line, _, data = file.read().partition(b"\n")
    except OSError:
        return None
    image = Image(data)
    if line != _line(path, image):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # eviction takes the least recently used entries first
    return image


def _line(path: pathlib.Path, image: Image) -> bytes:
    """Returns the first line of an entry: its format and key, which the name holds, and digest."""
    return f"{FORMAT} {path.stem} {image.digest}".encode()


def _write(path: pathlib.Path, image: Image) -> None:
    """Puts the entry in place at once or not at all; a full or read-only disk only warns."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_line(path, image) + b"\n" + image.data)
            os.replace(name, path)
        except BaseException:
            pathlib.Path(name).unlink(missing_ok=True)
            raise
        _evict(path.parent)
    except OSError as error:
        _warn_once(f"kernel cache {path.parent}: {error.strerror}")


def _evict(folder: pathlib.Path) -> None:
    """Removes the least recently used entries until the folder is within bounds."""
    for path, status in _files(folder, ".tmp"):
        if time.time() - status.st_mtime > _STALE_SECONDS:
            path.unlink(missing_ok=True)
    kept = [(status.st_mtime, status.st_size, path) for path, status in _files(folder, _SUFFIX)]
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= MAX_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size


def _files(folder: pathlib.Path, *suffixes: str) -> list[tuple[pathlib.Path, os.stat_result]]:
    """The files of a folder with these suffixes, without those that have vanished meanwhile."""
    entries = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(suffixes) and not stat.S_ISDIR(status.st_mode):
                    entries.append((pathlib.Path(entry.path), status))
    return entries
