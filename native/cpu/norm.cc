// RMSNorm, and LayerNorm if `centred`, on the CPU: typed FFI handlers.
//
// Every array is float64, float32, bfloat16 or float16, in any mix. C, the compute type, is float64
// where one of them is, else float32; mean, rstd, squares, sums, dots, dscale and dbias have it.
// Shapes: x, residual, h, y, dy, dh, dx (outer, n, inner); scale, bias, dscale, dbias (n,), or
// (heads, n) where line i has those of head i % heads; mean, rstd, squares, sums, dots (outer,
// inner). Operands marked [] are there when the attribute says so, mean and sums when `centred`
// does. weight = scale + scale_offset, or 1 without a scale.
#include <memory>

#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/handlers.h"
#include "cpu/operands.h"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

// A parameter plus `offset` in the compute type, or `missing` everywhere without one; if nothing
// changes, the parameter's own memory.
template <typename C>
class Parameter {
 public:
  Parameter(const Array& given, double offset, C missing, int64_t n) {
    if (given && given.dtype == kComputeDtype<C> && offset == 0) {
      data_ = static_cast<const C*>(given.data);
      return;
    }
    owned_ = Allocate<C>(n);
    data_ = owned_.get();
    if (!owned_) return;
    if (given) Widen(given, 0, n, owned_.get());
    for (int64_t i = 0; i < n; ++i)
      owned_[i] = given ? owned_[i] + static_cast<C>(offset) : missing;
  }

  const C* data() const { return data_; }  // null when there is no memory

 private:
  std::unique_ptr<C[]> owned_;
  const C* data_;
};

// Runs a kernel, given in both compute types, in the one that the operands ask for; `fill` is given
// the kernel, and the bias in that type: zeros where there is none and `takes_bias`.
template <template <typename> class Kernel, typename Fill>
ffi::Error Dispatch(Operands& operands, ffi::ThreadPool& pool, const Array& scale,
                    double scale_offset, const Array& bias, bool takes_bias, const Fill& fill) {
  if (auto error = operands.error()) return *error;
  auto run = [&](auto kernel, auto zero) {
    using C = decltype(zero);
    // Without lines n may be any number, and no memory stands behind it.
    const Shape& shape = operands.shape();
    const int64_t n = shape.lines() > 0 ? shape.heads * shape.n : 0;
    const Parameter<C> weight(scale, scale_offset, 1, n);
    const Parameter<C> shift(bias, 0, 0, takes_bias ? n : 0);
    if (weight.data() == nullptr || shift.data() == nullptr) return OutOfMemory();
    kernel.shape = shape;
    kernel.weight = weight.data();
    fill(kernel, takes_bias ? shift.data() : nullptr);
    return Run<C>(kernel, pool);
  };
  return operands.compute_in_double() ? run(Kernel<double>(), double{}) : run(Kernel<float>(), 0.f);
}

template <typename C>
using RmsForward = Forward<C, false>;
template <typename C>
using LayerForward = Forward<C, true>;
template <typename C>
using RmsBackward = Backward<C, false, 1>;
template <typename C>
using RmsBackwardAndBias = Backward<C, false, 2>;
template <typename C>
using LayerBackward = Backward<C, true, 2>;

template <typename Fill>
ffi::Error RunForward(bool centred, Operands& take, ffi::ThreadPool& pool, const Array& scale,
                      double scale_offset, const Array& bias, const Fill& fill) {
  const bool takes_bias = centred || bias;
  return centred ? Dispatch<LayerForward>(take, pool, scale, scale_offset, bias, takes_bias, fill)
                 : Dispatch<RmsForward>(take, pool, scale, scale_offset, bias, takes_bias, fill);
}

template <typename Fill>
ffi::Error RunBackward(bool centred, bool with_dbias, Operands& take, ffi::ThreadPool& pool,
                       const Array& scale, double scale_offset, const Fill& fill) {
  return centred ? Dispatch<LayerBackward>(take, pool, scale, scale_offset, {}, false, fill)
         : with_dbias
             ? Dispatch<RmsBackwardAndBias>(take, pool, scale, scale_offset, {}, false, fill)
             : Dispatch<RmsBackward>(take, pool, scale, scale_offset, {}, false, fill);
}

ffi::Error ForwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       bool centred, double scale_offset, bool has_scale, bool cast_before,
                       bool has_bias, double eps, bool has_residual, bool with_mean,
                       bool with_rstd) {
  Operands take("normfuse_norm_forward", args, rets);
  const Array x = take.Operand(kActivation, "x");
  const Array residual = take.Operand(kActivation, "residual", has_residual);
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array bias = take.Operand(kScale, "bias", has_bias);
  const Array y = take.Result(kActivation, "y");
  const Array h = take.Result(kActivation, "h", has_residual);
  const Array mean = take.Result(kStatistics, "mean", centred && with_mean);
  const Array rstd = take.Result(kStatistics, "rstd", with_rstd);
  auto fill = [&](auto& kernel, const auto* shift) {
    kernel.x = x, kernel.residual = residual, kernel.y = y, kernel.h = h;
    kernel.mean = mean, kernel.rstd = rstd, kernel.bias = shift;
    kernel.eps = eps, kernel.cast_before = cast_before;
  };
  return RunForward(centred, take, pool, scale, scale_offset, bias, fill);
}

