"""The choice of an operation's implementation: `implementation=`, and substitutes.

The names are "native" (compiled kernels), "pallas" and "xla" (plain JAX). Which of them can serve
is known where a program is lowered; a substitution is logged once there, and kept for
`normfuse info`.
"""

import dataclasses
import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

Name = Literal["native", "pallas", "xla"]
NAMES: tuple[str, ...] = get_args(Name)
Implementation = str | Sequence[str] | None
T = TypeVar("T")

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


def native_or_best(strict: bool) -> Order:
    """Returns the order of native kernels alone, or of the best there is."""
    return NATIVE if strict else BEST


def requested(
    implementation: Implementation,
    *,
    argument: str = "implementation",
    known: Sequence[str] = NAMES,
) -> list[str]:
    """Returns the implementations to try, in order; empty for the best that can serve.

    `None` takes `NORMFUSE_IMPLEMENTATION` (names separated by commas) where it is set. `known` are
    the names there are.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: for a name that is not among `known`.
      TypeError: for anything but None, a string, or a sequence of strings.
    """
    if implementation is None:
        argument = "NORMFUSE_IMPLEMENTATION"
        if not os.environ.get(argument):
            return []
        implementation = [name.strip() for name in os.environ[argument].split(",")]
    names = [implementation] if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be None, one of {', '.join(map(repr, known))} or a sequence of them, "
            f"got {implementation!r}; None takes the best that can serve here"
        )
    if not names or not {*names} <= {*known}:
        elsewhere = names and {*names} <= {*NAMES, *known}  # other operations have it
        raise (NotImplementedError if elsewhere else ValueError)(
            f"{argument} must name one of {', '.join(map(repr, known))}, got {implementation!r}; "
            "None takes the best that can serve here"
        )
    return list(names)


def order_of(op: str, implementation: Implementation) -> Order | None:
    """Returns the kernels that `implementation` asks for, whose names are kernels' or "xla".

    None if it asks for plain HLO before any of them.
    """
    names = requested(implementation, argument=f"{op}: implementation")
    if not names:
        return BEST
    plain = names.index("xla") if "xla" in names else len(names)
    return Order(tuple(names[:plain]), strict=plain == len(names)) if plain else None


def choose(op: str, implementation: Implementation, serve: Mapping[str, Callable[[bool], T]]) -> T:
    """Calls the implementation asked for.

    `serve` has for each implementation that exists a function of `strict`, which is True if plain
    HLO must not replace it (it may if "xla" follows, or if nothing was asked for).

    Raises:
      NotImplementedError: if the only implementation asked for cannot serve.
      ExceptionGroup: of the causes, if none of several can.
    """
    every = [name for name in ("native", "xla") if name in serve]
    names = requested(implementation, argument=f"{op}: implementation") or every
    if implementation is None:  # NORMFUSE_IMPLEMENTATION is a preference only
        names = [name for name in names if name in serve] or every
    errors, there = [], ", ".join(map(repr, serve))
    for i, name in enumerate(names):
        try:
            if name not in serve:
                raise NotImplementedError(f"{op} has no {name!r} implementation; it has {there}")
            return serve[name]("xla" not in names[i + 1 :])
        except NotImplementedError as error:
            errors.append(error)
    raise _together(op, names, errors)


def _together(op: str, names: list[str], errors: list[NotImplementedError]) -> Exception:
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
        raise _together(op, list(reasons), errors)
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
