"""The guides run as they stand: each is a script whose statements are assertions."""

import pathlib
import runpy

import pytest

GUIDES = pathlib.Path(__file__).parents[2] / "docs" / "guides"
NEWEST = {"elementwise_op", "fp8"}  # whose parts have tests that both stacks run


@pytest.mark.every_case
@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.newest] * (path.stem in NEWEST))
        for path in sorted(GUIDES.glob("*.py"))
    ],
)
def test_guide_runs(guide, eight_devices, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if guide.stem == "add_kernel":
        pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    runpy.run_path(str(guide), run_name="__main__")


def test_there_is_a_guide_for_every_reader():
    names = {path.stem for path in GUIDES.glob("*.py")}
    wanted = {
        "train_sharded",
        "elementwise_op",
        "add_kernel",
        "fp8",
    }
    assert wanted <= names
