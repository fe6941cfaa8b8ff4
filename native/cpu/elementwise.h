// normfuse_elementwise: runs a library that the system's C++ compiler made from a user's function.
//
// Attributes (all needed):
//   image    u8[]     a shared library that exports normfuse_elementwise
//   digest   string   names the image; equal digests share one loaded library
//   sizes    s64[]    the sizes of the collapsed dimensions
// The library's function is given the operands' pointers then the results', the sizes, and the
// range of elements to do.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseElementwise);
