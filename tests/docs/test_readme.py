"""The Python in README.md gives what it says; test_pages.py runs every page as it is written."""

import functools
import pathlib
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_the_first_code_is_the_one_line():
    text = (ROOT / "README.md").read_text()
    assert "```python" in text.splitlines()[:12]

    def loss(x, kernel, labels):
        log_p = jax.nn.log_softmax(x @ kernel)
        return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))

    x, kernel = (jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(4, 8), (8, 2048)]))
    fused = run("README.md", blocks("README.md")[0], loss=loss)["loss"]
    both = jax.value_and_grad(fused)(x, kernel, jnp.arange(4))
    wanted = jax.value_and_grad(loss)(x, kernel, jnp.arange(4))
    # float32 sums of 8 and 2048 terms, in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), both, wanted)
    assert "cross_entropy" in str(jax.make_jaxpr(fused)(x, kernel, jnp.arange(4)))


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
    from flax import nnx
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
    block = only("YourTransformer(config").replace("layers.nnx", f"layers.{framework}", 1)
    given = {"YourTransformer": lambda config, rngs: make(), "config": 2, "rngs": None}
    model, theirs, x = run("README.md", block, **given)["model"], make(), jnp.arange(8.0)
    assert isinstance(model, type(theirs))
    if framework == "linen":
        variables = theirs.init(jax.random.key(0), x)
        got, want = model.apply(variables, x), theirs.apply(variables, x)
    else:
        got, want = model(x), theirs(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert "1 of 1 norm" in capsys.readouterr().out


def test_the_nnx_block_is_the_one_it_replaces():
    from flax import nnx

    names = run("README.md", only("from flax import nnx"))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 256)), jnp.float32)
    block = names["block"]
    hidden = nnx.silu(block.norm(x) @ block.up.kernel[...] + block.up.bias[...])
    expected = x + hidden @ block.down.kernel[...] + block.down.bias[...]
    # float32 sums of 256 and 1024 terms, in another order
    np.testing.assert_allclose(block(x), expected, rtol=2e-5, atol=2e-5)
    assert isinstance(block.norm, ours_nnx.RMSNorm) and isinstance(block.up, ours_nnx.Linear)
