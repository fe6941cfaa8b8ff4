"""`normfuse train`, to which a signal comes in a phase of choice: `signalled.py PHASE NAME FLAGS…`.

The run's process sends the signal to itself as the phase begins.
"""

import gc
import signal
import sys
import time

import jax

from normfuse.train.checkpoint import Checkpoints
from normfuse.train.cli import main
from normfuse.train.evaluate import Evaluator
from normfuse.train.signals import StopRequest

# The phase's function, which of its calls is interrupted, and the steps that are taken after it.
PHASES = {
    "compiling": (jax.stages.Lowered, "compile", 1, 0),
    "stepping": (jax.stages.Compiled, "__call__", 3, 3),
    "evaluating": (Evaluator, "__call__", 2, 4),
    "saving": (Checkpoints, "save", 2, 4),
}


def send(number: int):
    """Sends this process a signal; returns when the run knows of it, as told by a thread."""
    entered = [x for x in gc.get_objects() if type(x) is StopRequest and x._old]
    (request,) = (x for x in entered if x._thread.is_alive())
    signal.raise_signal(number)
    deadline = time.monotonic() + 60
    while not request and time.monotonic() < deadline:
        time.sleep(0.001)


def interrupted(phase: str, number: int):
    """Gives the phase's owner, its function's name, and the function that signals in its place."""
    owner, name, call, _ = PHASES[phase]
    whole, calls = getattr(owner, name), []

    def interrupt(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            send(number)
        return whole(*args, **kwargs)

    return owner, name, interrupt


if __name__ == "__main__":
    phase, name, *flags = sys.argv[1:]
    setattr(*interrupted(phase, signal.Signals[name]))
    sys.exit(main(["train", *flags]))
