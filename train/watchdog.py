"""Ends a run that hangs, with the stacks of its threads, so that it holds no devices for ever."""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import TextIO, cast

_GRACE = 15  # seconds that the backstop leaves the thread to speak


class Watchdog:
    """While entered, ends the process with exit code 1 when nothing was done for a while.

    A thread says what was going on, writes all stacks to the standard error and to a file, and
    ends the process. It needs the interpreter: should a call into C hold that, a second timer
    without Python (`faulthandler`'s) ends the process a little later, with the stacks alone.

    Args:
      seconds: how long nothing may happen; 0 never ends anything.
      stacks: the file; its folder need not exist.
    """

    def __init__(self, seconds: int, stacks: Path):
        self._seconds, self._stacks = seconds, stacks
        self._last, self._doing = time.monotonic(), "starting"
        self._ended = threading.Event()

    def beat(self, doing: str):
        """Says that the run goes on, and what it does now."""
        self._last, self._doing = time.monotonic(), doing
        if self._seconds:
            faulthandler.dump_traceback_later(self._seconds + _GRACE, exit=True, file=_stderr())

    def __enter__(self) -> "Watchdog":
        self.beat(self._doing)
        if self._seconds:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self):
        while not self._ended.wait(self._last + self._seconds - time.monotonic()):
            if time.monotonic() - self._last >= self._seconds:
                self._end()

    def _end(self):
        err = _stderr()
        print(
            f"error: no progress for --watchdog {self._seconds} s while {self._doing}. On several "
            "processes another may be gone. What each thread is doing follows, and is in "
            f"{self._stacks}.",
            file=err,
            flush=True,
        )
        faulthandler.dump_traceback(err)
        try:
            with self._stacks.open("w") as file:
                faulthandler.dump_traceback(file)
        except OSError:
            pass  # the standard error has them
        os._exit(1)


def _stderr() -> TextIO:
    """The standard error as a real file, which a notebook's or a test's need not be."""
    try:
        sys.stderr.fileno()
        return sys.stderr
    except (AttributeError, OSError, ValueError):
        return cast(TextIO, sys.__stderr__)
