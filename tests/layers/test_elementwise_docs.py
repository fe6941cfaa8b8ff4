"""The code in docs/guides/elementwise.md runs as it is written there."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import normfuse

TEXT = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "elementwise.md"


BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_every_code_block_runs():
    text = TEXT.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 7
    namespace = {}
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(TEXT), "exec"), namespace)


@pytest.mark.parametrize(
    "wrong", ["1 - tanh(x / cap)", "1.01 * (1 - tanh(x / cap) * tanh(x / cap))"]
)
def test_the_check_of_a_derivative_finds_a_wrong_one(wrong):
    (check,) = (block for block in BLOCK.findall(TEXT.read_text()) if "check_grads" in block)
    code = "template <class T> T softcap(T x, float cap) { return cap * tanh(x / cap); }"
    softcap = normfuse.elementwise(code, derivative={"x": wrong}, cap=30.0)
    with pytest.raises(AssertionError, match="JVP tangent"):
        exec(check, {"jax": jax, "jnp": jnp, "softcap": softcap})
