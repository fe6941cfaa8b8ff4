"""SIGTERM and SIGINT: in every phase a run saves and ends well; a second one ends it at once."""

import signal
import subprocess
import sys
import threading

import pytest
import signalled
from signalled import PHASES, interrupted, send

from normfuse.train.cli import main
from normfuse.train.evaluate import Evaluator
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


def test_signal_in_the_last_validation_leaves_it_to_the_next_time(
    options, finished, train, monkeypatch, tmp_path, lines
):
    whole = Evaluator.__call__

    def interrupt(evaluator, params, tokens, stopping):
        if tokens != options["eval.tokens"]:
            send(signal.SIGINT)
        return whole(evaluator, params, tokens, stopping)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "__call__", interrupt)
        code, out, _ = train(**options)
    assert code == 0 and "stopped by SIGINT after step 6 of 6, saved to" in out
    assert train(**options)[0] == 0
    checks = lambda run: [(x["step"], x["val_loss"]) for x in lines(run) if "val_loss" in x]
    assert checks(tmp_path / "run") == checks(finished[0])


def test_signal_saves_and_exits_0(spawn, tmp_path, losses):
    """Another signal, while Python exits, changes nothing."""
    process = spawn(program=(signalled.__file__, "stepping=SIGINT", "exiting=SIGTERM"))
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert f"stopped by SIGINT after step 3 of 6, saved to {tmp_path / 'run'}" in out
    assert max(losses(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


def test_second_signal_stops_a_run_at_once(spawn):
    process = spawn(program=(signalled.__file__, "compiling=SIGTERM+SIGTERM"))
    out, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "a second signal stops at once" in out and "stopped by" not in out


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


def test_ctrl_c_during_imports_ends_the_command():
    """While a garbage collection runs a callback, as JAX's own: Python drops its exceptions."""
    program = """
import gc, signal, sys
def interrupt(*_):
    if "jax" in sys.modules:
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)
gc.callbacks.append(interrupt)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
from normfuse.train.cli import entry
entry(["train", "--steps", "0"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and done.stderr == ""


def test_ctrl_c_is_ignored_where_the_command_was_started_so():
    program = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from normfuse.train.cli import entry
try:
    entry(["--version"])
finally:
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
