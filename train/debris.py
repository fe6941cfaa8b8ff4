"""Keeps what orbax 0.12 and TensorStore print of a failure out of the output: it is raised, too."""

import logging
import sys
import traceback


def keep_quiet():
    """Drops, from now on, what follows a failed read or write besides the exception itself.

    That is orbax's own log of it; what other arrays of the same checkpoint failed with, which
    asyncio logs because orbax awaits the first alone; and callbacks of TensorStore that find their
    event loop closed, printed by hooks of the interpreter: there is nobody to raise them to.
    """
    if any(isinstance(old, _NotOrbax) for old in logging.getLogger("absl").filters):
        return
    for logger in "absl", "asyncio":
        logging.getLogger(logger).addFilter(_NotOrbax())
    unraisable, uncaught = sys.unraisablehook, sys.excepthook
    sys.unraisablehook = lambda args: None if _is_debris(args.exc_value) else unraisable(args)
    sys.excepthook = lambda kind, error, trace: (
        None if _is_debris(error) else uncaught(kind, error, trace)
    )


# What saves in the background have failed with, in this process. Orbax logs it at once; where there
# are several processes it raises it only when the others have given up waiting, minutes later.
failed_saves: list[BaseException] = []


class _NotOrbax(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if record.threadName == "async_save" and record.exc_info and record.exc_info[1]:
            failed_saves.append(record.exc_info[1])
        files = [record.pathname]
        if record.name == "asyncio" and record.exc_info:
            frames = traceback.extract_tb(record.exc_info[2])
            # Without a frame it was raised by no Python: TensorStore sets its futures from C++.
            files += [frame.filename for frame in frames] or ["orbax"]
        return not any("orbax" in file for file in files)


def _is_debris(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
