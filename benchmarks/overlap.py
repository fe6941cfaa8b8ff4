"""What a traced step's time goes to, and how much of its communication is hidden."""

import collections
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence

import jax

from normfuse.train import profiling

Interval = tuple[float, float]  # start and end

WORK = ("communication", "gemms", "others", "idle")
BEHIND = ("behind_gemms", "behind_any")


def traced(take: Callable[[int], object], steps: int = 2) -> dict[str, float]:
    """Milliseconds of a step by a device's activity, the mean over devices.

    With the shares of the communication behind products and behind any kernels; nothing where the
    profiler sees no device, as on CPUs.

    Args:
      take: runs so many steps, and waits for them.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        take(steps)
        jax.profiler.stop_trace()
        devices, _ = profiling.operations(pathlib.Path(folder))
    found = [times_of(events) for events in devices]
    if not found:
        return {}
    mean = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    talk = mean["communication"]
    times = {f"{name}_ms": round(mean[name] / steps / 1e6, 3) for name in WORK}
    hidden = {name: round(mean[name] / talk, 3) for name in BEHIND} if talk else {}
    return times | hidden


def times_of(events: Iterable[profiling.Operation]) -> dict[str, float]:
    """Nanoseconds of communication, products and other kernels, and in which none of these ran;
    and of the communication beside products, or beside any kernels."""
    kinds: dict[str, list[Interval]] = collections.defaultdict(list)
    for name, start, end in events:
        kinds[profiling.kind_of(name)].append((start, end))
    talk, gemms = (union(kinds.pop(k, [])) for k in (profiling.COMMUNICATION, profiling.PRODUCTS))
    others = union(itertools.chain(*kinds.values()))
    kernels = union([*gemms, *others])
    whole = union([*talk, *kernels])
    length = lambda intervals: sum(b - a for a, b in intervals)
    return {
        "communication": length(talk),
        "gemms": length(gemms),
        "others": length(others),
        "idle": whole[-1][1] - whole[0][0] - length(whole),
        "behind_gemms": common(talk, gemms),
        "behind_any": common(talk, kernels),
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """The time that two unions share."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        shared += max(end - start, 0.0)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared
