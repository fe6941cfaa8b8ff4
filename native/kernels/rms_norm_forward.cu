// RMSNorm along rows of FEATURES contiguous elements, in one pass over memory:
//
//   h = x + residual (or x)    rstd = 1 / sqrt(mean(h²) + eps)    y = h · rstd · (scale + offset)
//
// and its two halves, for rows that lie on several devices or do not fit in one block's registers:
// the sums of squares alone (NORMALIZE 0), and y for a given rstd (STATISTICS 0).
//
//   x, y     (rows, FEATURES)  X_TYPE, Y_TYPE
//   residual (rows, FEATURES)  RESIDUAL_TYPE, h (rows, FEATURES) H_TYPE     if HAS_RESIDUAL
//   scale    (FEATURES,)       SCALE_TYPE                                   if HAS_SCALE
//   rstd     (rows,)           COMPUTE_TYPE   operand, or result if WITH_RSTD
//   sums     (rows, SLICES)    COMPUTE_TYPE   sums of squares of each slice
//
// A row stays in the registers of ROW_THREADS threads between its statistics and its result; the
// statistics are those of h as stored. One block per BLOCK_ROWS rows and slice. If HOLD, registers have
// the scale too, so that it is there when the statistics are.
#include "row.cuh"

using Compute = COMPUTE_TYPE;

template <typename T>
__device__ inline Compute square_sum(const Chunks<T>& values) {
  Compute sum = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const auto wide = widen_all<Compute>(values[i]);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sum += wide.at[k] * wide.at[k];
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) KERNEL(
    const X_TYPE* x,
#if HAS_RESIDUAL
    const RESIDUAL_TYPE* residual,
#endif
#if HAS_SCALE
    const SCALE_TYPE* scale,
#endif
#if !STATISTICS
    const Compute* rstd,
#endif
#if NORMALIZE
    Y_TYPE* y,
#endif
#if HAS_RESIDUAL
    H_TYPE* h,
#endif
#if STATISTICS && WITH_RSTD
    Compute* rstd,
#endif
#if !NORMALIZE
    Compute* sums,
#endif
    long long rows, Compute eps, Compute scale_offset) {
  bool aligned = aligned_16(x);
#if HAS_RESIDUAL
  aligned = aligned && aligned_16(residual, h);
#endif
#if HAS_SCALE
  aligned = aligned && aligned_16(scale);
#endif
#if NORMALIZE
  aligned = aligned && aligned_16(y);
#endif
#if STATISTICS
  RowSum<Compute> row_sum(shared_memory());
#endif

#if NORMALIZE && HAS_SCALE && HOLD
  Wide<Compute, VECTOR> weights[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) weights[i] = load_weight(scale, scale_offset, i, aligned);
#endif
  const long long stride = static_cast<long long>(gridDim.x) * BLOCK_ROWS;
  for (long long first = static_cast<long long>(blockIdx.x) * BLOCK_ROWS; first < rows;
       first += stride) {
    const long long row = first + row_group();
    const bool active = row < rows;
    const long long start = row * FEATURES;

    Chunks<X_TYPE> xs;
    load_row(x + start, active, aligned, xs);
#if HAS_RESIDUAL
    Chunks<RESIDUAL_TYPE> residuals;
    load_row(residual + start, active, aligned, residuals);
    Chunks<H_TYPE> hs;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      auto sum = widen_all<Compute>(xs[i]);
      const auto more = widen_all<Compute>(residuals[i]);
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) sum.at[k] += more.at[k];
      hs[i] = narrow_all<H_TYPE>(sum);
      if (active) store_chunk(h + start, i, aligned, hs[i]);
    }
#else
    Chunks<X_TYPE>& hs = xs;
#endif

#if STATISTICS
    const Compute sum = row_sum(square_sum(hs));
#endif
#if !NORMALIZE
    if (active && row_thread() == 0) sums[row * SLICES + slice()] = sum;
#else
#if STATISTICS
    const Compute inverse = inverse_root(sum * (Compute(1) / FEATURES) + eps);
#if WITH_RSTD
    if (active && row_thread() == 0 && slice() == 0) rstd[row] = inverse;
#endif
#else
    const Compute inverse = active ? rstd[row] : Compute(0);
#endif
    if (!active) continue;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      auto out = widen_again<Compute>(hs[i]);
#if HAS_SCALE && HOLD
      const auto& weight = weights[i];
#elif HAS_SCALE
      const auto weight = load_weight(scale, scale_offset, i, aligned);
#endif
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        out.at[k] *= inverse;
#if HAS_SCALE
        out.at[k] *= weight.at[k];
#endif
      }
      store_chunk(y + start, i, aligned, narrow_all<Y_TYPE>(out));
    }
#endif
  }
#if STATISTICS
  row_sum.finish();
#endif
}
