"""Benchmarks run as they are told to, at a small size, and their sums are right."""

import argparse
import collections
import csv
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import equinox as eqx
import foreign_steps_toy
import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import normfuse
from normfuse.layers import info

REPOSITORY = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "benchmarks" / "scaling.py").is_file(),
    reason="benchmarks are not beside these tests",
)

PARTS = ["stack-tensor", "1b-fsdp"]
VERSIONS = ["jnp", "normfuse", "normfuse, gathered once"]
TOKENS = {"stack": 4 * 32, "1b": 8 * 128}  # a device's at the tiny size: sequences × length


ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",  # see conftest
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiled quickly: how fast it runs is no matter
}


def run_scaling(*arguments) -> subprocess.CompletedProcess:
    """Runs the command as a user would, on four emulated devices."""
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | ENVIRONMENT | devices,
        capture_output=True,
        text=True,
        timeout=300,
    )


def scaling(*arguments) -> None:
    done = run_scaling(*arguments)
    print(done.stdout)  # says what could not be measured
    assert done.returncode == 0, done.stderr[-4000:]


def test_scaling_is_measured_as_asked_and_drawn(tmp_path):
    # All in one test: workers that share a run would each measure for themselves.
    few = ["--steps", 1, "--groups", 2, "--warmup", 1, "--no-trace", "--size", "tiny"]
    scaling("--part", *PARTS, "--versions", *VERSIONS, "--gpus", 1, 2, *few, "--out", tmp_path)
    table = tmp_path / "scaling.csv"
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    # One device communicates nothing: each library is measured there once, for all meshes.
    wanted = [(part, "1", v) for part in PARTS for v in ("jnp", "normfuse")]
    wanted += [(part, "2", version) for part, version in itertools.product(PARTS, VERSIONS)]
    assert sorted((row["part"], row["gpus"], row["version"]) for row in rows) == sorted(wanted)
    same = {(row["scaling"], row["options"], row["device"]) for row in rows}
    assert same == {("weak", "default", "cpu")}
    for row in rows:  # each device has as many tokens as one alone
        assert int(row["tokens"]) == int(row["gpus"]) * TOKENS[row["part"].split("-")[0]], row
    check_rates(rows)
    apart = dict(zip(VERSIONS, (0.7, 0.8, 0.9)))  # lines of equal rates would cover one another
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row | {"efficiency": apart[row["version"]]} for row in rows)
    scaling("--plot", table, "--out", tmp_path / "drawn")
    check_picture(tmp_path / "drawn" / "scaling.png")


@pytest.mark.newest
@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("gpus", 16, "must be from 1 to 4, the devices there are"),
        ("steps", 0, "must be at least 1"),
    ],
)
def test_scaling_refuses_what_it_cannot_measure(tmp_path, flag, value, rule):
    done = run_scaling(f"--{flag}", value, "--size", "tiny", "--out", tmp_path / "out")
    assert done.returncode == 2 and f"--{flag} {value} {rule}" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.newest
def test_losses_are_those_of_one_device(tmp_path):
    few = ["--versions", "normfuse", "--gpus", 1, 2, "--size", "tiny"]
    scaling("--part", "losses", *few, "--batch", 4, "--length", 64, "--out", tmp_path)
    with open(tmp_path / "scaling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["part"] for row in rows] == ["losses, fsdp", "losses, fsdp", "losses, tensor"]
    assert {row["tokens"] for row in rows} == {str(4 * 64)}
    found = [[*map(float, row["losses"].split())] for row in rows]
    assert found[0][-1] < found[0][0]
    # Parts of float32 sums of up to 512 terms; the losses are about 6.
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=512**0.5 * 2**-24)


