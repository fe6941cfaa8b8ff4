// RMSNorm along rows of FEATURES contiguous elements, in one pass over memory:
//
//   h = x + residual (or x)    rstd = 1 / sqrt(mean(h²) + eps)
//   y = h · rstd · (scale + offset) (+ bias)
//
// (h · rstd is rounded to the type of h if CAST_BEFORE; with a = activation(z), h is x · a if
// GATE_BEFORE, and y is times a if GATE_AFTER),
// and its two halves, for rows that lie on several devices or do not fit in one block's registers:
// the sums of squares alone (NORMALIZE 0), and y for a given rstd (STATISTICS 0).
//
//   x, y     (rows, FEATURES)  X_TYPE, Y_TYPE
//   residual (rows, FEATURES)  RESIDUAL_TYPE, h (rows, FEATURES) H_TYPE     if HAS_RESIDUAL
//   z        (rows, FEATURES)  Z_TYPE                                       if gated
//   scale    (HEADS, FEATURES) SCALE_TYPE                                   if HAS_SCALE
//   bias     (HEADS, FEATURES) BIAS_TYPE                                    if HAS_BIAS
//   rstd     (rows,)           COMPUTE_TYPE   operand, or result if WITH_RSTD
//   sums     (rows, SLICES)    COMPUTE_TYPE   sums of squares of each slice
//
// A thread has THREAD_ROWS neighbouring rows at once, which stay in registers between their
// statistics and their results; the statistics are those of h as stored. One block per BLOCK_ROWS *
// THREAD_ROWS rows and slice. If HOLD, registers have the scale too, so that it is there when the
// statistics are; otherwise it is read once for all rows of a thread, and so is the bias. With more
// than one head, row i has the scale of head i % HEADS: the rows of a thread are HEADS apart, of
// one head. If PER_EXAMPLE, scale and bias are (rows / tokens, FEATURES), and `tokens` rows after
// one another have the same; each thread reads them for its rows, and they stay in the caches.
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#ifndef PER_EXAMPLE
#define PER_EXAMPLE 0
#endif
#include "gate.cuh"
#include "row.cuh"

using Compute = COMPUTE_TYPE;
using Normalised = IF(HAS_RESIDUAL, H_TYPE) IF_NOT(HAS_RESIDUAL, X_TYPE);

constexpr int kRows = BLOCK_ROWS * THREAD_ROWS;  // of a block

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

#if GATE_BEFORE
// The sum of squares of x · activation(z).
template <typename T, typename Z>
__device__ inline Compute square_sum(const Chunks<T>& values, const Chunks<Z>& zs) {
  Compute sum = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const auto wide = widen_all<Compute>(values[i]);
    const auto wide_z = widen_all<Compute>(zs[i]);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      const Compute gated = wide.at[k] * gate_of(wide_z.at[k]);
      sum += gated * gated;
    }
  }
  return sum;
}
#endif

#if NORMALIZE && HOLD && !PER_EXAMPLE
#define HELD 1
#else
#define HELD 0
#endif

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(const X_TYPE* x,
           // clang-format off
           IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual,)
           IF(HAS_GATE, const Z_TYPE* z,)
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF(HAS_BIAS, const BIAS_TYPE* bias,)
           IF_NOT(STATISTICS, const Compute* rstd,)
           IF(NORMALIZE, Y_TYPE* y,)
           IF(HAS_RESIDUAL, H_TYPE* h,)
           IF(STATISTICS, IF(WITH_RSTD, Compute* rstd,))
           IF_NOT(NORMALIZE, Compute* sums,)
           long long rows, IF(PER_EXAMPLE, long long tokens,) Compute eps, Compute scale_offset) {
  // clang-format on
  bool aligned = aligned_16(x);
  IF(HAS_RESIDUAL, aligned = aligned && aligned_16(residual, h));
  IF(HAS_GATE, aligned = aligned && aligned_16(z));
  IF(HAS_SCALE, aligned = aligned && aligned_16(scale));
  IF(HAS_BIAS, aligned = aligned && aligned_16(bias));
  IF(NORMALIZE, aligned = aligned && aligned_16(y));
  IF(STATISTICS, RowSums<Compute, THREAD_ROWS> row_sums(shared_memory()));

#if HELD
  IF(HAS_SCALE, Wide<Compute, VECTOR> weights[CHUNKS]);
  IF(HAS_BIAS, Wide<Compute, VECTOR> shifts[CHUNKS]);
  const auto hold = [&](long long head) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      IF(HAS_SCALE, weights[i] = load_weight(scale + head * FEATURES, scale_offset, i, aligned));
      IF(HAS_BIAS, shifts[i] = load_columns<Compute>(bias + head * FEATURES, i, aligned));
    }
  };
  if (HEADS == 1) hold(0);
#endif
  const long long stride = 1LL * gridDim.x * kRows;
