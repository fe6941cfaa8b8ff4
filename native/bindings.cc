// The extension module: names of FFI targets and types, and nothing else.
#include <pybind11/pybind11.h>

#include "xla/ffi/api/c_api.h"

namespace py = pybind11;

PYBIND11_MODULE(_ext, m) {
  m.doc() = "Native kernels of normfuse; use normfuse.native instead.";
  // (major, minor) of the FFI headers compiled in: an older jaxlib must not see our handlers.
  m.attr("ffi_api_version") = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}