def check_rates(rows):
    """A rate is tokens over time; efficiency a device's rate over that of one alone.

    Columns are rounded: a rate is half a token off at most, a time 0.0005 ms, and an efficiency
    0.00005; products' and quotients' own rounding is far below.
    """
    rate = lambda row: float(row["tokens_per_s"])
    name = lambda row: (row["part"].split("-")[0], row["version"].split(",")[0])
    alone = {name(row): rate(row) for row in rows if row["gpus"] == "1"}
    for row in rows:
        ms, base = float(row["ms"]), alone[name(row)]
        assert ms > 0
        off = 0.5 * ms / 1e3 + 0.0005 * (rate(row) + 0.5) / 1e3
        assert abs(rate(row) * ms / 1e3 - int(row["tokens"])) <= off * 1.001, row
        efficiency = rate(row) / (int(row["gpus"]) * base)
        off = 0.00005 + efficiency * (0.5 / rate(row) + 0.5 / (base - 0.5))
        assert abs(efficiency - float(row["efficiency"])) <= off * 1.001, row


def check_picture(path):
    """A panel for each part, with a line for each version."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 20_000
    pixels = np.round(255 * imread(path)[..., :3])
    height, width, _ = pixels.shape
    assert width > 1.6 * height
    for colour in ("0.5", "C1", "C2"):  # jnp's, ours in the order of VERSIONS
        same = np.all(pixels == np.round(255 * np.array(to_rgb(colour))), axis=-1)
        assert same.sum() > 500, colour


# ---------------------------------------------------------------- traces


def loaded(name):
    """A benchmark as a module."""
    path = REPOSITORY / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def overlap():
    return loaded("overlap")


def test_intervals_of_whole_numbers_are_those_counted_one_by_one(overlap, rng):
    for _ in range(50):
        starts, lengths = rng.integers(0, 40, (2, 8)), rng.integers(1, 8, (2, 8))
        given = [list(zip(s.tolist(), (s + n).tolist())) for s, n in zip(starts, lengths)]
        counted = [{t for a, b in some for t in range(a, b)} for some in given]
        first, second = map(overlap.union, given)
        assert {t for a, b in first for t in range(a, b)} == counted[0]
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(first))
        assert overlap.common(first, second) == len(counted[0] & counted[1])


# Communication in 0 to 10 and 22 to 30, products in 2 to 8, others in 7 to 9 and 20 to 25, and
# nothing in 10 to 20; streams overlap, and the list is in no order.
EVENTS = [
    ("loop_add_fusion", 20.0, 25.0),
    ("ncclDevKernel_AllGather_RING_LL", 0.0, 10.0),
    ("nvjet_tst_128x256_64x4", 4.0, 8.0),
    ("cutlass_gemm", 2.0, 6.0),
    ("flash_fwd", 7.0, 9.0),
    ("ncclDevKernel_ReduceScatter_Sum_bf16", 22.0, 30.0),
]
TIMES = {
    "communication": 18.0,
    "gemms": 6.0,
    "others": 7.0,
    "idle": 10.0,
    "behind_gemms": 6.0,
    "behind_any": 10.0,
}


def test_times_of_a_trace_whose_answer_is_known(overlap):
    assert overlap.times_of(EVENTS) == TIMES
    silent = overlap.times_of([event for event in EVENTS if "nccl" not in event[0]])
    # Then from 2 to 25, with nothing in 9 to 20.
    assert silent == TIMES | {"communication": 0, "idle": 11, "behind_gemms": 0, "behind_any": 0}


# ---------------------------------------------------------------- every kernel, compared


@pytest.fixture(scope="module")
def every_kernel():
    return loaded("every_kernel")


def test_every_kernel_of_the_cpu_is_right(every_kernel, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["every_kernel.py", "--features", "48"])
    every_kernel.main()
    counts = re.findall(r"(\w+) (\d+)[,;]", capsys.readouterr().out)
    run = {name for name, count in counts if int(count) > 0}
    examples = [example for by_name in info.kernels().values() for example in by_name.values()]
    assert run >= {kernel.name for kernel, *_ in examples if "cpu" in kernel.bodies}


def test_a_kernel_that_is_wrong_is_said(every_kernel, monkeypatch, rng):
    kernel, spec, structs = next(every_kernel.layer_norms([48]))
    operands = [every_kernel.draw(rng, of, 48) for of in structs]
    assert every_kernel.error_of(kernel, spec, operands) < 2**-7
    right = kernel.definition
    wrong = lambda *given: [1.02 * a for a in right(*given)]
    monkeypatch.setattr(kernel, "definition", wrong)
    with pytest.raises(
        SystemExit, match=rf"{kernel.name} .*: error 2\.\d\de-02, at most 1\.\d\de-02"
    ):
        every_kernel.error_of(kernel, spec, operands)


# ---------------------------------------------------------------- before and after a change


def on_one_device(script, *arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env=os.environ | ENVIRONMENT | {"XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def before_after(*arguments) -> subprocess.CompletedProcess:
    return on_one_device(REPOSITORY / "benchmarks" / "before_after.py", *arguments)


NORMS = itertools.product(["rms_norm", "residual_rms_norm", "layer_norm"], ["forward", "backward"])
CASES = [
    *(f"{op} 8 x 128 {way}" for op, way in NORMS),
    "norm + dense, 8 tokens",
    "norm + gelu MLP, 8 tokens",
    "norm + SwiGLU MLP, 8 tokens",
    "norm + SwiGLU MLP, hidden kept, 8 tokens",
    "1b step",
]


def test_before_and_after_are_measured_and_compared():
    copy = pathlib.Path(normfuse.__file__).parents[1]
    both = "--before", copy, "--after", copy
    done = before_after(*both, "--size", "tiny", "--rounds", 1, "--limit", 1e6)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["case", "before", "after", "ratio"]
    rows = [re.fullmatch(r"(.+?) +([\d.]+) us +([\d.]+) us +([\d.]+)", line) for line in lines]
    assert [row[1] for row in rows] == CASES
    assert all(float(number) > 0 for row in rows for number in row.groups()[1:])
    assert "before, round 1" in done.stderr and "after, round 1" in done.stderr


def test_medians_more_than_the_limit_apart_are_slower():
    compare = loaded("before_after").compare
    before = {
        "same": [100, 90, 500],
        "faster": [8.0],
        "at the limit": [50.0],
        "slower": [1000, 1000],
    }
    after = {"same": [100, 1, 900], "faster": [4.0], "at the limit": [51.0], "slower": [1021, 1023]}
    table, slower = compare(before, after, 0.02)
    assert slower == ["slower"]
    lines = table.splitlines()[1:]
    assert [line.split()[-1] for line in lines] == ["1.000", "0.500", "1.020", "slower"]
    assert lines[3].split()[1:] == ["1000.0", "us", "1022.0", "us", "1.022", "slower"]


# ---------------------------------------------------------------- steps of other people's models


VERSIONS_OF_STEPS = ["theirs", "fuse", "fuse, fp8"]


def measure_steps(monkeypatch, capsys, served):
    """Lines of the steps of a model with what `fuse` serves, or without, and what failed."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # else importing sets it
    steps = loaded("foreign_steps")

    case = foreign_steps_toy.toy(steps, served)
    sizes = {"layers": 1, "vocabulary": 64, "tokens": 32, "seq": 16, "rounds": 3, "steps": 1}
    sizes["gpus"] = 1
    flags = dict.fromkeys(["kernels", "compile_only", "trace_only", "at_once", "profile"], False)
    options = argparse.Namespace(**sizes, **flags, versions=VERSIONS_OF_STEPS)
    failed = steps.measure("toy", case, options)
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    return {line["version"]: line for line in lines}, failed


