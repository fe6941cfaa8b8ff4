// What the FFI handlers of the norms share.
#pragma once

#include <memory>

#include "cpu/convert.h"
#include "cpu/operands.h"
#include "cpu/run.h"
#include "xla/ffi/api/ffi.h"

namespace normfuse {

// The weights in the compute type; they are the scale's own memory where nothing is to be done.
template <typename C>
class Weight {
 public:
  Weight(const Array& scale, double offset, int64_t n) {
    if (scale && scale.dtype == kComputeDtype<C> && offset == 0) {
      data_ = static_cast<const C*>(scale.data);
      return;
    }
    owned_ = Allocate<C>(n);
    data_ = owned_.get();
    if (!owned_) return;
    if (scale) Widen(scale, 0, n, owned_.get());
    for (int64_t i = 0; i < n; ++i) owned_[i] = scale ? owned_[i] + static_cast<C>(offset) : C{1};
  }

  const C* data() const { return data_; }  // null when there is no memory

 private:
  std::unique_ptr<C[]> owned_;
  const C* data_;
};

// Runs a kernel, given in both compute types, in the one that the operands ask for; `fill` is given
// the kernel, and the bias in that type or null.
template <template <typename> class Kernel, typename Fill>
xla::ffi::Error DispatchBiased(Operands& operands, xla::ffi::ThreadPool& pool, const Array& scale,
                               double scale_offset, const Array& bias, const Fill& fill) {
  if (auto error = operands.error()) return *error;
  auto run = [&](auto kernel, auto zero) {
    using C = decltype(zero);
    // Without lines n may be any number, and no memory stands behind it.
    const Shape& shape = operands.shape();
    const int64_t n = shape.lines() > 0 ? shape.heads * shape.n : 0;
    const Weight<C> weight(scale, scale_offset, n);
    const Weight<C> shift(bias, 0, bias ? n : 0);
    if (weight.data() == nullptr || shift.data() == nullptr) return OutOfMemory();
    kernel.shape = shape;
    kernel.weight = weight.data();
    fill(kernel, bias ? shift.data() : nullptr);
    return Run<C>(kernel, pool);
  };
  return operands.compute_in_double() ? run(Kernel<double>(), double{}) : run(Kernel<float>(), 0.f);
}

template <template <typename> class Kernel, typename Fill>
xla::ffi::Error Dispatch(Operands& operands, xla::ffi::ThreadPool& pool, const Array& scale,
                         double scale_offset, const Fill& fill) {
  return DispatchBiased<Kernel>(operands, pool, scale, scale_offset, {},
                                [&](auto& kernel, const auto*) { fill(kernel); });
}

inline auto Variadic() {
  return xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets();
}
inline auto Scaled() { return Variadic().Attr<double>("scale_offset").Attr<bool>("has_scale"); }
inline auto GradientAttributes() {
  return Scaled().Attr<bool>("has_residual").Attr<bool>("with_dscale").Attr<bool>("with_dbias");
}

}  // namespace normfuse
