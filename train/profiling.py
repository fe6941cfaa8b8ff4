"""Where a step's time goes: a trace by JAX's profiler, and a table of it."""

import collections
from pathlib import Path

import jax

_SKIPPED, _TRACED = 5, 5
_SHOWN = 40  # the norms of a small model are near the end


class Profiler:
    """Traces five steps, after the first five of a run.

    Args:
      folder: for the trace and the table.
    """

    def __init__(self, folder: Path):
        self._folder, self._first, self._tracing = folder, None, False

    def before(self, step: int):
        """Called before each step."""
        if self._first is None:
            self._first = step + _SKIPPED
        if step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif step == self._first + _TRACED:
            self.stop()

    def stop(self):
        """Ends the trace, if one is being made, and writes its table."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            (self._folder / "table.txt").write_text(table(self._folder))


def table(folder: Path) -> str:
    """Tabulates the newest trace in a folder: milliseconds per step of each operation.

    On accelerators the device's own streams are counted; on the CPU, XLA's threads.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    times: collections.Counter[str] = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
        on_device = plane.name.startswith("/device:")
        for line in plane.lines:
            if (on_device and line.name.startswith(("Stream", "XLA Ops"))) or (
                not on_device and line.name.startswith("tf_XLA")
            ):
                for event in line.events:
                    if _is_operation(event.name):
                        times[event.name.split(".")[0]] += event.duration_ns
    total = sum(times.values()) or 1
    rows = [f"{'ms/step':>9} {'share':>6}  operation"]
    for name, spent in times.most_common(_SHOWN):
        rows.append(f"{spent / _TRACED / 1e6:9.3f} {spent / total:6.1%}  {name}")
    return "\n".join(rows) + "\n"


def _is_operation(name: str) -> bool:
    return not (name.startswith("end: ") or "::" in name or name.startswith("$"))
