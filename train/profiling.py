"""Profiles of a run: a trace by JAX's profiler, its operations in a table, and times by kind."""

import collections
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

_SKIPPED, _TRACED = 5, 5
_SHOWN = 40  # the norms of a small model are near the end
# Kinds of operations by their names (on GPUs, of kernels); the first match counts.
_KINDS = {
    "communication": r"nccl|memcpyp2p|all-?(reduce|gather|to-all)|reduce-?scatter|collect|permute",
    "attention": r"sdpa|flash|fmha",
    "RMSNorm": r"rms_norm|column_sum|^ffi.call",  # the last on CPUs, where ours are the only ones
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|split_?k|matmul|dot|convol|mosaic_gpu|^ynn",
    "copies": r"memcpy|memset|^copy|transpose|concatenate|slice",
}
_REST, _IDLE = "element-wise and sums", "idle"
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
            times, idle = read_trace(self._folder)
            kinds = by_kind(times, idle, _TRACED)
            lines = [f"{spent:9.3f} ms of a step: {kind}\n" for kind, spent in kinds.items()]
            (self._folder / "table.txt").write_text("".join([*lines, "\n", table(times, _TRACED)]))

    def stop(self) -> None:
        """Ends a trace in progress."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False


def read_trace(folder: Path) -> tuple[dict[str, float], float]:
    """Sums the newest trace in a folder.

    On accelerators it counts the device's own streams, as a mean over the devices; on the CPU, all
    of XLA's threads together.

    Returns: each operation's milliseconds; and the milliseconds between the first and the last
      operation in which a device was idle, 0 for a CPU.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = jax.profiler.ProfileData.from_file(str(newest)).planes
    by_plane = {plane.name: list(_operations(plane)) for plane in planes}
    devices = [x for name, x in by_plane.items() if name.startswith(_DEVICE) and x]
    times: dict[str, float] = collections.defaultdict(float)
    share = 1e-6 / max(len(devices), 1)
    for name, start, end in itertools.chain(*(devices or by_plane.values())):
        times[name] += (end - start) * share
    idle = sum(_gaps([(start, end) for _, start, end in operations]) for operations in devices)
    return dict(times), idle * share


def table(times: dict[str, float], steps: int) -> str:
    """Returns a table of each operation's milliseconds in a step."""
    total = sum(times.values()) or 1
    rows = [f"{'ms/step':>9} {'share':>6}  operation"]
    for name, spent in sorted(times.items(), key=lambda item: -item[1])[:_SHOWN]:
        rows.append(f"{spent / steps:9.3f} {spent / total:6.1%}  {name}")
    return "\n".join(rows) + "\n"


def by_kind(times: dict[str, float], idle: float, steps: int) -> dict[str, float]:
    """Returns the milliseconds of a step by kind of operation, longest first, idle time last."""
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, spent in times.items():
        matching = (kind for kind, names in _KINDS.items() if re.search(names, name, re.I))
        kinds[next(matching, _REST)] += spent / steps
    longest = sorted(kinds, key=lambda kind: -kinds[kind])
    return {kind: kinds[kind] for kind in longest} | ({_IDLE: idle / steps} if idle else {})


def _operations(plane: jax.profiler.ProfilePlane) -> Iterator[tuple[str, float, float]]:
    """Yields the name, and the start and end in nanoseconds, of a plane's operations."""
    on_device = plane.name.startswith(_DEVICE)
    lines = ("Stream", "XLA Ops") if on_device else ("tf_XLA",)
    for line in plane.lines:
        for event in line.events if line.name.startswith(lines) else ():
            if on_device or not re.match(r"end: |\$|.*::", event.name):
                start = event.start_ns
                yield event.name.split(".")[0], start, start + event.duration_ns


def _gaps(intervals: list[tuple[float, float]]) -> float:
    """Returns how much of the time from the first to the last interval none covers."""
    gaps, reached = 0.0, min((start for start, _ in intervals), default=0.0)
    for start, end in sorted(intervals):
        gaps += max(start - reached, 0.0)
        reached = max(reached, end)
    return gaps
