// c = sum(dy * weight * x) / count;  dx = rstd * dy * weight - x * rstd^3 * c (+ dh);
// dscale = sum over lines of dy * x * rstd
#pragma once

#include "cpu/convert.h"
#include "cpu/run.h"

namespace normfuse {

template <typename C>
struct Backward {
  static constexpr int kPerLine = 1, kColumns = 1;

  Shape shape;
  Array dy, x, rstd, dh;  // dh: where there is a residual
  Array given_dots;       // BackwardApply only
  Array dx, dots;         // results, each where wanted
  Array dscale_result;
  const C* weight = nullptr;  // (n,)
  double count = 0;           // of the features normalised together, on all devices

  bool reduces() const { return !given_dots; }
  bool applies() const { return static_cast<bool>(dx); }
  C* column_sums(int) const { return static_cast<C*>(dscale_result.data); }

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
      Gradient(tile, gradient, share);
      if (dh) Add(gradient, Read(dh, offset, tile.size(), a), tile.size(), target);
      Commit(target, dx, offset, tile.size());
    });
  }
};

}  // namespace normfuse
