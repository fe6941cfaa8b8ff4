"""Counts how far a reader who follows a call through the package has to go."""

import pathlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import normfuse

ROOT = str(pathlib.Path(normfuse.__file__).parent)


class Trip(NamedTuple):
    """Files of the package, calls of its functions, and how often the file changes."""

    files: Counter[str]
    calls: int
    changes: int


def counted(run: Callable[[], object]) -> Trip:
    """Returns the trip of `run`."""
    files, changes, last = Counter(), 0, ""

    def count(frame, event, _):
        nonlocal changes, last
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and "/tests/" not in file:
            changes += file != last
            last = file
            files[file.removeprefix(ROOT)] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Trip(files, sum(files.values()), changes)
