"""Runs that fail say why, what helps, and never "done"."""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import processes
import pytest

from normfuse.train.cli import main
from normfuse.train.loop import Loop
from normfuse.train.shutdown import Watchdog


def test_out_of_memory_says_what_helps(train, monkeypatch):
    monkeypatch.setattr(Loop, "run", lambda *_: jnp.zeros(2**46, jnp.uint8).block_until_ready())
    code, _, err = train()
    assert code == 1 and "Traceback" not in err
    assert re.search(r"out of device memory: .*RESOURCE_EXHAUSTED.*Out of memory", err)
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
    assert "error: the checkpoint of step 2 could not be written to" in done.stderr
    assert "File too large" in done.stderr
    assert "validation" not in done.stdout and "step  200/4000" not in done.stdout


def test_hung_run_is_ended_with_its_stacks(tmp_path):
    """Also where a call into C holds the interpreter."""
    program = """
import ctypes
from normfuse.train.shutdown import Watchdog
def stuck():
    with Watchdog(1) as dog:
        dog.beat()
        ctypes.PyDLL(None).sleep(10_000)
stuck()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in stuck" in done.stderr


def test_run_tells_the_watchdog_at_every_step(options, train, monkeypatch):
    beats = []
    monkeypatch.setattr(Watchdog, "beat", lambda _: beats.append(1))
    assert train(**options)[0] == 0
    assert len(beats) > 6 + 3 + 3  # steps, validations and saves


def test_sample_that_cannot_be_written_leaves_the_checkpoint(options, train, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    (run / "sample.txt").mkdir()
    code, _, err = train(**options)
    assert (code, err) == (1, f"error: {run / 'sample.txt'}: Is a directory\n")
    assert (run / "checkpoints" / "6").is_dir()
    (run / "sample.txt").rmdir()
    code, out, err = train(**options)  # the same command does the rest
    assert (code, err) == (0, "") and "validation " in out


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
    path.write_text(content[: len(content) // 2])
    code, _, err = train(**bpe | {"steps": 3})
    assert code == 2 and err.count("\n") == 1
    assert f"{path} is not a valid tokenizer.json" in err and "delete that of a run" in err
    assert main(["generate", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"error: RUN {path} is not a valid tokenizer.json")
    path.unlink()  # the remedy in the message
    code, _, err = train(**bpe | {"steps": 3})
    assert (code, err) == (0, "") and path.read_text() == content
