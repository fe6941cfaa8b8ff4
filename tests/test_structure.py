"""The package stays readable: few files to a kernel, few modules, no circles."""

import ast
import pathlib
import subprocess
import sys

import lines
import mutants
import pytest
import structure

OPENINGS = "of what whether as which where".split()


@pytest.fixture(scope="module")
def journeys():
    script = pathlib.Path(structure.__file__)
    out = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True
    ).stdout
    lines = [line.split(": ", 2) for line in out.splitlines() if " files: " in line]
    return {name: files.split(", ") for name, _, files in lines}


@pytest.mark.parametrize(
    "what, limit",
    [
        ("rms_norm", 11),
        ("rms_norm and gradient", 12),
        ('nnx.Linear(activation="silu") and gradient', 14),
        ('nnx.Linear(quantization="fp8") and gradient', 15),
    ],
)
def test_few_files_from_an_op_to_its_kernel(journeys, what, limit):
    files = journeys[what]
    assert "layers/core/op.py" in files and "native/launch.py" in files
    assert len(files) <= limit, files


def test_few_modules():
    assert 50 < len(structure.MODULES) <= 135


def test_nothing_grows_harder_to_read(monkeypatch):
    assert lines.exceeded() == []
    for name, count in lines.measures().items():
        monkeypatch.setitem(lines.LIMITS, name, count - 1)
    assert [said.partition(":")[0] for said in lines.exceeded()] == [*lines.LIMITS]


def test_branch_points():
    """Two `if`, a loop, a comprehension with a condition, `and`, a handler and a choice are 8."""
    source = """
def f(x, *, y=0):
    if x and y:
        return 1
    try:
        return [i for i in x if i] if y else 0
    except KeyError:
        while x:
            x = 0
"""
    (function,) = ast.parse(source).body
    assert (lines.branches(function), lines.parameters(function)) == (7, 2)


def test_no_import_circles():
    assert structure.circle() == []


def test_docstrings_begin_with_a_subject_or_a_verb():
    """ "Returns whether …" says who does what; "Whether …" and "Of …" do not."""
    assert [place for word, place in structure.docstrings() if word in OPENINGS] == []


@pytest.mark.parametrize("suffixes, least", [(structure.PYTHON, 1300), (structure.NATIVE, 400)])
def test_comments_begin_with_a_subject_or_a_verb(suffixes, least):
    """At most 3 % begin so: "of the result" and "what is kept" say too little."""
    places = list(structure.openings(suffixes))
    found = [p for word, p in places if word in OPENINGS]
    assert len(places) > least and len(found) <= 0.03 * len(places), "\n".join(found)


def test_mutants_apply():
    """Their texts stand where they say, so that what moves a line moves its mutant."""
    stale = []
    for mutant in mutants.MUTANTS:
        path, (file, *names) = mutants.ROOT / mutant.file, mutant.test.partition("[")[0].split("::")
        there = path.exists() and path.read_text().count(mutant.old) == 1
        test = mutants.ROOT / file
        found = test.exists() and all(f"def {name}(" in test.read_text() for name in names)
        if not there or not found or mutant.new == mutant.old:
            stale.append(mutant)
    assert not stale and len(mutants.MUTANTS) >= 120
