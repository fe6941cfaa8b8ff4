// h = x + residual, or x;  rstd = 1 / sqrt(mean(h^2) + eps);  y = h * rstd * weight (+ bias), with
// h * rstd rounded to the dtype of h first if cast_before
#pragma once

#include <cmath>
#include <vector>

#include "cpu/convert.h"
#include "cpu/run.h"

namespace normfuse {

template <typename C>
struct Forward {
  static constexpr int kPerLine = 1, kColumns = 1;

  Shape shape;
  Array x, residual, h;       // residual and h: both or neither
  Array given_rstd;           // Apply only
  Array y, rstd, sums;        // results, each where wanted
  const C* weight = nullptr;  // (heads, n), where y is wanted
  const C* bias = nullptr;    // (heads, n), where there is one
  double eps = 0;
  bool cast_before = false;

  bool reduces() const { return !given_rstd; }
  bool applies() const { return static_cast<bool>(y); }
  C* column_sums(int) const { return nullptr; }

  void Reduce(const Range& lines, const Range& features, double* sums) const {
    C a[kTileSize<C>], b[kTileSize<C>];
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t, Tile<C> tile) {
      tile.x = Read(x, offset, tile.size(), a);
      if (residual) {  // the sum as it is stored: statistics and y come from the rounded values
        C* sum = Target(h, offset, a);
        Add(tile.x, Read(residual, offset, tile.size(), b), tile.size(), sum);
        Commit(sum, h, offset, tile.size());
        tile.x = Read(h, offset, tile.size(), a);
      }
      AddSquares(tile, sums);
    });
  }

  void Finish(const Range& lines, const double* line_sums, C* values) const {
    for (int64_t i = 0; i < lines.size(); ++i) {
      const int64_t line = lines.begin + i;
      if (sums) static_cast<C*>(sums.data)[line] = static_cast<C>(line_sums[i]);
      values[i] = given_rstd ? static_cast<const C*>(given_rstd.data)[line]
                             : static_cast<C>(1 / std::sqrt(line_sums[i] / shape.n + eps));
      if (rstd) static_cast<C*>(rstd.data)[line] = values[i];
    }
  }

  void Apply(const Range& lines, const Range& features, const C* values, C*) const {
    static const std::vector<C> ones(kTileSize<C>, 1), zeros(kGroupLines);
    C a[kTileSize<C>], b[kTileSize<C>];
    const Array normalised = residual ? h : x;
    const bool rounds = cast_before && normalised.dtype != kComputeDtype<C>;
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      tile.x = Read(normalised, offset, tile.size(), a);
      tile.rstd = values;
      if (rounds) {
        Tile<C> once = tile;
        once.weight = ones.data(), once.heads = 1;
        Normalise(once, a);
        const Array narrow{b, normalised.dtype};
        Narrow(a, narrow, 0, tile.size());
        Widen(narrow, 0, tile.size(), a);
        tile.rstd = ones.data();
      }
      tile.weight = weight + feature;
      if (bias != nullptr) tile.bias = bias + feature, tile.mean = zeros.data();
      C* target = Target(y, offset, b);
      Normalise(tile, target);
      Commit(target, y, offset, tile.size());
    });
  }
};

}  // namespace normfuse
