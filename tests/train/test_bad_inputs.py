"""Every mistake: exit 2, one line with argument, value and fix, nothing compiled or written."""

import os
import subprocess
import sys

import jax
import pytest

from normfuse.train import compilation
from normfuse.train.cli import main

_USAGE = [
    ({"steps": 0}, ["--steps 0", "at least 1"]),
    ({"batch_size": 0}, ["--batch-size 0", "at least 1"]),
    ({"seq_len": 0}, ["--seq-len 0", "at least 1"]),
    ({"microbatches": -1}, ["--microbatches -1", "at least 1"]),
    ({"seed": -1}, ["--seed -1"]),
    ({"seed": 2**32}, ["--seed 4294967296", "2**32"]),
    ({"eval.every": -5}, ["--eval.every -5"]),
    ({"checkpoint.every": -1}, ["--checkpoint.every -1"]),
    ({"checkpoint.keep": 0}, ["--checkpoint.keep 0", "at least 1"]),
    ({"seq_len": 33}, ["--seq-len 33", "--model.max-seq-len 32"]),
    ({"batch_size": 10, "microbatches": 4}, ["--batch-size 10", "--microbatches 4", "8 or 12"]),
    ({"batch_size": 12}, ["--batch-size 12", "multiple of 8", "8 or 16"]),
    ({"batch_size": 8, "microbatches": 2}, ["--batch-size 8", "multiple of 16", "Take 16"]),
    ({"optim.lr": "nan"}, ["--optim.lr nan", "finite"]),
    ({"optim.lr": -1}, ["--optim.lr -1.0", "above 0"]),
    ({"optim.b1": 2}, ["--optim.b1 2.0", "below 1"]),
    ({"optim.b2": 1}, ["--optim.b2 1.0", "below 1"]),
    ({"optim.eps": 0}, ["--optim.eps 0.0", "above 0"]),
    ({"optim.clip": "inf"}, ["--optim.clip inf", "finite"]),
    ({"optim.weight_decay": -0.1}, ["--optim.weight-decay -0.1"]),
    ({"optim.final-lr": 2}, ["--optim.final-lr 2.0", "from 0 to 1"]),
    ({"optim.mu-dtype": "float16"}, ["--optim.mu-dtype", "float16", "bfloat16"]),
    ({"optim.warmup": 7}, ["--optim.warmup 7", "--steps 6"]),
    ({"optim.lr": 1e300}, ["--optim.lr 1e+300", "float32"]),
    ({"optim.eps": 1e-50}, ["--optim.eps 1e-50", "float32"]),
    ({"optim.clip": 1e39}, ["--optim.clip 1e+39", "float32"]),
    ({"optim.b2": 0.99999999999}, ["--optim.b2 0.99999999999", "below 1, in float32"]),
    ({"sample.temperature": 1e-50}, ["--sample.temperature 1e-50", "float32"]),
    ({"spike": 1e300}, ["--spike 1e+300", "above 1"]),
    ({"steps": 2**31}, ["--steps 2147483648", "below 2**31"]),
    ({"eval.every": 2**63}, ["--eval.every 9223372036854775808", "below 2**31"]),
    ({"watchdog": 10**400}, ["--watchdog 1000", "below 2**31"]),
    ({"mesh.data": -(2**40)}, ["--mesh.data -1099511627776"]),
    ({"distributed.timeout": 2**31}, ["--distributed.timeout 2147483648", "below 2**31"]),
    ({"guard": f"skip:{10**30}"}, ["--guard 'skip:1000", "below 10**9"]),
    ({"model.num-layers": 10_001}, ["--model.num-layers 10001", "at most 10000"]),
    ({"model.dim": 2**30}, ["does not fit", "7,486.1 GB", "--mesh.fsdp"]),
    ({"batch_size": 2**31 - 8}, ["does not fit", "inputs of the blocks", "--batch-size"]),
    ({"data.tokenizer": f"bpe:{10**30}"}, ["--data.tokenizer 'bpe:1000", "fewer than 10**9"]),
    ({"lock_timeout": -1}, ["--lock-timeout -1", "at least 0"]),
    ({"out_dir": "~no-such-user/x"}, ["--out-dir ~no-such-user/x", "not a home folder"]),
    ({"sample.temperature": -1}, ["--sample.temperature -1.0"]),
    ({"sample.prompt": ""}, ["--sample.prompt ''", "at least one"]),
    ({"sample.prompt": "\udcff"}, ["--sample.prompt '\\udcff'", "UTF-8"]),
    ({"sample.prompt": "x" * 40}, ["--sample.prompt", "--model.max-seq-len 32"]),
    ({"guard": "skip:0"}, ["--guard 'skip:0'", "skip:N"]),
    ({"guard": "ignore"}, ["--guard 'ignore'", "stop"]),
    ({"mesh.fsdp": 3}, ["--mesh.data -1 --mesh.fsdp 3 --mesh.tensor 1 cannot use all 8 devices"]),
    ({"mesh.data": 2}, ["--mesh.data 2 --mesh.fsdp 1 --mesh.tensor 1 take 2 devices"]),
    ({"spike": 0.5}, ["--spike 0.5", "above 1"]),
    ({"watchdog": -1}, ["--watchdog -1"]),
    ({"mesh.data": 0}, ["--mesh.data 0", "-1"]),
    ({"mesh.fsdp": -1}, ["--mesh.data and --mesh.fsdp", "only one"]),
    (
        {"mesh.data": 2, "mesh.fsdp": 2},
        ["--mesh.data 2 --mesh.fsdp 2", "take 4 devices", "there are 8"],
    ),
    ({"mesh.data": 16}, ["--mesh.data 16", "take 16", "there are 8"]),
    ({"mesh.fsdp": 3}, ["fsdp 3", "8 devices", "does not divide"]),
    ({"mesh.tensor": 4}, ["--model.num-heads=2", "'tensor'", "4"]),
    ({"mesh.fsdp": 8, "model.dim": 20}, ["dim=20", "'fsdp'", "8"]),
    ({"mesh.fsdp": 8, "model.mlp-dim": 36}, ["--model.mlp-dim=36", "'fsdp'", "8"]),
    ({"mesh.tensor": 2, "mesh.sequence": True, "seq_len": 15}, ["seq_len=15", "'tensor'", "2"]),
    ({"model.vocab-size": 257, "mesh.tensor": 2}, ["--model.vocab-size=257", "'tensor'"]),
    ({"model.num-heads": 3}, ["--model.num-heads=3", "--model.num-kv-heads=2"]),
    ({"model.dim": 0}, ["--model.dim=0", "at least 1"]),
    ({"model.head-dim": 7}, ["--model.head-dim=7", "even"]),
    ({"model.norm-eps": "nan"}, ["--model.norm-eps=nan", "finite"]),
    ({"model.vocab-size": 100}, ["token", "--model.vocab-size 100", "256"]),
    ({"implementation": "pallas"}, ["--implementation", "pallas"]),
    ({"mesh.parts": 0}, ["--mesh.parts 0", "at least 1"]),
    (
        {"batch_size": 6, "microbatches": 2, "mesh.parts": 2},
        ["--batch-size 6", "--microbatches 2 of --mesh.parts 2", "4 or 8"],
    ),
    ({"batch_size": 8, "mesh.parts": 2}, ["--batch-size 8", "times --mesh.parts 2", "Take 16"]),
    ({"distributed.num-processes": 2}, ["--distributed.coordinator"]),
    ({"distributed.coordinator": "host"}, ["--distributed.coordinator 'host'", "HOST:PORT"]),
    ({"distributed.coordinator": "host:99999"}, ["'host:99999'", "65535"]),
    (
        {"mesh.keep-gathered": True, "mesh.fsdp": 8, "model.remat": "block"}
        | {"model.quantization": "fp8"},
        ["--mesh.keep-gathered", "--model.quantization fp8"],
    ),
    ({"distributed.coordinator": "host:1"}, ["--distributed.num-processes"]),
    (
        {
            "distributed.coordinator": "host:1",
            "distributed.num-processes": 2,
            "distributed.process-id": 2,
        },
        ["--distributed.process-id 2", "from 0 to 1"],
    ),
    ({"distributed.timeout": 0}, ["--distributed.timeout 0", "at least 1 second"]),
    ({"out_dir": None, "resume": "must"}, ["--resume must", "--out-dir"]),
    ({"resume": "must"}, ["--resume must", "no checkpoint"]),
    ({"data.path": "/nonexistent/text"}, ["--data.path /nonexistent/text", "does not exist"]),
    ({"data.path": "/nonexistent/*.txt"}, ["--data.path /nonexistent/*.txt", "matches nothing"]),
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
    assert error.count("\n") == 1 or "helptext" in error  # tyro's own
    for part in parts:
        assert part in error


@pytest.mark.parametrize(("changes", "parts"), _USAGE, ids=lambda value: str(value)[:60])
def test_bad_input_is_one_message(train, nothing_compiled, tmp_path, changes, parts):
    if "implementation" in changes and _serves(changes["implementation"]):
        pytest.skip("this implementation serves")
    code, _, error = train(**changes)
    _assert_usage_error(code, error, parts)
    assert error.startswith("error: ") or "helptext" in error
    assert not (tmp_path / "run").exists()


def _serves(implementation: str) -> bool:
    import jax.numpy as jnp

    import normfuse

    try:
        normfuse.rms_norm(jnp.ones((2, 4)), implementation=implementation)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--mesh.dta", "3"], ["--mesh.dta", "Perhaps you meant", "--mesh.data"]),
        (["--optim.lr", "abc"], ["--optim.lr", "abc"]),
        (["--framework", "torch"], ["torch", "nnx", "eqx"]),
        (["--implementation", "cuda"], ["cuda", "native", "xla"]),
        (["--preset", "huge"], ["huge", "tiny"]),
        (["--resume", "maybe"], ["maybe", "auto"]),
        (["stray"], ["stray"]),
        (["--data.path", ""], ["--data.path is empty"]),  # was the current folder
        (["--data.path="], ["--data.path is empty"]),
        (["--out-dir", ""], ["--out-dir is empty"]),
        (["--out-dir", "x", ""], ["an argument of `normfuse train` is empty"]),
        (["--data.tokenizer", ""], ["--data.tokenizer is empty"]),
        (["--config", ""], ["--config is empty"]),
        (["--steps", ""], ["--steps is empty"]),
    ],
)
def test_mistyped_flags_are_explained(nothing_compiled, capsys, argv, parts):
    code = main(["train", *argv])
    _assert_usage_error(code, capsys.readouterr().err, parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [(b"", ["is empty"]), (b"short", ["5 tokens", "at least 340", "--seq-len"])],
)
def test_text_that_cannot_be_trained_on(train, nothing_compiled, tmp_path, content, parts):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    code, _, error = train(**{"data.path": path})
    _assert_usage_error(code, error, [str(path), *parts])


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["generate", ""], "an argument of `normfuse generate`"),
        (["report", "run", ""], "an argument of `normfuse report`"),
        (["report", "run", "--html", ""], "--html"),
        (["plan", "--huggingface="], "--huggingface"),
    ],
)
def test_empty_paths_are_not_the_current_folder(capsys, argv, part):
    code = main(argv)
    _assert_usage_error(code, capsys.readouterr().err, [f"{part} is empty"])


