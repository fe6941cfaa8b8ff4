"""Every mistake: exit 2, one line with argument, value and fix, nothing compiled or written."""

import os
import subprocess
import sys

import jax
import pytest

from normfuse.train import compilation
from normfuse.train.cli import main

_ADDRESS = {"distributed.coordinator": "host:1", "distributed.num-processes": 2}
_USAGE = [
    ({"steps": 0}, ["--steps 0", "from 1 to"]),
    ({"microbatches": -1}, ["--microbatches -1", "from 1 to"]),
    ({"seed": 2**32}, ["--seed 4294967296", "to 4294967295"]),
    ({"seq_len": 33}, ["--seq-len 33", "--model.max-seq-len 32"]),
    ({"batch_size": 10, "microbatches": 4}, ["--batch-size 10", "--microbatches 4", "8 or 12"]),
    ({"batch_size": 12}, ["--batch-size 12", "multiple of 8", "8 or 16"]),
    ({"optim.lr": "nan"}, ["--optim.lr nan", "from 1.18e-38 to 3.4e+38"]),
    ({"optim.b2": 0.99999999999}, ["--optim.b2 0.99999999999", "from 0 to 1"]),
    ({"optim.mu-dtype": "float16"}, ["--optim.mu-dtype", "float16", "bfloat16"]),
    ({"optim.warmup": 7}, ["--optim.warmup 7", "--steps 6"]),
    ({"model.num-layers": 10_001}, ["--model.num-layers 10001", "to 10000"]),
    ({"out_dir": "~no-such-user/x"}, ["--out-dir ~no-such-user/x", "not a home folder"]),
    ({"mesh.data": 0}, ["--mesh.data 0", "-1"]),
    ({"mesh.fsdp": -1}, ["--mesh.data -1 --mesh.fsdp -1", "one may be -1"]),
    ({"mesh.fsdp": 3}, ["--mesh.data -1 --mesh.fsdp 3", "a multiple of 3 devices", "are 8"]),
    ({"model.vocab-size": 257, "mesh.tensor": 2}, ["--model.vocab-size=257", "'tensor'"]),
    ({"model.num-heads": 3}, ["--model.num-heads=3", "--model.num-kv-heads=2"]),
    ({"model.norm-eps": "nan"}, ["--model.norm-eps=nan", "finite"]),
    ({"model.vocab-size": 100}, ["tokens", "--model.vocab-size 128"]),
    ({"implementation": "pallas"}, ["--implementation", "pallas"]),
    ({"distributed.num-processes": 2}, ["--distributed.coordinator", "all three"]),
    (_ADDRESS | {"distributed.process-id": 2}, ["--distributed.process-id 2", "from 0 to 1"]),
    ({"out_dir": None, "resume": "must"}, ["--resume must", "--out-dir"]),
    ({"resume": "must"}, ["--resume must", "no checkpoint"]),
    ({"data.path": "/nonexistent/*.txt"}, ["--data.path /nonexistent/*.txt", "no files"]),
    ({"data.path": ""}, ["--data.path= is empty"]),  # not the current folder
    ({"data.path": "~no-such-user/x"}, ["--data.path ~no-such-user/x"]),
    ({"data.path": "\udcff"}, ["--data.path=\\udcff", "UTF-8"]),
    ({"config": "/nowhere.yaml"}, ["--config /nowhere.yaml cannot be read"]),
    ({"init-from": "/nowhere"}, ["--init-from /nowhere cannot be read", "config.json"]),
    ({"model.rope-scaling.factor": 0.5}, ["rope-scaling", "factor=0.5"]),
    ({"data.tokenizer": __file__}, [f"{__file__} is not a valid tokenizer.json", "`byte`"]),
    ({"mesh.dta": 3}, ["--mesh.dta", "Perhaps you meant", "--mesh.data"]),
    ({"preset": "huge"}, ["huge", "tiny"]),
]


@pytest.fixture
def nothing_compiled(monkeypatch):
    """Fails a test in which a step is compiled."""

    def compile(lowered):
        raise AssertionError("compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)


def _assert_usage_error(code: int, error: str, parts: list[str]):
    assert code == 2
    assert "Traceback" not in error
    assert error.count("\n") == 1 and error.startswith("error: ") or "full helptext" in error
    for part in parts:
        assert part in error


@pytest.mark.parametrize(("changes", "parts"), _USAGE, ids=lambda value: str(value)[:60])
def test_bad_input_is_one_message(train, nothing_compiled, tmp_path, changes, parts):
    code, _, error = train(**changes)
    _assert_usage_error(code, error, parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "parts"),
    [(b"", ["is empty"]), (b"short", ["5 tokens", "at least 340", "--seq-len"])],
)
def test_text_that_cannot_be_trained_on(train, nothing_compiled, tmp_path, content, parts):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    code, _, error = train(**{"data.path": path})
    _assert_usage_error(code, error, [str(path), *parts])


def test_folders_that_cannot_serve_are_left_alone(train, nothing_compiled, tmp_path, text_file):
    for folder, part in ((text_file / "run", "Not a directory"), ("/proc/normfuse", "be written")):
        code, _, error = train(out_dir=folder)
        _assert_usage_error(code, error, [f"--out-dir {folder}", part])
    for name in ("checkpoints", "loss.png"):  # before the first step, not after the last
        used = tmp_path / name
        used.mkdir()
        (used / "config.yaml").touch()
        (used / name).touch() if name == "checkpoints" else (used / name).mkdir()
        code, _, error = train(out_dir=used)
        _assert_usage_error(code, error, [f"--out-dir {used}", str(used / name)])
    (tmp_path / "run").mkdir()
    code, _, error = train(**{"data.path": tmp_path / "run"})
    _assert_usage_error(code, error, ["--data.path", "no files"])
    (tmp_path / "run" / "thesis.tex").write_text("dear")
    code, _, error = train()
    _assert_usage_error(code, error, ["--out-dir", "not empty"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_checkpoint_folder_of_something_else_is_no_run(train, tmp_path):
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    code, _, error = train()
    assert code == 1 and "holds no undamaged checkpoint" in error


def test_platform_without_devices_is_usage():
    """In a process of its own: a JAX backend is chosen once."""
    done = subprocess.run(
        [sys.executable, "-m", "normfuse.train"],
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
    )
    _assert_usage_error(done.returncode, done.stderr, ["JAX_PLATFORMS=cuda", "jax[cuda13]"])


def test_implementation_that_cannot_serve_is_usage(train, nothing_compiled, monkeypatch):
    def refuse(*_):
        raise NotImplementedError("rms_norm has no kernel for a Tuesday")

    monkeypatch.setattr(compilation.Program, "lower", refuse)
    code, _, error = train()
    _assert_usage_error(code, error, ["--implementation", "Tuesday"])


def test_empty_words_are_refused(capsys):
    for named, *argv in (
        ("after generate", "generate", ""),
        ("--plot", "report", "run", "--plot", ""),
        ("error: The argument after run", "export", "run", ""),
        ("--out-dir", "train", "--out-dir", ""),
    ):
        code = main(argv)
        _assert_usage_error(code, capsys.readouterr().err, [f"{named} is empty"])


def test_processes_that_do_not_meet_are_named(tmp_path):
    """A wrong coordinator: JAX alone would have XLA abort after five minutes."""
    flags = ["--distributed.coordinator=localhost:9", "--distributed.num-processes=2"]
    flags += ["--distributed.process-id=1", "--distributed.timeout=1"]
    command = [sys.executable, "-m", "normfuse.train", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: --distributed: the other processes did not meet at localhost")
    assert "Traceback" not in done.stderr and "Check failure" not in done.stderr
