"""What could not be served by a native kernel, and why: logged once, kept for `normfuse info`."""

import logging
import threading

_logger = logging.getLogger("normfuse")
_lock = threading.Lock()
_seen: dict[tuple[str, str], None] = {}


class Unsupported(Exception):
    """A native kernel cannot serve here; the message says why."""


def report(op: str, reason: str, *, strict: bool) -> None:
    """Logs once per (op, reason) that plain HLO serves `op`.

    Raises:
      NotImplementedError: if `strict`, the caller having asked for `implementation="native"`.
    """
    if strict:
        raise NotImplementedError(
            f"{op}: implementation='native' cannot serve here: {reason}. "
            "Use implementation=None to let plain HLO serve what native kernels cannot."
        )
    with _lock:
        if (op, reason) in _seen:
            return
        _seen[op, reason] = None
    _logger.info("%s is served by plain HLO: %s", op, reason)


def fallbacks() -> list[tuple[str, str]]:
    """Every (op, reason) served by plain HLO in this process so far, oldest first."""
    with _lock:
        return list(_seen)
