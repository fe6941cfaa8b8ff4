"""SIGTERM and SIGINT: in every phase a run saves and ends well; a second one ends it at once."""

import re
import signal
import subprocess
import sys
import time

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
    assert f" -m normfuse.train --config {tmp_path / 'run'}" in out
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


def test_signal_saves_and_exits_0_with_the_command_that_resumes(
    spawn, wait_for_steps, tmp_path, losses
):
    """Another signal, while Python exits, changes nothing."""
    process = spawn(program=(signalled.__file__, "exiting", "SIGTERM"), steps=100_000)
    wait_for_steps(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    stopped = re.search(r"stopped by SIGINT after step (\d+) of 100000, saved to (.*)", out)
    assert stopped and max(losses(tmp_path / "run")) == int(stopped[1])
    assert (tmp_path / "run" / "checkpoints" / stopped[1]).is_dir()
    assert f"--config {tmp_path / 'run' / 'config.yaml'}" in out


def test_second_signal_stops_a_run_at_once(spawn):
    """Both come while it compiles: the first line is printed before."""
    process = spawn(**{"model.num-layers": 12})
    assert process.stdout.readline().startswith("model")
    started = time.monotonic()
    while process.poll() is None and time.monotonic() < started + 30:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)  # two that are too close arrive as one
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started < 20


def test_second_signal_stops_even_c_code():
    """Even while the main thread runs no Python: here it sleeps in C."""
    program = """
import ctypes
from normfuse.train.shutdown import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(30), ctypes.CDLL(None).sleep(30)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    started = time.monotonic()
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)  # two that are too close arrive as one
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started < 20
    process.stdout.close()


def test_first_signal_only_asks():
    before = signal.getsignal(signal.SIGINT)  # ignored, if the tests were started in the background
    with StopRequest() as stop:
        assert not stop and stop.signal is None
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + 10
        while not stop and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stop.signal is signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
