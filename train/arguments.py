"""Texts and paths as users give them: checked before use, and safe to print."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import UsageError

_LONGEST = 2000  # characters of a message


def printable(text: str, except_for: str = "\n\t") -> str:
    """Escapes the characters of a text that a terminal would obey, but for those of `except_for`.

    It may hold anything, bytes that were not UTF-8 as surrogates.
    """
    plain = lambda c: c.isprintable() or c in except_for
    return "".join(c if plain(c) else c.encode("unicode_escape").decode() for c in text)


def one_line(message: object) -> str:
    """Returns a message as one printable line of at most 2000 characters."""
    line = printable(re.sub(r"\s*\n\s*", " ", str(message).strip()), except_for="")
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} … {line[-half:]}"


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]}…"


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
      UsageError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UsageError(f"{argument} {path}: {user} is not a home folder here.") from None
