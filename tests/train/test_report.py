"""`normfuse report`: the table, and a plot of the losses."""

import json
import shutil

import numpy as np
import pytest

from normfuse.train import metrics
from normfuse.train.cli import main
from normfuse.train.report import Figure, plot_loss
from normfuse.train.run_dir import RunDir, RunResults

PNG = b"\x89PNG\r\n\x1a\n"


def test_report_prints_a_table_and_draws_the_losses(finished, tmp_path, capsys):
    """One of two runs has a name that a terminal would obey, and damaged lines."""
    other = shutil.copytree(finished[0], tmp_path / "[red]\x1b[2J")
    lines = metrics.read(other / "metrics.jsonl")
    lines[0]["loss"] = "high"
    del lines[1]["step_time_s"], lines[1]["tokens"]
    (other / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "losses.png"
    assert main(["report", str(finished[0]), str(other), "--plot", str(out)]) == 0
    said, name = capsys.readouterr().out, f"{tmp_path}/[red]\\x1b[2J"
    assert "\x1b" not in said and "tokens/s" in said
    rows = [line.split() for line in said.splitlines() if name in line]
    assert rows[0][1] == "6"
    assert out.read_bytes().startswith(PNG)
    last = RunDir(finished[0]).results("").validations()[-1]
    assert f"{last['val_bits_per_byte']:.3f}" in said


def test_runs_that_cannot_be_reported_are_explained(finished, tmp_path, capsys):
    for argv, part in (
        ([str(tmp_path)], "no metrics.jsonl"),
        ([], "RUN is missing"),
        ([str(finished[0]), "--plot", str(tmp_path)], "cannot be written"),
    ):
        assert main(["report", *argv]) == 2
        assert part in capsys.readouterr().err


def test_a_run_that_diverges_does_not_flatten_the_others(drawn, tmp_path):
    """The axis says how many of its losses are beyond it."""
    losses = {"good": [4.0, 3.0, 2.0, 2.0], "bad": [4.0, 3.0, 9e3, 9e4]}
    line = lambda step, loss: {"step": step, "loss": loss, "val_bits_per_byte": loss, "val_loss": 1}
    runs = [RunResults(n, [line(i, y) for i, y in enumerate(x, 1)]) for n, x in losses.items()]
    plot_loss(tmp_path / "loss.png", runs)
    assert 4 / np.log(2) < drawn().get_ylim()[1] < 20
    assert "25.00% of the losses are above, up to 1.3e+05" in drawn().get_title(loc="left")
    dots = [line for line in drawn().get_lines() if line.get_marker() == "o"]
    points = np.concatenate([line.get_ydata() for line in dots])
    assert np.nanmax(points) < 20  # those beyond the axis would be drawn outside of it
    plot_loss(tmp_path / "loss.png", runs[:1])
    assert drawn().get_title(loc="left") == ""


@pytest.fixture
def drawn(monkeypatch):
    """Gives the axes of a drawing, in place of its file."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return lambda: figures[-1].axes[0]


def test_loss_is_drawn_in_bits_per_byte(finished, tmp_path, drawn):
    run = RunDir(finished[0]).results("whole")
    pairs = RunResults("pairs", run.lines, tokens_per_byte=0.25)
    plot_loss(tmp_path / "loss.png", [run, pairs])
    axes = drawn()
    curves = {line.get_label(): line for line in axes.get_lines()}
    bits = np.array([x["loss"] for x in run.steps()]) / np.log(2)
    np.testing.assert_allclose(curves["whole: training"].get_ydata(), bits, rtol=1e-12)
    np.testing.assert_allclose(curves["pairs: training"].get_ydata(), bits / 4, rtol=1e-12)
    assert any(label.startswith("whole: validation") for label in curves)
