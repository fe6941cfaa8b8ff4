"""The guides run as they stand: each is a script whose statements are assertions."""

import pathlib
import re
import runpy
import shlex

import pytest

from normfuse.train.cli import parse

GUIDES = pathlib.Path(__file__).parents[2] / "docs" / "guides"


@pytest.mark.parametrize("guide", sorted(GUIDES.glob("*.py")), ids=lambda path: path.stem)
def test_guide_runs(guide, eight_devices, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if guide.stem == "add_kernel":
        pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    runpy.run_path(str(guide), run_name="__main__")


def test_every_train_command_in_the_documents_is_understood():
    documents = [*GUIDES.parent.glob("*.md"), GUIDES.parents[1] / "README.md"]
    lines = [line for path in documents for line in path.read_text().splitlines()]
    found = [command for line in lines for command in re.findall(r"normfuse train (--.*)", line)]
    assert len(found) >= 3
    for command in found:
        words = shlex.split(command.split("`")[0], comments=True)
        parse(["train", *(word for word in words if word != "…")])


def test_there_is_a_guide_for_every_reader():
    names = {path.stem for path in GUIDES.glob("*.py")}
    wanted = {"swap_nnx", "swap_equinox", "train_sharded", "elementwise_op", "add_kernel"}
    assert wanted <= names
