"""Profiles of a run: a trace by JAX's profiler, its operations in a table, and times by kind."""

import collections
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

_SKIPPED, _TRACED = 5, 5
_SHOWN = 40  # the norms of a small model are near the end
COMMUNICATION, PRODUCTS = "communication", "matrix products"
# Kinds of operations by their names (on GPUs, of kernels); the first match counts.
_KINDS = {
    COMMUNICATION: r"nccl|memcpyp2p|all-?(reduce|gather|to-all)|reduce-?scatter|collective|permute",
    "attention": r"sdpa|flash|fmha",
    "RMSNorm": r"rms_norm|column_sum|^ffi.call",  # the last on CPUs, where ours are the only ones
    PRODUCTS: r"gemm|nvjet|cutlass|cublas|xmma|split_?k|matmul|dot|convolution|mosaic_gpu|^ynn",
    "copies": r"memcpy|memset|^copy|transpose|concatenate|slice",
}
_REST, _IDLE = "element-wise and sums", "idle"
_DEVICE = "/device:"  # begins the name of a device's plane in a trace

Operation = tuple[str, float, float]  # name, start and end in nanoseconds


class Profiler:
    """Traces five steps after the first five of a run.

    The folder gets the trace, the table (table.txt) and times by kind (breakdown.json).
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._tracing = folder, False
        self._first: int | None = None

    def before(self, step: int, settle: Callable[[], None]) -> None:
        """Must be called before each step; `settle` waits for the steps before it."""
        if self._first is None:
            self._first = step + _SKIPPED
        if step == self._first:
            settle()
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif step == self._first + _TRACED:
            settle()
            self.stop(_TRACED)

    def stop(self, steps: int = 0) -> None:
        """Ends a trace in progress, and writes its table if it has all its `steps`."""
        if not self._tracing:
            return
        self._tracing = False
        jax.profiler.stop_trace()
        if steps:
            times, idle = read_trace(self._folder)
            (self._folder / "table.txt").write_text(table(times, steps))
            kinds = by_kind(times, idle, steps)
            (self._folder / "breakdown.json").write_text(json.dumps(kinds, indent=2) + "\n")


def read_trace(folder: Path) -> tuple[dict[str, float], float]:
    """Sums the newest trace in a folder.

    On accelerators it counts the device's own streams, as a mean over the devices; on the CPU, all
    of XLA's threads together.

    Returns: each operation's milliseconds; and the milliseconds between the first and the last
      operation in which a device was idle, 0 for a CPU.
    """
    devices, host = operations(folder)
    times: dict[str, float] = collections.defaultdict(float)
    for name, start, end in itertools.chain(*(devices or host)):
        times[name] += (end - start) / 1e6
    idle = sum(_gaps([(start, end) for _, start, end in found]) / 1e6 for found in devices)
    share = 1 / max(len(devices), 1)
    return {name: spent * share for name, spent in times.items()}, idle * share


def operations(folder: Path) -> tuple[list[list[Operation]], list[list[Operation]]]:
    """Returns the newest trace's operations: of each device that has any, and of the host."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    devices, host = [], []
    for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
        if found := list(_events(plane)):
            (devices if plane.name.startswith(_DEVICE) else host).append(found)
    return devices, host


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
        kinds[kind_of(name)] += spent / steps
    longest = sorted(kinds, key=lambda kind: -kinds[kind])
    return {kind: kinds[kind] for kind in longest} | ({_IDLE: idle / steps} if idle else {})


def kind_of(name: str) -> str:
    """Returns the kind of an operation by its name in a trace."""
    found = (kind for kind, names in _KINDS.items() if re.search(names, name, re.I))
    return next(found, _REST)


def _events(plane: jax.profiler.ProfilePlane) -> Iterator[Operation]:
    on_device = plane.name.startswith(_DEVICE)
    lines = ("Stream", "XLA Ops") if on_device else ("tf_XLA",)
    for line in plane.lines:
        if line.name.startswith(lines):
            for event in line.events:
                if on_device or _is_operation(event.name):
                    start = event.start_ns
                    yield event.name.split(".")[0], start, start + event.duration_ns


def _gaps(intervals: list[tuple[float, float]]) -> float:
    """Returns how much of the time from the first to the last interval none covers."""
    gaps, reached = 0.0, min((start for start, _ in intervals), default=0.0)
    for start, end in sorted(intervals):
        gaps += max(start - reached, 0.0)
        reached = max(reached, end)
    return gaps


def _is_operation(name: str) -> bool:
    return not (name.startswith("end: ") or "::" in name or name.startswith("$"))
