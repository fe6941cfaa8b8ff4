"""SIGTERM, SIGINT and SIGUSR1 ask a run to save and stop; a second one stops it at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """While entered, notes the first signal and obeys the second.

    A thread is told of signals by the interpreter's wake-up pipe, so the second stops the process
    even while the main thread compiles or computes and runs no Python.

    Args:
      end: ends the process, with an exit code, at the second signal.

    Attributes:
      tell: called with the name of the first signal, from that thread.
    """

    # What signals do once it is left: None for what they did before. A command whose process exits
    # then has them ignored, since its exit code is known.
    afterwards: signal.Handlers | None = None

    def __init__(self, end: Callable[[int], None] = os._exit):
        self._end = end
        self.tell: Callable[[str], None] = lambda name: None
        self._first: signal.Signals | None = None
        self._old = {}

    @property
    def signal(self) -> signal.Signals | None:
        """The signal received, or None while nobody asked to stop."""
        return self._first

    def __bool__(self) -> bool:
        return self._first is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may handle signals: its owner does
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _WATCHED:
            self._old[number] = signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # libraries' system calls are not to fail with EINTR
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")
        self._thread.start()
        return self

    def __exit__(self, *_):
        if not self._old:
            return
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler if self.afterwards is None else self.afterwards)
        os.close(self._write)  # ends the thread
        self._thread.join()
        os.close(self._read)

    def _watch(self):
        while received := os.read(self._read, 1):
            if received[0] not in _WATCHED:
                continue
            if self._first is not None:
                _show_cursor()
                self._end(128 + received[0])
            self._first = signal.Signals(received[0])
            with contextlib.suppress(OSError):  # nobody may be there to be told
                self.tell(self._first.name)


def _show_cursor():
    """Undoes on a terminal what a progress bar does to it."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
