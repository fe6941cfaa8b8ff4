"""Device times from CUPTI, through JAX's own profiler tools."""

import itertools
import json
import math
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler

GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|split_?k", re.IGNORECASE)  # kernels' names
CACHE_BYTES = 256 << 20  # several times any L2: inputs of one turn are gone when it comes again


Kernel = tuple[str, float, float]  # its name, and when it began and ended, in nanoseconds
PROFILED = 3  # steps
PAUSE = 20e3  # nanoseconds without a kernel that count as a gap


def profiled(take: Callable[[int], float]) -> list[Kernel]:
    """The kernels of some steps in the GPU's own streams, from JAX's profiler."""
    take(2)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            take(PROFILED)
        trace = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    return [
        (event.name, event.start_ns, event.start_ns + event.duration_ns)
        for plane in planes
        for line in (plane.lines if plane.name.startswith("/device:") else ())
        for event in (line.events if line.name.startswith("Stream") else ())
    ]


def busy(found: list[Kernel], steps: int = PROFILED) -> dict[str, float]:
    """Milliseconds of a step: "busy", "gaps" above 20 µs, and "profiled" from first to last kernel.

    Kernels that run beside each other count once.
    """
    if not found:  # a CPU
        return {}
    intervals = sorted((began, ended) for _, began, ended in found)
    first, until = intervals[0][0], intervals[0][0]
    covered = gaps = 0.0
    for began, ended in intervals:
        gaps += began - until if began - until > PAUSE else 0
        covered += max(ended - max(began, until), 0)
        until = max(ended, until)
    whole = {"busy": covered, "gaps": gaps, "profiled": until - first}
    return {name: round(spent * 1e-6 / steps, 3) for name, spent in whole.items()}


def emit(**line) -> dict:
    print(json.dumps(line), flush=True)
    return line


def sets_for(nbytes: int) -> int:
    """How many sets of inputs of `nbytes` to take in turn, so that none is found in the cache."""
    return max(2, -(-CACHE_BYTES // max(nbytes, 1 << 24)))


def microseconds(fn: Callable, sets: Sequence[tuple], runs: int = 11) -> float:
    """Median device time of all kernels of one call, the sets of operands taken in turn."""
    return statistics.median(sum(us for _, us in run) for run in kernels(fn, sets, runs))


def kernels(fn: Callable, sets: Sequence[tuple], runs: int) -> list[list[tuple[str, float]]]:
    """(name, microseconds) of each kernel of each call."""
    measured = profiler.measure(jax.jit(fn), aggregate=False)
    found = []
    for operands in itertools.islice(itertools.cycle(sets), runs):
        _, timings = measured(*operands)
        found.append([(name, 1e3 * ms) for name, ms in timings or []])
    return found


def by_turns(
    calls: dict[str, tuple], iterations: int, warm: float = 1.5, until: float = math.inf
) -> dict[str, list[list[tuple[str, float]]]]:
    """[(kernel, microseconds)] of every call of (compiled function, arguments), taking turns.

    The GPU is warm when it begins, and each turn is one call: products that heat it slow down what
    comes after them by up to a tenth. No round of turns begins after `until`, by
    `time.perf_counter`. On CPUs the one "kernel" of a call is all of it, by the clock.
    """
    samples: dict[str, list] = {name: [] for name in calls}
    began = time.perf_counter()
    while time.perf_counter() - began < warm and time.perf_counter() < until:
        for fn, args in calls.values():
            jax.block_until_ready(fn(*args))
    measured = {name: _measured(fn) for name, (fn, _) in calls.items()}
    for turn in range(iterations):
        if time.perf_counter() > until:
            break
        order = list(calls) if turn % 2 else list(calls)[::-1]
        for name in order:
            samples[name].append(measured[name](*calls[name][1]))
    return samples


def _measured(fn: Callable) -> Callable[..., list[tuple[str, float]]]:
    """(name, microseconds) of each kernel of one call, after another."""
    if jax.default_backend() == "gpu":
        run = profiler.measure(fn, aggregate=False, iterations=1)
        return lambda *args: [(kernel, 1e3 * ms) for kernel, ms in run(*args)[1]]

    def by_clock(*args: Any) -> list[tuple[str, float]]:
        jax.block_until_ready(fn(*args))
        began = time.perf_counter()
        jax.block_until_ready(fn(*args))
        return [("all", 1e6 * (time.perf_counter() - began))]

    return by_clock


class Copies:
    """The driver's own copy within the device: the limit of a kernel that only moves memory."""

    def __init__(self):
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        self._driver = driver
        self._call("cuInit", 0)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", 0))
        self._events = [self._call("cuEventCreate", 0) for _ in range(2)]
        self._known: dict[int, float] = {}
        size = 512 << 20
        self.rate = 2 * size / self.microseconds(size)  # bytes read and written in a microsecond

    def microseconds(self, size: int) -> float:
        """Median time to copy `size` bytes, back to back, the memory taken in turn."""
        if size not in self._known:
            self._known[size] = self._measure(size)
        return self._known[size]

    def _measure(self, size: int, count: int = 10) -> float:
        pairs = [[self._call("cuMemAlloc", size) for _ in range(2)] for _ in range(sets_for(size))]
        begin, end = self._events
        times = []
        for _ in range(7):
            self._call("cuEventRecord", begin, 0)
            for target, source in itertools.islice(itertools.cycle(pairs), count):
                self._call("cuMemcpyDtoDAsync", target, source, size, 0)
            self._call("cuEventRecord", end, 0)
            self._call("cuEventSynchronize", end)
            times.append(1e3 * self._call("cuEventElapsedTime", begin, end) / count)
        for pointer in itertools.chain(*pairs):
            self._call("cuMemFree", pointer)
        return statistics.median(times)

    def _call(self, name, *arguments):
        result, *values = getattr(self._driver, name)(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {result.name}")
        return values[0] if values else None
