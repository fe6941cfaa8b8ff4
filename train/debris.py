"""Keeps what orbax 0.12 and TensorStore print of a failure out of the output: it is raised, too."""

import logging
import sys


def keep_quiet():
    """Drops, from now on, what follows a failed read or write besides the exception itself.

    That is orbax's own log of it, and callbacks of TensorStore that find their event loop closed:
    these are printed by hooks of the interpreter, since there is nobody to raise them to.
    """
    logger = logging.getLogger("absl")
    if any(isinstance(old, _NotOrbax) for old in logger.filters):
        return
    logger.addFilter(_NotOrbax())
    unraisable, uncaught = sys.unraisablehook, sys.excepthook
    sys.unraisablehook = lambda args: None if _is_debris(args.exc_value) else unraisable(args)
    sys.excepthook = lambda kind, error, trace: (
        None if _is_debris(error) else uncaught(kind, error, trace)
    )


class _NotOrbax(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


def _is_debris(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