@pytest.mark.parametrize("setting", ["data.path", "out_dir"])
def test_empty_paths_of_a_file_are_refused(nothing_compiled, tmp_path, capsys, setting):
    (tmp_path / "settings.yaml").write_text(f"{setting}: ''\n")
    code = main(["train", "--config", str(tmp_path / "settings.yaml")])
    _assert_usage_error(code, capsys.readouterr().err, [f"{setting!r} is ''"])


def test_empty_directory_is_no_text(train, nothing_compiled, tmp_path):
    (tmp_path / "texts").mkdir()
    code, _, error = train(**{"data.path": tmp_path / "texts"})
    _assert_usage_error(code, error, ["--data.path", "no files"])


def test_out_dir_below_a_file_is_refused(train, nothing_compiled, text_file):
    code, _, error = train(out_dir=text_file / "run")
    _assert_usage_error(code, error, ["--out-dir", "not a folder"])


def test_out_dir_that_cannot_be_made_is_refused(train, nothing_compiled):
    code, _, error = train(out_dir="/proc/normfuse")
    _assert_usage_error(code, error, ["--out-dir /proc/normfuse", "cannot be written"])


def test_out_dir_of_something_else_is_left_alone(train, nothing_compiled, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("dear")
    code, _, error = train()
    _assert_usage_error(code, error, ["--out-dir", "not empty"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["checkpoints", "profile", "tensorboard"])
def test_a_file_in_the_place_of_a_folder_is_found_before_the_first_save(
    train, nothing_compiled, tmp_path, name
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "run" / name).touch()
    code, _, error = train(**({} if name == "checkpoints" else {name: True}))
    _assert_usage_error(code, error, ["--out-dir", f"its {name} must be a folder"])


def test_platform_without_devices_is_usage():
    """In a process of its own: a JAX backend is chosen once."""
    program = "import sys; from normfuse.train.cli import main; sys.exit(main(['train']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh.fsdp": 8}, True),  # the preset's --model.remat is none
        ({"model.remat": "block"}, True),
        ({"mesh.fsdp": 8, "model.remat": "block"}, False),
    ],
    ids=str,
)
def test_nothing_to_keep_is_said(train, monkeypatch, changes, said):
    from normfuse.train.run import Run

    monkeypatch.setattr(Run, "go", lambda run, stack: run.introduce())
    code, out, error = train(**changes, **{"mesh.keep-gathered": True})
    assert (code, error) == (0, "")
    assert ("--mesh.keep-gathered has nothing to keep" in out) == said


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


def test_checkpoint_folder_of_something_else_is_no_run(train, tmp_path):
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    code, _, error = train()
    assert code == 1 and "holds no undamaged checkpoint" in error
