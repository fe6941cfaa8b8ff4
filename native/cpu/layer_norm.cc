// LayerNorm on the CPU: typed FFI handlers.
//
// Arrays are as in rms_norm.cc; bias and dbias are like scale and dscale, mean and squares like
// rstd. Operands marked [] are there when the attribute says so.
#include <cmath>

#include "cpu/handler.h"
#include "cpu/handlers.h"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

constexpr bool kMayHaveHeads = false;

// Two numbers of each line, as they lie, as two arrays.
template <typename C>
struct Pairs {
  C first[kGroupLines], second[kGroupLines];

  Pairs(const C* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) first[i] = values[2 * i], second[i] = values[2 * i + 1];
  }
};

// h = x + residual, or x;  rstd = 1 / sqrt(mean((h - mean)^2) + eps)
// y = (h - mean) * rstd * weight + bias
//
// One pass adds up differences to a line's first element, and their squares, in double. That
// element is at most sqrt(n) standard deviations from the mean, so that the variance, which is a
// difference of these sums, loses log2(n) of the 53 bits at worst.
template <typename C>
struct LayerForward {
  static constexpr int kPerLine = 2, kColumns = 1;

  Shape shape;
  Array x, residual, h;                       // residual and h: both or neither
  Array given_mean, given_rstd;               // Apply only
  Array bias, y, mean, rstd, squares_wanted;  // bias, if any; results, each where wanted
  const C* weight = nullptr;                  // (n,), where y is wanted
  double eps = 0;

  bool reduces() const { return !given_rstd; }
  bool applies() const { return static_cast<bool>(y); }
  C* column_sums(int) const { return nullptr; }

  // The first elements of h of up to kGroupLines lines.
  void Firsts(const Range& lines, C* firsts) const {
    C a[kGroupLines], b[kGroupLines];
    for (int64_t line = lines.begin, count; line < lines.end; line += count) {
      const int64_t column = line % shape.inner;
      count = std::min(lines.end - line, shape.inner - column);
      const int64_t offset = line / shape.inner * shape.n * shape.inner + column;
      const C* from = Read(x, offset, count, a);
      C* to = firsts + (line - lines.begin);
      if (residual) {  // not rounded as h is: any number near the line's will do
        Add(from, Read(residual, offset, count, b), count, to);
      } else {
        std::copy(from, from + count, to);
      }
    }
  }

  void Reduce(const Range& lines, const Range& features, double* sums) const {
    C a[kTileSize<C>], b[kTileSize<C>], firsts[kGroupLines];
    Firsts(lines, firsts);
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t, Tile<C> tile) {
      tile.x = Read(x, offset, tile.size(), a);
      if (residual) {  // the sum as it is stored: statistics and y come from the rounded values
        C* sum = Target(h, offset, a);
        Add(tile.x, Read(residual, offset, tile.size(), b), tile.size(), sum);
        Commit(sum, h, offset, tile.size());
        tile.x = Read(h, offset, tile.size(), a);
      }
      tile.mean = firsts;
      AddDifferences(tile, sums);
    });
  }

  void Finish(const Range& lines, const double* sums, C* values) const {
    C firsts[kGroupLines];
    for (int64_t i = 0; i < lines.size(); ++i, values += 2) {
      const int64_t line = lines.begin + i, at = i % kGroupLines;
      if (given_rstd) {
        values[0] = static_cast<const C*>(given_mean.data)[line];
        values[1] = static_cast<const C*>(given_rstd.data)[line];
        continue;
      }
      if (at == 0) Firsts({line, std::min(line + kGroupLines, lines.end)}, firsts);
      const double first = sums[2 * i], squares = sums[2 * i + 1] - first * (first / shape.n);
      const double squared = squares < 0 ? 0 : squares;  // NaN stays NaN
      values[0] = static_cast<C>(firsts[at] + first / shape.n);
      values[1] = static_cast<C>(1 / std::sqrt(squared / shape.n + eps));
      if (mean) static_cast<C*>(mean.data)[line] = values[0];
      if (rstd) static_cast<C*>(rstd.data)[line] = values[1];
      if (squares_wanted) static_cast<C*>(squares_wanted.data)[line] = static_cast<C>(squared);
    }
  }

  void Apply(const Range& lines, const Range& features, const C* values, C*) const {
    C a[kTileSize<C>], b[kTileSize<C>], c[kTileSize<C>] = {};
    const Pairs<C> known(values, lines.size());
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      tile.x = Read(residual ? h : x, offset, tile.size(), a);
      tile.weight = weight + feature;
      tile.bias = bias ? Read(bias, feature, tile.down ? tile.rows : tile.cols, c) : c;
      tile.mean = known.first;
      tile.rstd = known.second;
      C* target = Target(y, offset, b);
      Normalise(tile, target);
      Commit(target, y, offset, tile.size());
    });
  }
};