def test_steps_before_and_after_fuse_differ_by_what_they_are_named_for(monkeypatch, capsys):
    lines, failed = measure_steps(monkeypatch, capsys, served=True)
    assert failed == []
    assert [*lines] == VERSIONS_OF_STEPS
    assert lines["theirs"]["kernels"] == {} and lines["theirs"]["ratio"] == 1
    assert [line["fp8"] > 0 for line in lines.values()] == [False, False, True]
    for line in lines.values():
        assert (line["parameters"], line["tokens"]) == (2 * 64 * 32 + 32 * 33, 32)
        assert line["gib"] > 0
        assert statistics.median(line["all_ms"]) == line["ms"]
        # bfloat16 rounds logits by 2^-9 of their size, FP8 by 2^-4; they are about 1 at most.
        assert abs(line["loss_first"]) < 2**-8
        assert len(line["losses"]) == 10 and line["losses"][-1] < line["losses"][0]
    assert lines["theirs"]["replaced"] == {}
    counted = lambda version, word: sum(
        n for what, n in lines[version]["replaced"].items() if word in what
    )
    assert [counted(version, "rms_norm") for version in VERSIONS_OF_STEPS] == [0, 1, 1]
    assert [counted(version, "fp8") for version in VERSIONS_OF_STEPS] == [0, 0, 1]
    for version in VERSIONS_OF_STEPS[1:]:
        assert "norm_forward" in lines[version]["kernels"], version
    assert lines["fuse, fp8"]["losses"] != lines["theirs"]["losses"]


