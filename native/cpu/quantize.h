// FP8 on the CPU: the scale's maximum, and the codes as they lie and transposed. The same numbers,
// bit for bit, as kernels/quantize_amax.cu and kernels/quantize_cast.cu (docs/quantization.md).
//
// normfuse_quantize_amax: x (any shape; float32, bfloat16 or float16) -> maximum (1,) float32
// normfuse_quantize_cast: x (rows, columns), maxima (count,) float32
//     -> [q (rows, columns)] [qt (columns, rows)] scale (1,) float32
//   Attributes (all needed):
//     has_q, has_qt  bool  which results are there; both have one type, e4m3fn or e5m2
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseQuantizeAmax);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseQuantizeCast);
