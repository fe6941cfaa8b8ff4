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

template <typename C>
struct Plain {
  const C* a;

  template <int kBytes>
  NORMFUSE_INLINE auto At(int64_t i) const {
    return Load<kBytes>(a + i);
  }
};

template <typename C>
struct PairProduct {
  const C *a, *b;

  template <int kBytes>
  NORMFUSE_INLINE auto At(int64_t i) const {
    return Load<kBytes>(a + i) * Load<kBytes>(b + i);
  }
};

template <typename C>
struct CentredProduct {
  const C *a, *b, *x;
  C mean;

  template <int kBytes>
  NORMFUSE_INLINE auto At(int64_t i) const {
    return Load<kBytes>(a + i) * Load<kBytes>(b + i) * (Load<kBytes>(x + i) - mean);
  }
};

// The same with a mean for each column.
template <typename C>
struct CentredColumns {
  const C *a, *b, *x, *mean;

  template <int kBytes>
  NORMFUSE_INLINE auto At(int64_t i) const {
    const auto centred = Load<kBytes>(x + i) - Load<kBytes>(mean + i);
    return Load<kBytes>(a + i) * Load<kBytes>(b + i) * centred;
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
      const C* weight = t->weight + t->Head(r) * t->n;
      sums[r] += SumTerms<kBytes, C>(Product<C>{t->dy + at, weight, t->x + at}, t->cols);
    }
  }
};

struct DifferencesOfRows {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    constexpr int kLanes = 16;  // running sums, which the compiler makes vectors of
    for (int64_t r = 0; r < t->rows; ++r) {
      const C* x = t->x + r * t->cols;
      const double mean = t->mean[r];
      double first[kLanes] = {}, second[kLanes] = {};
      int64_t i = 0;
      for (; i + kLanes <= t->cols; i += kLanes) {
        for (int k = 0; k < kLanes; ++k) {
          const double centred = double{x[i + k]} - mean;
          first[k] += centred;
          second[k] += centred * centred;
        }
      }
      for (; i < t->cols; ++i) {
        const double centred = double{x[i]} - mean;
        first[0] += centred;
        second[0] += centred * centred;
      }
      sums[2 * r] += SumLanes<kLanes>(first);
      sums[2 * r + 1] += SumLanes<kLanes>(second);
    }
  }
};

struct CentredProductsOfRows {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const C *x = t->x + r * t->cols, *dy = t->dy + r * t->cols;
      const C* weight = t->weight + t->Head(r) * t->n;
      sums[2 * r] += SumTerms<kBytes, C>(PairProduct<C>{dy, weight}, t->cols);
      const CentredProduct<C> product{dy, weight, x, t->mean[r]};
      sums[2 * r + 1] += SumTerms<kBytes, C>(product, t->cols);
    }
  }
};

template <bool kCentred>
struct NormaliseRows {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* y) {
    constexpr int64_t kLanes = Vec<C, kBytes>::kLanes;
    const int64_t cols = t->cols;
    for (int64_t r = 0; r < t->rows; ++r, y += cols) {
      const C *x = t->x + r * cols, *weight = t->weight + t->Head(r) * t->n;
      const C rstd = t->rstd[r];
      int64_t i = 0;
      if constexpr (kCentred) {
        const C mean = t->mean[r], shift = t->shift[r], *bias = t->bias + t->Head(r) * t->n;
        for (; i + kLanes <= cols; i += kLanes) {
          const auto normal = (Load<kBytes>(x + i) - mean) * rstd - shift;
          Store(y + i, normal * Load<kBytes>(weight + i) + Load<kBytes>(bias + i));
        }
        for (; i < cols; ++i) y[i] = ((x[i] - mean) * rstd - shift) * weight[i] + bias[i];
        continue;
      }
      for (; i + kLanes <= cols; i += kLanes) {
        Store(y + i, Load<kBytes>(x + i) * rstd * Load<kBytes>(weight + i));
      }
      for (; i < cols; ++i) y[i] = x[i] * rstd * weight[i];
    }
  }
};

