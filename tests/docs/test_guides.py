"""The guides run as they stand: each is a script whose statements are assertions."""

import ast
import json
import pathlib
import runpy
import sys

import pytest
from pages import hidden

GUIDES = pathlib.Path(__file__).parents[2] / "docs" / "guides"
SCRIPTS = runpy.run_path(str(GUIDES.parent / "scripts.py"))


PATHS = [path for path in sorted(GUIDES.glob("*.py")) if path.stem not in SCRIPTS["NOTEBOOKS"]]


@pytest.mark.parametrize("guide", PATHS, ids=lambda path: path.stem)
def test_guide_runs(guide, eight_devices, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if guide.stem == "add_kernel":
        pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    for name in hidden(guide):  # packages of extras that it does not name
        monkeypatch.setitem(sys.modules, name, None)
    runpy.run_path(str(guide), run_name="__main__")


@pytest.mark.parametrize("name", SCRIPTS["NOTEBOOKS"])
def test_a_notebook_is_its_script_and_runs_cell_by_cell(name, eight_devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (GUIDES / f"{name}.ipynb").read_text()
    script = (GUIDES / f"{name}.py").read_text()
    assert text == SCRIPTS["notebook"](script), "python docs/scripts.py writes it"
    cells = ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    whole = ast.parse(script)
    assert ast.unparse(ast.parse("\n".join(cells))) == ast.unparse(whole.body[1:])
    names = {"__name__": "__main__"}
    for i, cell in enumerate(cells):
        exec(compile(cell, f"{name}.ipynb, cell {i}", "exec"), names)
