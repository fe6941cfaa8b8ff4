"""The declarations of libcuda in native/cuda/driver.h are those of NVIDIA's cuda.h."""

import pathlib
import shutil
import subprocess

import pytest

from normfuse.native import compiler

pytest.importorskip("cuda.bindings", reason="cuda.h comes with cuda-bindings' companions")

NATIVE = pathlib.Path(__file__).parents[2] / "native"

CODE = """
#include <cstddef>
#include <cuda.h>
#include "cuda/driver.h"
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuStreamGetCtx
#undef cuLaunchKernelEx

using namespace normfuse::cuda;

template <typename T> struct Parameters;
template <typename R, typename... A> struct Parameters<R (*)(A...)> {
  static constexpr size_t kSizes[] = {sizeof(A)...};
  static constexpr size_t kCount = sizeof...(A);
};
template <typename Ours, typename Theirs> constexpr bool Same() {
  using A = Parameters<Ours>;
  using B = Parameters<Theirs>;
  if (A::kCount != B::kCount) return false;
  for (size_t i = 0; i < A::kCount; ++i) if (A::kSizes[i] != B::kSizes[i]) return false;
  return true;
}
#define SAME(ours, theirs) \\
  static_assert(Same<decltype(Driver::ours), decltype(&theirs)>(), #theirs)
SAME(LibraryLoadData, cuLibraryLoadData);
SAME(LibraryGetKernel, cuLibraryGetKernel);
SAME(KernelGetFunction, cuKernelGetFunction);
SAME(KernelGetAttribute, cuKernelGetAttribute);
SAME(KernelSetAttribute, cuKernelSetAttribute);
SAME(FuncGetAttribute, cuFuncGetAttribute);
SAME(KernelGetParamInfo, cuKernelGetParamInfo);
SAME(LaunchKernelEx, cuLaunchKernelEx);
SAME(StreamGetCtx, cuStreamGetCtx);
SAME(CtxPushCurrent, cuCtxPushCurrent_v2);
SAME(CtxPopCurrent, cuCtxPopCurrent_v2);
SAME(CtxGetDevice, cuCtxGetDevice);
SAME(DeviceGetAttribute, cuDeviceGetAttribute);
SAME(GetErrorName, cuGetErrorName);
SAME(GetErrorString, cuGetErrorString);

#define VALUE(ours, theirs) static_assert(int{ours} == int{theirs}, #theirs)
VALUE(kSharedSizeBytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
VALUE(kNumRegs, CU_FUNC_ATTRIBUTE_NUM_REGS);
VALUE(kMaxDynamicSharedSizeBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
VALUE(kNonPortableClusterSizeAllowed, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
VALUE(kMaxSharedMemoryPerBlockOptin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
VALUE(kErrorLogBuffer, CU_JIT_ERROR_LOG_BUFFER);
VALUE(kErrorLogBufferSizeBytes, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
VALUE(kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);

#define PLACE(ours, field, theirs, other) \\
  static_assert(offsetof(ours, field) == offsetof(theirs, other), #theirs "::" #other)
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
PLACE(LaunchConfig, grid, CUlaunchConfig, gridDimX);
PLACE(LaunchConfig, block, CUlaunchConfig, blockDimX);
PLACE(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes);
PLACE(LaunchConfig, stream, CUlaunchConfig, hStream);
PLACE(LaunchConfig, attributes, CUlaunchConfig, attrs);
PLACE(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
PLACE(LaunchAttribute, id, CUlaunchAttribute, id);
PLACE(LaunchAttribute, value.cluster, CUlaunchAttribute, value.clusterDim);
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(not NATIVE.exists(), reason="needs the sources")
def test_cuda_driver_declarations_match_cuda_h(tmp_path):
    source = tmp_path / "abi.cc"
    source.write_text(CODE)
    headers = ["-I", str(NATIVE), "-isystem", compiler.include_directory()]
    command = ["g++", "-std=c++17", "-Wno-invalid-offsetof", "-fsyntax-only", *headers, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