template <bool kDscale, bool kCentred>
struct GradientOfRows {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* dx, C* dscale, C* dbias) {
    int64_t r = 0;
    if (t->heads > 1) {
      Tile<C> row = *t;
      for (; r < t->rows; ++r) {
        const int64_t at = t->Head(r) * t->n;
        row.weight = t->weight + at;
        Rows<1, kBytes>(row, r, dx, kDscale ? dscale + at : dscale,
                        kDscale && kCentred ? dbias + at : dbias);
      }
    }
    for (; r + 4 <= t->rows; r += 4) Rows<4, kBytes>(*t, r, dx, dscale, dbias);
    for (; r + 2 <= t->rows; r += 2) Rows<2, kBytes>(*t, r, dx, dscale, dbias);
    for (; r < t->rows; ++r) Rows<1, kBytes>(*t, r, dx, dscale, dbias);
  }

  // Several rows at once: their shares of dscale are added up before it is touched.
  template <int kRows, int kBytes, typename C>
  static NORMFUSE_INLINE void Rows(const Tile<C>& t, int64_t first, C* dx, C* dscale, C* dbias) {
    const int64_t i = Columns<kRows, kBytes>(t, first, 0, dx, dscale, dbias);
    Columns<kRows, sizeof(C)>(t, first, i, dx, dscale, dbias);
  }

  // Whole vectors of columns from `i`; returns the first column that is left.
  template <int kRows, int kBytes, typename C>
  static NORMFUSE_INLINE int64_t Columns(const Tile<C>& t, int64_t first, int64_t i, C* dx,
                                         C* dscale, [[maybe_unused]] C* dbias) {
    using V = typename Vec<C, kBytes>::Type;
    constexpr int64_t kLanes = Vec<C, kBytes>::kLanes;
    const int64_t cols = t.cols, at = first * cols;
    const C *x = t.x + at, *dy = t.dy + at;
    const C *rstd = t.rstd + first, *correction = t.correction + first;
    dx += at;
    for (; i + kLanes <= cols; i += kLanes) {
      const V weight = Load<kBytes>(t.weight + i);
      V share{}, result[kRows];
      [[maybe_unused]] V more{};
      for (int r = 0; r < kRows; ++r) {
        V v = Load<kBytes>(x + r * cols + i);
        if constexpr (kCentred) v -= t.mean[first + r];
        const V given = Load<kBytes>(dy + r * cols + i), scaled = given * rstd[r];
        result[r] = scaled * weight - v * correction[r];
        if constexpr (kCentred) {
          result[r] -= t.shift[first + r];
          more += given;
        }
        share += scaled * v;
      }
      // After all loads: a store holds up loads from addresses a multiple of 4096 bytes apart.
      for (int r = 0; r < kRows; ++r) Store(dx + r * cols + i, result[r]);
      if (kDscale) Store(dscale + i, Load<kBytes>(dscale + i) + share);
      if (kDscale && kCentred) Store(dbias + i, Load<kBytes>(dbias + i) + more);
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

struct DifferencesOfColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const C* x = t->x + r * t->cols;
      for (int64_t j = 0; j < t->cols; ++j) {
        const double centred = double{x[j]} - double{t->mean[j]};
        sums[2 * j] += centred;
        sums[2 * j + 1] += centred * centred;
      }
    }
  }
};

struct CentredProductsOfColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, double* sums) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const C *x = t->x + r * t->cols, *dy = t->dy + r * t->cols;
      const C weight = t->weight[r];
      for (int64_t j = 0; j < t->cols; ++j) {
        const double g = double{dy[j] * weight};
        sums[2 * j] += g;
        sums[2 * j + 1] += g * double{x[j] - t->mean[j]};
      }
    }
  }
};

template <bool kCentred>
struct NormaliseColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* y) {
    const int64_t cols = t->cols;
    const C* rstd = t->rstd;
    for (int64_t r = 0; r < t->rows; ++r, y += cols) {
      const C* x = t->x + r * cols;
      const C weight = t->weight[r];
      if constexpr (kCentred) {
        const C *mean = t->mean, *shift = t->shift;
        const C bias = t->bias[r];
        for (int64_t j = 0; j < cols; ++j) {
          y[j] = ((x[j] - mean[j]) * rstd[j] - shift[j]) * weight + bias;
        }
        continue;
      }
      for (int64_t j = 0; j < cols; ++j) y[j] = x[j] * rstd[j] * weight;
    }
  }
};

