"""Benchmarks run as they are told to, at a small size, and their sums are right."""

import argparse
import collections
import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

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
    _, (kernel, spec, structs), *_ = every_kernel.norm_kernels(48, "bfloat16", "float32", True)
    operands = [None if of is None else every_kernel.draw(rng, of, 48) for of in structs]
    assert every_kernel.error_of(kernel, spec, operands) < 2**-7
    right = kernel.definition
    wrong = lambda *given: jax.tree.map(lambda a: 1.02 * a, right(*given))
    monkeypatch.setattr(kernel, "definition", wrong)
    with pytest.raises(
        SystemExit, match=rf"{kernel.name} .*: error [12]\.\d\de-02, at most 1\.\d\de-02"
    ):
        every_kernel.error_of(kernel, spec, operands)


# ---------------------------------------------------------------- how long a GPU is busy


def test_kernels_beside_each_other_count_once_and_long_pauses_are_gaps():
    busy = loaded("device_time").busy
    kernels = [("b", 50e3, 150e3), ("a", 0, 100e3), ("c", 160e3, 200e3), ("d", 260e3, 300e3)]
    assert busy(kernels, steps=1) == {"busy": 0.23, "gaps": 0.06, "profiled": 0.3}
    assert busy([("inside", 20e3, 40e3), *kernels], steps=1)["busy"] == 0.23
    assert busy(kernels, steps=2)["busy"] == 0.115
    assert busy([]) == {}


# ---------------------------------------------------------------- commands side by side


def test_commands_take_turns_on_gpus_and_end_in_time(tmp_path):
    jobs = tmp_path / "jobs.txt"
    lines = [
        "# a comment",
        """9 echo '{"gpu": '$CUDA_VISIBLE_DEVICES'}'; echo words""",
        "1 sleep 60 | cat",
        "90 echo never",
    ]
    jobs.write_text("\n".join(lines))
    command = [sys.executable, REPOSITORY / "benchmarks" / "launch.py", jobs, "--out", tmp_path]
    began = time.monotonic()
    subprocess.run([*command, "--seconds", "20", "--gpus", "7"], check=True)
    assert time.monotonic() - began < 15
    assert (tmp_path / "results.jsonl").read_text() == '{"gpu": 7}\n'
    log = (tmp_path / "log.txt").read_text()
    assert "7: words\n" in log and "exit status -9" in log
    assert "are left: echo never" in log and "7: never" not in log


# ---------------------------------------------------------------- steps of other people's models


VERSIONS_OF_STEPS = ["theirs", "fuse", "fuse, fp8"]


def measure_steps(monkeypatch, capsys, served):
    """Lines of the steps of a model with what `fuse` serves, or without, and what failed."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # else importing sets it
    steps = loaded("foreign_steps")

    case = foreign_steps_toy.toy(steps, served)
    sizes = {"layers": 1, "vocabulary": 64, "tokens": 32, "seq": 16, "rounds": 3, "steps": 1}
    sizes |= {"padding": 0.0}
    flags = dict.fromkeys(["kernels", "trace_only", "at_once", "profile", "turn"], False)
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


# ---------------------------------------------------------------- public models of other people


def test_packed_texts_begin_at_place_0_and_are_counted_from_1():
    (tokens, texts, places), labels = loaded("foreign_zoo").packed(3, 64, 100)
    assert tokens.shape == texts.shape == places.shape == labels.shape == (3, 64)
    assert texts[:, 0].tolist() == [1, 1, 1] and int(texts.max()) > 1
    for row, place in zip(np.asarray(texts), np.asarray(places)):
        assert set(np.diff(row)) <= {0, 1}
        for text in set(row):
            assert place[row == text].tolist() == list(range((row == text).sum()))


def test_a_step_within_a_trainer_is_the_one_that_is_written(tmp_path, monkeypatch):
    (tmp_path / "a_trainer.py").write_text(
        "def main():\n    @nothing\n    def step(x):\n        return grad(lambda y: y * y)(x) + k\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    step = loaded("foreign_zoo").nested("a_trainer", "step", {"grad": jax.grad, "k": 1.0})
    assert step(3.0) == 7.0


def test_a_public_model_is_served_and_computes_the_same():
    folder = os.environ.get("NORMFUSE_FOREIGN_MODELS", "")
    if not pathlib.Path(folder, "dantinox").is_dir():
        pytest.skip("needs the models that .ci/test installs")
    zoo = loaded("foreign_zoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            given = zoo.dantinox(vocab_size=2048)
        except SyntaxError:
            pytest.skip("it is written in a newer Python")
    graph, *params = nnx.split(given.model, nnx.Param, ...)
    tokens = jax.random.randint(jax.random.key(0), (2, 17), 0, 2048)

    def loss(own, others, tokens):
        logits = given.forward(nnx.merge(graph, own, others), tokens[:, :-1])
        return zoo.cross_entropy(logits, tokens[:, 1:])

    compared = normfuse.compare(loss, *params, tokens)
    found = collections.Counter(row.domain for row in compared.report.fused)
    served = {"attention": 2, "norm": 5, "mlp": 2, "loss": 1, "indexing": 4}
    assert dict(found) == served, str(compared.report)
    # Ours sum in another order.
    assert all(each.ours <= 2 * each.theirs + 1e-6 for each in compared.rows), str(compared)
