"""Whole runs: their output and files."""

import re

import numpy as np
import pytest
import yaml

PNG = b"\x89PNG\r\n\x1a\n"


def test_run_leaves_metrics_plot_checkpoint(finished, lines):
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
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["2", "4", "6"]
    assert yaml.safe_load((run / "config.yaml").read_text())["steps"] == 6
    for name in ("metrics.jsonl", "loss.png"):
        assert str(run / name) in out
    *_, training, validation = filter(None, out.splitlines())
    mean = np.mean([x["loss"] for x in steps])
    assert re.match(rf"loss +{mean:.4f} nats/token, .* \(mean of the last 6 steps\)$", training)
    assert validation.startswith(f"validation  loss {checks[-1]['val_loss']:.4f} nats/token")


def test_piped_output_is_plain_lines(finished):
    _, out = finished
    assert "\x1b" not in out and "\r" not in out
    assert re.search(r"^model +tiny, [\d.]+k parameters, nnx, float32", out, re.M)
    assert re.search(r"^text +.*text\.txt, 1 files, [\d,]+ bytes$", out, re.M)
    assert re.search(r"^sha256 +[0-9a-f]{64}$", out, re.M)
    assert re.search(r"^mesh +data 8 × fsdp 1 × tensor 1, of 8 cpu devices$", out, re.M)
    figures = r"loss \d\.\d{4}  \d\.\d{3} bits/byte  [\d.]+k? tokens/s  ETA \d+:\d\d"
    assert len(re.findall(rf"^step \d/6  {figures}$", out, re.M)) == 6


def test_other_failures_of_the_loop_still_close_the_log(train, tmp_path, monkeypatch, lines):
    from normfuse.train.run import Run

    def fail(*_):
        raise ZeroDivisionError("no")

    monkeypatch.setattr(Run, "_evaluate", fail)
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        train(steps=2)
    assert [x["step"] for x in lines(tmp_path / "run")] == [1, 2]