ffi::Error RowStatisticsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             bool centred) {
  Operands take("normfuse_norm_row_statistics", args, rets);
  const Array x = take.Operand(kActivation, "x");
  const Array mean = take.Result(kStatistics, "mean", centred);
  const Array squares = take.Result(kStatistics, "squares");
  auto fill = [&](auto& kernel, const auto*) {
    kernel.x = x, kernel.mean = mean, kernel.squares = squares;
  };
  return RunForward(centred, take, pool, {}, 0, {}, fill);
}

ffi::Error ApplyImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     bool centred, double scale_offset, bool has_scale, bool cast_before,
                     bool has_bias) {
  Operands take("normfuse_norm_apply", args, rets);
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array bias = take.Operand(kScale, "bias", has_bias);
  const Array mean = take.Operand(kStatistics, "mean", centred);
  const Array rstd = take.Operand(kStatistics, "rstd");
  const Array y = take.Result(kActivation, "y");
  auto fill = [&](auto& kernel, const auto* shift) {
    kernel.x = x, kernel.given_mean = mean, kernel.given_rstd = rstd, kernel.y = y;
    kernel.bias = shift, kernel.cast_before = cast_before;
  };
  return RunForward(centred, take, pool, scale, scale_offset, bias, fill);
}

// Backward; or, where there is a `count`, BackwardApply, whose sums and dots are given.
template <typename... Count>
ffi::Error BackwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        bool centred, double scale_offset, bool has_scale, bool has_residual,
                        bool with_dscale, bool with_dbias, Count... count) {
  constexpr bool kApply = sizeof...(Count) > 0;
  Operands take(kApply ? "normfuse_norm_backward_apply" : "normfuse_norm_backward", args, rets);
  const Array dy = take.Operand(kActivation, "dy");
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array mean = take.Operand(kStatistics, "mean", centred);
  const Array rstd = take.Operand(kStatistics, "rstd");
  const Array dh = take.Operand(kActivation, "dh", has_residual);
  const Array sums = take.Operand(kStatistics, "sums", kApply && centred);
  const Array dots = take.Operand(kStatistics, "dots", kApply);
  const Array dx = take.Result(kActivation, "dx");
  const Array dscale = take.Result(kScale, "dscale", with_dscale);
  const Array dbias = take.Result(kScale, "dbias", with_dbias);
  auto fill = [&](auto& kernel, const auto*) {
    kernel.dy = dy, kernel.x = x, kernel.mean = mean, kernel.rstd = rstd, kernel.dh = dh;
    kernel.given_sums = sums, kernel.given_dots = dots;
    kernel.dx = dx, kernel.dscale = dscale, kernel.dbias = dbias;
    kernel.count = kApply ? (count + ... + 0.0) : static_cast<double>(take.shape().n);
  };
  return RunBackward(centred, with_dbias, take, pool, scale, scale_offset, fill);
}

ffi::Error RowDotsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       bool centred, double scale_offset, bool has_scale) {
  Operands take("normfuse_norm_row_dots", args, rets);
  const Array dy = take.Operand(kActivation, "dy");
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array mean = take.Operand(kStatistics, "mean", centred);
  const Array sums = take.Result(kStatistics, "sums", centred);
  const Array dots = take.Result(kStatistics, "dots");
  auto fill = [&](auto& kernel, const auto*) {
    kernel.dy = dy, kernel.x = x, kernel.mean = mean, kernel.sums = sums, kernel.dots = dots;
  };
  return RunBackward(centred, false, take, pool, scale, scale_offset, fill);
}

auto Variadic() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<bool>(
      "centred");
}
auto Scaled() { return Variadic().Attr<double>("scale_offset").Attr<bool>("has_scale"); }
auto ForwardAttributes() { return Scaled().Attr<bool>("cast_before").Attr<bool>("has_bias"); }
auto GradientAttributes() {
  return Scaled().Attr<bool>("has_residual").Attr<bool>("with_dscale").Attr<bool>("with_dbias");
}

}  // namespace
}  // namespace normfuse

// (x[, residual][, scale][, bias]) -> (y[, h][, mean][, rstd])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseNormForward, normfuse::ForwardImpl,
                              normfuse::ForwardAttributes()
                                  .Attr<double>("eps")
                                  .Attr<bool>("has_residual")
                                  .Attr<bool>("with_mean")
                                  .Attr<bool>("with_rstd"));
// (x) -> ([mean,] squares)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseNormRowStatistics, normfuse::RowStatisticsImpl,
                              normfuse::Variadic());
// (x[, scale][, bias][, mean], rstd) -> (y)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseNormApply, normfuse::ApplyImpl,
                              normfuse::ForwardAttributes());
// (dy, x[, scale][, mean], rstd[, dh]) -> (dx[, dscale][, dbias])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseNormBackward, normfuse::BackwardImpl<>,
                              normfuse::GradientAttributes());
// (dy, x[, scale][, mean]) -> ([sums,] dots)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseNormRowDots, normfuse::RowDotsImpl, normfuse::Scaled());
// (dy, x[, scale][, mean], rstd[, dh][, sums], dots) -> (dx[, dscale][, dbias])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseNormBackwardApply, normfuse::BackwardImpl<double>,
                              normfuse::GradientAttributes().Attr<double>("count"));
