"""What no kernel could serve, and why: logged once, kept for `normfuse info`."""

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence

_logger = logging.getLogger("normfuse")
_lock = threading.Lock()
_seen: dict[tuple[str, str], None] = {}  # served by plain HLO
_substituted: dict[tuple[str, str], None] = {}  # served by another kernel
_CALLED = {"native": "native", "pallas": "Pallas"}


class Unsupported(Exception):
    """A kernel cannot serve here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Order:
    """Which kernels are to serve, decided where a program is lowered.

    Attributes:
      names: "native" and "pallas", the first to be tried first; empty for the best there is on
        the platform.
      strict: whether plain HLO may not stand in where none of them can serve.
    """

    names: tuple[str, ...]
    strict: bool

    @staticmethod
    def of(strict: "bool | Order") -> "Order":
        """The order that `strict` is; a flag stands for native kernels and whether plain HLO may
        not stand in for them."""
        return strict if isinstance(strict, Order) else Order(("native",), strict)


def report(
    op: str,
    reason: str | Mapping[str, str],
    *,
    strict: bool = False,
    names: Sequence[str] = ("native",),
    by: str = "plain HLO",
) -> None:
    """Logs once per (op, reason) that another implementation than the first serves `op`.

    Args:
      op: the operation's name.
      reason: why, for all of `names` or for each.
      strict: whether the caller rules plain HLO out.
      names: the implementations that were asked for.
      by: what serves instead.

    Raises:
      NotImplementedError: if `strict`; an ExceptionGroup of them for several `names`.
    """
    reasons = {n: reason for n in names or ("native",)} if isinstance(reason, str) else dict(reason)
    if strict:
        errors = [_refusal(op, name, why) for name, why in reasons.items()]
        if len(errors) == 1:
            raise errors[0]
        raise ExceptionGroup(f"{op}: none of {list(reasons)} can serve", errors)
    reason = "; ".join(dict.fromkeys(reasons.values()))
    with _lock:
        seen = _substituted if by in _CALLED else _seen
        if (op, reason) in seen:
            return
        seen[op, reason] = None
    _logger.info("%s is served by %s: %s", op, _CALLED.get(by, by), reason)


def _refusal(op, name, reason):
    return NotImplementedError(
        f"{op}: implementation={name!r} cannot serve here: {reason}. "
        f"Use implementation=None to let plain HLO serve what {_CALLED[name]} kernels cannot."
    )


def fallbacks() -> list[tuple[str, str]]:
    """Every (op, reason) served by plain HLO in this process so far, oldest first."""
    with _lock:
        return list(_seen)
