"""Runnable guides as prose and code: for the pages of the documentation, and as a notebook.

python docs/scripts.py        writes docs/guides/recipe_nnx.ipynb from docs/guides/recipe_nnx.py,
                              and what the code of pages prints into the blocks after it
"""

import ast
import contextlib
import importlib.util
import io
import json
import pathlib
import re
from collections.abc import Iterator

GUIDES = pathlib.Path(__file__).parent / "guides"
NOTEBOOKS = ("recipe_nnx",)


def cells(script: str) -> Iterator[tuple[str, str]]:
    """Yields ("markdown", docstring or numbered comments) and ("code", what stands between)."""
    module = ast.parse(script)
    title, _, text = (ast.get_docstring(module) or "").partition("\n")
    yield "markdown", f"# {title.rstrip('.')}\n{text}".strip()
    prose: list[str] = []
    code: list[str] = []

    def finished() -> Iterator[tuple[str, str]]:
        for kind, lines in (("markdown", prose), ("code", code)):
            if text := "\n".join(lines).strip("\n"):
                yield kind, text
            lines.clear()

    for line in script.splitlines()[module.body[0].end_lineno :]:
        if re.match(r"# \d+\. ", line) or prose and not code and line.startswith("#"):
            if code:
                yield from finished()
            prose.append(line.removeprefix("# "))
        else:
            code.append(line)
    yield from finished()


def page(script: str) -> str:
    """Returns a guide as a page of Markdown, which shows what holds, and asserts nothing."""
    fenced = {"markdown": "{}\n", "code": "```python\n{}\n```\n"}
    text = "\n".join(fenced[kind].format(text) for kind, text in cells(script))
    text = re.sub(r"^( *)assert (.*\S)  # (.*)$", r"\1\2  # True: \3", text, flags=re.MULTILINE)
    return re.sub(r"^( *)assert (.*[^(\s])$", r"\1\2  # True", text, flags=re.MULTILINE)


def notebook(script: str) -> str:
    """Returns a guide as a notebook, of version 4.5 of Jupyter's format."""
    made = []
    for i, (kind, text) in enumerate(cells(script)):
        own = {"execution_count": None, "outputs": []} if kind == "code" else {}
        source = text.splitlines(keepends=True)
        made.append({"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": source} | own)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def printed(page: str) -> str:
    """Returns a page with the output of each block of Python in the block without a language after.

    Later blocks see the names of earlier ones.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    outputs = []

    def run(match: re.Match[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(match[1], "train.py", "exec"), names)
        outputs.append(out.getvalue())
        return match[0] if match[3] is None else f"{match[0][: -len(match[3])]}{outputs[-1]}```"

    block = r"^```python\n(.*?)^```$(\n\n```\n(.*?^```$))?"
    return re.sub(block, run, page, flags=re.DOTALL | re.MULTILINE)


if __name__ == "__main__":
    for name in NOTEBOOKS:
        (GUIDES / f"{name}.ipynb").write_text(notebook((GUIDES / f"{name}.py").read_text()))
    for path in (GUIDES.parents[1] / "README.md", GUIDES / "examples.md", GUIDES / "keras.md"):
        if path.stem != "keras" or importlib.util.find_spec("keras"):
            path.write_text(printed(path.read_text()))
