// The inner loops of RMSNorm over one tile: `rows` x `cols` elements, dense in memory.
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
  bool down;  // whether lines run down the columns
  const C* x;
  const C* dy = nullptr;
  const C* weight = nullptr;      // scale + scale_offset
  const C* rstd = nullptr;        // a statistic each
  const C* correction = nullptr;  // rstd^3 * sum(dy * weight * x) / count, a statistic each

  int64_t size() const { return rows * cols; }
};

// a + b
template <typename C>
void Add(const C* a, const C* b, int64_t count, C* sum);

// sums += x^2 along the lines
template <typename C>
void AddSquares(const Tile<C>& tile, double* sums);

// sums += dy * weight * x along the lines
template <typename C>
void AddProducts(const Tile<C>& tile, double* sums);

// y = x * rstd * weight
template <typename C>
void Normalise(const Tile<C>& tile, C* y);

// dx = dy * rstd * weight - x * correction; where `dscale` is given, dscale += dy * x * rstd across
// the lines
template <typename C>
void Gradient(const Tile<C>& tile, C* dx, C* dscale);

}  // namespace normfuse
