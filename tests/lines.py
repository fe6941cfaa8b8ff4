"""Counts lines of each folder, results of benchmarks, and the longest module, beside their limits.

python tests/lines.py        prints them, and fails where a limit is exceeded
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ("native", "layers", "models", "train")

# Whoever deletes lowers a limit; the aims are 25,000 lines of package and 28,000 of tests.
LIMITS = {
    "package": 26_000,
    "tests": 29_000,
    "benchmarks": 3_500,
    "files of results": 15,
    "longest module": 700,
}


def lines(*folders: str) -> dict[str, int]:
    """Lines of the Python files below folders, by path."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}


def counts() -> dict[str, int]:
    """The numbers that `LIMITS` bounds."""
    package = lines(*PACKAGE)
    return {
        "package": sum(package.values()),
        "tests": sum(lines("tests").values()),
        "benchmarks": sum(lines("benchmarks").values()),
        "files of results": len([*(ROOT / "benchmarks" / "results").glob("*")]),
        "longest module": max(package.values()),
    }


def exceeded() -> list[str]:
    """A line for each number that is above its limit."""
    found = counts()
    return [
        f"{name}: {found[name]}, at most {limit}. Delete as much, or say why it stays."
        for name, limit in LIMITS.items()
        if found[name] > limit
    ]


def main() -> int:
    for name, count in counts().items():
        print(f"{name:17} {count:7,}  of {LIMITS[name]:,}")
    for folder in PACKAGE:
        print(f"  {folder:15} {sum(lines(folder).values()):7,}")
    every = lines(*PACKAGE)
    for path in sorted(every, key=lambda path: -every[path])[:5]:
        print(f"  {every[path]:7,}  {path}")
    print(*exceeded(), sep="\n")
    return bool(exceeded())


if __name__ == "__main__":
    sys.exit(main())
