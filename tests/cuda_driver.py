"""Runs CUDA kernels through NVIDIA's driver, without XLA: exact allocations, at any alignment.

XLA's arrays lie 256 bytes apart inside one large allocation, where neither compute-sanitizer nor an
odd pointer would show a kernel that reads too far.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from normfuse.native import cache
from normfuse.native.compiler import Source, kernel_source


class Driver:
    """Stands in for `normfuse.native.launch.launch` on device 0; results are NumPy arrays.

    Args:
      shift: elements by which every array is off its allocation's (256-byte aligned) start.
    """

    def __init__(self, shift: int = 0):
        from cuda.bindings import driver

        self.cu, self.shift = driver, shift
        self._call("cuInit", 0)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", 0))

    def launch(
        self,
        source: str | Source,
        kernel: str,
        operands: Sequence,
        results: Sequence,
        *,
        target,
        grid,
        block,
        macros=None,
        cluster=1,
        shared=0,
        ints=(),
        floats=(),
        doubles=(),
        aliases=None,
    ) -> list[np.ndarray]:
        """As `normfuse.native.launch.launch`, at once; arrays aliased there have two places."""
        source = kernel_source(source) if isinstance(source, str) else source
        function = self._function(cache.get(source, macros or {}, target.arch).data, kernel, shared)
        arrays = [np.asarray(a) for a in operands]
        arrays += [_nan(r) for r in results]
        bases = [self._upload(array) for array in arrays]
        pointers = [
            base + self.shift * array.itemsize for base, array in zip(bases, arrays, strict=True)
        ]
        values = (*pointers, *ints, *floats, *doubles)
        types = [ctypes.c_void_p] * len(pointers) + [ctypes.c_longlong] * len(ints)
        types += [ctypes.c_float] * len(floats) + [ctypes.c_double] * len(doubles)
        config = launch_config(self.cu, grid, block, cluster, int(shared))
        self._call("cuLaunchKernelEx", config, function, (values, tuple(types)), 0)
        self._call("cuCtxSynchronize")
        done = [
            self._download(pointer, array)
            for pointer, array in zip(
                pointers[len(operands) :], arrays[len(operands) :], strict=True
            )
        ]
        for base in bases:
            self._call("cuMemFree", base)
        return done

    def _call(self, name: str, *arguments):
        result, *values = getattr(self.cu, name)(*arguments)
        assert result == self.cu.CUresult.CUDA_SUCCESS, f"{name}: {result}"
        return values[0] if len(values) == 1 else values

    def _function(self, image: bytes, kernel: str, shared: int):
        library = self._call("cuLibraryLoadData", image + b"\0", [], [], 0, [], [], 0)
        handle = self._call("cuLibraryGetKernel", library, kernel.encode())
        function = self._call("cuKernelGetFunction", handle)
        if shared > 48 << 10:
            attribute = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, shared)
        return function

    def _upload(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        size = max(1, array.nbytes + self.shift * array.itemsize)
        base = int(self._call("cuMemAlloc", size))
        if array.nbytes:
            start = base + self.shift * array.itemsize
            self._call("cuMemcpyHtoD", start, array.ctypes.data, array.nbytes)
        return base

    def _download(self, pointer: int, like: np.ndarray) -> np.ndarray:
        array = np.empty_like(like)
        self._call("cuMemcpyDtoH", array.ctypes.data, pointer, array.nbytes)
        return array


def launch_config(cu, grid, block, cluster, shared, stream=0):
    """The driver's structure for a launch; sizes are numbers, or up to three of them.

    Args:
      cu: `cuda.bindings.driver`.
    """
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
    config.sharedMemBytes, config.hStream = shared, stream
    if _three(cluster) != (1, 1, 1):
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        sizes = attribute.value.clusterDim
        sizes.x, sizes.y, sizes.z = _three(cluster)
        config.attrs, config.numAttrs = [attribute], 1
    return config


def capability() -> int | None:
    """Compute capability times ten of device 0; None where there is no driver or no device."""
    try:
        from cuda.bindings import driver

        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return None
    except Exception:  # no bindings, or no libcuda: each release raises something else
        return None
    attributes = driver.CUdevice_attribute
    _, major = driver.cuDeviceGetAttribute(
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0
    )
    _, minor = driver.cuDeviceGetAttribute(
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0
    )
    return 10 * major + minor


def _nan(result) -> np.ndarray:
    size = int(np.prod(result.shape)) * result.dtype.itemsize
    return np.frombuffer(b"\xff" * size, result.dtype).reshape(result.shape)


def _three(sizes) -> tuple[int, ...]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes + (1,) * (3 - len(sizes))
