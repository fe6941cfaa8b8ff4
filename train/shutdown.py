"""How a run ends early, on signals. Nothing here imports JAX."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def end_by_ctrl_c() -> None:
    """Lets a Ctrl-C end the process at once, until `train` notes it to save and stop.

    As Python's KeyboardInterrupt it would be lost in whatever callback it interrupts: JAX runs one
    at every garbage collection, and imports collect hundreds of times.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored: `nohup … &`
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class StopRequest:
    """While entered, notes the first signal (SIGTERM, SIGINT, SIGUSR1) and obeys the second.

    The first asks the run to save and stop. A thread learns of signals from the interpreter's
    wake-up pipe, so the second stops the process even while the main thread compiles or computes
    and runs no Python.
    """

    def __init__(self) -> None:
        # Called with the name of the first signal, from that thread.
        self.tell: Callable[[str], None] = lambda name: None
        self._first: signal.Signals | None = None
        self._old: dict[signal.Signals, Any] = {}

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
        for number in _SIGNALS:
            self._old[number] = signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # libraries' system calls must not fail with EINTR
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._old:
            return
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write)  # ends the thread
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        while received := os.read(self._read, 1):
            if received[0] not in _SIGNALS:
                continue
            if self._first is not None:
                os._exit(128 + received[0])
            self._first = signal.Signals(received[0])
            with contextlib.suppress(OSError):  # nobody may be there to be told
                self.tell(self._first.name)
