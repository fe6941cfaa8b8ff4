"""Processes of one run end together: what fails or ends one of them at once ends the others.

Left to itself, the end of one is noticed by the others when JAX misses its heartbeats, two minutes
later; and one that fails would wait as long, in JAX's shutdown, for the others to join it there.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from ..native.jax_private import coordination_client
from .errors import UsageError

_TOLD = "normfuse/ended"  # what is told: process, exit code, and why
_HEARD = "normfuse/heard/"  # who has heard of it
_GONE = "normfuse/gone/"  # and who has ended since
_GRACE = 10  # seconds for a process to fail of itself, and then for all to hear of an end
_EVERY = 0.5  # seconds between two looks


class Together:
    """While entered, ends this process when another has failed, or was ended by a second signal.

    Left with an exception, it tells the others, and the process will exit without waiting for them.
    Alone it does nothing.
    """

    def __init__(self):
        self._left = threading.Event()
        self._client: Any = None

    def __enter__(self) -> "Together":
        client = coordination_client()  # without one, JAX is not asked for devices yet
        if client is not None and jax.process_count() > 1:
            self._client = client
            self._thread = threading.Thread(target=self._watch, daemon=True, name="together")
            self._thread.start()
        return self

    def __exit__(self, _, error: BaseException | None, __):
        self._left.set()
        if self._client is None:
            return
        self._thread.join(_GRACE)
        if error is not None:
            code = 2 if isinstance(error, UsageError) else 1
            _later(4 * _GRACE, os._exit, code)  # should JAX's service not answer
            self._tell(code, f"failed: {error or type(error).__name__}")
            atexit.register(self._exit, code)  # before JAX's own, which waits for the others
            # Python waits for orbax's threads before that, and those may wait for the others.
            _later(1, self._exit, code)

    def end(self, code: int):
        """Ends this process and the others at once, with an exit code."""
        if self._client is not None:
            _later(_GRACE, os._exit, code)  # should JAX's service not answer
            self._tell(code, "was told twice to stop, and has ended at once")
            self._exit(code)
        os._exit(code)

    def _tell(self, code: int, why: str):
        try:
            self._client.key_value_set(_TOLD, f"{jax.process_index()} {code} {why}")
        except jax.errors.JaxRuntimeError:
            pass  # another was first, or JAX's service is gone, and with it every process

    def _watch(self):
        while not self._left.wait(_EVERY):
            try:
                told = self._client.key_value_try_get(_TOLD)
            except jax.errors.JaxRuntimeError:
                continue  # nothing was told
            process, code, why = told.split(" ", 2)
            if int(process) == jax.process_index():
                return
            if why.startswith("failed") and self._left.wait(_GRACE):
                return  # it has failed too, and says so itself
            print(f"error: process {process} {why}", file=sys.stderr)
            _later(3 * _GRACE, os._exit, int(code))
            self._exit(int(code))

    def _exit(self, code: int):
        """Ends this process when all have heard of the end; the one with JAX's service ends last.

        Left alone in a collective operation, or without the service, a process may be aborted.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._sign(_HEARD)
        self._await(_HEARD, jax.process_count())
        if jax.process_index():
            self._sign(_GONE)
        else:
            self._await(_GONE, jax.process_count() - 1)
        os._exit(code)

    def _sign(self, where: str):
        try:
            self._client.key_value_set(f"{where}{jax.process_index()}", "")
        except jax.errors.JaxRuntimeError:
            pass  # signed already, or the service is gone

    def _await(self, where: str, count: int):
        """Returns when so many have signed, at the latest after twice the grace."""
        deadline = time.monotonic() + 2 * _GRACE
        while time.monotonic() < deadline:
            try:
                if len(self._client.key_value_dir_get(where)) >= count:
                    return
            except jax.errors.JaxRuntimeError:
                if jax.process_index():
                    return  # the service is gone; it is this process's own where nobody has signed
            time.sleep(0.005)


def _later(seconds: float, action: Callable[[int], Any], code: int):
    """Ends this process after a while, by a thread that nobody waits for."""
    timer = threading.Timer(seconds, action, [code])
    timer.daemon = True
    timer.start()
