"""Runs that fail say why, what helps, and never "done"."""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import processes

from normfuse.train import shutdown
from normfuse.train.loop import Loop
from normfuse.train.shutdown import Watchdog


def test_out_of_memory_says_what_was_needed_and_what_helps(train, monkeypatch):
    monkeypatch.setattr(Loop, "run", lambda *_: jnp.zeros(2**46, jnp.uint8).block_until_ready())
    code, _, err = train()
    assert code == 1 and "Traceback" not in err
    assert re.search(r"out of device memory: .*RESOURCE_EXHAUSTED.*Out of memory", err)
    assert re.search(r"state and batch [\d.]+ MiB, temporaries [\d.]+ MiB", err)
    for knob in ("--microbatches", "--model.remat block", "--mesh.fsdp"):
        assert knob in err


def test_save_that_fails_in_the_background_fails_the_run(flags, tmp_path):
    """Files may not grow beyond 20 kB, and a checkpoint's does: it is written by other threads."""
    command = [sys.executable, "-m", "normfuse.train"]
    command += flags(steps=4000, **{"checkpoint.every": 2})
    environment = {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": processes.xla_flags(1),
    }
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 20; exec "$@"', "bash", *command],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: the checkpoint of step 2 could not be written to")
    assert "File too large" in done.stderr and done.stderr.count("\n") == 1
    assert "validation" not in done.stdout and "step  200/4000" not in done.stdout


def _hang(program: str, grace: int, tmp_path) -> subprocess.CompletedProcess:
    program = f"""
import ctypes, pathlib, time
from normfuse.train import shutdown
shutdown._GRACE = {grace}
dog = shutdown.Watchdog(1, pathlib.Path("stacks.txt"))
def stuck():
    dog._doing = "taking step 2"
    with dog:
        {program}
stuck()
"""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


def test_hung_run_is_ended_with_its_stacks(tmp_path):
    done = _hang("time.sleep(10_000)", 10_000, tmp_path)
    assert done.returncode == 1
    assert "error: no progress for --watchdog 1 s while taking step 2" in done.stderr
    for stacks in (done.stderr, (tmp_path / "stacks.txt").read_text()):
        assert "in stuck" in stacks


def test_hang_that_holds_the_interpreter_is_ended_too(tmp_path):
    done = _hang("ctypes.PyDLL(None).sleep(10_000)", 1, tmp_path)
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in stuck" in done.stderr


def test_beats_keep_a_run_alive(monkeypatch, tmp_path):
    """By a clock of the test's own: each wait ends where it should, after one or no beat."""
    clock, beats, ended = [0.0], ["taking step 1", "taking step 2"], []
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(shutdown.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    dog = shutdown.Watchdog(10, tmp_path / "stacks.txt")

    def wait(seconds):
        clock[0] += seconds / 2
        if beats:
            dog.beat(beats.pop(0))
        clock[0] += seconds / 2
        return bool(ended)

    monkeypatch.setattr(dog._ended, "wait", wait)
    monkeypatch.setattr(dog, "_end", lambda: ended.append((clock[0], dog._doing)))
    dog._watch()
    # Waits end at 10, 15 and 17.5 with beats at 5 and 12.5 between: the last is due at 22.5.
    assert ended == [(22.5, "taking step 2")]


def test_run_tells_the_watchdog_of_all_it_does(options, train, monkeypatch):
    said = []
    monkeypatch.setattr(Watchdog, "beat", lambda _, doing: said.append(doing))
    assert train(**options)[0] == 0
    phases = ["compiling", *(f"taking step {i}" for i in range(1, 7)), "validating", "saving"]
    assert set(phases) | {"sampling", "plotting"} <= set(said)
    assert said.index("compiling") < said.index("taking step 1")
