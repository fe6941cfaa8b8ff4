"""The two ways a command ends badly, each in one message and without a traceback."""


class UsageError(ValueError):
    """What was asked for cannot be done: raised before anything is compiled or written. Exit 2."""


class RunError(RuntimeError):
    """A run that had started failed. Exit 1."""
