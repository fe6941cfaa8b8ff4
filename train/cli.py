"""The command `normfuse`: `train`, `generate`, `report`, `info` and `cache`."""

import difflib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from .signals import StopRequest

_USAGE = """\
usage: normfuse COMMAND [...]

Native RMSNorm and fused Dense layers for JAX, and a trainer that uses them.

  train      train a transformer; without arguments, a tiny one on Python's own library
  generate   continue a prompt with a trained run
  report     compare runs: a table and a picture
  info       which implementation each op would use here, and why
  cache      show, clear or warm the cache of compiled kernels

`normfuse COMMAND --help` tells more.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: its words; those of the process when None.
    Returns: 0 for success or a clean stop, 1 for a run that failed, 2 for usage.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except SystemExit as exit:  # tyro and argparse end so
        return exit.code if isinstance(exit.code, int) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def entry(argv: list[str] | None = None) -> NoReturn:
    """Runs a command as `main` does, and exits; a signal during the exit changes nothing."""
    StopRequest.afterwards = signal.SIG_IGN
    sys.exit(main(argv))


def _dispatch(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(version("normfuse"))
        return 0
    if command not in _COMMANDS:
        close = difflib.get_close_matches(command, _COMMANDS, 1)
        hint = f"Did you mean {close[0]!r}?" if close else "`normfuse --help` lists them."
        return _fail(f"{command!r} is no command of normfuse. {hint}", 2)
    from .errors import RunError, UsageError

    try:
        _COMMANDS[command](rest)
    except UsageError as error:
        return _fail(str(error), 2)
    except RunError as error:
        return _fail(str(error), 1)
    return 0


def _train(argv: list[str]):
    from .settings import parse

    config = parse(argv)
    from .run import train  # JAX, after flags have been read

    train(config)


def _generate(argv: list[str]):
    from .generation import main

    main(argv)


def _report(argv: list[str]):
    from .report import main

    main(argv)


def _info(argv: list[str]):
    from ..layers.info import main

    main(["info", *argv])


def _cache(argv: list[str]):
    from ..layers.info import main

    main(["cache", *argv])


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "generate": _generate,
    "report": _report,
    "info": _info,
    "cache": _cache,
}


def _fail(message: str, code: int) -> int:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    entry()
