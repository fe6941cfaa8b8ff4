// normfuse_launch: runs one run-time compiled CUDA kernel on XLA's stream.
//
// Attributes (all needed):
//   image    u8[]                  cubin or PTX text
//   digest   string                the image's SHA-256; equal digests share one loaded library
//   dtypes   string                of the operands and results: "float32 bfloat16 -> float32"
//   elements s64[]                 how many each of them has
//   kernel   string                the entry point in the image
//   grid, block, cluster  s64[3]   an empty grid runs nothing; cluster 1 1 1 is none
//   shared   s64                   bytes of dynamic shared memory
//   ints     s64[]                 scalars, passed as `long long`
//   floats   f32[]                 scalars, passed as `float`
//   doubles  f64[]                 scalars, passed as `double`
// The kernel's parameters are the operands' pointers, the results' pointers, then the scalars, each
// in the order given. Nothing is loaded unless the image has its digest, and nothing is launched
// unless the buffers are those described and the kernel takes as many parameters of these sizes.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace normfuse::cuda {

// State of one call site; must be registered as an FFI type before the handlers.
xla::ffi::TypeId* LaunchTypeId();
xla::ffi::TypeInfo* LaunchTypeInfo();

}  // namespace normfuse::cuda

// Decodes the attributes and claims the image's library.
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseLaunchInstantiate);
// Loads the kernel onto the device at hand, so that nothing is loaded while a graph is captured.
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseLaunchInitialize);
// One cuLaunchKernelEx.
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseLaunchExecute);
