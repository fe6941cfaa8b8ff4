// The extension module: names of FFI targets and types, and nothing else.
#include <pybind11/pybind11.h>

#include <type_traits>

#include "cpu/handlers.h"
#include "cuda/launch.h"
#include "xla/ffi/api/c_api.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

template <typename Handler>
py::capsule Capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>);
  return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

// {platform: {"types": {name: {"type_id", "type_info"}},
//             "targets": {name: handler, or {stage: handler}}}}
py::dict Registrations() {
  using py::dict;
  const dict cpu("normfuse_norm_forward"_a = Capsule(NormfuseNormForward),
                 "normfuse_norm_row_statistics"_a = Capsule(NormfuseNormRowStatistics),
                 "normfuse_norm_apply"_a = Capsule(NormfuseNormApply),
                 "normfuse_norm_backward"_a = Capsule(NormfuseNormBackward),
                 "normfuse_norm_row_dots"_a = Capsule(NormfuseNormRowDots),
                 "normfuse_norm_backward_apply"_a = Capsule(NormfuseNormBackwardApply),
                 "normfuse_elementwise"_a = Capsule(NormfuseElementwise),
                 "normfuse_quantize_amax"_a = Capsule(NormfuseQuantizeAmax),
                 "normfuse_quantize_cast"_a = Capsule(NormfuseQuantizeCast));
  const dict launch_type("type_id"_a = py::capsule(normfuse::cuda::LaunchTypeId()),
                         "type_info"_a = py::capsule(normfuse::cuda::LaunchTypeInfo()));
  const dict launch("instantiate"_a = Capsule(NormfuseLaunchInstantiate),
                    "initialize"_a = Capsule(NormfuseLaunchInitialize),
                    "execute"_a = Capsule(NormfuseLaunchExecute));
  const dict cuda("types"_a = dict("normfuse_launch"_a = launch_type),
                  "targets"_a = dict("normfuse_launch"_a = launch));
  return dict("cpu"_a = dict("types"_a = dict(), "targets"_a = cpu), "CUDA"_a = cuda);
}

}  // namespace

PYBIND11_MODULE(_ext, m) {
  m.doc() = "Native kernels of normfuse; use normfuse.native instead.";
  // (major, minor) of the FFI headers compiled in: an older jaxlib must not see our handlers.
  m.attr("ffi_api_version") = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("registrations", &Registrations);
}
