"""Texts and paths as users give them: checked before use, and safe to print."""

import contextlib
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import UsageError

_LONGEST = 2000  # characters of a message
# Other characters than those of categories Cc (terminal escapes), Cs (bytes that are not UTF-8), Zl
# and Zp that do not appear as themselves: they reorder what follows.
_REORDERING = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# Pipes that are open already, as a shell's `<(command)` is.
_OPEN = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")


def printable(text: str, kept: str = "\n\t") -> str:
    """Escapes the characters of a text that a terminal would obey, except those in `kept`.

    It may hold anything, bytes that were not UTF-8 as surrogates.
    """

    def shown(c: str) -> str:
        obeyed = unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _REORDERING
        return c.encode("unicode_escape").decode() if obeyed and c not in kept else c

    return "".join(map(shown, text))


def one_line(message: object) -> str:
    """Returns a message as one printable line of at most 2000 characters."""
    line = printable(re.sub(r"\s*\n\s*", " ", str(message).strip()), kept="")
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} … {line[-half:]}"


def shown(value: object) -> str:
    """Returns the `repr` of a value, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = f"an {type(value).__name__} of thousands of digits"
    return text if len(text) <= 100 else f"{text[:80]}…"


def is_text(argument: str) -> bool:
    """Whether an argument is UTF-8 (Python makes surrogates of other bytes) without zero bytes."""
    return "\0" not in argument and not any("\ud800" <= c <= "\udfff" for c in argument)


@contextlib.contextmanager
def named(argument: str, path: Any, what: str = "be read") -> Iterator[None]:
    """Turns the operating system's errors into a UsageError: `ARGUMENT PATH cannot WHAT`."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{argument} {path} cannot {what}: {reason(error, path)}") from None


def reason(error: BaseException, known: Any = None) -> str:
    """Returns the operating system's message, with the file unless that is `known`."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    about = error.filename
    if about is None or isinstance(about, int) or str(about) == str(known):
        return error.strerror
    return f"{os.fsdecode(about)}: {error.strerror}"


def expanded(path: Path | str, argument: str) -> Path:
    """Returns a path with the home folder for `~`, and another user's for `~name`.

    Raises:
      UsageError: there is no such user, or the path cannot be one.
    """
    if path == "":  # "$UNSET"; as a path it would be the current folder
        raise UsageError(f"{argument} is empty: give a path, or leave it out.")
    if not is_text(str(path)):
        raise UsageError(f"{argument} {shown(str(path))} must be UTF-8 text without zero bytes.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UsageError(f"{argument} {path}: {user} is not a home folder here.") from None


def read_bytes(path: Path | str) -> bytes:
    """Reads a file that may be anything; does not wait for a pipe without a writer.

    Raises:
      OSError: it cannot be read, or is neither a regular file nor one that is open already.
    """
    if str(path).startswith(_OPEN):
        return Path(path).read_bytes()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not regular and str(path) != os.devnull:
            raise OSError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
