"""Builds the documentation as HTML: `bash .ci/docs`.

The source folder is the repository's root, so the links between Markdown files are those that work
on a code host, and a broken one is a warning. The reference imports the installed package and
depends on public names, not on the files that define them. Two other generators were tried:
mkdocstrings reads source files and does not find an editable install; pdoc does not resolve the
names that `normfuse` imports lazily, and has no pages beside the reference.
"""

import re
import sys
from pathlib import Path

from sphinx.util import inspect

import normfuse

sys.path.insert(0, str(Path(__file__).parent))
import scripts  # noqa: E402
import signatures  # noqa: E402

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
exclude_patterns = [".*", "build", "dist", "runs", "**/__pycache__"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
highlight_language = "none"  # a fence without a language is output
default_role = "code"  # docstrings write `name` as Markdown does
suppress_warnings = ["myst.header"]  # a page may begin below its first heading

html_theme = "furo"
html_static_path = ["style.css", "copy.js"]
html_css_files = ["style.css"]
html_js_files = ["copy.js"]
html_title = f"normfuse {release}"
html_extra_path = ["index.html"]  # leads from the folder to docs/index.html
html_copy_source = False
html_search_scorer = "search.js"
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True


NAVIGATION = {  # the sidebar; here, because code hosts show such blocks as they are
    "docs/index": """
```{toctree}
:hidden:

Overview <../README>
```

```{toctree}
:hidden:
:caption: A faster step

Your training step <guides/fuse>
Examples <guides/examples>
Keras <guides/keras>
Does it help me? <guides/expect>
performance
When FP8 is safe <guides/fp8_safe>
FP8 in your model <guides/fp8>
Troubleshooting <guides/troubleshooting>
```

```{toctree}
:hidden:
:caption: Training

A whole training step <guides/recipe>
The step in nnx <guides/recipe_nnx>
The step in Equinox <guides/recipe_equinox>
guides/training
Parallelism <guides/parallelism>
A sharded step <guides/train_sharded>
A norm without all-gather <guides/shard_norm>
Several hosts <guides/distributed>
```

```{toctree}
:hidden:
:caption: Operations

guides/dense
The loss <guides/loss>
Element-wise operations <guides/elementwise>
An operation, step by step <guides/elementwise_op>
Add a kernel <guides/add_kernel>
guides/implementations
FP8: the recipe <quantization>
support
```

```{toctree}
:hidden:
:caption: Reference and project

reference/index
security
../CONTRIBUTING
../CHANGELOG
../benchmarks/results/README
```
""",
    "benchmarks/results/README": """
```{toctree}
:hidden:
:glob:

[a-z]*
```
""",
}


def _read(app, docname, content):
    content[0] += NAVIGATION.get(docname, "")
    if docname == "docs/reference/index":
        content[0] += signatures.tables()
    if re.match("benchmarks/results/[a-z]", docname):  # a search is for functions and guides
        content[0] = f"---\nnosearch: true\n---\n{content[0]}"
    if str(app.env.doc2path(docname)).endswith(".py"):
        content[0] = scripts.page(content[0])


def _restructured(app, what, name, obj, options, lines):
    """Turns what docstrings have of Markdown into reStructuredText."""
    text = "\n".join(lines)
    formula = r"(?m)^(\S.*)\n\n(?=    \S)"  # a block of code is four spaces deep
    text = re.sub(formula, r"\1\n\n.. code-block:: text\n\n", text)
    plural = lambda code: code[0] + "\\ " * code.string[code.end() :][:1].isalnum()  # `Linear`s
    lines[:] = re.sub(r"`[^`]+`", plural, text).splitlines()


def _signature(app, what, name, obj, options, signature, returns):
    """Shows a class as its constructor, defaults as Python, and `jax.typing.DTypeLike` by name."""
    if what == "class" and "__init__" in vars(obj):
        found = signatures.signature_of(obj)
        signature = inspect.stringify_signature(found, unqualified_typehints=True)
    if signature:
        dtype = r"str \| type\[[\w.~]*Any\] \| [\w.~]*dtype \| [\w.~]*SupportsDType"
        signature = re.sub(dtype, "DTypeLike", signature)
        signature = signatures.readable(signature)
    return signature, returns


def setup(app):
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _restructured, priority=400)
    app.connect("autodoc-process-signature", _signature)