def test_steps_without_what_they_are_named_for_are_not_measured(monkeypatch, capsys):
    lines, failed = measure_steps(monkeypatch, capsys, served=False)
    assert [*lines] == ["theirs"]
    without = "not measured: nothing was replaced"
    assert failed == [f"toy, {version}: {without}" for version in VERSIONS_OF_STEPS[1:]]


# ---------------------------------------------------------------- rows of layers in FP8

ROWS = {  # each with the versions of ours
    "linears": ["bf16, normfuse", "FP8, normfuse"],
    "blocks": ["bf16, normfuse", "FP8, normfuse"],
    "dense": ["bf16, normfuse", "FP8, normfuse"],
}
RIVALS = ["bf16, jnp", "FP8, XLA's best", "FP8, Flax's fp8_ops"]


def test_rows_of_layers_take_turns_with_other_fp8(tmp_path):
    flags = "--part layers --size tiny --turns 3 --threads 2 --seconds 280 --rows".split()
    script, out = REPOSITORY / "benchmarks" / "quantization.py", tmp_path / "lines"
    done = on_one_device(script, *flags, *ROWS, "--json", out)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")] == lines
    head, *lines = lines
    assert head["device"] == "cpu" and head["compiling"] == []
    assert [(line["row"], line["version"]) for line in lines] == [
        (row, version) for row, ours in ROWS.items() for version in [*ours, *RIVALS]
    ]
    base = {line["row"]: line for line in lines if line["version"] == "bf16, normfuse"}
    table = [x for x in done.stdout.splitlines() if not x.startswith("{")]
    for line, text in zip(lines, table, strict=True):
        version = line["version"]
        assert text.startswith(line["row"]) and version in text and f"{line['ms']:.3f} ms" in text
        assert (line["fp8"] > 0) == version.startswith("FP8")
        assert bool(line["kernels"]) == ("normfuse" in version)
        assert ("quantize_cast" in line["kernels"]) == version.startswith("FP8, normfuse")
        assert (0 < line["error"] < 0.2) if line["fp8"] else (line["error"] < 0.03)
        assert len(line["turns"]) == 3 and line["ms"] == statistics.median(line["turns"]) > 0
        # Both times and the ratio are rounded by half a thousandth.
        times = base[line["row"]]["ms"], line["ms"]
        off = 0.0005 * (1 + (1 + line["ratio"]) / (line["ms"] - 0.0005))
        assert abs(times[0] / times[1] - line["ratio"]) <= off


