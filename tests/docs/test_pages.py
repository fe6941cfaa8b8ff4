"""Every page's code, pasted from top to bottom into a new process that has what the page names.

That is JAX, normfuse and the extras named on the page: other packages cannot be imported there. Of
guides that are scripts test_guides.py tests the same.
"""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest
from pages import hidden

ROOT = pathlib.Path(__file__).parents[2]
# A reader has these where a page's code is about something of theirs.
_LOSS = """
import jax, jax.numpy as jnp
def loss(x, kernel):
    return jnp.mean(jax.nn.logsumexp(x @ kernel, -1))
"""
_GIVEN = {"docs/index.md": _LOSS}
# Pages that show what their code prints, and how often.
_SHOWN = {"README.md": 1, "fuse.md": 3, "examples.md": 4, "keras.md": 1}


def fenced(page: pathlib.Path) -> list[tuple[str, str]]:
    """Languages and contents of a page's blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "```python\n" in page.read_text()]


def test_what_a_page_does_not_name_is_hidden(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Needs `pip install '.[flax]'`.\n")
    assert {"equinox", "grain", "cuda.bindings"} <= set(hidden(page))
    page.write_text("Needs the extra `train`, and `pip install flatbuffers`.\n")
    assert hidden(page) == ["cuda.bindings"]
    page.write_text("The extras `flax` and `equinox`.\n")
    assert not {"flax", "equinox", "optax"} & set(hidden(page))  # flax needs optax


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_runs_as_pasted(page, tmp_path):
    """Each block is a file; tables are printed as shown, but for the numbers of errors."""
    if "import keras\n" in page.read_text():
        try:
            importlib.metadata.version("keras")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("needs keras, which the extra test brings")
    given = _GIVEN.get(str(page.relative_to(ROOT)), "")
    names = hidden(page)
    blocks = [block for language, block in fenced(page) if language == "python"]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({names!r}))
names = {{"__name__": "__main__"}}
exec({given!r}, names)
for block in {blocks!r}:
    exec(compile(block, "train.py", "exec"), names)
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"NORMFUSE_CACHE_DIR": str(tmp_path / "kernels"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    without_errors = lambda table: re.sub(r"\d\.\de[+-]\d\d", "#", table)
    shown = [block for language, block in fenced(page) if not language]
    assert len(shown) == _SHOWN.get(page.name, 0)
    for table in shown:
        assert without_errors(table) in without_errors(done.stdout), done.stdout
