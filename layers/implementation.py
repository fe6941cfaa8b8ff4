"""Which implementation serves an op: the meaning of `implementation=`, in one place."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..native.fallback import Order

NAMES = ("native", "pallas", "xla")
Implementation = str | Sequence[str] | None
T = TypeVar("T")


def requested(implementation: Implementation, *, argument: str = "implementation") -> list[str]:
    """The implementations to try, in order; empty for the best that can serve.

    `None` takes `NORMFUSE_IMPLEMENTATION` (names separated by commas) where it is set.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything but None, a string, or a sequence of strings.
    """
    if implementation is None:
        implementation = os.environ.get("NORMFUSE_IMPLEMENTATION") or None
        argument = "NORMFUSE_IMPLEMENTATION"
        if implementation is None:
            return []
        implementation = [name.strip() for name in implementation.split(",")]
    names = [implementation] if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be None, a name or a sequence of names, got {implementation!r}"
        )
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ValueError(
            f"{argument} must name one of {', '.join(map(repr, NAMES))}, got {implementation!r}; "
            "None takes the best that can serve here"
        )
    return list(names)


def kernels(implementation: Implementation) -> Order | None:
    """Which kernels `implementation` asks for, to be chosen from where the program is lowered.

    None where it asks for plain HLO before any of them.
    """
    names = requested(implementation)
    if not names:
        return Order((), strict=False)
    plain = names.index("xla") if "xla" in names else len(names)
    return Order(tuple(names[:plain]), strict=plain == len(names)) if plain else None


def order_of(strict: bool) -> Order:
    """Native kernels alone, or the best there is where the program is lowered."""
    return Order(("native",), strict=True) if strict else Order((), strict=False)


def choose(op: str, implementation: Implementation, serve: Mapping[str, Callable[[bool], T]]) -> T:
    """Calls what `implementation` asks for.

    Args:
      op: the op's name, for errors.
      implementation: as the user gave it.
      serve: for each implementation that exists, a function of `strict`: whether plain HLO may not
        stand in for it (it may where "xla" follows, or where nothing was asked for).

    Raises:
      NotImplementedError: if the only implementation asked for cannot serve.
      ExceptionGroup: of the causes, if none of several can.
    """
    every = [name for name in ("native", "xla") if name in serve]
    names = requested(implementation) or every
    if implementation is None:  # what NORMFUSE_IMPLEMENTATION prefers, of what there is
        names = [name for name in names if name in serve] or every
    errors = []
    for i, name in enumerate(names):
        if name not in serve:
            there = ", ".join(map(repr, serve))
            errors.append(
                NotImplementedError(f"{op} has no {name!r} implementation; it has {there}")
            )
            continue
        try:
            return serve[name]("xla" not in names[i + 1 :])
        except NotImplementedError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise ExceptionGroup(f"{op}: none of {names} can serve", errors)
