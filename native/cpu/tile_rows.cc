#include "cpu/tile.h"
#include "cpu/vec.h"

namespace normfuse {
namespace {

template <typename C>
struct Square {
  const C* x;

  NORMFUSE_INLINE C at(int64_t i) const { return x[i] * x[i]; }
  NORMFUSE_INLINE typename Vec<C>::Type vector(int64_t i) const {
    const auto v = LoadVec(x + i);
    return v * v;
  }
};

template <typename C>
struct Product {
  const C* dy;
  const C* weight;
  const C* x;

  NORMFUSE_INLINE C at(int64_t i) const { return dy[i] * weight[i] * x[i]; }
  NORMFUSE_INLINE typename Vec<C>::Type vector(int64_t i) const {
    return LoadVec(dy + i) * LoadVec(weight + i) * LoadVec(x + i);
  }
};

template <typename C>
NORMFUSE_CLONES void AddLoop(const C* a, const C* b, int64_t count, C* sum) {
  constexpr int64_t kLanes = Vec<C>::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) StoreVec(sum + i, LoadVec(a + i) + LoadVec(b + i));
  for (; i < count; ++i) sum[i] = a[i] + b[i];
}

template <typename C>
NORMFUSE_CLONES void SquaresLoop(const Tile<C>& t, double* sums) {
  for (int64_t r = 0; r < t.rows; ++r) {
    sums[r] += SumTerms<C>(Square<C>{t.x + r * t.cols}, t.cols);
  }
}

template <typename C>
NORMFUSE_CLONES void ProductsLoop(const Tile<C>& t, double* sums) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t at = r * t.cols;
    sums[r] += SumTerms<C>(Product<C>{t.dy + at, t.weight, t.x + at}, t.cols);
  }
}

template <typename C>
NORMFUSE_CLONES void NormaliseLoop(const Tile<C>& t, C* y) {
  constexpr int64_t kLanes = Vec<C>::kLanes;
  for (int64_t r = 0; r < t.rows; ++r, y += t.cols) {
    const C* x = t.x + r * t.cols;
    const C rstd = t.rstd[r];
    int64_t i = 0;
    for (; i + kLanes <= t.cols; i += kLanes) {
      StoreVec(y + i, LoadVec(x + i) * rstd * LoadVec(t.weight + i));
    }
    for (; i < t.cols; ++i) y[i] = x[i] * rstd * t.weight[i];
  }
}

// kRows rows at once: their shares of dscale are added up before it is touched.
template <int kRows, bool kDscale, typename C>
NORMFUSE_INLINE void GradientOfSome(const Tile<C>& t, int64_t first, C* dx, C* dscale) {
  using V = typename Vec<C>::Type;
  constexpr int64_t kLanes = Vec<C>::kLanes;
  const int64_t cols = t.cols, at = first * cols;
  const C *x = t.x + at, *dy = t.dy + at;
  const C *rstd = t.rstd + first, *correction = t.correction + first;
  dx += at;
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) {
    const V weight = LoadVec(t.weight + i);
    V share{}, result[kRows];
    for (int r = 0; r < kRows; ++r) {
      const V v = LoadVec(x + r * cols + i), scaled = LoadVec(dy + r * cols + i) * rstd[r];
      result[r] = scaled * weight - v * correction[r];
      share += scaled * v;
    }
    // After all loads: a store holds up loads from addresses that differ by a multiple of 4096
    // bytes.
    for (int r = 0; r < kRows; ++r) StoreVec(dx + r * cols + i, result[r]);
    if (kDscale) StoreVec(dscale + i, LoadVec(dscale + i) + share);
  }
  for (; i < cols; ++i) {
    C share{};
    for (int r = 0; r < kRows; ++r) {
      const C v = x[r * cols + i], scaled = dy[r * cols + i] * rstd[r];
      dx[r * cols + i] = scaled * t.weight[i] - v * correction[r];
      share += scaled * v;
    }
    if (kDscale) dscale[i] += share;
  }
}

template <bool kDscale, typename C>
NORMFUSE_CLONES void GradientLoop(const Tile<C>& t, C* dx, C* dscale) {
  int64_t r = 0;
  for (; r + 4 <= t.rows; r += 4) GradientOfSome<4, kDscale>(t, r, dx, dscale);
  for (; r + 2 <= t.rows; r += 2) GradientOfSome<2, kDscale>(t, r, dx, dscale);
  for (; r < t.rows; ++r) GradientOfSome<1, kDscale>(t, r, dx, dscale);
}

}  // namespace

template <typename C>
void Add(const C* a, const C* b, int64_t count, C* sum) {
  AddLoop(a, b, count, sum);
}

template <typename C>
void SquaresOfRows(const Tile<C>& tile, double* sums) {
  SquaresLoop(tile, sums);
}

template <typename C>
void ProductsOfRows(const Tile<C>& tile, double* sums) {
  ProductsLoop(tile, sums);
}

template <typename C>
void NormaliseRows(const Tile<C>& tile, C* y) {
  NormaliseLoop(tile, y);
}

template <typename C>
void GradientOfRows(const Tile<C>& tile, C* dx, C* dscale) {
  dscale == nullptr ? GradientLoop<false>(tile, dx, dscale) : GradientLoop<true>(tile, dx, dscale);
}

#define NORMFUSE_INSTANTIATE(C)                          \
  template void Add(const C*, const C*, int64_t, C*);    \
  template void SquaresOfRows(const Tile<C>&, double*);  \
  template void ProductsOfRows(const Tile<C>&, double*); \
  template void NormaliseRows(const Tile<C>&, C*);       \
  template void GradientOfRows(const Tile<C>&, C*, C*)

NORMFUSE_INSTANTIATE(float);
NORMFUSE_INSTANTIATE(double);

}  // namespace normfuse
