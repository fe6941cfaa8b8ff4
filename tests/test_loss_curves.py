"""Loss curves in bfloat16 and FP8 are trained as asked, resumed exactly, and judged."""

import csv
import importlib
import lzma
import math
import pathlib
import sys
import zipfile

import numpy as np
import pytest
import tiny_model
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from normfuse.native import implementation
from normfuse.train import compilation, data, mesh

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
pytestmark = [
    pytest.mark.skipif(
        not (BENCHMARKS / "loss_curves.py").is_file(),
        reason="benchmarks are not beside these tests",
    ),
    pytest.mark.newest,  # benchmarks are run with the newest JAX
]

TOKENS = 4 * 16  # a step's
SIZES = "--batch-size 4 --seq-len 16 --eval.tokens 64 --optim.lr 0.01"
LAYER = "--model.num-layers 1 --model.dim 32 --model.mlp-dim 64 --model.num-heads 2"
HEADS = "--model.num-kv-heads 2 --model.head-dim 16"
RUNS = [(seed, name) for seed in (0, 1) for name in ("bf16", "fp8")]


@pytest.fixture
def loss_curves(monkeypatch):
    """The benchmark as a module, for one device and without a cache of programs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else it sets this for good
    monkeypatch.setattr(compilation, "keep_compiled_programs", lambda: None)
    monkeypatch.setattr(mesh, "make_mesh", lambda config: tiny_model.first_devices(1, 1, 1))
    before = {*sys.modules}
    yield importlib.import_module("loss_curves")
    for name in ({*sys.modules} - before) & {"loss_curves", "loss_curves_table", "headline"}:
        del sys.modules[name]


@pytest.fixture
def train(loss_curves, tmp_path):
    """Calls the command for eight steps of a model of one layer, by default with two seeds."""
    text = tmp_path / "text"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 8000).astype(np.uint8).tobytes())

    def run(out, *flags, tokens=8 * TOKENS, seeds=2, heads=HEADS):
        flags = (
            f"--preset tiny --tokens {tokens} --seeds {seeds} --points 8 --out {out}".split()
            + [
                *f"{SIZES} {LAYER} {heads}".split(),
                *("--data.path", __file__, *flags),
            ]
        )
        return loss_curves.main(flags)

    return run


def rows_of(folder):
    """Rows of the file without the columns that each measurement renews."""
    with open(folder / "loss_curves.csv", newline="") as file:
        return [
            {name: value for name, value in row.items() if name not in ("ms", "date")}
            for row in csv.DictReader(file)
        ]


def test_curves_are_trained_as_asked_and_resumed_exactly(
    train, loss_curves, tmp_path, compilations, monkeypatch, capsys
):
    given, drawn, whole, parts = [], [], tmp_path / "whole", tmp_path / "parts"
    batches, make, made = data.batches, loss_curves.Trainer, []

    def watched(tokens, *, seed, first, steps, **size):
        given.append((seed, first, steps))
        return batches(tokens, seed=seed, first=first, steps=steps, **size)

    def once(*arguments):  # all calls but the first take its programs: this test is quicker so
        trainer = made[0][1] if made else make(*arguments)
        if not made:
            init = trainer._init
            trainer._init = lambda run: drawn.append(run[0]) or init(run)
        made.append((arguments[-1], trainer))
        return trainer

    monkeypatch.setattr(data, "batches", watched)
    monkeypatch.setattr(loss_curves, "Trainer", once)
    status = train(whole)
    # Both runs of a seed have the same initial values and batches.
    assert drawn == [seed for seed, _ in RUNS]
    assert given == [(seed, 0, 8) for seed, _ in RUNS]
    counts = {name: compilations[f"jit({name})"] for name in ("_step", "loss_sum", "init")}
    assert counts == {"_step": 2, "loss_sum": 2, "init": 1}
    rows, printed = rows_of(whole), capsys.readouterr().out
    places = [(int(r["seed"]), r["version"], int(r["step"]), int(r["tokens"])) for r in rows]
    assert places == [(*run, step, step * TOKENS) for run in RUNS for step in range(1, 9)]
    for name, title in {"loss": "training", "val_loss": "held-out"}.items():
        found = np.array([float(row[name]) for row in rows]).reshape(2, 2, 8)
        first, last = found[..., 0], found[..., -1]  # (seed, quantization)
        assert np.all(last < 0.9 * first)  # it learns
        assert np.all(found[:, 0] != found[:, 1])  # it quantizes
        holds = abs(np.mean(last[:, 1] - last[:, 0])) <= np.ptp(last[:, 0])
        (line,) = [line for line in printed.splitlines() if line.startswith(f"fp8, {title}: ")]
        assert (": holds;" in line) == holds
        assert holds or status == 1
    check_picture(whole / "loss_curves.png")

    # A run that --seconds ends goes on from its state; a row that a crash has cut off is dropped.
    train(parts, "--seconds", "0")
    assert rows_of(parts) == rows[:1]
    assert "4 runs are not complete" in capsys.readouterr().out
    with open(parts / "loss_curves.csv", "a") as file:
        file.write("2026-01-01,cpu,0.1")
    given.clear()
    train(parts)
    assert given == [(0, 1, 8), *[(seed, 0, 8) for seed, _ in RUNS[1:]]]
    assert rows_of(parts) == rows
    assert sorted(path.name for path in parts.iterdir()) == ["loss_curves.csv", "loss_curves.png"]

    # Without a state it begins again; only what is left is compiled, and nothing if nothing is.
    lines = (parts / "loss_curves.csv").read_text().splitlines(keepends=True)
    (parts / "loss_curves.csv").write_text("".join(lines[:-3]))
    given.clear()
    train(parts, "--runs", "0:fp8", "1:bf16")  # nothing is left of these
    assert not given
    assert train(parts) == train(parts) == status
    assert given == [(1, 0, 8)] and rows_of(parts) == rows
    assert drawn == [*[0, 0, 1, 1] * 2, 1]  # not where a state was saved
    assert [names for names, _ in made] == [*[["bf16", "fp8"]] * 3, ["fp8"]]

    with pytest.raises(SystemExit, match="curves of other settings"):
        train(parts, tokens=9 * TOKENS)
    assert rows_of(parts) == rows


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tokens", "nan"), "--tokens nan must be a number above 0, such as 30M"),
        (("--tokens", "0"), "--tokens 0.0 must be a number above 0"),
        (("--seeds", "0"), "--seeds 0 must be at least 1"),
        (("--points", "0"), "--points 0 must be at least 1"),
        (("--steps", "3"), "--steps is set for each run here"),
        (("--model.quantization", "fp8"), "--model.quantization is set for each run here"),
        (("--also", "x=--seed 1"), "--seed is set for each run here"),
        (("--also", "x=--batch-size 16"), "--also x: batch_size must be that of all versions"),
        (("--also", 'x=--model.remat "'), "cannot be read: No closing quotation"),
        (("--also", "fp8=--model.remat block"), "with another name than bf16 or fp8"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_one_error_before_anything_is_trained(
    loss_curves, tmp_path, capsys, monkeypatch, flags, said
):
    monkeypatch.setattr(loss_curves, "train", None)
    with pytest.raises(SystemExit) as error:
        loss_curves.main(["--preset", "tiny", "--out", str(tmp_path), *flags])
    assert error.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


def test_what_is_not_served_in_fp8_is_an_error(train, tmp_path, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})  # each reason is reported once a process
    with pytest.raises(SystemExit, match="not all of it is FP8: .*no multiple of 16"):
        train(tmp_path, heads="--model.num-kv-heads 1 --model.head-dim 8")
    assert not (tmp_path / "loss_curves.csv").exists()


@pytest.mark.parametrize(
    ("name", "hlo", "platform", "message"),
    [
        ("fp8", '"__cublas$lt$matmul$f8"' * 42, "gpu", None),
        ("fp8", '"__cublas$lt$matmul$f8"' * 41, "gpu", "41 products .* at least 42"),
        ("fp8", '"__cublas$gemm"' * 42, "gpu", "0 products .* at least 42"),
        ("bf16", '"__cublas$gemm"' * 42, "gpu", None),
        ("bf16", '"__cublas$lt$matmul$f8"', "gpu", "bf16 has 1 products .* should have none"),
        ("fp8", "%a = f8e4m3fn[4]{0} copy(%b)\n" * 42, "cpu", None),
        ("fp8", "%a = bf16[4]{0} copy(%b)\n" * 42, "cpu", "0 arrays .* at least 42"),
        ("bf16", "%a = f8e4m3fn[4]{0} copy(%b)\n", "cpu", "should have none"),
        ("loss", '"__cublas$lt$matmul$f8"' * 2, "gpu", None),
        ("loss", '"__cublas$lt$matmul$f8"', "gpu", "1 products .* at least 2"),
    ],
)
def test_programs_without_what_they_are_named_for_are_errors(
    loss_curves, name, hlo, platform, message
):
    given = name, {"bf16": 0, "loss": 2, "fp8": 42}[name], hlo, platform
    if message is None:
        loss_curves.check_products(*given)
    else:
        with pytest.raises(SystemExit, match=message):
            loss_curves.check_products(*given)


def made_up(loss_curves, folder, last, steps=4):
    """Writes a file of curves that end in these losses, by run; None: the run is not complete."""
    common = dict.fromkeys(("date", "device", "jax", "normfuse"), "x") | {"settings": "a; b; c"}
    folder.mkdir(parents=True, exist_ok=True)
    curves = loss_curves.Curves(folder / "loss_curves.csv", common)
    for (seed, name), loss in last.items():
        for step in range(1, steps + (loss is not None)):
            value = 5 + seed - step if step < steps else loss
            ms = 20.0 if name == "bf16" else 10.0 + step
            curves.add(
                loss_curves.Point(seed, name, step, steps, 100 * step, value, value + 0.5, ms)
            )


# The gaps of three seeds; bfloat16's last losses are 2.0, 2.1 and 2.3, a range of 0.3.
@pytest.mark.parametrize(
    ("gaps", "holds"),
    [
        ((0.1, -0.1, 0.2), True),
        ((0.0, 0.0, 0.87), True),  # one seed's gap may be larger: the mean is 0.29
        ((0.3, 0.3, 0.36), False),
        ((-0.3, -0.3, -0.36), False),  # better by more than seeds differ: not the same training
        ((0.0, 0.0, math.nan), False),
    ],
)
def test_a_gap_larger_than_the_range_fails(loss_curves, tmp_path, capsys, monkeypatch, gaps, holds):
    drawn = math.nan in gaps  # the others' picture is like it
    if not drawn:
        monkeypatch.setattr(loss_curves, "plot", lambda *_: None)
    plain = (2.0, 2.1, 2.3)
    last = {(seed, "bf16"): loss for seed, loss in enumerate(plain)}
    last |= {(seed, "fp8"): plain[seed] + gap for seed, gap in enumerate(gaps)}
    made_up(loss_curves, tmp_path, dict(sorted(last.items())))
    assert loss_curves.main(["--report", "--out", str(tmp_path)]) == (0 if holds else 1)
    lines = capsys.readouterr().out.splitlines()
    mean, end = sum(gaps) / 3, "holds" if holds else "DOES NOT HOLD"
    said = f"mean gap {mean:+.4f}, range of bf16's 3 seeds 0.3000: {end}"
    for line, loss in zip(lines[-2:], ("training", "held-out"), strict=True):
        assert line.startswith(f"fp8, {loss}: {said}; ")
    row = f"| 1 | 2.1000 | {2.1 + gaps[1]:.4f} | {gaps[1]:+.4f} | 2.6000 | {2.6 + gaps[1]:.4f} |"
    assert f"{row} {gaps[1]:+.4f} |" in lines
    assert "| bf16 | 20.00 | 5,000 |" in lines and "| fp8 | 12.50 | 8,000 |" in lines
    if drawn:
        check_picture(tmp_path / "loss_curves.png")


def test_the_ratio_of_tokens_is_that_of_two_curves(loss_curves):
    table = sys.modules["loss_curves_table"]
    # One curve is the other's, a quarter slower; 80 is a point of the faster, 70 lies between two.
    for at, slower in (20, 1.25), (35, 10 / 7):
        base = [(t, 3 - math.sqrt(t / 100)) for t in range(at // 2, 101, at // 2)]
        line = [(t, 3 - t / 100) for t in range(at, 141, at)]
        late = [(t, 3 - t / slower / 100) for t, _ in line]
        assert table.tokens_ratio(line, late) == pytest.approx(slower)
        assert table.tokens_ratio(late, line) == pytest.approx(1 / slower)
        assert table.tokens_ratio(base, base) == 1
    # A curve that was there before, and rose again, is not there yet.
    noisy = [(10, 3.0), (20, 1.0), (30, 3.0), (40, 2.0)]
    assert table.tokens_at(noisy, 2.5) == 35
    assert math.isnan(table.tokens_ratio(noisy, [(10, 3.0), (40, math.nan)]))


def test_runs_of_other_folders_are_taken(loss_curves, tmp_path, capsys, monkeypatch):
    """As from several processes with a run each; they replace the same runs in the file here."""
    monkeypatch.setattr(loss_curves, "plot", lambda *_: None)
    last = {(0, "bf16"): 2.0, (1, "bf16"): 2.1, (0, "fp8"): 2.2, (1, "fp8"): 2.3}
    last |= {(0, "kept"): 2.04, (1, "kept"): 2.13}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    made_up(loss_curves, whole, last)
    for (seed, name), loss in last.items():
        made_up(loss_curves, parts / f"{seed}-{name}", {(seed, name): loss})
    made_up(loss_curves, parts, {(0, "bf16"): 9.0})
    said = {}
    for folder in whole, parts:
        assert loss_curves.main(["--report", "--out", str(folder)]) == 1  # fp8's gap of 0.2
        said[folder] = capsys.readouterr().out
    assert said[parts] == said[whole]
    assert "kept, held-out: mean gap +0.0350, range of bf16's 2 seeds 0.1000: holds" in said[whole]
    row = "| 0 | 2.0000 | 2.2000 | +0.2000 | 2.0400 | +0.0400 | 2.5000 | 2.7000 | +0.2000 |"
    assert row in said[whole]
    assert len(rows_of(parts)) == len(rows_of(whole)) == 6 * 4


def test_a_text_is_made_of_files_that_differ(tmp_path, monkeypatch, capsys):
    """The trainer cuts it where the files end that are held out."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    corpus = importlib.import_module("corpus")
    lines = lambda *seeds: "".join(
        f"def a_function_of_number_{seed}_{i}(x): return x + {i}\n"
        for seed in seeds
        for i in range(20)
    )
    files, folder, wheels = {}, tmp_path / "more", tmp_path / "wheels"
    for seed in range(200):
        files[f"package{seed % 4}/a{seed:03}.py"] = lines(seed)
    files |= {
        "z/b.py": lines(7),
        "z/c.md": lines(3, 1000, 4),
        "z/d.rst": lines(1, 2000, 2001, 2002),
    }
    files |= {"z/e.cfg": lines(1004), "z/f.py": "x = 1\n", "z/g.py": lines(1005) + "\0"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "some.whl", "w") as wheel:
        wheel.writestr("some/w.py", lines(3000))
        wheel.writestr("some/w.so", lines(3001))
    monkeypatch.setattr(corpus, "download", lambda folder: None)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path / "nothing"))
    # The copy, and the file with two thirds of its lines known, are left out; a quarter may be.
    kept = {f"package{seed % 4}" for seed in range(200)} | {"some", "z"}
    roots = [wheels / "some.whl", folder]
    assert {name for name, _ in corpus.new_texts(roots)} == kept
    assert len([*corpus.new_texts(roots)]) == 202
    monkeypatch.setattr(corpus, "MOST", 20_000)
    argv = ["corpus.py", "--out", str(tmp_path / "out"), "--wheels", str(wheels), str(folder)]
    monkeypatch.setattr(sys, "argv", [*argv, "--bytes", "60e3"])
    corpus.main()
    parts = [lzma.open(tmp_path / "out" / f"{name}.xz").read() for name in ("text", "heldout")]
    text = tmp_path / "text"
    text.write_bytes(b"".join(parts))
    loaded = data.load(str(text), seq_len=16, vocab_size=256)
    assert [loaded.train.tobytes(), loaded.held_out.tobytes()] == parts
    assert 60e3 <= len(parts[0]) < 60e3 + max(map(len, files.values())) + 1
    assert not {*parts[0].splitlines()} & {*parts[1].splitlines()} - {b""}
    sizes = (tmp_path / "out" / "sources.txt").read_text().splitlines()
    assert sum(int(line.split()[0].replace(",", "")) for line in sizes) <= 5 * 21_500
    monkeypatch.setattr(sys, "argv", [*argv, "--bytes", "1e6"])
    with pytest.raises(SystemExit, match="only .* bytes: give more folders"):
        corpus.main()


class Parameters(int):
    """A state that counts steps."""

    params = None

    def __add__(self, other):
        return Parameters(int(self) + other)


def check_picture(path):
    """Two panels, with lines of both versions."""
    pixels = np.round(255 * imread(path)[..., :3])
    height, width, _ = pixels.shape
    assert width > 2 * height
    for colour in ("#c0392b", "#9aa5ae"):
        same = np.all(pixels == np.round(255 * np.array(to_rgb(colour))), axis=-1)
        assert same.sum() > 200, colour
