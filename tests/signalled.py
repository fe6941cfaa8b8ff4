"""`signalled.py PHASE EVENT FLAGS…` is `normfuse train`, to which something happens in a phase.

The event is a signal that the run's process sends to itself as the phase begins (`SIGTERM`), or two
(`SIGTERM+SIGTERM`), or an error of this process alone (`failure`), or that its files may not grow
any more (`full disk`). The phase is one of `PHASES`, or `exiting`.
"""

import atexit
import gc
import resource
import signal
import sys
import time

import jax

from normfuse.train import RunError
from normfuse.train.checkpoint import Checkpoints
from normfuse.train.cli import entry
from normfuse.train.evaluate import Evaluator
from normfuse.train.shutdown import StopRequest

# The phase's function, which of its calls is interrupted, and the steps that are taken after it.
PHASES = {
    "compiling": (jax.stages.Lowered, "compile", 1, 0),
    "stepping": (jax.stages.Compiled, "__call__", 3, 3),
    "evaluating": (Evaluator, "__call__", 2, 4),
    "saving": (Checkpoints, "save", 2, 4),
    "restoring": (Checkpoints, "_item", 3, 0),  # the newest record, twice, then its arrays
}


def send(number: int):
    """Sends this process a signal; returns when the run knows of it, as told by a thread.

    The second never returns.
    """
    entered = [x for x in gc.get_objects() if type(x) is StopRequest and x._old]
    (request,) = (x for x in entered if x._thread.is_alive())
    second = bool(request)
    signal.raise_signal(number)
    deadline = time.monotonic() + 60
    while (second or not request) and time.monotonic() < deadline:
        time.sleep(0.001)


def happen(event: str):
    """Makes an event happen."""
    if event == "failure":
        raise RunError("a disk of this process is gone")
    if event == "full disk":
        return resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    for name in event.split("+"):
        send(signal.Signals[name])


def interrupted(phase: str, event: str):
    """Gives the phase's owner, its function's name, and the function that has the event happen."""
    owner, name, call, _ = PHASES[phase]
    whole, calls = getattr(owner, name), []

    def interrupt(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            happen(event)
        return whole(*args, **kwargs)

    return owner, name, interrupt


if __name__ == "__main__":
    phase, event, *flags = sys.argv[1:]
    if phase == "exiting":
        atexit.register(signal.raise_signal, signal.Signals[event])
    else:
        setattr(*interrupted(phase, event))
    entry(["train", *flags])
