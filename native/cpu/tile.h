// The inner loops of the norms over one tile: `rows` x `cols` elements, dense in memory.
//
// Statistics (sums, rstd, corrections) belong to a line of n elements that are normalised together.
// A line runs along a tile's row: one statistic a row, one weight a column; or, where the
// normalised axis is not the last, down a column: one statistic a column, one weight a row. Sums go
// on in double from tile to tile. Outputs may be the inputs' own memory.
#pragma once

#include <cstdint>

namespace normfuse {

template <typename C>
struct Tile {
  int64_t rows, cols;
  bool down;  // lines run down the columns
  const C* x = nullptr;
  const C* dy = nullptr;
  // If lines run along rows, the parameters of the tile's row r start `n` * Head(r) after the
  // first.
  int64_t n = 0, heads = 1, line = 0;
  const C* weight = nullptr;      // scale + scale_offset
  const C* rstd = nullptr;        // a statistic each
  const C* correction = nullptr;  // rstd^3 * sum(dy * weight * x) / count, a statistic each
  // LayerNorm only (x above means x - mean). Null for an RMSNorm, or zeros if it has a bias or its
  // gradient.
  const C* mean = nullptr;
  const C* bias = nullptr;
  // A statistic each: rstd * sum(dy * weight) / count, or rstd * what the mean has lost in
  // rounding.
  const C* shift = nullptr;

  int64_t size() const { return rows * cols; }
  int64_t Head(int64_t row) const { return heads == 1 ? 0 : (line + row) % heads; }
};

// a + b
template <typename C>
void Add(const C* a, const C* b, int64_t count, C* sum);

// sums += x^2 along the lines
template <typename C>
void AddSquares(const Tile<C>& tile, double* sums);

// sums += (x - mean, (x - mean)^2) along the lines, in pairs, for any `mean`; all in double
template <typename C>
void AddDifferences(const Tile<C>& tile, double* sums);

// sums += dy * weight * x along the lines; of a LayerNorm (dy * weight, dy * weight * (x - mean)),
// in pairs
template <typename C>
void AddProducts(const Tile<C>& tile, double* sums);

// y = x * rstd * weight, or ((x - mean) * rstd - shift) * weight + bias
template <typename C>
void Normalise(const Tile<C>& tile, C* y);

// dx = dy * rstd * weight - x * correction, or dy * rstd * weight - shift - (x - mean) *
// correction; where `dscale` is given, dscale += dy * x * rstd across the lines, and of a LayerNorm
// dbias += dy
template <typename C>
void Gradient(const Tile<C>& tile, C* dx, C* dscale, C* dbias = nullptr);

}  // namespace normfuse
