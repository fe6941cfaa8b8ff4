// h = x + residual, or x;  rstd = 1 / sqrt(mean((h - mean)^2) + eps)
// y = (h - mean) * rstd * weight (+ bias), with mean 0 unless kCentred, and (h - mean) * rstd
// rounded to the dtype of h first if cast_before
//
// For a mean one pass adds up differences to a line's first element, and their squares, in double.
// That element is at most sqrt(n) standard deviations from the mean, so that the variance, which is
// a difference of these sums, loses log2(n) of the 53 bits at worst.
#pragma once

#include <cmath>
#include <vector>

#include "cpu/convert.h"
#include "cpu/run.h"

namespace normfuse {

template <typename C, bool kCentred>
struct Forward {
  static constexpr int kSums = kCentred ? 2 : 1, kValues = kCentred ? 3 : 1, kColumns = 1;

  Shape shape;
  Array x, residual, h;          // residual and h: both or neither
  Array given_mean, given_rstd;  // Apply only
  Array y, mean, rstd, squares;  // results, each where wanted
  const C* weight = nullptr;     // (heads, n), where y is wanted
  const C* bias = nullptr;       // (heads, n), where there is one, and always if kCentred
  double eps = 0;
  bool cast_before = false;

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
    if (kCentred) Firsts(lines, firsts);
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t, Tile<C> tile) {
      tile.x = Read(x, offset, tile.size(), a);
      if (residual) {  // the sum as it is stored: statistics and y come from the rounded values
        C* sum = Target(h, offset, a);
        Add(tile.x, Read(residual, offset, tile.size(), b), tile.size(), sum);
        Commit(sum, h, offset, tile.size());
        tile.x = Read(h, offset, tile.size(), a);
      }
      tile.mean = firsts;
      kCentred ? AddDifferences(tile, sums) : AddSquares(tile, sums);
    });
  }

  // The values are rstd and, if kCentred, the mean and what its rounding has lost, times rstd.
  void Finish(const Range& lines, const double* sums, C* values) const {
    C firsts[kGroupLines];
    for (int64_t i = 0; i < lines.size(); ++i, sums += kSums, values += kValues) {
      const int64_t line = lines.begin + i, at = i % kGroupLines;
      const auto of_line = [line](const Array& array) -> C& {
        return static_cast<C*>(array.data)[line];
      };
      double squared = sums[0], lost = 0;
      if (given_rstd) {
        values[0] = of_line(given_rstd);
        if (kCentred) values[1] = of_line(given_mean), values[2] = 0;
        continue;
      }
      if constexpr (kCentred) {
        if (at == 0) Firsts({line, std::min(line + kGroupLines, lines.end)}, firsts);
        const double apart = sums[0] / shape.n;
        squared = sums[1] - sums[0] * apart;
        if (squared < 0) squared = 0;  // NaN stays NaN
        values[1] = static_cast<C>(firsts[at] + apart);
        lost = apart - (double{values[1]} - firsts[at]);
        if (mean) of_line(mean) = values[1];
      }
      const double inverse = 1 / std::sqrt(squared / shape.n + eps);
      values[0] = static_cast<C>(inverse);
      if (kCentred) values[2] = static_cast<C>(lost * inverse);
      if (rstd) of_line(rstd) = values[0];
      if (squares) of_line(squares) = static_cast<C>(squared);
    }
  }

  void Apply(const Range& lines, const Range& features, const C* values, C*) const {
    static const std::vector<C> ones(kTileSize<C>, 1), zeros(kGroupLines);
    C a[kTileSize<C>], b[kTileSize<C>];
    const Unzipped<C, kValues> known(values, lines.size());
    const Array normalised = residual ? h : x;
    const bool rounds = cast_before && normalised.dtype != kComputeDtype<C>;
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      tile.x = Read(normalised, offset, tile.size(), a);
      tile.rstd = known.at[0];
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
      if (bias != nullptr) tile.bias = bias + feature, tile.mean = tile.shift = zeros.data();
      if (kCentred) tile.mean = known.at[kCentred], tile.shift = known.at[2 * kCentred];
      C* target = Target(y, offset, b);
      Normalise(tile, target);
      Commit(target, y, offset, tile.size());
    });
  }
};

}  // namespace normfuse
