"""`python -m normfuse.train ARGS` is `normfuse train ARGS`."""

import sys

from .cli import entry

if __name__ == "__main__":
    entry(["train", *sys.argv[1:]])
