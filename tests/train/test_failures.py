"""Runs that fail say why, what helps, and never "done"."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import processes
import pytest

from normfuse.train import shutdown
from normfuse.train.cli import main
from normfuse.train.loop import Loop
from normfuse.train.run import Run
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
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
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


def test_full_disk_after_the_last_step_leaves_the_checkpoint(options, train, tmp_path, monkeypatch):
    """Files may not grow beyond 4 kB from then on, and a picture does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    draw = Run._plot

    def limited(run):
        run.checkpoints.close()  # writes in the background end before the limit is set
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            return draw(run)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_plot", limited)
        code, _, err = train(**options)
    _assert_saved(code, err, tmp_path / "run", "File too large")
    code, out, err = train(**options)  # the same command does the rest
    assert (code, err) == (0, "") and "validation " in out


def test_sample_that_cannot_be_written_leaves_the_checkpoint(options, train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "run" / "sample.txt").mkdir()
    code, _, err = train(**options)
    _assert_saved(code, err, tmp_path / "run", "sample.txt: Is a directory")


def _assert_saved(code: int, error: str, run: Path, why: str):
    assert code == 1 and error.count("\n") == 1
    saved = run / "checkpoints" / "6"
    assert error.startswith(f"error: all 6 steps are done and saved in {saved}, but the rest")
    assert why in error and saved.is_dir()


def test_log_that_cannot_be_written_does_not_end_a_run(spawn, tmp_path, lines):
    """The standard output is on a full disk."""
    process = spawn(program=("-c", _FULL_OUTPUT))
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert [x["step"] for x in lines(tmp_path / "run") if "loss" in x] == [1, 2, 3, 4, 5, 6]


_FULL_OUTPUT = """
import os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
from normfuse.train.cli import entry
entry(["train", *sys.argv[1:]])
"""


def test_run_goes_on_when_its_reader_leaves(flags, tmp_path, lines):
    command = [sys.executable, "-m", "normfuse.train", *flags()]
    pipe = ["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *command]
    done = subprocess.run(pipe, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1
    assert max(x["step"] for x in lines(tmp_path / "run") if "loss" in x) == 6


def test_damaged_tokenizer_of_a_run_is_one_line(train, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    bpe = {"data.tokenizer": "bpe:270", "model.vocab-size": 384, "steps": 2}
    assert train(**bpe)[0] == 0
    path = tmp_path / "run" / "tokenizer.json"
    content = path.read_text()
    for damage in ("", content[: len(content) // 2], "[]", "\0"):
        path.write_text(damage)
        code, _, err = train(**bpe | {"steps": 3})
        assert code == 2 and err.count("\n") == 1
        assert f"{path} is not a valid tokenizer.json" in err and "Delete it" in err
    path.unlink()  # the remedy in the message
    code, _, err = train(**bpe | {"steps": 3})
    assert (code, err) == (0, "") and path.read_text() == content
    path.write_text("[]")
    assert main(["generate", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"error: RUN {path} is not a valid tokenizer.json")


@pytest.mark.parametrize("size", ["1 GiB", "a cgroup"])
def test_limited_memory_is_one_line(flags, size):
    """An address space that JAX does not fit into; what a cgroup kills says nothing anywhere."""
    if size == "a cgroup":
        limit = ["systemd-run", "--user", "--scope", "-q", "-p", "MemoryMax=64M"]
        if shutil.which("systemd-run") is None or subprocess.run([*limit, "true"]).returncode:
            pytest.skip("needs systemd")
    else:
        limit = ["bash", "-c", 'ulimit -v 1048576; exec "$@"', "bash"]
    command = [*limit, sys.executable, "-m", "normfuse.train", *flags()]
    done = subprocess.run(command, capture_output=True, text=True)
    killed = size == "a cgroup" and done.returncode in (-9, 137)
    assert (
        killed
        or done.returncode == 1
        and done.stderr.splitlines()[-1].startswith(
            "error: out of memory: this process may not have as much as it needs"
        )
    ), done.stderr[-500:]
