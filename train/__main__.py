"""The command `normfuse`; `python -m normfuse.train ARGS` is `normfuse train ARGS`."""

import sys
from typing import NoReturn

from .shutdown import end_by_ctrl_c


def entry(argv: list[str] | None = None) -> NoReturn:
    """Runs the command line, or names the package that is missing."""
    end_by_ctrl_c()  # before anything heavy is imported
    try:
        from . import cli
    except ModuleNotFoundError as error:
        install = f"pip install 'normfuse[train]', or {error.name} alone for `info` and `cache`"
        print(f"error: the package {error.name} is missing: {install}", file=sys.stderr)
        sys.exit(2)
    cli.entry(argv)


if __name__ == "__main__":
    entry(["train", *sys.argv[1:]])