// a = sum(dy * weight) / count;  b = sum(dy * weight * (x - mean)) / count
// dx = rstd * (dy * weight - a) - (x - mean) * rstd^3 * b (+ dh)
// dscale = sum over lines of dy * (x - mean) * rstd;  dbias = sum over lines of dy
template <typename C>
struct LayerBackward {
  static constexpr int kPerLine = 2, kColumns = 2;

  Shape shape;
  Array dy, x, mean, rstd, dh;   // dh: where there is a residual
  Array given_sums, given_dots;  // BackwardApply only
  Array dx, sums, dots;          // results, each where wanted
  Array dscale, dbias;
  const C* weight = nullptr;  // (n,)
  double count = 0;           // of the features normalised together, on all devices

  bool reduces() const { return !given_dots; }
  bool applies() const { return static_cast<bool>(dx); }
  C* column_sums(int which) const { return static_cast<C*>(which == 0 ? dscale.data : dbias.data); }

  Tile<C> Terms(Tile<C> tile, const Range& lines, int64_t offset, int64_t feature, C* a,
                C* b) const {
    tile.x = Read(x, offset, tile.size(), a);
    tile.dy = Read(dy, offset, tile.size(), b);
    tile.weight = weight + feature;
    tile.mean = static_cast<const C*>(mean.data) + lines.begin;
    return tile;
  }

  void Reduce(const Range& lines, const Range& features, double* sums) const {
    C a[kTileSize<C>], b[kTileSize<C>];
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      AddProducts(Terms(tile, lines, offset, feature, a, b), sums);
    });
  }

  void Finish(const Range& lines, const double* line_sums, C* values) const {
    for (int64_t i = 0; i < lines.size(); ++i) {
      const int64_t line = lines.begin + i;
      const auto at = [line](const Array& array) -> C& {
        return static_cast<C*>(array.data)[line];
      };
      if (sums) at(sums) = static_cast<C>(line_sums[2 * i]);
      if (dots) at(dots) = static_cast<C>(line_sums[2 * i + 1]);
      if (!dx) continue;
      const double sum = given_sums ? at(given_sums) : line_sums[2 * i];
      const double dot = given_dots ? at(given_dots) : line_sums[2 * i + 1];
      const double r = at(rstd);
      values[2 * i] = static_cast<C>(r * (sum / count));
      values[2 * i + 1] = static_cast<C>(r * r * r * (dot / count));
    }
  }

  void Apply(const Range& lines, const Range& features, const C* values, C* partial) const {
    C a[kTileSize<C>], b[kTileSize<C>], c[kTileSize<C>];
    const Pairs<C> known(values, lines.size());
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      tile = Terms(tile, lines, offset, feature, a, b);
      tile.rstd = static_cast<const C*>(rstd.data) + lines.begin;
      tile.shift = known.first;
      tile.correction = known.second;
      C* target = Target(dx, offset, c);
      C* gradient = dh ? c : target;
      C* share = partial == nullptr ? nullptr : partial + (feature - features.begin);
      Gradient(tile, gradient, share, share == nullptr ? nullptr : share + shape.n);
      if (dh) Add(gradient, Read(dh, offset, tile.size(), a), tile.size(), target);
      Commit(target, dx, offset, tile.size());
    });
  }
};

ffi::Error ForwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       double scale_offset, bool has_scale, double eps, bool has_bias,
                       bool has_residual, bool with_mean, bool with_rstd) {
  Operands take("normfuse_layer_norm_forward", args, rets, kMayHaveHeads);
  const Array x = take.Operand(kActivation, "x");
  const Array residual = take.Operand(kActivation, "residual", has_residual);
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array bias = take.Operand(kScale, "bias", has_bias);
  const Array y = take.Result(kActivation, "y");
  const Array h = take.Result(kActivation, "h", has_residual);
  const Array mean = take.Result(kStatistics, "mean", with_mean);
  const Array rstd = take.Result(kStatistics, "rstd", with_rstd);
  return Dispatch<LayerForward>(take, pool, scale, scale_offset, [&](auto& kernel) {
    kernel.x = x, kernel.residual = residual, kernel.bias = bias, kernel.y = y, kernel.h = h;
    kernel.mean = mean, kernel.rstd = rstd, kernel.eps = eps;
  });
}

