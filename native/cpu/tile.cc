#include "cpu/tile.h"

#include "cpu/vec.h"

namespace normfuse {
namespace {

template <typename C>
struct Square {
  const C* x;

  template <int kBytes>
  NORMFUSE_INLINE auto At(int64_t i) const {
    const auto v = Load<kBytes>(x + i);
    return v * v;
  }
};

template <typename C>
struct Product {
  const C *a, *b, *c;

  template <int kBytes>
  NORMFUSE_INLINE auto At(int64_t i) const {
    return Load<kBytes>(a + i) * Load<kBytes>(b + i) * Load<kBytes>(c + i);
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

// ---------------------------------------------------------------- lines along the tile's rows

struct SquaresOfRows {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      sums[r] += SumTerms<kBytes, C>(Square<C>{t->x + r * t->cols}, t->cols);
    }
  }
};

struct ProductsOfRows {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const int64_t at = r * t->cols;
      sums[r] += SumTerms<kBytes, C>(Product<C>{t->dy + at, t->weight, t->x + at}, t->cols);
    }
  }
};

struct NormaliseRows {
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
struct GradientOfRows {
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
    const int64_t i = Columns<kRows, kBytes>(t, first, 0, dx, dscale);
    Columns<kRows, sizeof(C)>(t, first, i, dx, dscale);
  }

  // Whole vectors of columns from `i`; returns the first column that is left.
  template <int kRows, int kBytes, typename C>
  static NORMFUSE_INLINE int64_t Columns(const Tile<C>& t, int64_t first, int64_t i, C* dx,
                                         C* dscale) {
    using V = typename Vec<C, kBytes>::Type;
    constexpr int64_t kLanes = Vec<C, kBytes>::kLanes;
    const int64_t cols = t.cols, at = first * cols;
    const C *x = t.x + at, *dy = t.dy + at;
    const C *rstd = t.rstd + first, *correction = t.correction + first;
    dx += at;
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
    return i;
  }
};

// ---------------------------------------------------------------- lines down the tile's columns

// Plain loops over a tile's row, which the compiler vectorises. A column's sum is a chain of as
// many additions as there are elements in its line: it runs in double.

struct SquaresOfColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const C* x = t->x + r * t->cols;
      for (int64_t j = 0; j < t->cols; ++j) sums[j] += double{x[j]} * double{x[j]};
    }
  }
};

struct ProductsOfColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const C *x = t->x + r * t->cols, *dy = t->dy + r * t->cols;
      const C weight = t->weight[r];
      for (int64_t j = 0; j < t->cols; ++j) sums[j] += double{dy[j] * weight} * double{x[j]};
    }
  }
};

struct NormaliseColumns {
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

struct GradientOfColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* dx) {
    const int64_t cols = t->cols;
    const C *rstd = t->rstd, *correction = t->correction;
    for (int64_t r = 0; r < t->rows; ++r, dx += cols) {
      const C *x = t->x + r * cols, *dy = t->dy + r * cols;
      const C weight = t->weight[r];
      for (int64_t j = 0; j < cols; ++j) dx[j] = dy[j] * rstd[j] * weight - x[j] * correction[j];
    }
  }
};

struct DscaleOfColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* dscale) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const int64_t at = r * t->cols;
      dscale[r] += SumTerms<kBytes, C>(Product<C>{t->dy + at, t->x + at, t->rstd}, t->cols);
    }
  }
};

}  // namespace

template <typename C>
void Add(const C* a, const C* b, int64_t count, C* sum) {
  Dispatch<AddLoop>(a, b, count, sum);
}

template <typename C>
void AddSquares(const Tile<C>& tile, double* sums) {
  tile.down ? Dispatch<SquaresOfColumns>(&tile, sums) : Dispatch<SquaresOfRows>(&tile, sums);
}

template <typename C>
void AddProducts(const Tile<C>& tile, double* sums) {
  tile.down ? Dispatch<ProductsOfColumns>(&tile, sums) : Dispatch<ProductsOfRows>(&tile, sums);
}

template <typename C>
void Normalise(const Tile<C>& tile, C* y) {
  tile.down ? Dispatch<NormaliseColumns>(&tile, y) : Dispatch<NormaliseRows>(&tile, y);
}

template <typename C>
void Gradient(const Tile<C>& tile, C* dx, C* dscale) {
  if (tile.down) {
    // dscale first: dx may be the memory of dy or x.
    if (dscale != nullptr) Dispatch<DscaleOfColumns>(&tile, dscale);
    Dispatch<GradientOfColumns>(&tile, dx);
  } else if (dscale != nullptr) {
    Dispatch<GradientOfRows<true>>(&tile, dx, dscale);
  } else {
    Dispatch<GradientOfRows<false>>(&tile, dx, dscale);
  }
}

#define NORMFUSE_INSTANTIATE(C)                       \
  template void Add(const C*, const C*, int64_t, C*); \
  template void AddSquares(const Tile<C>&, double*);  \
  template void AddProducts(const Tile<C>&, double*); \
  template void Normalise(const Tile<C>&, C*);        \
  template void Gradient(const Tile<C>&, C*, C*)

NORMFUSE_INSTANTIATE(float);
NORMFUSE_INSTANTIATE(double);

}  // namespace normfuse
