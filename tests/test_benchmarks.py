"""Benchmarks run as they are told to, at a small size, and their sums are right."""

import argparse
import collections
import importlib.util
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

import normfuse
from normfuse.layers import info

REPOSITORY = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "benchmarks" / "step.py").is_file(),
    reason="benchmarks are not beside these tests",
)

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",  # see conftest
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiled quickly: how fast it runs is no matter
}


def loaded(name):
    """A benchmark as a module."""
    path = REPOSITORY / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- every kernel, compared


@pytest.fixture(scope="module")
def every_kernel():
    return loaded("every_kernel")


def test_every_kernel_of_the_cpu_is_right(every_kernel, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["every_kernel.py", "--features", "48"])
    every_kernel.main()
    counts = re.findall(r"(\w+) (\d+)[,;]", capsys.readouterr().out)
    run = {name for name, count in counts if int(count) > 0}
    every = [kernel for those in info.kernels().values() for kernel in those]
    assert run >= {kernel.name for kernel in every if "cpu" in kernel.bodies}


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


def on_one_device(script, *arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env=os.environ | ENVIRONMENT | {"XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


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
    flags = dict.fromkeys(["kernels", "trace_only", "at_once", "profile"], False)
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
    "dense": ["bf16, normfuse", "FP8, normfuse"],
}
RIVALS = ["bf16, jnp", "FP8, XLA's best", "FP8, Flax's fp8_ops"]


def test_rows_of_layers_take_turns_with_other_fp8(tmp_path):
    flags = "--size tiny --turns 3 --threads 2 --seconds 280 --rows".split()
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
def layers(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # else importing sets it
    return loaded("quantization")


@pytest.mark.parametrize(
    ("value", "problem"),
    [(0.0, "its results are 1 from bfloat16's"), (math.nan, "are nan from"), (1.0, "")],
)
def test_versions_whose_gradients_are_zero_are_not_measured(layers, capsys, value, problem):
    (row,) = layers.rows(["dense"], tiny=True)
    (plain,) = (version for version in row.versions if version.name == "bf16, jnp")

    def run(operands, extra):
        y, (dx, dscale, dkernel) = plain.run(operands, extra)
        return y, (dx, dscale, dkernel * value)

    row.versions = [layers.Version("other", run), plain]
    assert layers.compile_all([row], 1, time.perf_counter() + 60) == []
    layers.measure_row(row, 1, time.perf_counter() + 60)
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
def test_every_product_of_ours_must_be_fp8(layers, text, problem):
    version = layers.Version("FP8, normfuse", print, products=2, ours=True)
    version.read(text, exact=True)
    assert problem in version.problem and bool(problem) == bool(version.problem)


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


# ---------------------------------------------------------------- loss curves


def metrics(folder, seed, name, loss, val_loss, steps=60):
    """Writes the metrics of a run that ends in these losses."""
    path = folder / f"{seed}-{name}" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    lines = [
        {"step": step, "loss": loss if step > steps - 3 else 5.0, "step_time_s": 0.02}
        for step in range(1, steps + 1)
    ]
    lines.append({"step": steps, "val_loss": val_loss})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


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
def test_a_gap_larger_than_the_range_of_seeds_fails(tmp_path, capsys, monkeypatch, gaps, holds):
    curves, out = loaded("loss_curves"), tmp_path / "out"
    monkeypatch.setattr(curves, "steps_of", lambda *_: 60)
    monkeypatch.setattr(curves, "train", None)  # nothing is left to train
    for seed, (plain, gap) in enumerate(zip((2.0, 2.1, 2.3), gaps)):
        metrics(out, seed, "bf16", plain, plain + 0.5)
        metrics(out, seed, "fp8", plain + gap, plain + gap + 0.5)
    assert curves.main(["--out", str(out)]) == (0 if holds else 1)
    said = capsys.readouterr().out
    assert said.count(": holds") == 2 * holds and said.count("DOES NOT HOLD") == 2 * (not holds)
    row = f"| 1 | 2.1000 | {2.1 + gaps[1]:.4f} | {gaps[1]:+.4f} | 2.6000 | {2.6 + gaps[1]:.4f} |"
    assert row in said


def test_loss_curves_are_trained_and_told_apart(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 8000).astype(np.uint8).tobytes())
    sizes = "--batch-size 4 --seq-len 16 --model.num-layers 1 --model.dim 32 --model.mlp-dim 64"
    heads = "--model.num-heads 2 --model.num-kv-heads 2 --model.head-dim 16 --optim.lr 0.01"
    flags = f"--preset tiny --tokens 4000 --seeds 1 {sizes} {heads} --data.path {text}".split()
    script = REPOSITORY / "benchmarks" / "loss_curves.py"
    done = on_one_device(script, *flags, "--runs", "0:fp8", "--out", tmp_path / "out")
    assert "1 runs are not complete" in done.stdout and not done.returncode, done.stderr
    first = (tmp_path / "out" / "0-fp8" / "metrics.jsonl").read_bytes()
    done = on_one_device(script, *flags, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "0-fp8" / "metrics.jsonl").read_bytes() == first  # it was complete
    (row,) = re.findall(r"\| 0 \| ([\d.]+) \| ([\d.]+) \| [+-]", done.stdout)
    assert row[0] != row[1] and abs(float(row[0]) - float(row[1])) < 0.1
    assert done.returncode == 1 and "range of bf16's 1 seeds 0.0000: DOES NOT HOLD" in done.stdout
