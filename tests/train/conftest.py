"""Runs small enough for tests: a two-layer transformer of 10 k parameters on 40 kB of text."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import processes
import pytest
import signalled
import train_state
from jax.experimental.compilation_cache import compilation_cache

from normfuse.native import implementation
from normfuse.train.checkpoint import Checkpoints
from normfuse.train.cli import main

_FLAGS = {
    "steps": 6,
    "batch-size": 8,
    "seq-len": 16,
    "eval.every": 0,
    "eval.final-tokens": 256,
    "checkpoint.every": 0,
    "optim.lr": 1e-2,
    "model.dim": 16,
    "model.num-layers": 2,
    "model.num-heads": 2,
    "model.num-kv-heads": 2,
    "model.head-dim": 8,
    "model.mlp-dim": 32,
    "model.max-seq-len": 32,
}


@pytest.fixture(scope="package", autouse=True)
def _cache(tmp_path_factory):
    """Programs compiled by these tests, in any worker, are for these tests alone."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "cache of train"
    folder.mkdir(mode=0o700, exist_ok=True)
    settings = {
        "jax_compilation_cache_dir": str(folder / "xla"),
        "jax_compilation_cache_max_size": 1 << 30,  # with a limit, JAX locks what it writes
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at its folder only once
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMFUSE_CACHE_DIR", str(folder))
        for name in list(settings)[1:]:  # in other processes
            patch.setenv(name.upper(), str(settings[name]))
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """40 kB of prose-like text, the same in every session."""
    words = (
        "the norm of a row divides the row and the scale of the layer scales the row again".split()
    )
    lines = [" ".join(words[(i * j + j) % len(words)] for j in range(9)) for i in range(1000)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines)[:40_000])
    return path


@pytest.fixture(scope="session")
def small_run():
    """Gives a small run's flags: `small_run(text, folder, steps=4, **{"mesh.fsdp": 2})`."""

    def make(text: Path, folder: Path, **changes) -> list[str]:
        base = {"data.path": text, "out-dir": folder} | _FLAGS
        changes = {name.replace("_", "-"): value for name, value in changes.items()}
        given = {k: v for k, v in (base | changes).items() if v is not None}
        return [f"--{k}" if v is True else f"--{k}={v}" for k, v in given.items()]

    return make


@pytest.fixture
def flags(small_run, text_file, tmp_path):
    """Gives the flags of a small run in this test's folder."""
    return lambda **changes: small_run(text_file, tmp_path / "run", **changes)


@pytest.fixture
def train(flags, capsys):
    """Runs `normfuse train` in this process; gives exit code, standard output and errors."""

    def run(**changes) -> tuple[int, str, str]:
        code = main(["train", *flags(**changes)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def spawn(flags):
    """Starts `python -m normfuse.train` in a process of its own, on one device unless told.

    Or another `program` of Python's, which takes the same flags.
    """
    started = []

    def run(devices: int = 1, program=("-m", "normfuse.train"), **changes) -> subprocess.Popen:
        env = os.environ | {"XLA_FLAGS": processes.xla_flags(devices)}
        process = subprocess.Popen(
            [sys.executable, *program, *flags(**changes)],
            env=env,
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def options() -> dict:
    """One configuration for most whole runs: it is compiled once."""
    return {
        "eval.every": 2,
        "eval.tokens": 128,
        "checkpoint.every": 2,
    }


@pytest.fixture(scope="package")
def finished(_cache, tmp_path_factory, text_file, small_run, options):
    """The folder of a run that nothing interrupted, and its output. Not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(implementation, "_plain", {})  # other tests of this process fell back too
        assert main(["train", *small_run(text_file, folder, **options)]) == 0
    return folder, out.getvalue()


@pytest.fixture
def interrupted(train, monkeypatch, options):
    """Starts a run to which SIGTERM is sent during step 3; gives its output."""

    def run(**changes) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(*signalled.interrupted("stepping", "SIGTERM"))
            code, out, err = train(**options | changes)
        assert code == 0 and not err, err
        return out

    return run


@pytest.fixture
def lines():
    """Reads a run's metrics.jsonl strictly."""
    return lambda run: [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def losses(lines):
    """Gives each step's loss in hex; a step that stands twice fails."""

    def read(run: Path) -> dict[int, str]:
        steps = [line for line in lines(run) if "loss" in line]
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
        return {line["step"]: float(line["loss"]).hex() for line in steps}

    return read


@pytest.fixture(scope="package")
def saved(tmp_path_factory) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, report=print)
    for step in (1, 2):
        checkpoints.save(train_state.make_state(step), step, train_state.RECORD)
    checkpoints.close()
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))
