"""SIGTERM and SIGINT: in every phase a run saves and ends well; a second one ends it at once."""

import signal
import subprocess
import sys
import threading

import pytest
import signalled
from signalled import PHASES, interrupted

from normfuse.train.cli import main
from normfuse.train.shutdown import StopRequest


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "restoring"])
def test_signal_in_any_phase_ends_well(
    options, finished, train, flags, monkeypatch, tmp_path, losses, phase
):
    steps = PHASES[phase][-1]
    with monkeypatch.context() as patch:
        patch.setattr(*interrupted(phase, "SIGTERM"))
        code, out, err = train(**options)
    assert (code, err) == (0, "")
    assert f"stopped by SIGTERM after step {steps} of 6" in out
    assert "SIGTERM: stopping after this step, then saving; a second signal stops at once\n" in out
    assert f"normfuse train --config {tmp_path / 'run'}" in out
    assert main(["train", "--config", str(tmp_path / "run" / "config.yaml")]) == 0
    assert losses(tmp_path / "run") == losses(finished[0])


def test_signal_saves_and_exits_0(spawn, tmp_path, losses):
    process = spawn(program=(signalled.__file__, "stepping=SIGINT"))
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert f"stopped by SIGINT after step 3 of 6, saved to {tmp_path / 'run'}" in out
    assert max(losses(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


def test_second_signal_stops_even_c_code():
    """While the main thread is in C for ever, and no signal wakes it: in a lock that it holds."""
    program = """
import ctypes
from normfuse.train.shutdown import StopRequest
with StopRequest() as stop:
    stop.tell = lambda name: print(name, flush=True)
    print("ready", flush=True)
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for line in ("ready\n", "SIGTERM\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    process.stdout.close()


def test_first_signal_only_asks():
    before = signal.getsignal(signal.SIGINT)  # ignored, if the tests were started in the background
    with StopRequest() as stop:
        told = threading.Event()
        stop.tell = lambda name: told.set()
        assert not stop and stop.signal is None
        signal.raise_signal(signal.SIGINT)
        told.wait()
        assert stop.signal is signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_any_moment_before_the_run_ends_it():
    """Copies of the process are interrupted at more than twenty of its imports."""
    program = """
import os, signal, sys
class Moments:
    count = 0
    def find_spec(self, name, path=None, target=None):
        if name == "normfuse.train.cli":
            assert not {"jax", "numpy", "tyro"} & set(sys.modules)
            self.count = 60
        self.count += self.count > 0
        if self.count > 60:
            self.count = 1
            if (child := os.fork()) == 0:
                signal.raise_signal(signal.SIGINT)
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
sys.meta_path.insert(0, Moments())
from normfuse.train.__main__ import entry
entry(["train", "--steps", "0"])
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "error: --steps 0 must be from 1 to 2147483647.\n"
    codes = done.stdout.split()
    assert len(codes) > 20 and set(codes) == {str(-signal.SIGINT)}


def test_ctrl_c_during_imports_ends_the_command():
    """While a garbage collection runs a callback, as JAX's own: Python drops its exceptions."""
    program = """
import gc, signal, sys
def interrupt(*_):
    if "optax" in sys.modules:
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)
gc.callbacks.append(interrupt)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
from normfuse.train.cli import entry
entry(["train", "--steps", "0"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and done.stderr == ""
