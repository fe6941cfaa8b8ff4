// The inner loops of RMSNorm over one tile: `rows` x `cols` elements, dense in memory.
//
// Statistics (sums, rstd, corrections) belong to a line of n elements that are normalised together.
// In the Rows kernels a line runs along a tile's row: one statistic a row, one weight a column. In
// the Columns kernels (normalised axis not last) it runs down a column: one statistic a column, one
// weight a row. Sums go on in double from tile to tile. Outputs may be the inputs' own memory.
#ifndef NORMFUSE_CPU_TILE_H_
#define NORMFUSE_CPU_TILE_H_

#include <cstdint>

namespace normfuse {

template <typename C>
struct Tile {
  int64_t rows, cols;
  const C* x;
  const C* dy = nullptr;
  const C* weight = nullptr;      // scale + scale_offset
  const C* rstd = nullptr;        // a statistic each
  const C* correction = nullptr;  // rstd^3 * sum(dy * weight * x) / count, a statistic each
};

// a + b
template <typename C>
void Add(const C* a, const C* b, int64_t count, C* sum);

// sums += x^2, and sums += dy * weight * x, along the lines
template <typename C>
void SquaresOfRows(const Tile<C>& tile, double* sums);
template <typename C>
void SquaresOfColumns(const Tile<C>& tile, double* sums);
template <typename C>
void ProductsOfRows(const Tile<C>& tile, double* sums);
template <typename C>
void ProductsOfColumns(const Tile<C>& tile, double* sums);

// y = x * rstd * weight
template <typename C>
void NormaliseRows(const Tile<C>& tile, C* y);
template <typename C>
void NormaliseColumns(const Tile<C>& tile, C* y);

// dx = dy * rstd * weight - x * correction; where `dscale` is given, dscale += dy * x * rstd across
// the lines
template <typename C>
void GradientOfRows(const Tile<C>& tile, C* dx, C* dscale);
template <typename C>
void GradientOfColumns(const Tile<C>& tile, C* dx, C* dscale);

}  // namespace normfuse

#endif  // NORMFUSE_CPU_TILE_H_
