// c = sum(dy * weight * x) / count;  dx = rstd * dy * weight - x * rstd^3 * c (+ dh);
// dscale = sum over lines of dy * x * rstd;  dbias = sum over lines of dy
#pragma once

#include <vector>

#include "cpu/convert.h"
#include "cpu/run.h"

namespace normfuse {

// `kSums` is 2 where dbias is wanted.
template <typename C, int kSums>
struct BackwardOf {
  static constexpr int kPerLine = 1, kColumns = kSums;

  Shape shape;
  Array dy, x, rstd, dh;  // dh: where there is a residual
  Array given_dots;       // BackwardApply only
  Array dx, dots;         // results, each where wanted
  Array dscale_result, dbias_result;
  const C* weight = nullptr;  // (n,)
  double count = 0;           // of the features normalised together, on all devices

  bool reduces() const { return !given_dots; }
  bool applies() const { return static_cast<bool>(dx); }
  C* column_sums(int which) const {
    return static_cast<C*>(which == 0 ? dscale_result.data : dbias_result.data);
  }

  void Reduce(const Range& lines, const Range& features, double* sums) const {
    C a[kTileSize<C>], b[kTileSize<C>];
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      tile.x = Read(x, offset, tile.size(), a);
      tile.dy = Read(dy, offset, tile.size(), b);
      tile.weight = weight + feature;
      AddProducts(tile, sums);
    });
  }

  void Finish(const Range& lines, const double* line_sums, C* values) const {
    for (int64_t i = 0; i < lines.size(); ++i) {
      const int64_t line = lines.begin + i;
      if (dots) static_cast<C*>(dots.data)[line] = static_cast<C>(line_sums[i]);
      if (!dx) continue;
      const double dot = given_dots ? static_cast<const C*>(given_dots.data)[line] : line_sums[i];
      const double r = static_cast<const C*>(rstd.data)[line];
      values[i] = static_cast<C>(r * r * r * (dot / count));
    }
  }

  void Apply(const Range& lines, const Range& features, const C* values, C* partial) const {
    static const std::vector<C> zeros(kGroupLines);
    C a[kTileSize<C>], b[kTileSize<C>], c[kTileSize<C>];
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      tile.x = Read(x, offset, tile.size(), a);
      tile.dy = Read(dy, offset, tile.size(), b);
      tile.weight = weight + feature;
      tile.rstd = static_cast<const C*>(rstd.data) + lines.begin;
      tile.correction = values;
      // dx may be the memory of dh: it is written when dh has been read.
      C* target = Target(dx, offset, c);
      C* gradient = dh ? c : target;
      C* share = partial == nullptr ? nullptr : partial + (feature - features.begin);
      C* more = nullptr;
      if (kSums == 2) {
        tile.mean = tile.shift = zeros.data();
        if (share != nullptr) more = share + shape.heads * shape.n;
      }
      Gradient(tile, gradient, share, more);
      if (dh) Add(gradient, Read(dh, offset, tile.size(), a), tile.size(), target);
      Commit(target, dx, offset, tile.size());
    });
  }
};

template <typename C>
using Backward = BackwardOf<C, 1>;
template <typename C>
using BackwardAndBias = BackwardOf<C, 2>;

}  // namespace normfuse
