"""`normfuse report`: the table, and one page with the losses that needs nothing else."""

import base64
import html.parser
import json
import re
import shutil

import numpy as np
import pytest

from normfuse.train import metrics
from normfuse.train.cli import main
from normfuse.train.profiling import _gaps, by_kind, table
from normfuse.train.report import Figure, plot_loss
from normfuse.train.run_dir import RunDir, RunResults

PNG = b"\x89PNG\r\n\x1a\n"


class _Page(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.links, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.words.append(data)


def test_page_holds_the_table_the_differences_and_the_losses(finished, tmp_path, capsys):
    """One of two runs has a name that a terminal would obey, and damaged lines."""
    other = shutil.copytree(finished[0], tmp_path / "[red]\x1b[2J")
    settings = (other / "config.yaml").read_text().replace("b1: 0.9", "b1: 0.8")
    (other / "config.yaml").write_text(settings)
    lines = metrics.read(other / "metrics.jsonl")
    lines[0]["loss"] = "high"
    del lines[1]["step_time_s"], lines[1]["tokens"]
    (other / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "page.html"
    assert main(["report", str(finished[0]), str(other), "--html", str(out)]) == 0
    said, name = capsys.readouterr().out, f"{tmp_path}/[red]\\x1b[2J"
    assert "\x1b" not in said and "tokens/s" in said
    rows = [line.split() for line in said.splitlines() if name in line]
    assert rows[0][1] == "6" and rows[1][1] == "0.8"
    assert re.search(r"^ *run +optim\.b1 *$", said, re.M)
    page = _Page(out.read_text())
    (picture,) = page.links
    assert base64.b64decode(picture.removeprefix("data:image/png;base64,")).startswith(PNG)
    last = RunDir(finished[0]).results("").validations()[-1]
    assert {name, f"{last['val_bits_per_byte']:.3f}", "Settings that differ"} <= set(page.words)


def test_runs_that_cannot_be_reported_are_explained(finished, tmp_path, capsys):
    for argv, part in (
        ([str(tmp_path)], "no metrics.jsonl"),
        ([], "RUN is missing"),
        ([str(finished[0]), "--html", str(tmp_path)], "cannot be written"),
    ):
        assert main(["report", *argv]) == 2
        assert part in capsys.readouterr().err


@pytest.fixture
def drawn(monkeypatch):
    """Gives the axes of a drawing, in place of its file."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return lambda: figures[-1].axes[0]


def test_loss_is_drawn_in_bits_per_byte_with_its_references(finished, tmp_path, drawn):
    run = RunDir(finished[0]).results("whole")
    pairs = RunResults("pairs", run.lines, tokens_per_byte=0.25)
    plot_loss(tmp_path / "loss.png", [run, pairs])
    axes = drawn()
    curves = {line.get_label(): line for line in axes.get_lines()}
    bits = np.array([x["loss"] for x in run.steps()]) / np.log(2)
    np.testing.assert_allclose(curves["whole: training"].get_ydata(), bits, rtol=1e-12)
    np.testing.assert_allclose(curves["pairs: training"].get_ydata(), bits / 4, rtol=1e-12)
    assert any(label.startswith("whole: validation") for label in curves)
    assert [text.get_text().split()[0] for text in axes.texts] == ["unigram", "bigram", "zlib"]
    heights = {line.get_ydata()[0] for line in axes.get_lines() if len(set(line.get_ydata())) == 1}
    assert set(run.references.values()) <= heights


def test_operations_are_sorted_into_kinds():
    times = {
        "nvjet_tst_128x256": 10.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": 5.0,
        "rms_norm_backward": 2.0,
        "column_sum": 0.5,
        "ncclDevKernel_AllReduce_Sum_f32": 1.0,
        "MemcpyD2D": 0.25,
        "loop_add_fusion": 4.0,
    }
    kinds = by_kind(times, idle=1.5, steps=5)
    assert kinds == {
        "matrix products": 2.0,
        "attention": 1.0,
        "element-wise and sums": 0.8,
        "RMSNorm": 0.5,
        "communication": 0.2,
        "copies": 0.05,
        "idle": 0.3,
    }
    assert list(kinds)[-1] == "idle"
    assert re.search(r"^    2\.000  44\.0%  nvjet_tst_128x256$", table(times, 5), re.M)


def test_idle_time_is_what_no_operation_covers():
    assert _gaps([(0, 4), (1, 2), (6, 7), (3, 5), (9, 10)]) == 3
    assert _gaps([]) == 0
