// RMSNorm on the CPU: typed FFI handlers.
//
// Every array is float64, float32, bfloat16 or float16, in any mix. C, the compute type, is float64
// where one of them is, else float32; rstd, sums, dots and dscale have it. Shapes: x, residual, h,
// y, dy, dh, dx (outer, n, inner); scale, bias, dscale, dbias (n,), or (heads, n) where line i has
// those of head i % heads; rstd, sums, dots (outer, inner). Operands marked [] are there when the
// attribute says so. weight = scale + scale_offset, or 1 without a scale.
#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/handler.h"
#include "cpu/handlers.h"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error ForwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       double scale_offset, bool has_scale, bool cast_before, bool has_bias,
                       double eps, bool has_residual, bool with_rstd) {
  Operands take("normfuse_rms_norm_forward", args, rets);
  const Array x = take.Operand(kActivation, "x");
  const Array residual = take.Operand(kActivation, "residual", has_residual);
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array bias = take.Operand(kScale, "bias", has_bias);
  const Array y = take.Result(kActivation, "y");
  const Array h = take.Result(kActivation, "h", has_residual);
  const Array rstd = take.Result(kStatistics, "rstd", with_rstd);
  auto fill = [&](auto& kernel, const auto* shift) {
    kernel.x = x, kernel.residual = residual, kernel.y = y, kernel.h = h, kernel.rstd = rstd;
    kernel.bias = shift, kernel.eps = eps, kernel.cast_before = cast_before;
  };
  return DispatchBiased<Forward>(take, pool, scale, scale_offset, bias, fill);
}

ffi::Error RowSumsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Operands take("normfuse_rms_norm_row_sums", args, rets);
  const Array x = take.Operand(kActivation, "x");
  const Array sums = take.Result(kStatistics, "sums");
  return Dispatch<Forward>(take, pool, {}, 0,
                           [&](auto& kernel) { kernel.x = x, kernel.sums = sums; });
}

ffi::Error ApplyImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     double scale_offset, bool has_scale, bool cast_before, bool has_bias) {
  Operands take("normfuse_rms_norm_apply", args, rets);
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array bias = take.Operand(kScale, "bias", has_bias);
  const Array rstd = take.Operand(kStatistics, "rstd");
  const Array y = take.Result(kActivation, "y");
  auto fill = [&](auto& kernel, const auto* shift) {
    kernel.x = x, kernel.given_rstd = rstd, kernel.y = y;
    kernel.bias = shift, kernel.cast_before = cast_before;
  };
  return DispatchBiased<Forward>(take, pool, scale, scale_offset, bias, fill);
}

// Backward; or, where there is a `count`, BackwardApply, whose dots are given.
template <typename... Count>
ffi::Error BackwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        double scale_offset, bool has_scale, bool has_residual, bool with_dscale,
                        bool with_dbias, Count... count) {
  constexpr bool kApply = sizeof...(Count) > 0;
  Operands take(kApply ? "normfuse_rms_norm_backward_apply" : "normfuse_rms_norm_backward", args,
                rets);
  const Array dy = take.Operand(kActivation, "dy");
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array rstd = take.Operand(kStatistics, "rstd");
  const Array dh = take.Operand(kActivation, "dh", has_residual);
  const Array dots = take.Operand(kStatistics, "dots", kApply);
  const Array dx = take.Result(kActivation, "dx");
  const Array dscale = take.Result(kScale, "dscale", with_dscale);
  const Array dbias = take.Result(kScale, "dbias", with_dbias);
  auto fill = [&](auto& kernel) {
    kernel.dy = dy, kernel.x = x, kernel.rstd = rstd, kernel.dh = dh, kernel.given_dots = dots;
    kernel.dx = dx, kernel.dscale_result = dscale, kernel.dbias_result = dbias;
    kernel.count = kApply ? (count + ... + 0.0) : static_cast<double>(take.shape().n);
  };
  return with_dbias ? Dispatch<BackwardAndBias>(take, pool, scale, scale_offset, fill)
                    : Dispatch<Backward>(take, pool, scale, scale_offset, fill);
}

ffi::Error RowDotsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       double scale_offset, bool has_scale) {
  Operands take("normfuse_rms_norm_row_dots", args, rets);
  const Array dy = take.Operand(kActivation, "dy");
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array dots = take.Result(kStatistics, "dots");
  return Dispatch<Backward>(take, pool, scale, scale_offset, [&](auto& kernel) {
    kernel.dy = dy, kernel.x = x, kernel.dots = dots;
  });
}

auto ForwardAttributes() { return Scaled().Attr<bool>("cast_before").Attr<bool>("has_bias"); }

}  // namespace
}  // namespace normfuse

// (x[, residual][, scale][, bias]) -> (y[, h][, rstd])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseRmsNormForward, normfuse::ForwardImpl,
                              normfuse::ForwardAttributes()
                                  .Attr<double>("eps")
                                  .Attr<bool>("has_residual")
                                  .Attr<bool>("with_rstd"));
// (x) -> (sums)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseRmsNormRowSums, normfuse::RowSumsImpl, normfuse::Variadic());
// (x[, scale][, bias], rstd) -> (y)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseRmsNormApply, normfuse::ApplyImpl,
                              normfuse::ForwardAttributes());
// (dy, x[, scale], rstd[, dh]) -> (dx[, dscale][, dbias])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseRmsNormBackward, normfuse::BackwardImpl<>,
                              normfuse::GradientAttributes());
// (dy, x[, scale]) -> (dots)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseRmsNormRowDots, normfuse::RowDotsImpl, normfuse::Scaled());
// (dy, x[, scale], rstd[, dh], dots) -> (dx[, dscale][, dbias])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseRmsNormBackwardApply, normfuse::BackwardImpl<double>,
                              normfuse::GradientAttributes().Attr<double>("count"));
