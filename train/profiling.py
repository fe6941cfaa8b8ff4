"""Profiles of a run: a trace by JAX's profiler, and its operations in a table."""

import collections
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

_SKIPPED, _TRACED = 5, 5
_SHOWN = 40  # the norms of a small model are near the end
_DEVICE = "/device:"  # begins the name of a device's plane in a trace


class Profiler:
    """Traces five steps after the first five of a run.

    The folder gets the trace and a table of a step's times (table.txt).
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._tracing = folder, False
        self._first: int | None = None

    def before(self, step: int, settle: Callable[[], None]) -> None:
        """Must be called before each step; `settle` waits for the steps before it."""
        if self._first is None:
            self._first = step + _SKIPPED
        if step in (self._first, self._first + _TRACED):
            settle()
        if step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif step == self._first + _TRACED:
            self.stop()
            (self._folder / "table.txt").write_text(table(read_trace(self._folder), _TRACED))

    def stop(self) -> None:
        """Ends a trace in progress."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False


def read_trace(folder: Path) -> dict[str, float]:
    """Returns each operation's milliseconds in the newest trace in a folder.

    On accelerators it counts the device's own streams, as a mean over the devices; on the CPU, all
    of XLA's threads together.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = jax.profiler.ProfileData.from_file(str(newest)).planes
    by_plane = {plane.name: list(_operations(plane)) for plane in planes}
    devices = [x for name, x in by_plane.items() if name.startswith(_DEVICE) and x]
    times: dict[str, float] = collections.defaultdict(float)
    for name, nanoseconds in itertools.chain(*(devices or by_plane.values())):
        times[name] += nanoseconds * 1e-6 / max(len(devices), 1)
    return dict(times)


def table(times: dict[str, float], steps: int) -> str:
    """Returns a table of each operation's milliseconds in a step."""
    total = sum(times.values()) or 1
    rows = [f"{'ms/step':>9} {'share':>6}  operation"]
    for name, spent in sorted(times.items(), key=lambda item: -item[1])[:_SHOWN]:
        rows.append(f"{spent / steps:9.3f} {spent / total:6.1%}  {name}")
    return "\n".join(rows) + "\n"


def _operations(plane: jax.profiler.ProfilePlane) -> Iterator[tuple[str, float]]:
    """Yields the name of each of a plane's operations, and the nanoseconds that it took."""
    on_device = plane.name.startswith(_DEVICE)
    lines = ("Stream", "XLA Ops") if on_device else ("tf_XLA",)
    for line in plane.lines:
        for event in line.events if line.name.startswith(lines) else ():
            if on_device or not re.match(r"end: |\$|.*::", event.name):
                yield event.name.split(".")[0], event.duration_ns
