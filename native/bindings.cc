// The extension module: names of FFI targets and types, and nothing else.
#include <pybind11/pybind11.h>

#include <type_traits>

#include "cpu/elementwise.h"
#include "cpu/quantize.h"
#include "cpu/rms_norm.h"
#include "cuda/launch.h"
#include "xla/ffi/api/c_api.h"

namespace py = pybind11;

namespace {

template <typename Handler>
py::capsule Capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>);
  return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

// {platform: {"types": {name: {"type_id", "type_info"}},
//             "targets": {name: handler, or {stage: handler}}}}
py::dict Registrations() {
  py::dict targets;
  targets["normfuse_rms_norm_forward"] = Capsule(NormfuseRmsNormForward);
  targets["normfuse_rms_norm_row_sums"] = Capsule(NormfuseRmsNormRowSums);
  targets["normfuse_rms_norm_apply"] = Capsule(NormfuseRmsNormApply);
  targets["normfuse_rms_norm_backward"] = Capsule(NormfuseRmsNormBackward);
  targets["normfuse_rms_norm_row_dots"] = Capsule(NormfuseRmsNormRowDots);
  targets["normfuse_rms_norm_backward_apply"] = Capsule(NormfuseRmsNormBackwardApply);
  targets["normfuse_elementwise"] = Capsule(NormfuseElementwise);
  targets["normfuse_quantize_amax"] = Capsule(NormfuseQuantizeAmax);
  targets["normfuse_quantize_cast"] = Capsule(NormfuseQuantizeCast);

  py::dict cuda_types;
  cuda_types["normfuse_launch"] =
      py::dict(py::arg("type_id") = py::capsule(normfuse::cuda::LaunchTypeId()),
               py::arg("type_info") = py::capsule(normfuse::cuda::LaunchTypeInfo()));
  py::dict cuda_targets;
  cuda_targets["normfuse_launch"] =
      py::dict(py::arg("instantiate") = Capsule(NormfuseLaunchInstantiate),
               py::arg("initialize") = Capsule(NormfuseLaunchInitialize),
               py::arg("execute") = Capsule(NormfuseLaunchExecute));

  py::dict platforms;
  platforms["cpu"] = py::dict(py::arg("types") = py::dict(), py::arg("targets") = targets);
  platforms["CUDA"] = py::dict(py::arg("types") = cuda_types, py::arg("targets") = cuda_targets);
  return platforms;
}

}  // namespace

PYBIND11_MODULE(_ext, m) {
  m.doc() = "Native kernels of normfuse; use normfuse.native instead.";
  // (major, minor) of the FFI headers compiled in: an older jaxlib must not see our handlers.
  m.attr("ffi_api_version") = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("registrations", &Registrations);
}
