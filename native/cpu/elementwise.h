// normfuse_elementwise: runs a library that the system's C++ compiler made from a user's function.
//
// Attributes (all needed):
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
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseElementwise);
