#include "cpu/tile.h"
#include "cpu/vec.h"

namespace normfuse {
namespace {

// Plain loops over a tile's row, which the compiler vectorises. A column's sum is a chain of as
// many additions as there are elements in its line: it runs in double.

struct SquaresLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const C* x = t->x + r * t->cols;
      for (int64_t j = 0; j < t->cols; ++j) sums[j] += double{x[j]} * double{x[j]};
    }
  }
};

struct ProductsLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const C* x = t->x + r * t->cols;
      const C* dy = t->dy + r * t->cols;
      const C weight = t->weight[r];
      for (int64_t j = 0; j < t->cols; ++j) sums[j] += double{dy[j] * weight} * double{x[j]};
    }
  }
};

struct NormaliseLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* y) {
    const int64_t cols = t->cols;
    const C* rstd = t->rstd;
    for (int64_t r = 0; r < t->rows; ++r, y += cols) {
      const C* x = t->x + r * cols;
      const C weight = t->weight[r];
      for (int64_t j = 0; j < cols; ++j) y[j] = x[j] * rstd[j] * weight;
    }
  }
};

struct GradientLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* dx) {
    const int64_t cols = t->cols;
    const C *rstd = t->rstd, *correction = t->correction;
    for (int64_t r = 0; r < t->rows; ++r, dx += cols) {
      const C* x = t->x + r * cols;
      const C* dy = t->dy + r * cols;
      const C weight = t->weight[r];
      for (int64_t j = 0; j < cols; ++j) dx[j] = dy[j] * rstd[j] * weight - x[j] * correction[j];
    }
  }
};

template <typename C>
struct Share {  // of dscale
  const C* dy;
  const C* x;
  const C* rstd;

  NORMFUSE_INLINE C At(int64_t j) const { return dy[j] * x[j] * rstd[j]; }
  template <int kBytes>
  NORMFUSE_INLINE auto Vector(int64_t j) const {
    return Load<kBytes>(dy + j) * Load<kBytes>(x + j) * Load<kBytes>(rstd + j);
  }
};

struct SharesLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* dscale) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const int64_t at = r * t->cols;
      dscale[r] += SumTerms<kBytes, C>(Share<C>{t->dy + at, t->x + at, t->rstd}, t->cols);
    }
  }
};

}  // namespace

template <typename C>
void SquaresOfColumns(const Tile<C>& tile, double* sums) {
  Dispatch<SquaresLoop>(&tile, sums);
}

template <typename C>
void ProductsOfColumns(const Tile<C>& tile, double* sums) {
  Dispatch<ProductsLoop>(&tile, sums);
}

template <typename C>
void NormaliseColumns(const Tile<C>& tile, C* y) {
  Dispatch<NormaliseLoop>(&tile, y);
}

template <typename C>
void GradientOfColumns(const Tile<C>& tile, C* dx, C* dscale) {
  if (dscale != nullptr)
    Dispatch<SharesLoop>(&tile, dscale);  // first: dx may be the memory of dy or x
  Dispatch<GradientLoop>(&tile, dx);
}

#define NORMFUSE_INSTANTIATE(C)                             \
  template void SquaresOfColumns(const Tile<C>&, double*);  \
  template void ProductsOfColumns(const Tile<C>&, double*); \
  template void NormaliseColumns(const Tile<C>&, C*);       \
  template void GradientOfColumns(const Tile<C>&, C*, C*)

NORMFUSE_INSTANTIATE(float);
NORMFUSE_INSTANTIATE(double);

}  // namespace normfuse
