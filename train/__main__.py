"""`python -m normfuse.train ARGS` is `normfuse train ARGS`."""

import sys

from normfuse.train.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
