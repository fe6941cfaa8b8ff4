"""Packages of normfuse's extras that a page of the documents does not name."""

import importlib.metadata
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
# Packages whose names in Python are others than pip's.
_NAMES = {"cuda-bindings": "cuda.bindings", "orbax-checkpoint": "orbax", "pyyaml": "yaml"}


def packages(extra: str) -> set[str]:
    """The packages that an extra of normfuse installs, without those that these need."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    found = set()
    for requirement in extras[extra]:
        name, _, others = re.match(r"([\w-]+)(\[([\w,]+)\])?", requirement).groups()
        of_ours = name == "normfuse"
        found |= {p for x in others.split(",") for p in packages(x)} if of_ours else {name}
    return found


def needed(packages: set[str]) -> set[str]:
    """Packages and all that they need, as far as they are installed."""
    found, left = set(), {*packages}
    while left:
        package = left.pop()
        found.add(package)
        try:
            requirements = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        names = {re.match(r"[\w.-]+", x)[0].lower() for x in requirements if "extra ==" not in x}
        left |= names - found
    return found


def hidden(page: pathlib.Path) -> list[str]:
    """Packages of the extras that a page does not name, nor need those that it names."""
    text = page.read_text()
    lists = re.findall(r"(?:'\.|normfuse)\[([a-z0-9,]+)\]", text)
    lists += re.findall(r"extras?\s+(`\w+`(?:(?:, | and )`\w+`)*)", text)
    extras = {extra for found in lists for extra in re.findall(r"\w+", found)} - {"and"}
    have = needed(set().union(*map(packages, extras))) | set(re.findall(r"pip install (\w+)", text))
    every = {*packages("train"), "cuda-bindings", "flatbuffers"}
    return sorted(_NAMES.get(name, name) for name in every - have)
