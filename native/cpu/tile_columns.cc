#include "cpu/tile.h"
#include "cpu/vec.h"

namespace normfuse {
namespace {

// Plain loops over a tile's row, which the compiler vectorises. A column's sum is a chain of as
// many additions as there are elements in its line: it runs in double.

template <typename C>
NORMFUSE_CLONES void SquaresLoop(const Tile<C>& t, double* sums) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const C* x = t.x + r * t.cols;
    for (int64_t j = 0; j < t.cols; ++j) sums[j] += double{x[j]} * double{x[j]};
  }
}

template <typename C>
NORMFUSE_CLONES void ProductsLoop(const Tile<C>& t, double* sums) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const C* x = t.x + r * t.cols;
    const C* dy = t.dy + r * t.cols;
    const C weight = t.weight[r];
    for (int64_t j = 0; j < t.cols; ++j) sums[j] += double{dy[j] * weight} * double{x[j]};
  }
}

template <typename C>
NORMFUSE_CLONES void NormaliseLoop(const Tile<C>& t, C* y) {
  for (int64_t r = 0; r < t.rows; ++r, y += t.cols) {
    const C* x = t.x + r * t.cols;
    const C weight = t.weight[r];
    for (int64_t j = 0; j < t.cols; ++j) y[j] = x[j] * t.rstd[j] * weight;
  }
}

template <typename C>
NORMFUSE_CLONES void GradientLoop(const Tile<C>& t, C* dx) {
  for (int64_t r = 0; r < t.rows; ++r, dx += t.cols) {
    const C* x = t.x + r * t.cols;
    const C* dy = t.dy + r * t.cols;
    const C weight = t.weight[r];
    for (int64_t j = 0; j < t.cols; ++j) {
      dx[j] = dy[j] * t.rstd[j] * weight - x[j] * t.correction[j];
    }
  }
}

template <typename C>
struct Share {  // of dscale
  const C* dy;
  const C* x;
  const C* rstd;

  NORMFUSE_INLINE C at(int64_t j) const { return dy[j] * x[j] * rstd[j]; }
  NORMFUSE_INLINE typename Vec<C>::Type vector(int64_t j) const {
    return LoadVec(dy + j) * LoadVec(x + j) * LoadVec(rstd + j);
  }
};

template <typename C>
NORMFUSE_CLONES void SharesLoop(const Tile<C>& t, C* dscale) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = r * t.cols;
    dscale[r] += SumTerms<C>(Share<C>{t.dy + at, t.x + at, t.rstd}, t.cols);
  }
}

}  // namespace

template <typename C>
void SquaresOfColumns(const Tile<C>& tile, double* sums) {
  SquaresLoop(tile, sums);
}

template <typename C>
void ProductsOfColumns(const Tile<C>& tile, double* sums) {
  ProductsLoop(tile, sums);
}

template <typename C>
void NormaliseColumns(const Tile<C>& tile, C* y) {
  NormaliseLoop(tile, y);
}

template <typename C>
void GradientOfColumns(const Tile<C>& tile, C* dx, C* dscale) {
  if (dscale != nullptr) SharesLoop(tile, dscale);  // first: dx may be the memory of dy or x
  GradientLoop(tile, dx);
}

#define NORMFUSE_INSTANTIATE(C)                             \
  template void SquaresOfColumns(const Tile<C>&, double*);  \
  template void ProductsOfColumns(const Tile<C>&, double*); \
  template void NormaliseColumns(const Tile<C>&, C*);       \
  template void GradientOfColumns(const Tile<C>&, C*, C*)

NORMFUSE_INSTANTIATE(float);
NORMFUSE_INSTANTIATE(double);

}  // namespace normfuse
