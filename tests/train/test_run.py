"""Whole runs: what they print and leave, and that nothing that stops one costs more than time."""

import contextlib
import io
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml

from normfuse.train.cli import main
from normfuse.train.loop import Loop
from normfuse.train.signals import StopRequest

PNG = b"\x89PNG\r\n\x1a\n"
# One configuration for most tests: it is compiled once.
OPTIONS = {
    "eval.every": 2,
    "eval.tokens": 128,
    "checkpoint.every": 2,
    "sample.tokens": 9,
    "sample.prompt": "the ",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text_file, small_run):
    """The folder of a run that nothing interrupted, and what it printed. Not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["train", *small_run(text_file, folder, **OPTIONS)]) == 0
    return folder, out.getvalue()


@pytest.fixture
def interrupted(train, monkeypatch):
    """Starts a run to which SIGTERM is sent during step 3; gives what it printed."""

    def run(**changes) -> str:
        take = Loop.run

        def signalled(loop, state, done):
            before = loop.on_step

            def on_step(step, settle):
                before(step, settle)
                if step == 3:
                    signal.raise_signal(signal.SIGTERM)

            loop.on_step = on_step
            return take(loop, state, done)

        with monkeypatch.context() as patch:
            patch.setattr(Loop, "run", signalled)
            code, out, err = train(**OPTIONS | changes)
        assert (code, err) == (0, "")
        return out

    return run


def test_run_leaves_metrics_plot_sample_checkpoint(finished, lines):
    run, out = finished
    entries = lines(run)
    steps = [x for x in entries if "loss" in x]
    assert [x["step"] for x in steps] == [1, 2, 3, 4, 5, 6]
    fields = ["step", "loss", "tokens", "tokens_per_s", "step_time_s", "grad_norm", "lr", "time"]
    assert all(list(x) == fields for x in steps)
    assert steps[-1]["tokens"] == 6 * 8 * 16
    assert all(float(np.float32(x["loss"])) == x["loss"] for x in steps)  # float32, exactly
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    checks = [x for x in entries if "val_loss" in x]
    assert [x["step"] for x in checks] == [2, 4, 6]
    assert checks[-1]["val_bits_per_byte"] == pytest.approx(checks[-1]["val_loss"] / np.log(2))
    assert (run / "loss.png").read_bytes().startswith(PNG)
    assert (run / "sample.txt").read_text().startswith("the ")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["2", "4", "6"]
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] == 6
    for name in ("metrics.jsonl", "loss.png", "sample.txt", "checkpoints/6"):
        assert str(run / name) in out
    assert f"loss {checks[-1]['val_loss']:.4f} nats/token" in out


def test_piped_output_is_plain_lines(finished):
    _, out = finished
    assert "\x1b" not in out and "\r" not in out
    assert re.search(r"^model +tiny, [\d.]+k parameters, Flax nnx, float32", out, re.M)
    assert re.search(r"^text +.*text\.txt, [\d,]+ bytes$", out, re.M)
    assert re.search(r"^sha256 +[0-9a-f]{64}$", out, re.M)
    assert re.search(r"^mesh +data 8 × fsdp 1 × tensor 1, of 8 cpu devices$", out, re.M)
    figures = r"loss \d\.\d{4}  \d\.\d{3} bits/byte  [\d.]+k? tokens/s  ETA \d+:\d\d"
    assert len(re.findall(rf"^step \d/6  {figures}$", out, re.M)) == 6


def test_resumed_run_has_the_losses_of_the_unbroken(interrupted, finished, tmp_path, losses, lines):
    """It is resumed by the command that it printed."""
    out = interrupted()
    run, whole = tmp_path / "run", finished[0]
    assert "stopped by SIGTERM after step 3 of 6, saved to" in out
    command = re.search(r"continue with: python -m normfuse.train (.*)", out)[1]
    assert max(losses(run)) == 3
    assert main(["train", *shlex.split(command)]) == 0
    assert losses(run) == losses(whole)
    checks = lambda path: {x["step"]: x["val_loss"] for x in lines(path) if "val_loss" in x}
    assert checks(run) == checks(whole)
    assert [x["from_step"] for x in lines(run) if x.get("event") == "resume"] == [3]


def test_other_mesh_and_microbatches_resume_within_1e_5(
    interrupted, train, finished, tmp_path, losses
):
    interrupted()
    other = {"microbatches": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    code, out, _ = train(**OPTIONS | other)
    assert code == 0 and "microbatches  saved 1, now 2" in out
    floats = lambda run: [float.fromhex(x) for x in losses(run).values()]
    found, expected = floats(tmp_path / "run"), floats(finished[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_finished_run_is_only_validated_again(finished, train, tmp_path, losses, lines):
    run = shutil.copytree(finished[0], tmp_path / "run")
    code, out, _ = train(**OPTIONS)
    assert code == 0 and "validation" in out
    assert losses(run) == losses(finished[0])
    assert [x["step"] for x in lines(run) if "val_loss" in x] == [2, 4, 6]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model.mlp-dim": 48}, ["model.mlp_dim", "saved 32, now 48"]),
        ({"framework": "eqx"}, ["framework", "saved nnx, now eqx"]),
        ({"seed": 1}, ["seed", "saved 0, now 1"]),
        ({"batch_size": 16}, ["batch_size", "saved 8, now 16"]),
        ({"steps": 5}, ["--steps 5", "taken 6"]),
        ({"resume": "never"}, ["--resume never", "already holds a run"]),
    ],
    ids=str,
)
def test_other_run_is_not_continued(train, finished, changes, parts):
    code, _, err = train(out_dir=finished[0], **OPTIONS | changes)
    assert code == 2
    for part in parts:
        assert part in err


def test_other_text_is_not_continued(train, finished, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("row", "col"))
    code, _, err = train(out_dir=finished[0], **OPTIONS, **{"data.path": other})
    assert code == 2
    assert "another text" in err and err.count(f"{other.stat().st_size:,} bytes") == 2


def test_generate_continues_the_prompt(finished, capsys):
    run = str(finished[0])
    arguments = ["--prompt", "the norm", "--tokens", "5", "--temperature", "0"]
    assert main(["generate", run, *arguments]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the norm") and len(first) >= len("the norm") + 2
    assert main(["generate", run, *arguments]) == 0
    assert capsys.readouterr().out == first
    assert main(["generate", run, "--tokens", "500"]) == 2
    assert "500" in capsys.readouterr().err


def test_report_compares_runs(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    picture, run = tmp_path / "report.png", str(finished[0])
    assert main(["report", run, run, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(PNG)
    assert "tokens/s" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err


def test_loss_that_is_not_finite_stops_before_the_update(train, tmp_path, lines):
    code, _, err = train(**{"optim.lr": 1e30, "optim.clip": 0, "checkpoint.every": 1})
    assert code == 1
    assert "Traceback" not in err
    step = next(x["step"] for x in lines(tmp_path / "run") if x.get("event") == "not finite")
    batch = tmp_path / "run" / f"bad_batch_{step}.npy"
    assert f"step {step}: loss" in err and str(batch) in err and "last finite loss was" in err
    assert np.load(batch).shape == (8, 17)
    last = tmp_path / "run" / "checkpoints" / str(step - 1)
    assert str(last) in err and last.is_dir()
    assert not (tmp_path / "run" / "checkpoints" / str(step)).exists()


def test_bad_steps_may_be_left_out(train, tmp_path, lines, monkeypatch):
    """A poisoned state is beyond help; here one batch's gradient overflows."""
    from normfuse.train import step

    whole = step.loss_and_gradient

    def sometimes(model, params, tokens, **options):
        import jax
        import jax.numpy as jnp

        loss, gradient = whole(model, params, tokens, **options)
        unlucky = jnp.where(tokens.sum() % 3 == 0, jnp.inf, 1.0)
        return loss, jax.tree.map(lambda g: g * unlucky, gradient)

    monkeypatch.setattr(step, "loss_and_gradient", sometimes)
    code, out, err = train(guard="skip:9")
    assert (code, err) == (0, "")
    left_out = [x for x in lines(tmp_path / "run") if x.get("skipped")]
    assert 1 <= len(left_out) <= 5
    assert out.count("update left out") == len(left_out)
    assert all(x["grad_norm"] is None and x["loss"] > 0 for x in left_out)


