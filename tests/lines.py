"""Measures how hard the package is to read, beside limits: branches, parameters, letters, lines.

python tests/lines.py        prints the measures, and fails where a limit is exceeded

Comments and tests are free, so that nobody saves lines where a reader needs them.
"""

import ast
import pathlib
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ("native", "layers", "models", "train")
SOURCES = "*.cc", "*.h", "*.cu", "*.cuh", "*.hpp"
MOST_BRANCHES, MOST_PARAMETERS = 20, 10

# Whoever improves a number lowers its limit. The aims: 26,000 lines of package and 5,400 of fuse,
# no function above 40 branch points, twelve above 20, no function of more than ten parameters but
# public operations. What stands between: totals of losses, gradients at once, attention along
# queries, kernels with a batch dimension, rows that see nothing, evaluated and not derived, and
# words of a loss in rows that devices share (340: no wide array is gathered that plain jnp has in
# parts); what scores.py says of picks and averages goes where rows serve as fast.
LIMITS = {
    "lines of the package": 29_320,
    "lines of C++ and CUDA": 6_130,
    "lines of layers/fuse": 9_130,
    "lines of benchmarks": 3_500,
    "files of results": 15,
    "longest module": 691,
    "functions of more than 20 branch points": 28,
    "functions of more than 40 branch points": 0,
    "functions of more than 10 parameters": 4,
    "names of one letter, in a hundred": 19,
}

_BRANCHES = ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines(*folders: str, names: tuple[str, ...] = ("*.py",)) -> dict[str, int]:
    """Lines of files below folders that are no comments, by path."""
    every = [p for folder in folders for name in names for p in (ROOT / folder).rglob(name)]
    comment = "#" if names == ("*.py",) else "//"
    count = lambda path: sum(
        not line.lstrip().startswith(comment) for line in path.read_text().splitlines()
    )
    return {str(path.relative_to(ROOT)): count(path) for path in sorted(every)}


def functions() -> Iterator[tuple[str, _Function]]:
    """The functions of the package, each with its module and name."""
    for folder in PACKAGE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, _Function):
                    yield f"{path.relative_to(ROOT)}:{node.name}", node


def branches(function: _Function) -> int:
    """Branch points: statements and expressions that choose or repeat, `and` and `or`."""
    count = 0
    for node in ast.walk(function):
        count += isinstance(node, _BRANCHES)
        if isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def parameters(function: _Function) -> int:
    """Parameters but for the first of a method, and for those that take all others."""
    a = function.args
    every = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([name for name in every if name not in ("self", "cls")])


def letters() -> float:
    """How many of a hundred names that the package binds are one letter."""
    names = []
    for folder in PACKAGE:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.append(node.id)
                elif isinstance(node, ast.arg):
                    names.append(node.arg)
    return 100 * sum(len(name) == 1 for name in names) / len(names)


def measures() -> dict[str, int]:
    """The numbers that `LIMITS` bounds."""
    package, every = lines(*PACKAGE), [f for _, f in functions()]
    of_fuse = [n for path, n in package.items() if path.startswith("layers/fuse/")]
    return {
        "lines of the package": sum(package.values()),
        "lines of C++ and CUDA": sum(lines("native", names=SOURCES).values()),
        "lines of layers/fuse": sum(of_fuse),
        "lines of benchmarks": sum(lines("benchmarks").values()),
        "files of results": len([*(ROOT / "benchmarks" / "results").glob("*")]),
        "longest module": max(package.values()),
        "functions of more than 20 branch points": sum(branches(f) > 20 for f in every),
        "functions of more than 40 branch points": sum(branches(f) > 40 for f in every),
        "functions of more than 10 parameters": sum(parameters(f) > 10 for f in every),
        "names of one letter, in a hundred": round(letters()),
    }


def exceeded() -> list[str]:
    """A line for each number that is above its limit."""
    found = measures()
    return [
        f"{name}: {found[name]}, at most {limit}. Make it less, or say why it stays."
        for name, limit in LIMITS.items()
        if found[name] > limit
    ]


def main() -> int:
    for name, count in measures().items():
        print(f"{name:40} {count:7,}  of {LIMITS[name]:,}")
    rooms: dict[str, int] = {}
    for path, count in lines(*PACKAGE).items():
        room = "/".join(path.split("/")[:-1])
        rooms[room] = rooms.get(room, 0) + count
    for room, count in rooms.items():
        print(f"  {count:7,}  {room}")
    hardest = sorted(((branches(f), name) for name, f in functions()), reverse=True)
    for count, name in hardest[:12]:
        print(f"  {count:7,}  branch points of {name}")
    print(*exceeded(), sep="\n")
    return bool(exceeded())


if __name__ == "__main__":
    sys.exit(main())
