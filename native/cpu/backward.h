// a = sum(dy * weight) / count;  b = sum(dy * weight * (x - mean)) / count
// dx = rstd * (dy * weight - a) - (x - mean) * rstd^3 * b (+ dh), with mean and a 0 unless
// kCentred; dscale = sum over lines of dy * (x - mean) * rstd;  dbias = sum over lines of dy
#pragma once

#include <vector>

#include "cpu/convert.h"
#include "cpu/run.h"

namespace normfuse {

// `kParameters` is 2 where dbias may be wanted.
template <typename C, bool kCentred, int kParameters>
struct Backward {
  static constexpr int kSums = kCentred ? 2 : 1, kValues = kSums, kColumns = kParameters;

  Shape shape;
  Array dy, x, mean, rstd, dh;   // mean: if kCentred; dh: where there is a residual
  Array given_sums, given_dots;  // BackwardApply only
  Array dx, sums, dots;          // results, each where wanted
  Array dscale, dbias;
  const C* weight = nullptr;  // (heads, n)
  double count = 0;           // number of features normalised together, over all devices

  bool reduces() const { return !given_dots; }
  bool applies() const { return static_cast<bool>(dx); }
  C* column_sums(int which) const { return static_cast<C*>(which == 0 ? dscale.data : dbias.data); }

  Tile<C> Terms(Tile<C> tile, const Range& lines, int64_t offset, int64_t feature, C* a,
                C* b) const {
    tile.x = Read(x, offset, tile.size(), a);
    tile.dy = Read(dy, offset, tile.size(), b);
    tile.weight = weight + feature;
    if (kCentred) tile.mean = static_cast<const C*>(mean.data) + lines.begin;
    return tile;
  }

  void Reduce(const Range& lines, const Range& features, double* line_sums) const {
    C a[kTileSize<C>], b[kTileSize<C>];
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      AddProducts(Terms(tile, lines, offset, feature, a, b), line_sums);
    });
  }

  // The values are correction and, if kCentred, shift of the tiles.
  void Finish(const Range& lines, const double* line_sums, C* values) const {
    for (int64_t i = 0; i < lines.size(); ++i, line_sums += kSums, values += kValues) {
      const int64_t line = lines.begin + i;
      const auto at = [line](const Array& array) -> C& {
        return static_cast<C*>(array.data)[line];
      };
      if (sums) at(sums) = static_cast<C>(line_sums[0]);
      if (dots) at(dots) = static_cast<C>(line_sums[kCentred]);
      if (!dx) continue;
      const double dot = given_dots ? at(given_dots) : line_sums[kCentred];
      const double r = at(rstd);
      values[0] = static_cast<C>(r * r * r * (dot / count));
      if constexpr (kCentred) {
        const double sum = given_sums ? at(given_sums) : line_sums[0];
        values[1] = static_cast<C>(r * (sum / count));
      }
    }
  }

  void Apply(const Range& lines, const Range& features, const C* values, C* partial) const {
    static const std::vector<C> zeros(kGroupLines);
    C a[kTileSize<C>], b[kTileSize<C>], c[kTileSize<C>];
    const Unzipped<C, kValues> known(values, lines.size());
    ForEachTile<C>(shape, lines, features, [&](int64_t offset, int64_t feature, Tile<C> tile) {
      tile = Terms(tile, lines, offset, feature, a, b);
      tile.rstd = static_cast<const C*>(rstd.data) + lines.begin;
      tile.correction = known.at[0];
      // dx may be the memory of dh: it is written when dh has been read.
      C* target = Target(dx, offset, c);
      C* gradient = dh ? c : target;
      C* share = partial == nullptr ? nullptr : partial + (feature - features.begin);
      C* more = nullptr;
      if (kParameters == 2) {
        tile.shift = kCentred ? known.at[kCentred] : zeros.data();
        if (!kCentred) tile.mean = zeros.data();
        if (share != nullptr) more = share + shape.heads * shape.n;
      }
      Gradient(tile, gradient, share, more);
      if (dh) Add(gradient, Read(dh, offset, tile.size(), a), tile.size(), target);
      Commit(target, dx, offset, tile.size());
    });
  }
};

}  // namespace normfuse
