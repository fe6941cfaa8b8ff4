"""`signalled.py PHASE=EVENT … FLAGS…` is `normfuse train`, to which something happens in phases.

An event is a signal that the run's process sends to itself as the phase begins (`SIGTERM`), or two
(`SIGTERM+SIGTERM`), or its end without notice (`SIGKILL`, or so many seconds later, `SIGKILL 0.1`),
or an error of this process alone (`failure`). A phase is one of `PHASES`, or `saved`, as a save has
returned; `stepping@7` is its seventh time.
"""

import itertools
import os
import signal
import sys
import threading
import time

import jax

from normfuse.train import RunError
from normfuse.train.checkpoint import Checkpoints
from normfuse.train.cli import entry
from normfuse.train.evaluate import Evaluator

# The phase's function, which of its calls is interrupted, and the steps that are taken after it.
PHASES = {
    "compiling": (jax.stages.Lowered, "compile", 1, 0),
    "stepping": (jax.stages.Compiled, "__call__", 3, 3),
    "evaluating": (Evaluator, "__call__", 2, 4),
    "saving": (Checkpoints, "save", 2, 4),
    "restoring": (Checkpoints, "_item", 1, 0),
}


def send(number: int):
    """Sends this process a signal; returns when the run knows of it, as told by a thread.

    The second never returns.
    """
    # Not by gc.get_objects: it shows unfinished tuples, and a thread that saves then fails in
    # CPython ("bad argument to internal function"), because its tuple has another owner.
    (watching,) = (thread for thread in threading.enumerate() if thread.name == "signals")
    request = watching._target.__self__
    second = bool(request)
    signal.raise_signal(number)
    while second or not request:
        time.sleep(0.001)


def happen(event: str):
    """Makes an event happen."""
    if event == "failure":
        raise RunError("a disk of this process is gone")
    if event.startswith("SIGKILL"):
        seconds = float(event.removeprefix("SIGKILL") or 0)
        end = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        return end.start() if seconds else end.function(*end.args)
    for name in event.split("+"):
        send(signal.Signals[name])


def interrupted(phase: str, event: str):
    """Gives the phase's owner, its function's name, and the function that has the event happen."""
    phase, _, time_of = phase.partition("@")
    owner, name, call, _ = PHASES["saving" if phase == "saved" else phase]
    call = int(time_of or call)
    whole, calls = getattr(owner, name), []

    def interrupt(*args, **kwargs):
        calls.append(args)
        if len(calls) == call and phase != "saved":
            happen(event)
        result = whole(*args, **kwargs)
        if len(calls) == call and phase == "saved":
            happen(event)
        return result

    return owner, name, interrupt


if __name__ == "__main__":
    faults = list(itertools.takewhile(lambda word: not word.startswith("--"), sys.argv[1:]))
    for fault in faults:
        phase, event = fault.split("=")
        setattr(*interrupted(phase, event))
    entry(["train", *sys.argv[1 + len(faults) :]])
