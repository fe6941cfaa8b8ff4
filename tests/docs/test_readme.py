"""The Python in README.md gives what it says; test_pages.py runs every page as it is written."""

import functools
import importlib
import pathlib
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normfuse
import normfuse.layers.nnx as ours_nnx

ROOT = pathlib.Path(__file__).parents[2]


def blocks(name: str) -> list[str]:
    """The Python blocks of a document, each preceded by as many lines as stand before it there."""
    text = (ROOT / name).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * (text[: m.start()].count("\n") + 1) + m[1] for m in found]


def run(name: str, block: str, **names):
    exec(compile(block, str(ROOT / name), "exec"), names)
    return names


def only(text: str, name: str = "README.md") -> str:
    """The block of a document that has `text`."""
    (found,) = (b for b in blocks(name) if text in b)
    return found


def test_the_first_code_is_the_one_line(capsys):
    text = (ROOT / "README.md").read_text()
    assert "```python" in text.splitlines()[:8]
    block = blocks("README.md")[0]
    assert len(block.strip().splitlines()) <= 16
    fused = run("README.md", block)
    capsys.readouterr()
    line = next(line for line in block.splitlines() if line.startswith("loss = normfuse.fuse("))
    plain = run("README.md", block.replace(line, ""))
    norm = lambda a: np.linalg.norm(np.asarray(a, np.float32))
    for name in ("value", "gradients"):
        for a, b in zip(*(jax.tree.leaves(each[name]) for each in (fused, plain)), strict=True):
            # bfloat16 rounds both by 2^-9 at some five places
            assert norm(a.astype(jnp.float32) - b.astype(jnp.float32)) < 2**-6 * norm(b), name


def test_the_line_that_leaves_a_layer_out_of_fp8_does():
    (call,) = re.findall(r"`(fuse\(loss, .*skip=.*?\))`", (ROOT / "README.md").read_text())
    source = "\n" * 55 + "def loss(x, w, v):\n  x = x @ w\n  return (x @ v).sum()"
    names, reports = {}, []
    exec(compile(source, "model.py", "exec"), names)
    fuse = functools.partial(normfuse.fuse, report=reports.append)
    fused = eval(call, {"fuse": fuse, "loss": names["loss"]})
    jax.eval_shape(fused, *[jnp.ones((32, 32))] * 3)
    found = {row.where: row.served or row.reason for row in reports[0].rows}
    assert found == {"model.py:57": "skip names it", "model.py:58": "dense, fp8"}


@pytest.mark.parametrize("framework", ["nnx", "eqx", "linen"])
def test_a_model_is_swapped_as_shown(framework, capsys):
    from foreign_norms import OnePlusScale

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.RMSNorm()(x))

    make = {
        "nnx": lambda: nnx.Sequential(OnePlusScale(8, rngs=nnx.Rngs(0))),
        "eqx": lambda: eqx.nn.RMSNorm(8),
        "linen": Linen,
    }[framework]
    (line,) = (line for line in only("swap(").splitlines() if "swap(theirs" in line)
    theirs, x = make(), jnp.arange(8.0)
    swap = importlib.import_module(f"normfuse.layers.{framework}").swap
    model = run("README.md", line, swap=swap, theirs=theirs)["model"]
    assert isinstance(model, type(theirs))
    if framework == "linen":
        variables = theirs.init(jax.random.key(0), x)
        got, want = model.apply(variables, x), theirs.apply(variables, x)
    else:
        got, want = model(x), theirs(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert "1 of 1 norm" in capsys.readouterr().out


def test_the_layers_are_those_that_they_replace():
    names = run("README.md", only("swap("))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 256)), jnp.float32)
    norm, up = names["norm"], names["up"]
    theirs = nnx.RMSNorm(256, rngs=nnx.Rngs(0))
    expected = nnx.silu(theirs(x) @ up.kernel[...] + up.bias[...])
    # float32 sums of 256 terms, in another order
    np.testing.assert_allclose(up(norm(x)), expected, rtol=2e-5, atol=2e-5)
    assert isinstance(norm, ours_nnx.RMSNorm) and isinstance(up, ours_nnx.Linear)
