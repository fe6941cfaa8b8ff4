"""Implementations of an operation, and their substitutes.

They are "native" (compiled kernels), "pallas" and "xla" (plain JAX). Which of them can serve is
known where a program is lowered; a substitution is logged once there, and kept for `normfuse info`.
"""

import dataclasses
import logging
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

Name = Literal["native", "pallas", "xla"]
NAMES: tuple[str, ...] = get_args(Name)
Implementation = str | Sequence[str] | None

_logger = logging.getLogger("normfuse")
_lock = threading.Lock()
_plain: dict[tuple[str, str], None] = {}  # (operation, reason): served by plain HLO
_substituted: dict[tuple[str, str], None] = {}  # served by another kernel
_TITLES = {"native": "native", "pallas": "Pallas"}


def warn(message: str, *, stacklevel: int = 2) -> None:
    """Gives a RuntimeWarning about something that the program can do without.

    Where warnings are errors (`python -W error`) it is logged instead: it must not end an operation
    that would go on.
    """
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning:
        _logger.warning("%s", message)


class Unsupported(Exception):
    """A kernel cannot serve here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Order:
    """The kernels to try, when a program is lowered."""

    names: tuple[str, ...]  # in the order to try them; empty for the platform's best
    strict: bool  # raise an error where none of them can serve, rather than use plain HLO


BEST = Order((), strict=False)
NATIVE = Order(("native",), strict=True)
PLAIN = Order(("xla",), strict=False)  # the definition, in place of any kernel


def together(op: str, names: list[str], errors: list[NotImplementedError]) -> Exception:
    """Returns the only error, or an ExceptionGroup of those of all `names`."""
    if len(errors) == 1:
        return errors[0]
    return ExceptionGroup(f"{op}: none of {names} can serve", errors)


def report(
    op: str,
    reason: str | Mapping[str, str],
    *,
    strict: bool = False,
    names: Sequence[str] = ("native",),
    by: str = "plain HLO",
) -> None:
    """Logs once per (op, reason) that `by` serves `op` instead of `names`, which were asked for.

    `reason` says why, for all of `names` or for each. Where `strict` rules plain HLO out it raises
    NotImplementedError; an ExceptionGroup of them for several `names`.
    """
    reasons = {n: reason for n in names or ("native",)} if isinstance(reason, str) else dict(reason)
    if strict:
        errors = [_refusal(op, name, why) for name, why in reasons.items()]
        raise together(op, list(reasons), errors)
    reason = "; ".join(dict.fromkeys(reasons.values()))
    with _lock:
        seen = _substituted if by in _TITLES else _plain
        if (op, reason) in seen:
            return
        seen[op, reason] = None
    _logger.info("%s is served by %s: %s", op, _TITLES.get(by, by), reason)


def _refusal(op: str, name: str, reason: str) -> NotImplementedError:
    others = "plain HLO" if name == "native" else "native kernels or plain HLO"
    told = os.environ.get("NORMFUSE_IMPLEMENTATION", "")
    variable = (
        f", or set NORMFUSE_IMPLEMENTATION, now {told!r}, to '{name},xla'," if name in told else ""
    )
    return NotImplementedError(
        f"{op}: implementation={name!r} cannot serve here: {reason}. Use implementation=None"
        f"{variable} to let {others} serve what {_TITLES[name]} kernels cannot."
    )


def fallbacks() -> list[tuple[str, str]]:
    """Returns every (op, reason) served by plain HLO in this process so far, oldest first."""
    with _lock:
        return list(_plain)
