"""Counts of the package's structure: files that a lowering enters, modules, circles.

python tests/structure.py        prints them, for the installed package
"""

import ast
import functools
import graphlib
import io
import os
import pathlib
import re
import sys
import tokenize
from collections.abc import Callable, Iterator

import normfuse

ROOT = pathlib.Path(normfuse.__file__).parent
FOLDERS = ("native", "layers", "models", "train")
CHECKOUT = pathlib.Path(__file__).parents[1]
PYTHON, NATIVE = (".py",), (".cc", ".h", ".cu", ".cuh", ".hpp")
_ASIDE = re.compile(r"(#|//)\s*(-{3}|%%|noqa|pyright:|type:|fmt:|clang-format|NOLINT)")
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def entered(run: Callable[[], object]) -> list[str]:
    """The package's files of which `run` enters a function, in order of first entry."""
    files: dict[str, None] = {}
    root = f"{ROOT}{os.sep}"
    folders = tuple(f"{root}{folder}{os.sep}" for folder in FOLDERS)

    def hook(frame, event, argument):
        del argument
        # A module's own code runs once, when it is imported.
        if event == "call" and frame.f_code.co_name != "<module>":
            name = frame.f_code.co_filename
            if name.startswith(folders):
                files.setdefault(name.removeprefix(root))

    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(files)


def journeys() -> dict[str, list[str]]:
    """Files that a first lowering for a GPU enters; no GPU is needed."""
    os.environ["NORMFUSE_CUDA_ARCH"] = "sm_90"
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from normfuse import rms_norm
    from normfuse.layers.nnx import Linear

    x = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((2048,), jnp.float32)
    total = lambda y: jnp.sum(y.astype(jnp.float32))

    def linear(**options):
        layer = Linear(2048, 256, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
        graph, state = nnx.split(layer)
        loss = lambda state, x: total(nnx.merge(graph, state)(x))
        return entered(functools.partial(lower, jax.grad(loss, (0, 1)), state, x))

    def lower(fn, *operands):
        jax.clear_caches()
        jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",))

    norm = lambda x, scale: total(rms_norm(x, scale))
    return {
        "rms_norm": entered(functools.partial(lower, rms_norm, x, scale)),
        "rms_norm and gradient": entered(
            functools.partial(lower, jax.grad(norm, (0, 1)), x, scale)
        ),
        'nnx.Linear(activation="silu") and gradient': linear(activation="silu"),
        'nnx.Linear(quantization="fp8") and gradient': linear(quantization="fp8"),
    }


def imports(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The package's modules that a file imports, at any depth of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = path.parents[node.level - 1]
        base = folder.joinpath(*node.module.split(".")) if node.module else folder
        for alias in node.names:
            for found in (base / f"{alias.name}.py", base / alias.name / "__init__.py"):
                if found.exists():
                    yield found
                    break
            else:
                for found in (base.with_suffix(".py"), base / "__init__.py"):
                    if found.exists():
                        yield found


def circle() -> list[str]:
    """Returns modules that import each other in a circle, the first one last too; none if none."""
    graph = {path: set(imports(path)) - {path} for path in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [str(path.relative_to(ROOT)) for path in error.args[1]]
    return []


def _comments(path: pathlib.Path) -> list[tuple[int, int, str, str]]:
    """Comments, or their lines: row, column, text, and the whole line."""
    text = path.read_text()
    if path.suffix in PYTHON:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return [(*t.start, t.string, t.line) for t in tokens if t.type == tokenize.COMMENT]
    found = (re.search(r"(?<!:)//.*", line) for line in text.splitlines())
    return [(i, m.start(), m[0], m.string) for i, m in enumerate(found) if m]


def openings(suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields (first word in lower case, place) of each comment; a block of lines is one comment.

    Separators and pragmas are no comments.
    """
    for folder in (*FOLDERS, "tests", "docs", "benchmarks"):
        for path in sorted(p for p in (CHECKOUT / folder).rglob("*") if p.suffix in suffixes):
            above = None
            for row, column, comment, line in _comments(path):
                alone = not line[:column].strip()
                word = re.search(r"\w+", comment)
                if word and not (_ASIDE.match(comment) or alone and above == (row - 1, column)):
                    yield word[0].lower(), f"{path.relative_to(CHECKOUT)}: {comment}"
                above = (row, column) if alone else None


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields (first word, place) of each docstring of the package."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in [ROOT / "__init__.py", *MODULES]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                word = re.search(r"\w+|$", text)[0].lower()
                yield word, f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"


def main() -> None:
    for name, files in journeys().items():
        print(f"{name}: {len(files)} files: {', '.join(files)}")
    lines = sum(len(path.read_text().splitlines()) for path in MODULES)
    print(f"{len(MODULES)} modules, {lines} lines of Python")
    print(f"circle: {circle() or 'none'}")


if __name__ == "__main__":
    main()
