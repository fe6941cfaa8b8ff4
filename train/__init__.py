"""Sharded training of the transformer, and the command line.

`python -m normfuse.train` trains a small model on text that every machine has.
"""


class UsageError(ValueError):
    """The request cannot be carried out; raised before anything is compiled or written. Exit 2."""


class RunError(RuntimeError):
    """A run that had started failed. Exit 1."""