@pytest.fixture
def fp8_rows(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # else importing sets it
    return loaded("fp8_rows")


def not_measured(fp8_rows, capsys, row, seconds=60.0) -> dict[str, str]:
    """Why which of our versions of a row are not measured."""
    row.versions = [version for version in row.versions if version.ours]
    if seconds:
        assert fp8_rows.compile_all([row], 1, time.perf_counter() + seconds) == []
    fp8_rows.measure_row(row, 1, time.perf_counter() + seconds, wants=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["version"] for line in lines] == [version.name for version in row.versions]
    return {line["version"]: line["not_measured"] for line in lines if "not_measured" in line}


@pytest.mark.parametrize(
    ("value", "problem"),
    [(0.0, "its results are 1 from bfloat16's"), (math.nan, "are nan from"), (1.0, "")],
)
def test_versions_whose_gradients_are_zero_are_not_measured(fp8_rows, capsys, value, problem):
    (row,) = fp8_rows.rows(["dense"], tiny=True)
    (plain,) = (version for version in row.versions if version.name == "bf16, jnp")

    def run(operands, extra):
        y, (dx, dscale, dkernel) = plain.run(operands, extra)
        return y, (dx, dscale, dkernel * value)

    row.versions = [fp8_rows.Version("other", run), plain]
    assert fp8_rows.compile_all([row], 1, time.perf_counter() + 60) == []
    fp8_rows.measure_row(row, 1, time.perf_counter() + 60, wants=True)
    other, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert problem in other.get("not_measured", "") and ("ms" in other) == (not problem)


CUBLAS = 'custom_call_target="__cublas$lt$matmul$f8"\n'
QUANTIZER = 'custom_call_target="normfuse_launch" kernel = "quantize_cast"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (2 * CUBLAS + QUANTIZER, ""),
        (CUBLAS + QUANTIZER, "its program has 1 products of FP8 codes and 0 others"),
        (
            2 * CUBLAS + QUANTIZER + 'custom_call_target="__cublas$gemm"',
            "2 products of FP8 codes and 1",
        ),
        (2 * CUBLAS, "its program calls no kernel of ours"),
        (2 * CUBLAS + QUANTIZER.replace("quantize_cast", "rms_norm"), "calls no quantizer of ours"),
        (QUANTIZER, "has no products of FP8 codes"),
    ],
)
def test_every_product_of_ours_must_be_fp8(fp8_rows, text, problem):
    version = fp8_rows.Version("FP8, normfuse", print, products=2, ours=True)
    version.read(text, exact=True)
    assert problem in version.problem and bool(problem) == bool(version.problem)


# ---------------------------------------------------------------- errors of FP8


def test_errors_of_fp8_are_printed_beside_those_of_bfloat16(monkeypatch, capsys):
    sizes = ["--tokens", "32", "--features", "16", "--hidden", "32"]
    monkeypatch.setattr(sys, "argv", ["fp8_errors.py", *sizes])
    loaded("fp8_errors").main()
    rows = re.findall(r"\| (y|d\w+) \| ([\d.e-]+) \| ([\d.e-]+) \|", capsys.readouterr().out)
    numbers = [(float(plain), float(fp8)) for _, plain, fp8 in rows]
    assert len(rows) == 31 and all(plain < fp8 < 0.15 for plain, fp8 in numbers if plain != fp8)
    assert sum(plain == fp8 for plain, fp8 in numbers) == 2  # both losses


# ---------------------------------------------------------------- public models of other people


@pytest.mark.parametrize(
    "make, served",
    [
        ("eqx_zoo", {"attention": 2, "norm": 5, "mlp": 2, "loss": 1}),
        ("dantinox", {"attention": 2, "norm": 5, "mlp": 2, "loss": 1, "indexing": 4}),
    ],
)
def test_a_public_model_is_served_and_computes_the_same(make, served):
    folder = os.environ.get("NORMFUSE_FOREIGN_MODELS", "")
    if not pathlib.Path(folder, "eqx_zoo").is_dir():
        pytest.skip("needs the models that .ci/test installs")
    zoo = loaded("foreign_zoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            given = {
                "eqx_zoo": lambda: zoo.eqx_zoo("LlamaForCausalLM", vocab_size=2048),
                "dantinox": lambda: zoo.dantinox(vocab_size=2048),
            }[make]()
        except SyntaxError:
            pytest.skip("it is written in a newer Python")
    if make == "dantinox":
        graph, *params = nnx.split(given.model, nnx.Param, ...)
        merge = lambda own, others: nnx.merge(graph, own, others)
    else:
        params, merge = eqx.partition(given.model, eqx.is_array), eqx.combine
    tokens = jax.random.randint(jax.random.key(0), (2, 17), 0, 2048)

    def loss(own, others, tokens):
        return zoo.cross_entropy(given.forward(merge(own, others), tokens[:, :-1]), tokens[:, 1:])

    compared = normfuse.compare(loss, *params, tokens)
    found = collections.Counter(row.domain for row in compared.report.fused)
    assert dict(found) == served, str(compared.report)
    # Ours sum in another order.
    assert all(each.ours <= 2 * each.theirs + 1e-6 for each in compared.rows), str(compared)
