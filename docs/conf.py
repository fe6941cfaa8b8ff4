"""Builds the documentation as HTML: `bash .ci/docs`.

The source folder is the repository's root, so the links between Markdown files are those that work
on a code host, and a broken one is a warning. The reference imports the installed package and
depends on public names, not on the files that define them. Two other generators were tried:
mkdocstrings reads source files and does not find an editable install; pdoc does not resolve the
names that `normfuse` imports lazily, and has no pages beside the reference.
"""

import ast
import re

import normfuse

project = "normfuse"
author = "The normfuse authors"
release = normfuse.__version__
source_suffix = {".md": "markdown", ".py": "markdown"}
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/guides/*",
    "docs/reference/*.md",
    "benchmarks/results/*.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "**/__pycache__", "README.md"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write `name` as Markdown does
suppress_warnings = ["myst.header"]  # a page may begin below its first heading

html_theme = "furo"
html_title = f"normfuse {release}"
html_extra_path = ["index.html"]  # leads from the folder to docs/index.html
html_copy_source = False
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_use_rtype = False
python_use_unqualified_type_names = True


def _guide(app, docname, content):
    """Turns a runnable guide into a page: docstring and numbered comments as prose, then code."""
    if not str(app.env.doc2path(docname)).endswith(".py"):
        return
    module = ast.parse(content[0])
    title, _, text = ast.get_docstring(module).partition("\n")
    page = [f"# {title.rstrip('.')}", text]
    code = []
    for line in content[0].splitlines()[module.body[0].end_lineno :]:
        if re.match(r"# \d+\. ", line) or not code and line.startswith("#"):
            page += _fenced(code)
            code = []
            page.append(line.removeprefix("# "))
        else:
            code.append(line)
    content[0] = "\n".join([*page, *_fenced(code)])


def _fenced(code: list[str]) -> list[str]:
    """The lines as a block of Python; nothing for blank lines."""
    text = "\n".join(code).strip("\n")
    return ["", "```python", text, "```", ""] if text else []


def _literal_formulas(app, what, name, obj, options, lines):
    """Turns Markdown's code block, four spaces deep in a docstring, into reStructuredText's."""
    text = "\n".join(lines)
    formula = r"(?m)^(\S.*)\n\n(?=    \S)"
    lines[:] = re.sub(formula, r"\1\n\n.. code-block:: text\n\n", text).splitlines()


def setup(app):
    app.connect("source-read", _guide)
    app.connect("autodoc-process-docstring", _literal_formulas, priority=400)
