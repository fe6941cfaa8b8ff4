"""CUDA kernels launched through the driver, without XLA, and timed in graphs."""

import ctypes
import itertools
import pathlib
import statistics
import sys

import jax.numpy as jnp
import numpy as np

from normfuse.native.launch import Target

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from cuda_driver import launch_config  # noqa: E402

COPIES = 2  # copies of every array, so that no launch finds its operands in the cache


class Gpu:
    """Device 0 through the CUDA driver."""

    def __init__(self):
        from cuda.bindings import driver

        self.cu = driver
        self("cuInit", 0)
        self("cuCtxSetCurrent", self("cuDevicePrimaryCtxRetain", 0))
        self.begin, self.end = self("cuEventCreate", 0), self("cuEventCreate", 0)
        self.stream = self("cuStreamCreate", 1)

    def __call__(self, name: str, *arguments):
        result, *values = getattr(self.cu, name)(*arguments)
        if result != self.cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {result.name}")
        return values[0] if values else None

    def attribute(self, name: str) -> int:
        attribute = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return self("cuDeviceGetAttribute", attribute, 0)

    def target(self) -> Target:
        major, minor = (self.attribute(f"COMPUTE_CAPABILITY_{n}") for n in ("MAJOR", "MINOR"))
        name = self("cuDeviceGetName", 100, 0).partition(b"\0")[0].decode()  # blanks come after
        return Target(f"sm_{10 * major + minor}", self.attribute("MULTIPROCESSOR_COUNT"), name)

    def array(self, size: int, fill: np.ndarray | None = None) -> int:
        pointer = int(self("cuMemAlloc", size))
        if fill is None:
            self("cuMemsetD8", pointer, 0, size)
        else:
            self("cuMemcpyHtoD", pointer, fill.ctypes.data, size)
        return pointer

    def microseconds(self, run, count: int = 10) -> float:
        """Median time of run(0), run(1), ..., back to back in one graph."""
        relaxed = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self("cuStreamBeginCapture", self.stream, relaxed)
        for i in range(count):
            run(i)
        graph = self("cuStreamEndCapture", self.stream)
        program = self("cuGraphInstantiate", graph, 0)
        time = self.elapsed(lambda: self("cuGraphLaunch", program, self.stream))
        self("cuGraphExecDestroy", program)
        self("cuGraphDestroy", graph)
        return time / count

    def elapsed(self, run) -> float:
        """Median microseconds of the work that run() puts on the stream."""
        times = []
        for _ in range(6):
            self("cuEventRecord", self.begin, self.stream)
            run()
            self("cuEventRecord", self.end, self.stream)
            self("cuEventSynchronize", self.end)
            times.append(1e3 * self("cuEventElapsedTime", self.begin, self.end))
        return statistics.median(times[1:])  # the first found nothing on the device

    def function(self, image: bytes, kernel: str, shared: int):
        library = self("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        function = self("cuKernelGetFunction", self("cuLibraryGetKernel", library, kernel.encode()))
        if shared > 48 << 10:
            limit = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self("cuFuncSetAttribute", function, limit, shared)
        return library, function


class Buffers:
    """Device memory for one piece of work, used by all its candidates."""

    def __init__(self, gpu: Gpu, launches: list[dict], count: int):
        self.gpu, self.count = gpu, count
        rng = np.random.default_rng(0)
        size = max(a.size for a in launches[0]["operands"])
        halves = rng.integers(0x3F00, 0x3FC0, size, np.uint16)  # bfloat16 from 0.5 to 1.5
        floats = rng.uniform(0.5, 1.5, 1 << 21).astype(np.float32)
        fill = lambda a: floats if a.dtype == jnp.float32 else halves
        first = launches[0]
        self.sets = [
            [gpu.array(a.size * a.dtype.itemsize, fill(a)) for a in first["operands"]]
            + [gpu.array(r.size * r.dtype.itemsize) for r in first["results"] if r.size >= size]
            for _ in range(COPIES)
        ]
        # rstd, or the blocks' shares of dscale and their sum: of any size a candidate may ask for.
        self.small = [gpu.array(256 << 20) for _ in range(2)]

    def free(self) -> None:
        for pointer in itertools.chain(self.small, *self.sets):
            self.gpu("cuMemFree", pointer)

    def time(self, launches: list[dict], images: list[bytes]) -> tuple[float, float]:
        """Microseconds of all launches, and of those behind the first."""
        calls, libraries = [], []
        for i, (launch, image) in enumerate(zip(launches, images, strict=True)):
            library, function = self.gpu.function(image, launch["kernel"], launch.get("shared", 0))
            libraries.append(library)
            sizes = launch["grid"], launch["block"], launch.get("cluster", 1)
            shared, stream = launch.get("shared", 0), self.gpu.stream
            config = launch_config(self.gpu.cu, *sizes, shared, stream)
            calls.append(
                (config, function, [self._parameters(i, launch, one) for one in self.sets])
            )

        def run(turn: int, calls=calls) -> None:
            for config, function, parameters in calls:
                self.gpu("cuLaunchKernelEx", config, function, parameters[turn % COPIES], 0)

        time = self.gpu.microseconds(run, self.count)
        last = 0.0
        if calls[1:]:
            last = self.gpu.microseconds(lambda turn: run(turn, calls[1:]), self.count)
        for library in libraries:
            self.gpu("cuLibraryUnload", library)
        return time, last

    def _parameters(self, which: int, launch: dict, pointers: list[int]):
        if which == 0:
            given = len(launch["operands"]) + len(launch["results"])
            used = [*pointers, *self.small][:given]
        else:  # column_sum of the first launch's last result
            used = self.small[:2]
        ints, floats = launch.get("ints", ()), launch.get("floats", ())
        types = [ctypes.c_void_p] * len(used) + [ctypes.c_longlong] * len(ints)
        return (*used, *ints, *floats), (*types, *[ctypes.c_float] * len(floats))


def copy_time(gpu: Gpu, size: int) -> float:
    """Microseconds that the driver's copy of so many bytes takes."""
    pairs = [(gpu.array(size), gpu.array(size)) for _ in range(COPIES)]
    count = 10

    def copy():
        for i in range(count):
            gpu("cuMemcpyDtoDAsync", *pairs[i % COPIES], size, gpu.stream)

    time = gpu.elapsed(copy) / count
    for pointer in itertools.chain(*pairs):
        gpu("cuMemFree", pointer)
    return time


def copy_rate(gpu: Gpu) -> float:
    """Bytes read and written in a microsecond by the driver's copy."""
    size = 512 << 20
    return 2 * size / copy_time(gpu, size)
