"""The code in docs/guides/elementwise.md runs as it is written there."""

import pathlib
import re

import pytest

TEXT = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "elementwise.md"


@pytest.mark.newest
def test_every_code_block_runs():
    text = TEXT.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) >= 7
    namespace = {}
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(TEXT), "exec"), namespace)