template <bool kCentred>
struct GradientOfColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* dx, C*, C*) {
    const int64_t cols = t->cols;
    const C *rstd = t->rstd, *correction = t->correction;
    for (int64_t r = 0; r < t->rows; ++r, dx += cols) {
      const C *x = t->x + r * cols, *dy = t->dy + r * cols;
      const C weight = t->weight[r];
      if constexpr (kCentred) {
        const C *mean = t->mean, *shift = t->shift;
        for (int64_t j = 0; j < cols; ++j) {
          dx[j] = dy[j] * rstd[j] * weight - (x[j] - mean[j]) * correction[j] - shift[j];
        }
        continue;
      }
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

struct DparametersOfColumns {
  template <int kBytes, typename C>
  static NORMFUSE_INLINE void Run(const Tile<C>* t, C* dscale, C* dbias) {
    for (int64_t r = 0; r < t->rows; ++r) {
      const C *x = t->x + r * t->cols, *dy = t->dy + r * t->cols;
      const CentredColumns<C> product{dy, t->rstd, x, t->mean};
      dscale[r] += SumTerms<kBytes, C>(product, t->cols);
      dbias[r] += SumTerms<kBytes, C>(Plain<C>{dy}, t->cols);
    }
  }
};

// Runs the loop of rows or of columns, of an RMSNorm or of a LayerNorm.
template <template <bool> class Rows, template <bool> class Columns, typename C, typename... A>
void Choose(const Tile<C>& tile, A... a) {
  if (tile.mean != nullptr) {
    tile.down ? Dispatch<Columns<true>>(&tile, a...) : Dispatch<Rows<true>>(&tile, a...);
  } else {
    tile.down ? Dispatch<Columns<false>>(&tile, a...) : Dispatch<Rows<false>>(&tile, a...);
  }
}

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
void AddDifferences(const Tile<C>& tile, double* sums) {
  tile.down ? Dispatch<DifferencesOfColumns>(&tile, sums)
            : Dispatch<DifferencesOfRows>(&tile, sums);
}

template <typename C>
void AddProducts(const Tile<C>& tile, double* sums) {
  if (tile.mean != nullptr) {
    tile.down ? Dispatch<CentredProductsOfColumns>(&tile, sums)
              : Dispatch<CentredProductsOfRows>(&tile, sums);
  } else {
    tile.down ? Dispatch<ProductsOfColumns>(&tile, sums) : Dispatch<ProductsOfRows>(&tile, sums);
  }
}

template <typename C>
void Normalise(const Tile<C>& tile, C* y) {
  Choose<NormaliseRows, NormaliseColumns>(tile, y);
}

template <bool kCentred>
using GradientOfRowsAlone = GradientOfRows<false, kCentred>;
template <bool kCentred>
using GradientOfRowsAndScale = GradientOfRows<true, kCentred>;

template <typename C>
void Gradient(const Tile<C>& tile, C* dx, C* dscale, C* dbias) {
  // dscale first: dx may be the memory of dy or x.
  if (tile.down && dscale != nullptr) {
    tile.mean != nullptr ? Dispatch<DparametersOfColumns>(&tile, dscale, dbias)
                         : Dispatch<DscaleOfColumns>(&tile, dscale);
  }
  if (dscale != nullptr) {
    Choose<GradientOfRowsAndScale, GradientOfColumns>(tile, dx, dscale, dbias);
  } else {
    Choose<GradientOfRowsAlone, GradientOfColumns>(tile, dx, dscale, dbias);
  }
}

#define NORMFUSE_INSTANTIATE(C)                          \
  template void Add(const C*, const C*, int64_t, C*);    \
  template void AddSquares(const Tile<C>&, double*);     \
  template void AddDifferences(const Tile<C>&, double*); \
  template void AddProducts(const Tile<C>&, double*);    \
  template void Normalise(const Tile<C>&, C*);           \
  template void Gradient(const Tile<C>&, C*, C*, C*)

NORMFUSE_INSTANTIATE(float);
NORMFUSE_INSTANTIATE(double);

}  // namespace normfuse
