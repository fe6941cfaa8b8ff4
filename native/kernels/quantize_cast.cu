// FP8 codes of a matrix, as it lies and transposed, in one pass over memory:
//
//   q[i][j] = qt[j][i] = round(x[i][j] / scale)      scale = a power of two, from max(maxima)
//
//   x       (rows, columns)   X_TYPE: float, __nv_bfloat16 or __half
//   maxima  (count,)          float: their largest is a bound on the magnitudes of x
//   q       (rows, columns)   e4m3 or, with E5M2, e5m2; where HAS_Q
//   qt      (columns, rows)   where HAS_QT
//   scale   (1,)              float: x ≈ scale · q
//
// VECTORS says that rows and columns are multiples of 16; with other shapes, or with pointers that
// are not aligned, elements are moved one by one.
#include "fp8_tile.cuh"

using Element = X_TYPE;

template <bool kVectors>
__device__ inline void run(const Element* x, const float* maxima, Fp8* q, Fp8* qt, float* scale,
                           long long rows, long long columns, long long count, int group) {
  __shared__ int warps[kThreads / 32];
  const Tile first = tile_of(rows, columns, group, blockIdx.x);
  const Part part = part_of(first, rows, columns);
  Packed<Element, kColumns> loaded[BATCH];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      loaded[i] = load_row<kVectors>(x, part, begin + i, columns);
    }
  };
  load(0);
  // While the first elements are on their way.
  const Scale by = scale_of(largest_of<kThreads>(maxima, count, warps));
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = by.scale;
  const auto encode_row = [&](int, int i, unsigned (&codes)[2]) {
    Wide<float, kColumns> wide = widen_all<float>(loaded[i % BATCH]);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) wide.at[k] *= by.multiplier;
    encode(wide, codes);
  };
  write_codes<kVectors>(load, encode_row, q, qt, first, part, rows, columns);
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    quantize_cast(const Element* x, const float* maxima,
#if HAS_Q
                  Fp8* q,
#endif
#if HAS_QT
                  Fp8* qt,
#endif
                  float* scale, long long rows, long long columns, long long count,
                  long long group) {
#if !HAS_Q
  Fp8* q = nullptr;
#endif
#if !HAS_QT
  Fp8* qt = nullptr;
#endif
#if VECTORS
  if (aligned_16(x) && (q == nullptr || aligned_16(q)) && (qt == nullptr || aligned_16(qt))) {
    return run<true>(x, maxima, q, qt, scale, rows, columns, count, group);
  }
#endif
  run<false>(x, maxima, q, qt, scale, rows, columns, count, group);
}
