// The part of CUDA's driver interface that launching needs, opened at run time: normfuse compiles
// and imports on machines without CUDA. Names, values and layouts are those of NVIDIA's cuda.h,
// which tests/native/test_cuda_driver_abi.py compares with these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace normfuse::cuda {

using Result = int;  // CUresult
using Device = int;  // CUdevice
using Context = void*;
using Function = void*;
using KernelHandle = void*;
using LibraryHandle = void*;
using Stream = void*;

enum FunctionAttribute : int {
  kSharedSizeBytes = 1,
  kNumRegs = 4,
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

enum DeviceAttribute : int { kMaxSharedMemoryPerBlockOptin = 97 };

enum JitOption : int { kErrorLogBuffer = 5, kErrorLogBufferSizeBytes = 6 };

enum LaunchAttributeId : int { kClusterDimension = 4 };

struct LaunchAttribute {
  int id;
  int pad;
  union {
    struct {
      uint32_t x, y, z;
    } cluster;
    char bytes[64];
  } value;
};

struct LaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  uint32_t num_attributes;
};

// Entry points of libcuda.
struct Driver {
  Result (*LibraryLoadData)(LibraryHandle*, const void* code, int* options, void** values,
                            unsigned count, int* library_options, void** library_values,
                            unsigned library_count);
  Result (*LibraryGetKernel)(KernelHandle*, LibraryHandle, const char* name);
  Result (*KernelGetFunction)(Function*, KernelHandle);
  Result (*KernelGetAttribute)(int*, int attribute, KernelHandle, Device);
  Result (*KernelSetAttribute)(int attribute, int value, KernelHandle, Device);
  Result (*FuncGetAttribute)(int*, int attribute, Function);
  // Since CUDA 12.4; null in older drivers. Fails for a parameter that the kernel does not have.
  Result (*KernelGetParamInfo)(KernelHandle, size_t index, size_t* offset, size_t* size);
  Result (*LaunchKernelEx)(const LaunchConfig*, Function, void** parameters, void** extra);
  Result (*StreamGetCtx)(Stream, Context*);
  Result (*CtxPushCurrent)(Context);
  Result (*CtxPopCurrent)(Context*);
  Result (*CtxGetDevice)(Device*);
  Result (*DeviceGetAttribute)(int*, int attribute, Device);
  Result (*GetErrorName)(Result, const char**);
  Result (*GetErrorString)(Result, const char**);

  // Why the other entry points above cannot be called; empty when they can.
  std::string missing;

  // "CUDA_ERROR_INVALID_VALUE (invalid argument)".
  std::string Describe(Result result) const;
};

// Opens libcuda on the first call.
const Driver& GetDriver();

}  // namespace normfuse::cuda