def test_out_of_memory_says_what_was_needed_and_what_helps(train, monkeypatch):
    def exhaust(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory, 3 GB wanted\nmore")

    monkeypatch.setattr(Loop, "run", exhaust)
    code, _, err = train()
    assert code == 1 and "Traceback" not in err
    for part in ("3 GB wanted", "GiB", "--microbatches", "--batch-size", "--mesh.fsdp"):
        assert part in err


def test_other_failures_of_the_loop_still_close_the_log(train, tmp_path, monkeypatch, lines):
    from normfuse.train.run import Run

    def fail(*_):
        raise MemoryError("no")

    monkeypatch.setattr(Run, "_evaluate", fail)
    with pytest.raises(MemoryError):  # a bug keeps its traceback
        train(steps=2)
    assert [x["step"] for x in lines(tmp_path / "run")] == [1, 2]


def _wait_for_steps(run, count: int, seconds: float = 120):
    deadline = time.monotonic() + seconds
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss"') < count:
        assert time.monotonic() < deadline, "the run takes no steps"
        time.sleep(0.01)


def test_killed_at_any_moment_it_resumes_bit_for_bit(spawn, tmp_path, losses, lines):
    options = {"steps": 60, "checkpoint.every": 3, "eval.every": 7, "eval.tokens": 64}
    rng = random.Random(0)
    whole = spawn(out_dir=tmp_path / "unbroken", **options)
    assert whole.wait() == 0, whole.communicate()
    for _ in range(3):
        process = spawn(**options)
        _wait_for_steps(tmp_path / "run", rng.randrange(1, 15))
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.wait()
    process = spawn(**options)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert losses(tmp_path / "run") == losses(tmp_path / "unbroken")
    resumes = [x["from_step"] for x in lines(tmp_path / "run") if x.get("event") == "resume"]
    assert resumes == sorted(resumes) and f"continuing after step {resumes[-1]}" in out


def test_signal_saves_and_exits_0_with_the_command_that_resumes(spawn, tmp_path, losses):
    process = spawn(steps=100_000)
    _wait_for_steps(tmp_path / "run", 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    stopped = re.search(r"stopped by SIGINT after step (\d+) of 100000, saved to (.*)", out)
    assert stopped and max(losses(tmp_path / "run")) == int(stopped[1])
    assert (tmp_path / "run" / "checkpoints" / stopped[1]).is_dir()
    assert f"--config {tmp_path / 'run' / 'config.yaml'}" in out


def test_second_signal_stops_at_once():
    """Even while the main thread runs no Python: here it sleeps in C."""
    program = """
import ctypes
from normfuse.train.signals import StopRequest
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
    assert time.monotonic() - started < 10
    process.stdout.close()


def test_first_signal_only_asks():
    with StopRequest() as stop:
        assert not stop and stop.signal is None
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + 10
        while not stop and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stop.signal is signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
