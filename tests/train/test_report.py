"""`normfuse report`: the table, the pictures, and one page that needs nothing else."""

import base64
import html.parser
import json
import re
import shutil

import numpy as np
import pytest

from normfuse.train import plot
from normfuse.train.cli import main
from normfuse.train.profiling import _gaps, by_kind, table
from normfuse.train.run_dir import RunDir, RunResults

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def profiled(finished, tmp_path):
    """A copy of the finished run, with a profile."""
    run = shutil.copytree(finished[0], tmp_path / "other")
    (run / "profile").mkdir()
    (run / "profile" / "breakdown.json").write_text(json.dumps({"matrix products": 3.0, "idle": 1}))
    return run


class _Page(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.images, self.words, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.links += [found[name] for name in ("src", "href") if name in found]
        if tag == "img":
            self.images.append(found)

    def handle_data(self, data):
        self.words.append(data)


def test_page_holds_the_table_and_every_picture(finished, profiled, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")  # too narrow, but this is no terminal
    out = tmp_path / "page.html"
    arguments = ["--html", str(out), "--pictures", str(tmp_path / "pictures")]
    assert main(["report", str(finished[0]), str(profiled), *arguments]) == 0
    table = capsys.readouterr().out
    assert "tokens/s" in table and str(profiled) in table and str(finished[0]) in table
    page = _Page(out.read_text())
    alt = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Where a step's time goes"]
    assert [image["alt"] for image in page.images] == alt
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    names = ["loss", "lr", "grad_norm", "throughput", "breakdown"]
    for image, name in zip(page.images, names, strict=True):
        picture = base64.b64decode(image["src"].split(",")[1])
        assert picture.startswith(PNG)
        assert picture == (tmp_path / "pictures" / f"{name}.png").read_bytes()
    last = [x for x in RunDir(profiled).results("").validations()][-1]
    assert {str(profiled), f"{last['val_bits_per_byte']:.3f}", "6"} <= set(page.words)


def test_runs_that_cannot_be_reported_are_explained(finished, tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "RUN is missing" in capsys.readouterr().err
    assert main(["report", str(finished[0]), "--html", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.fixture
def drawn(monkeypatch):
    """Gives the axes of a drawing, still open."""
    kept, close = [], plot.plt.close
    monkeypatch.setattr(plot.plt, "close", kept.append)
    yield lambda: kept[-1].axes[0]
    for figure in kept:
        close(figure)


def test_loss_is_drawn_in_bits_per_byte_with_its_references(finished, tmp_path, drawn):
    run = RunDir(finished[0]).results("whole")
    pairs = RunResults("pairs", run.lines, tokens_per_byte=0.25)
    plot.plot_loss(tmp_path / "loss.png", [run, pairs])
    axes = drawn()
    curves = {line.get_label(): line for line in axes.get_lines()}
    bits = np.array([x["loss"] for x in run.steps()]) / np.log(2)
    np.testing.assert_allclose(curves["whole: training"].get_ydata(), bits, rtol=1e-12)
    np.testing.assert_allclose(curves["pairs: training"].get_ydata(), bits / 4, rtol=1e-12)
    assert any(label.startswith("whole: validation") for label in curves)
    texts = [text.get_text() for text in axes.texts]
    assert [t.split()[0] for t in texts] == ["unigram", "bigram", "zlib"]
    heights = {line.get_ydata()[0] for line in axes.get_lines() if len(set(line.get_ydata())) == 1}
    assert set(run.references.values()) <= heights


def test_baselines_of_two_texts_are_apart(finished, tmp_path, drawn):
    lines = RunDir(finished[0]).results("").lines
    texts = {"a": {"unigram": 4.5, "zlib": 2.5}, "b": {"unigram": 3.5}, "d": {}}
    texts["c"] = texts["a"]  # the same text once more
    runs = [RunResults(name, lines, references=found) for name, found in texts.items()]
    plot.plot_loss(tmp_path / "loss.png", runs)
    axes = drawn()
    shown = [(text.get_text(), text.get_color()) for text in axes.texts]
    colours = {line.get_label()[0]: line.get_color() for line in axes.get_lines()}
    a, b = colours["a"], colours["b"]
    assert shown == [("unigram 4.50", a), ("zlib 2.50", a), ("unigram 3.50", b)]


def test_throughput_and_breakdown_show_their_numbers(finished, profiled, tmp_path, drawn):
    run = RunDir(profiled).results("run")
    plot.plot_throughput(tmp_path / "speed.png", [run])
    speeds = [x["tokens_per_s"] for x in run.steps()]
    (curve,) = drawn().get_lines()
    whole = len(speeds) / sum(1 / speed for speed in speeds)  # six steps are less than a window
    np.testing.assert_allclose(curve.get_ydata()[[0, -1]], whole)
    assert drawn().get_xlim() == (1, 6)  # where the data are
    assert f"median {np.median(speeds):,.0f}" in drawn().get_legend().get_texts()[0].get_text()
    plot.plot_breakdown(tmp_path / "kinds.png", [run])
    assert [t.get_text() for t in drawn().get_yticklabels()] == ["matrix products", "idle"]
    assert [t.get_text() for t in drawn().texts] == ["3 ms, 75%", "1 ms, 25%"]


def test_throughput_is_a_rate_over_a_window(tmp_path, drawn):
    """Tokens by the seconds of eleven steps, of which one waited for a checkpoint."""
    speeds = [100.0] * 50 + [10.0] + [100.0] * 49
    steps = [{"step": i, "loss": 1.0, "tokens_per_s": x} for i, x in enumerate(speeds, 1)]
    plot.plot_throughput(tmp_path / "speed.png", [RunResults("run", steps)])
    (curve,) = drawn().get_lines()
    np.testing.assert_allclose(curve.get_ydata()[44:57], [100, *[55] * 11, 100])


def test_settings_that_differ_are_listed(finished, tmp_path, capsys):
    """Not where a run was."""
    other = shutil.copytree(finished[0], tmp_path / "other")
    settings = (other / "config.yaml").read_text().replace("b1: 0.9", "b1: 0.8")
    (other / "config.yaml").write_text(settings.replace(str(finished[0]), str(other)))
    page = tmp_path / "page.html"
    assert main(["report", str(finished[0]), str(other), "--html", str(page)]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^ *run +optim\.b1 *$", table, re.M) and re.search(
        r"other +0\.8 *$", table, re.M
    )
    assert {"Settings that differ", "optim.b1", "0.9", "0.8"} <= set(_Page(page.read_text()).words)
    assert main(["report", str(other), "--html", str(page)]) == 0
    assert "Settings" not in page.read_text()


def test_runs_of_any_length_are_smoothed_alike(finished, tmp_path, drawn):
    """Compared are means over as many steps: here, over 3 of a run whose longest has 100."""
    run = RunDir(finished[0]).results("short")
    steps = [line | {"step": i, "loss": 1.0} for i, line in enumerate([run.lines[0]] * 100, 1)]
    plot.plot_loss(tmp_path / "loss.png", [run, RunResults("long", steps)])
    curve = next(x for x in drawn().get_lines() if x.get_label() == "short: training")
    bits = np.array([x["loss"] for x in run.steps()]) / np.log(2)
    np.testing.assert_allclose(curve.get_ydata()[1], bits[:3].mean(), rtol=1e-6)


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