ffi::Error RowStatisticsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args,
                             ffi::RemainingRets rets) {
  Operands take("normfuse_layer_norm_row_statistics", args, rets, kMayHaveHeads);
  const Array x = take.Operand(kActivation, "x");
  const Array mean = take.Result(kStatistics, "mean");
  const Array squares = take.Result(kStatistics, "squares");
  return Dispatch<LayerForward>(take, pool, {}, 0, [&](auto& kernel) {
    kernel.x = x, kernel.mean = mean, kernel.squares_wanted = squares;
  });
}

ffi::Error ApplyImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     double scale_offset, bool has_scale, bool has_bias) {
  Operands take("normfuse_layer_norm_apply", args, rets, kMayHaveHeads);
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array bias = take.Operand(kScale, "bias", has_bias);
  const Array mean = take.Operand(kStatistics, "mean");
  const Array rstd = take.Operand(kStatistics, "rstd");
  const Array y = take.Result(kActivation, "y");
  return Dispatch<LayerForward>(take, pool, scale, scale_offset, [&](auto& kernel) {
    kernel.x = x, kernel.bias = bias, kernel.given_mean = mean, kernel.given_rstd = rstd;
    kernel.y = y;
  });
}

// Backward; or, where there is a `count`, BackwardApply, whose sums are given.
template <typename... Count>
ffi::Error BackwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        double scale_offset, bool has_scale, bool has_residual, bool with_dscale,
                        bool with_dbias, Count... count) {
  constexpr bool kApply = sizeof...(Count) > 0;
  Operands take(kApply ? "normfuse_layer_norm_backward_apply" : "normfuse_layer_norm_backward",
                args, rets, kMayHaveHeads);
  const Array dy = take.Operand(kActivation, "dy");
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array mean = take.Operand(kStatistics, "mean");
  const Array rstd = take.Operand(kStatistics, "rstd");
  const Array dh = take.Operand(kActivation, "dh", has_residual);
  const Array sums = take.Operand(kStatistics, "sums", kApply);
  const Array dots = take.Operand(kStatistics, "dots", kApply);
  const Array dx = take.Result(kActivation, "dx");
  const Array dscale = take.Result(kScale, "dscale", with_dscale);
  const Array dbias = take.Result(kScale, "dbias", with_dbias);
  return Dispatch<LayerBackward>(take, pool, scale, scale_offset, [&](auto& kernel) {
    kernel.dy = dy, kernel.x = x, kernel.mean = mean, kernel.rstd = rstd, kernel.dh = dh;
    kernel.given_sums = sums, kernel.given_dots = dots;
    kernel.dx = dx, kernel.dscale = dscale, kernel.dbias = dbias;
    kernel.count = kApply ? (count + ... + 0.0) : static_cast<double>(take.shape().n);
  });
}

ffi::Error RowDotsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       double scale_offset, bool has_scale) {
  Operands take("normfuse_layer_norm_row_dots", args, rets, kMayHaveHeads);
  const Array dy = take.Operand(kActivation, "dy");
  const Array x = take.Operand(kActivation, "x");
  const Array scale = take.Operand(kScale, "scale", has_scale);
  const Array mean = take.Operand(kStatistics, "mean");
  const Array sums = take.Result(kStatistics, "sums");
  const Array dots = take.Result(kStatistics, "dots");
  return Dispatch<LayerBackward>(take, pool, scale, scale_offset, [&](auto& kernel) {
    kernel.dy = dy, kernel.x = x, kernel.mean = mean, kernel.sums = sums, kernel.dots = dots;
  });
}

}  // namespace
}  // namespace normfuse

// (x[, residual][, scale][, bias]) -> (y[, h][, mean][, rstd])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLayerNormForward, normfuse::ForwardImpl,
                              normfuse::Scaled()
                                  .Attr<double>("eps")
                                  .Attr<bool>("has_bias")
                                  .Attr<bool>("has_residual")
                                  .Attr<bool>("with_mean")
                                  .Attr<bool>("with_rstd"));
// (x) -> (mean, squares)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLayerNormRowStatistics, normfuse::RowStatisticsImpl,
                              normfuse::Variadic());
// (x[, scale][, bias], mean, rstd) -> (y)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLayerNormApply, normfuse::ApplyImpl,
                              normfuse::Scaled().Attr<bool>("has_bias"));
// (dy, x[, scale], mean, rstd[, dh]) -> (dx[, dscale][, dbias])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLayerNormBackward, normfuse::BackwardImpl<>,
                              normfuse::GradientAttributes());
// (dy, x[, scale], mean) -> (sums, dots)
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLayerNormRowDots, normfuse::RowDotsImpl, normfuse::Scaled());
// (dy, x[, scale], mean, rstd[, dh], sums, dots) -> (dx[, dscale][, dbias])
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLayerNormBackwardApply, normfuse::BackwardImpl<double>,
                              normfuse::GradientAttributes().Attr<double>("count"));
