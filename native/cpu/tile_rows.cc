#include "cpu/tile.h"
#include "cpu/vec.h"

namespace normfuse {
namespace {

template <typename C>
struct Square {
  const C* x;

  NORMFUSE_INLINE C At(int64_t i) const { return x[i] * x[i]; }
  template <int kBytes>
  NORMFUSE_INLINE auto Vector(int64_t i) const {
    const auto v = Load<kBytes>(x + i);
    return v * v;
  }
};

template <typename C>
struct Product {
  const C* dy;
  const C* weight;
  const C* x;

  NORMFUSE_INLINE C At(int64_t i) const { return dy[i] * weight[i] * x[i]; }
  template <int kBytes>
  NORMFUSE_INLINE auto Vector(int64_t i) const {
    return Load<kBytes>(dy + i) * Load<kBytes>(weight + i) * Load<kBytes>(x + i);
  }
};

struct AddLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const C* a, const C* b, int64_t count, C* sum) {
    constexpr int64_t kLanes = Vec<C, kBytes>::kLanes;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Store(sum + i, Load<kBytes>(a + i) + Load<kBytes>(b + i));
    }
    for (; i < count; ++i) sum[i] = a[i] + b[i];
  }
};

struct SquaresLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      sums[r] += SumTerms<kBytes, C>(Square<C>{t->x + r * t->cols}, t->cols);
    }
  }
};

struct ProductsLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const int64_t at = r * t->cols;
      sums[r] += SumTerms<kBytes, C>(Product<C>{t->dy + at, t->weight, t->x + at}, t->cols);
    }
  }
};

struct NormaliseLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* y) {
    constexpr int64_t kLanes = Vec<C, kBytes>::kLanes;
    const int64_t cols = t->cols;
    for (int64_t r = 0; r < t->rows; ++r, y += cols) {
      const C* x = t->x + r * cols;
      const C rstd = t->rstd[r];
      int64_t i = 0;
      for (; i + kLanes <= cols; i += kLanes) {
        Store(y + i, Load<kBytes>(x + i) * rstd * Load<kBytes>(t->weight + i));
      }
      for (; i < cols; ++i) y[i] = x[i] * rstd * t->weight[i];
    }
  }
};

template <bool kDscale>
struct GradientLoop {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* dx, C* dscale) {
    int64_t r = 0;
    for (; r + 4 <= t->rows; r += 4) Rows<4, kBytes>(*t, r, dx, dscale);
    for (; r + 2 <= t->rows; r += 2) Rows<2, kBytes>(*t, r, dx, dscale);
    for (; r < t->rows; ++r) Rows<1, kBytes>(*t, r, dx, dscale);
  }

  // Several rows at once: their shares of dscale are added up before it is touched.
  template <int kRows, int kBytes, typename C>
  static NORMFUSE_INLINE void Rows(const Tile<C>& t, int64_t first, C* dx, C* dscale) {
    using V = typename Vec<C, kBytes>::Type;
    constexpr int64_t kLanes = Vec<C, kBytes>::kLanes;
    const int64_t cols = t.cols, at = first * cols;
    const C *x = t.x + at, *dy = t.dy + at;
    const C *rstd = t.rstd + first, *correction = t.correction + first;
    dx += at;
    int64_t i = 0;
    for (; i + kLanes <= cols; i += kLanes) {
      const V weight = Load<kBytes>(t.weight + i);
      V share{}, result[kRows];
      for (int r = 0; r < kRows; ++r) {
        const V v = Load<kBytes>(x + r * cols + i);
        const V scaled = Load<kBytes>(dy + r * cols + i) * rstd[r];
        result[r] = scaled * weight - v * correction[r];
        share += scaled * v;
      }
      // After all loads: a store holds up loads from addresses a multiple of 4096 bytes apart.
      for (int r = 0; r < kRows; ++r) Store(dx + r * cols + i, result[r]);
      if (kDscale) Store(dscale + i, Load<kBytes>(dscale + i) + share);
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
};

}  // namespace

template <typename C>
void Add(const C* a, const C* b, int64_t count, C* sum) {
  Dispatch<AddLoop>(a, b, count, sum);
}

template <typename C>
void SquaresOfRows(const Tile<C>& tile, double* sums) {
  Dispatch<SquaresLoop>(&tile, sums);
}

template <typename C>
void ProductsOfRows(const Tile<C>& tile, double* sums) {
  Dispatch<ProductsLoop>(&tile, sums);
}

template <typename C>
void NormaliseRows(const Tile<C>& tile, C* y) {
  Dispatch<NormaliseLoop>(&tile, y);
}

template <typename C>
void GradientOfRows(const Tile<C>& tile, C* dx, C* dscale) {
  if (dscale == nullptr) {
    Dispatch<GradientLoop<false>>(&tile, dx, dscale);
  } else {
    Dispatch<GradientLoop<true>>(&tile, dx, dscale);
  }
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
