"""Writes docs/support.md from the context tests' findings: `pytest --support-table PATH`.

A test records an outcome with `record`; its row is the first line of its docstring and its section
the first line of its module's. A run fills the column of its JAX version and keeps the others, so
that one run on each supported version makes the whole table.
"""

import pathlib
import re

import jax
import pytest

_ROWS = pytest.StashKey[dict]()
_NOTES = "Notes"
_HEAD = """\
# Where normfuse runs natively

What serves `rms_norm` in each context of JAX, mostly with a residual, whose op has most operands
and results; the other operations share what makes an operation of kernels (`layers/core/op.py`).
Every row is a test that compares values and gradients with a float64 reference and counts the
kernels in the compiled program. Of a context it tests derivatives of it, and it of derivatives.

- **native**: normfuse's kernels compute each device's share, forward and backward.
- **native + plain**: kernels, and plain HLO for what is plain HLO by definition: tangents, higher
  derivatives, and the parts of `vmap` that belong to each example's own parameters.
- **pallas**: Pallas kernels, interpreted on CPUs.
- **plain HLO**: correct, but computed by XLA alone; `implementation="native"` raises
  `NotImplementedError` here and names the alternative.
- **refused**: raises an error; see the notes below.

`pytest tests/layers --support-table docs/support.md` writes this page, once per JAX version.
"""


def record(
    request: pytest.FixtureRequest, outcome: str, note: str = "", title: str | None = None
) -> None:
    """Records the implementation that served this test's context, which its docstring names."""
    title = title or _title(request.function.__doc__)
    request.node.user_properties.append(("support", (title, outcome, note)))


def pytest_addoption(parser):
    parser.addoption("--support-table", metavar="PATH", help="write the support table there")


def pytest_configure(config):
    if config.getoption("--support-table") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--support-table: each process would write its part; leave out -n")
    config.stash[_ROWS] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when != "call" or not outcome.get_result().passed:
        return
    for name, value in item.user_properties:
        if name == "support":
            title, *served = value
            key = (_title(item.module.__doc__), title)
            item.config.stash[_ROWS].setdefault(key, []).append(served)


def pytest_sessionfinish(session):
    found, path = session.config.stash[_ROWS], session.config.getoption("--support-table")
    if found and path:
        file = pathlib.Path(path)
        before = file.read_text() if file.exists() else ""
        rows = {key: _merged(outcomes) for key, outcomes in found.items()}
        file.write_text(render(rows, f"JAX {jax.__version__}", before))


def _title(doc):
    return doc.strip().splitlines()[0].rstrip(".")


def _merged(found):
    """One cell for the runs of a parametrised test."""
    outcomes = {outcome for outcome, _ in found}
    if outcomes == {"native", "native + plain"}:
        outcomes = {"native + plain"}
    return " or ".join(sorted(outcomes)), next((note for _, note in found if note), "")


def render(rows: dict, version: str, before: str) -> str:
    """The table's text: `rows` in the column of `version`, other columns as they were `before`."""
    old, notes = parse(before)
    for row in old.values():
        row.pop(version, None)
    cells = {key: {**old.pop(key, {}), version: outcome} for key, (outcome, _) in rows.items()}
    cells |= {key: row for key, row in old.items() if row}
    notes |= {key[1]: note for key, (_, note) in rows.items() if note}
    versions = sorted({v for row in cells.values() for v in row}, key=_numbers)
    lines = [_HEAD]
    for section in dict.fromkeys(section for section, _ in cells):
        lines += [f"## {section}", "", f"| context | {' | '.join(versions)} |"]
        lines += ["|---" * (1 + len(versions)) + "|"]
        for (where, title), row in cells.items():
            if where == section:
                lines.append(f"| {title} | {' | '.join(row.get(v, '') for v in versions)} |")
        lines.append("")
    lines += [f"## {_NOTES}", ""]
    lines += [f"- *{title}*: {notes[title]}" for _, title in cells if title in notes]
    return "\n".join(lines) + "\n"


def _numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def parse(text: str) -> tuple[dict, dict]:
    """The cells and notes of a table written before."""
    cells, notes, section, versions = {}, {}, "", []
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| context |"):
            versions = [cell.strip() for cell in line.split("|")[2:-1]]
        elif line.startswith("| ") and versions:
            title, *outcomes = [cell.strip() for cell in line.split("|")[1:-1]]
            cells[section, title] = {v: o for v, o in zip(versions, outcomes) if o}
        elif note := re.match(r"- \*(.+?)\*: (.+)", line):
            notes[note[1]] = note[2]
    return cells, notes
