"""Every page's code, pasted from top to bottom into a new process that has what the page names.

That is JAX, normfuse and the extras named on the page: other packages cannot be imported there.
"""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Names of packages in Python, where these are others than those that pip installs.
_NAMES = {"cuda-bindings": "cuda.bindings", "orbax-checkpoint": "orbax", "pyyaml": "yaml"}
_NAMES |= {"nvidia-cuda-nvrtc": "nvidia.cu13"}
# What a reader has where a page's code is about something of theirs.
_LOSS = """
import jax, jax.numpy as jnp
def loss(x, kernel):
    return jnp.mean(jax.nn.logsumexp(x @ kernel, -1))
"""
_README = f"""{_LOSS}
from flax import nnx
x = residual = jnp.ones((2, 4))
scale, bias = jnp.ones(4), jnp.ones(8)
kernel = gate = up = jnp.ones((4, 8))
params, microbatches = {{"kernel": kernel}}, jnp.ones((2, 3, 4))
loss_fn = lambda params, batch: jnp.mean((batch @ params["kernel"]) ** 2)
config, rngs = None, nnx.Rngs(0)
YourTransformer = lambda config, rngs: nnx.RMSNorm(4, rngs=rngs)
"""
_GIVEN = {"README.md": _README, "docs/index.md": _LOSS}


def packages(extra: str) -> set[str]:
    """Names, in Python, of the packages that an extra of normfuse installs."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    found = set()
    for requirement in extras[extra]:
        name, _, others = re.match(r"([\w-]+)(\[([\w,]+)\])?", requirement).groups()
        if name == "normfuse":
            found |= {package for other in others.split(",") for package in packages(other)}
        else:
            found.add(_NAMES.get(name, name.replace("-", "_")))
    return found


def pasted(page: pathlib.Path) -> str:
    """The code of a page, with as many lines before each block as stand before it there."""
    text = page.read_text()
    if page.suffix == ".py":
        return text
    blocks = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [""] * text.count("\n")
    for block in blocks:
        start = text[: block.start(1)].count("\n")
        code = block[1].splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "```python\n" in page.read_text()]
SCRIPTS = sorted((ROOT / "docs" / "guides").glob("*.py"))


def hidden(page: pathlib.Path) -> list[str]:
    """Packages of the extras that a page does not name."""
    text = page.read_text()
    named = re.findall(r"(?:'\.|normfuse)\[([a-z0-9,]+)\]|extras? `([a-z0-9]+)`", text)
    extras = {extra for found in named for names in found for extra in names.split(",") if extra}
    have = set().union(*(packages(extra) for extra in extras))
    have |= set(re.findall(r"pip install (\w+)", text))
    every = set().union(*(packages(extra) for extra in ("test", "cuda13")))
    return sorted(every - have - {"jax", "pytest"})


def test_what_a_page_does_not_name_is_hidden(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Needs `pip install '.[flax]'`.\n")
    assert {"equinox", "optax", "yaml", "cuda.bindings"} <= set(hidden(page))
    page.write_text("Needs the extra `train`, and `pip install flatbuffers`.\n")
    assert not {"flax", "equinox", "optax", "yaml", "flatbuffers"} & set(hidden(page))


@pytest.mark.newest
@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_runs_as_pasted(page, tmp_path):
    given = _GIVEN.get(str(page.relative_to(ROOT)), "")
    names = hidden(page)
    if given:  # of the reader's own
        names = [name for name in names if name not in given]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({names!r}))
names = {{"__name__": "__main__"}}
exec({given!r}, names)
exec(compile({pasted(page)!r}, {str(page)!r}, "exec"), names)
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"NORMFUSE_CACHE_DIR": str(tmp_path / "kernels"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
