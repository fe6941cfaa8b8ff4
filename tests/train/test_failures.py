"""Runs that fail say why, what helps, and never "done"."""

import errno
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import processes
import pytest

from normfuse.train.loop import Loop


def _internal(*_):
    """As CPUs say it where the computation has been dispatched."""
    text = "INTERNAL: Error dispatching computation: Out of memory allocating 1000000000000 bytes."
    raise jax.errors.JaxRuntimeError(text)


def _exhausted(*_):
    jnp.zeros(2**46, jnp.uint8).block_until_ready()


@pytest.mark.parametrize("kind", ["RESOURCE_EXHAUSTED", "INTERNAL"])
def test_out_of_memory_says_what_helps(train, monkeypatch, kind):
    monkeypatch.setattr(Loop, "run", _internal if kind == "INTERNAL" else _exhausted)
    code, _, err = train()
    assert code == 1 and "Traceback" not in err
    assert re.search(rf"out of device memory: .*{kind}.*Out of memory", err)
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
    assert "File too large" in done.stderr and done.stderr.count("\n") == 1
    assert "validation" not in done.stdout and "step  200/4000" not in done.stdout


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_checkpoint_that_cannot_be_renamed_is_one_line(train, monkeypatch, caplog, error):
    rename = os.rename

    def fail(old, new, **options):
        if re.search("checkpoints/2$", str(new)):
            raise OSError(error, os.strerror(error), str(old))
        rename(old, new, **options)

    monkeypatch.setattr(os, "rename", fail)
    code, _, err = train(steps=50, **{"checkpoint.every": 2})
    assert code == 1 and err.count("\n") == 1 and os.strerror(error) in err
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_run_goes_on_when_its_reader_leaves(flags, tmp_path, lines):
    command = [sys.executable, "-m", "normfuse.train", *flags()]
    pipe = ["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *command]
    done = subprocess.run(pipe, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1
    assert max(x["step"] for x in lines(tmp_path / "run") if "loss" in x) == 6
