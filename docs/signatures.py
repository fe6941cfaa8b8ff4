"""The table of all public signatures, from the code: the end of the reference's first page."""

import importlib
import inspect
import pathlib
import re
from typing import Any

PAGES = pathlib.Path(__file__).parent / "reference"


def documented() -> dict[str, list[str]]:
    """Returns the names that each page of the reference documents, by the page's title."""
    pages = re.findall(r"^(\w+)$", (PAGES / "index.md").read_text(), re.MULTILINE)
    texts = [(PAGES / f"{page}.md").read_text() for page in pages]
    named = lambda text: re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    return {re.findall("^# (.*)$", text, re.MULTILINE)[0]: named(text) for text in texts}


def named(name: str) -> Any:
    """Returns the object of a full name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def signature_of(value: Any) -> inspect.Signature:
    """Returns a function's signature, or that of a class's constructor."""
    own = inspect.isclass(value) and "__init__" in vars(value)
    found = inspect.signature(value.__init__ if own else value)
    kept = [*found.parameters.values()][own:]
    if own and "parent" in found.parameters:  # Linen adds two fields to every module
        kept = [p for p in kept if p.name not in ("parent", "name")]
    return found.replace(parameters=kept, return_annotation=found.empty)


def readable(signature: str) -> str:
    """Returns a signature with classes and functions among its defaults by name."""
    signature = re.sub(r"<(?:class|function) '?(\w[\w.]*)'?>", r"\1", signature)
    return re.sub(r"<[\w. ]+(<(?:locals|lambda)>[\w. ]*)*>", "...", signature)


def tables() -> str:
    """Returns a table for each page, as Markdown: name, parameters, the docstring's first line."""
    lines = ["", "## Signatures"]
    for title, names in documented().items():
        lines += ["", f"### {title}: signatures", "", "| name | parameters | |", "|---|---|---|"]
        for name in names:
            value = named(name)
            if inspect.isclass(value) and issubclass(value, Exception):
                continue  # nobody calls it
            found = signature_of(value)
            bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
            call = readable(str(found.replace(parameters=bare)))
            first = (inspect.getdoc(value) or "").partition("\n")[0].replace("|", r"\|")
            link = f"{{py:obj}}`{name.removeprefix('normfuse.')} <{name}>`"
            lines.append(f"| {link} | `{call}` | {first} |")
    return "\n".join(lines) + "\n"
