// The handlers of the CPU. Attributes are all needed.
#pragma once

#include "xla/ffi/api/ffi.h"

// RMSNorm, or LayerNorm if centred, of x (outer, n, inner) over n; see norm.cc.
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseNormForward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseNormRowStatistics);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseNormApply);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseNormBackward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseNormRowDots);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseNormBackwardApply);

// FP8: the scale's maximum, and the codes as they lie and transposed. The same numbers, bit for
// bit, as kernels/quantize_amax.cu and kernels/quantize_cast.cu (docs/quantization.md).
//
// normfuse_quantize_amax: x (any shape; float32, bfloat16 or float16) -> maximum (1,) float32
// normfuse_quantize_cast: x (rows, columns), maxima (count,) float32
//     -> [q (rows, columns)] [qt (columns, rows)] scale (1,) float32
//   has_q, has_qt  bool  which results are there; both have one type, e4m3fn or e5m2
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseQuantizeAmax);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseQuantizeCast);

// normfuse_elementwise: runs a library that the system's C++ compiler made from a user's function.
//   image    u8[]     a shared library that exports normfuse_elementwise and normfuse_layout
//   digest   string   the image's SHA-256; equal digests share one loaded library
//   layout   string   such as "float32 bfloat16 -> float32; 3 1; 2"
//   sizes    s64[]    the sizes of the collapsed dimensions
// The layout is the dtypes of the operands and results, for each operand the collapsed dimensions
// that it has (bit 0: the last), and how many there are.
// The library's function is given the operands' pointers then the results', the sizes, and the
// range of elements to do. Nothing is loaded unless the buffers are those that the attributes
// describe and the image has its digest; nothing runs unless normfuse_layout, for which the library
// was compiled, is what the attributes describe.
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseElementwise);