#if HEADS > 1
  // Groups of threads have one head after another; what they have past the last row is nothing.
  const long long last = (rows / HEADS + THREAD_ROWS - 1) / THREAD_ROWS * THREAD_ROWS * HEADS;
  for (long long first = 1LL * blockIdx.x * kRows; first < last; first += stride) {
    const long long group = first / THREAD_ROWS + row_group(), head = group % HEADS;
    const long long mine = group / HEADS * THREAD_ROWS * HEADS + head;
    const auto row = [&](int r) { return mine + r * HEADS; };
#else
  for (long long first = 1LL * blockIdx.x * kRows; first < rows; first += stride) {
    const long long mine = first + row_group() * THREAD_ROWS;  // the first of this thread's rows
    const auto row = [&](int r) { return mine + r; };
    [[maybe_unused]] constexpr long long head = 0;
#endif

    Chunks<X_TYPE> xs[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      load_row(x + row(r) * FEATURES, row(r) < rows, aligned, xs[r]);
    }
#if HELD && HEADS > 1
    hold(head);
#endif
#if HAS_GATE
    Chunks<Z_TYPE> zs[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      load_row(z + row(r) * FEATURES, row(r) < rows, aligned, zs[r]);
    }
#endif
#if HAS_RESIDUAL
    Chunks<RESIDUAL_TYPE> residuals[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      load_row(residual + row(r) * FEATURES, row(r) < rows, aligned, residuals[r]);
    }
    Chunks<H_TYPE> hs[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      add_residual<Compute>(xs[r], residuals[r], h + row(r) * FEATURES, row(r) < rows, aligned,
                            hs[r]);
    }
#else
    auto& hs = xs;
#endif

    Wide<Compute, THREAD_ROWS> inverse;
#if STATISTICS
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r)
      inverse.at[r] = square_sum(hs[r] IF(GATE_BEFORE, , zs[r]));
    row_sums.post(inverse);
    inverse = row_sums.total();
#endif
#if !NORMALIZE
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      if (row(r) < rows && row_thread() == 0) sums[row(r) * SLICES + slice()] = inverse.at[r];
    }
#else
#if STATISTICS
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      inverse.at[r] = inverse_root(inverse.at[r] * (Compute(1) / FEATURES) + eps);
      const bool writes = row(r) < rows && row_thread() == 0 && slice() == 0;
      IF(WITH_RSTD, if (writes) rstd[row(r)] = inverse.at[r]);
    }
#else
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) inverse.at[r] = row(r) < rows ? rstd[row(r)] : Compute(0);
#endif
    if (mine >= rows) continue;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#if PER_EXAMPLE
      Wide<Compute, VECTOR> weights[THREAD_ROWS];  // together: a store would hold up the next load
      IF(HAS_BIAS, Wide<Compute, VECTOR> shifts[THREAD_ROWS]);
#pragma unroll
      for (int r = 0; r < THREAD_ROWS; ++r) {
        const long long known = row(r) < rows ? row(r) : mine;  // beyond the last is no example
        const long long at = known / tokens * FEATURES;
        weights[r] = load_weight(scale + at, scale_offset, i, aligned);
        IF(HAS_BIAS, shifts[r] = load_columns<Compute>(bias + at, i, aligned));
      }
#elif HELD
      IF(HAS_SCALE, const auto& weight = weights[i]);
      IF(HAS_BIAS, const auto& shift = shifts[i]);
#else
      IF(HAS_SCALE,
         const auto weight = load_weight(scale + head * FEATURES, scale_offset, i, aligned));
      IF(HAS_BIAS, const auto shift = load_columns<Compute>(bias + head * FEATURES, i, aligned));
#endif
#pragma unroll
      for (int r = 0; r < THREAD_ROWS; ++r) {
        auto out = widen_again<Compute>(hs[r][i]);
#if PER_EXAMPLE
        const auto& weight = weights[r];
        IF(HAS_BIAS, const auto& shift = shifts[r]);
#endif
        IF(HAS_GATE, const auto wide_z = widen_again<Compute>(zs[r][i]));
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
          IF(GATE_BEFORE, out.at[k] *= gate_of(wide_z.at[k]));
          out.at[k] *= inverse.at[r];
          IF(CAST_BEFORE, out.at[k] = widen<Compute>(Normalised(out.at[k])));
          IF(HAS_SCALE, out.at[k] *= weight.at[k]);
          IF(HAS_BIAS, out.at[k] += shift.at[k]);
          IF(GATE_AFTER, out.at[k] *= gate_of(wide_z.at[k]));
        }
        if (row(r) < rows) {
          store_chunk(y + row(r) * FEATURES, i, aligned, narrow_all<Y_TYPE>(out));
        }
      }
    }
#endif
  }
  IF(STATISTICS, row_sums.finish());
}
