"""How commands are to be typed where this process was started, in an environment or outside."""

import shlex
import shutil
import sys
from pathlib import Path


def again(command: str) -> str:
    """Gives `normfuse COMMAND` as this process was called: by a path, a name, or Python's -m."""
    program = sys.argv[0]
    if Path(program).name == "normfuse":
        return f"{_shortest('normfuse', program)} {command}"
    module = "normfuse.train" if command == "train" else f"normfuse.train.cli {command}"
    return f"{_shortest('python', sys.executable)} -m {module}"


def _shortest(name: str, path: str) -> str:
    """Gives a program's name where it finds the program, else the path to it."""
    found = shutil.which(name)
    same = found is not None and Path(found).absolute() == Path(path).absolute()
    return name if same else shlex.quote(path)
