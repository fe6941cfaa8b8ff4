"""Runs that go on: bit for bit where they were, on other meshes too, and no other run's."""

import random
import re
import shlex
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import signalled

from normfuse.train import UsageError
from normfuse.train.checks import check_resume, make_record
from normfuse.train.cli import main
from normfuse.train.config import preset_config


def test_resumed_run_has_the_losses_of_the_unbroken(interrupted, finished, tmp_path, losses, lines):
    """It is resumed by the command that it printed."""
    out = interrupted()
    run, whole = tmp_path / "run", finished[0]
    assert "stopped by SIGTERM after step 3 of 6, saved to" in out
    command = re.search(r"continue with: normfuse train (.*)", out)[1]
    assert max(losses(run)) == 3
    assert main(["train", *shlex.split(command)]) == 0
    assert losses(run) == losses(whole)
    checks = lambda path: {x["step"]: x["val_loss"] for x in lines(path) if "val_loss" in x}
    assert checks(run) == checks(whole)
    assert [x["from_step"] for x in lines(run) if x.get("event") == "resume"] == [3]


def test_other_mesh_and_microbatches_resume_within_1e_5(
    options, interrupted, train, finished, tmp_path, losses
):
    interrupted()
    other = {"microbatches": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    code, out, _ = train(**options | other)
    assert code == 0 and "microbatches  saved 1, now 2" in out
    floats = lambda run: [float.fromhex(x) for x in losses(run).values()]
    found, expected = floats(tmp_path / "run"), floats(finished[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_settings_that_say_how_are_told_by_their_names():
    config = preset_config("tiny")
    text = {"tokenizer": "byte", "sha256": "f00d"}
    record = make_record(config, text)
    for name in ("attention", "implementation", "quantization", "remat"):
        record["config"]["model"][name] = "another"
    told = check_resume(record, config, text)
    assert told and all(x.startswith("  model.") and "saved another" in x for x in told)
    other = replace(config, model=replace(config.model, qk_norm=True))
    with pytest.raises(UsageError, match="model.qk_norm saved False, now True"):
        check_resume(record, other, text)
    with pytest.raises(UsageError, match="text.size saved None, now 3"):
        check_resume(record, config, text | {"size": 3})
    with pytest.raises(UsageError, match="of format 2; this version reads and writes 3"):
        check_resume(record | {"format": 2}, config, text)


def test_config_of_a_run_continues_it_from_any_folder(
    small_run, text_file, tmp_path, monkeypatch, capsys
):
    """In its own place, with its own text, though both were relative; also where it was moved."""
    (tmp_path / "a" / "texts").mkdir(parents=True)
    shutil.copy(text_file, tmp_path / "a" / "texts" / "text.txt")
    monkeypatch.chdir(tmp_path / "a")
    assert main(["train", *small_run("texts/text.txt", "runs/x", steps=2)]) == 0
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    assert main(["train", "--config", "../a/runs/x/config.yaml", "--steps", "4"]) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    (tmp_path / "a" / "runs").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved" / "x")
    assert main(["train", "--config", "config.yaml", "--steps", "5"]) == 0
    out = capsys.readouterr().out
    assert "saved 4, now 5: from here the learning rate follows another curve" in out
    assert "continuing after step 4" in out and f"folder      {tmp_path / 'moved' / 'x'}" in out
    assert [path.name for path in (tmp_path / "b").iterdir()] == []
    elsewhere = ["--out-dir", str(tmp_path / "b" / "y"), "--steps", "2"]
    assert main(["train", "--config", "config.yaml", *elsewhere]) == 0
    assert "continuing after" not in capsys.readouterr().out


def test_finished_run_is_only_validated_again(options, finished, train, tmp_path, losses, lines):
    run = shutil.copytree(finished[0], tmp_path / "run")
    code, out, _ = train(**options)
    assert code == 0 and "validation" in out
    assert losses(run) == losses(finished[0])
    assert [x["step"] for x in lines(run) if "val_loss" in x] == [2, 4, 6]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model.mlp-dim": 48, "framework": "eqx"}, ["framework saved nnx, now eqx"]),
        ({"seed": 1, "batch_size": 16}, ["seed saved 0, now 1", "batch_size saved 8, now 16"]),
        ({"seq_len": 8}, ["seq_len saved 16, now 8"]),
        ({"optim.mu-dtype": "bfloat16"}, ["optim.mu_dtype saved float32, now bfloat16"]),
        ({"steps": 5}, ["--steps 5", "taken 6"]),
        ({"resume": "never"}, ["--resume never", "already holds a run"]),
    ],
    ids=str,
)
def test_other_run_is_not_continued(options, train, finished, changes, parts):
    code, _, err = train(out_dir=finished[0], **options | changes)
    assert code == 2
    for part in parts:
        assert part in err


def test_other_text_is_not_continued(options, train, finished, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("row", "col"))
    code, _, err = train(out_dir=finished[0], **options, **{"data.path": other})
    assert code == 2
    assert "text.sha256 saved " in err and "the same text by the flags --data" in err


def test_damaged_newest_checkpoint_costs_only_the_steps_since(
    options, finished, train, tmp_path, losses
):
    run = shutil.copytree(finished[0], tmp_path / "run")
    # Some files, and parts of others, hold what was written and then written again elsewhere.
    for path in (run / "checkpoints" / "6" / "params").rglob("d/*"):
        content = bytearray(path.read_bytes())
        for at in range(16):
            content[at * len(content) // 16] ^= 1
        path.write_bytes(content)
    code, out, err = train(**options)
    assert (code, err) == (0, "")
    assert re.search(r"^checkpoint of step 6 is damaged and not used: .+$", out, re.M)
    assert "continuing after step 4" in out
    assert losses(run) == losses(finished[0])


def _random_kills(count: int) -> list[str]:
    """Ends without notice: as a step or a validation begins, during a save, and a little later."""
    rng = random.Random(count)
    kills = []
    for _ in range(count):
        phase, call = rng.choice(("stepping", "saved", "evaluating")), rng.randrange(1, 9)
        kills.append(f"{phase}@{call}=SIGKILL{rng.choice(('', f' {rng.random() / 10:.3f}'))}")
    return kills


@pytest.mark.optimized
@pytest.mark.parametrize(
    "kills",
    [
        ("stepping@8=SIGKILL", "saved@2=SIGKILL"),
        pytest.param(_random_kills(20), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_killed_at_any_moment_it_resumes_bit_for_bit(spawn, tmp_path, losses, lines, kills):
    steps = 10 * len(kills)
    options = {"steps": steps, "checkpoint.every": 3, "eval.every": 7, "eval.tokens": 64}
    run, unbroken = tmp_path / "run", spawn(out_dir=tmp_path / "unbroken", **options)
    assert unbroken.wait() == 0, unbroken.communicate()
    for kill in kills:
        process = spawn(program=(signalled.__file__, kill), **options)
        assert process.wait() == -signal.SIGKILL or len(losses(run)) == steps
        losses(run)  # no step stands twice at any time
    process = spawn(**options)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert losses(run) == losses(tmp_path / "unbroken")
    resumes = [x["from_step"] for x in lines(run) if x.get("event") == "resume"]
    assert resumes == sorted(resumes) and f"continuing after step {resumes[-1]}" in out
    checks = lambda path: {x["step"]: x["val_loss"] for x in lines(path) if "val_loss" in x}
    assert checks(run) == checks(tmp_path / "unbroken")
