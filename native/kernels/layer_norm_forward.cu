// LayerNorm along rows of FEATURES contiguous elements, in one pass over memory:
//
//   h = x + residual (or x)    rstd = 1 / sqrt(mean((h - mean)²) + eps)
//   y = (h - mean) · rstd · (scale + offset) + bias
//
// and its two halves, for rows that lie on several devices or do not fit in one block's registers:
// each slice's mean and squared differences alone (NORMALIZE 0), and y for a given mean and rstd
// (STATISTICS 0).
//
//   x, y         (rows, FEATURES)  X_TYPE, Y_TYPE
//   residual     (rows, FEATURES)  RESIDUAL_TYPE, h (rows, FEATURES) H_TYPE   if HAS_RESIDUAL
//   scale        (FEATURES,)       SCALE_TYPE                                 if HAS_SCALE
//   bias         (FEATURES,)       BIAS_TYPE                                  if HAS_BIAS
//   mean         (rows,)           COMPUTE_TYPE   an operand, or a result if WITH_MEAN
//   rstd         (rows,)           COMPUTE_TYPE   an operand, or a result if WITH_RSTD
//
//   mean, squares  (rows, SLICES)  COMPUTE_TYPE   of each slice, where NORMALIZE is 0
//
// Threads have rows as in rms_norm_forward.cu. If HOLD, registers have scale and bias too, so that
// they are there when the statistics are; otherwise they are read once for all rows of a thread. If
// PER_EXAMPLE, scale and bias are (rows / tokens, FEATURES), and `tokens` rows after one another
// have the same: the rows of a thread are of one example, and read them once.
//
// If AHEAD, blocks go through the rows, and the next ones are on their way to shared memory while
// these are worked on.
#ifndef PER_EXAMPLE
#define PER_EXAMPLE 0
#endif
#ifndef AHEAD
#define AHEAD 0
#endif
#include "stage.cuh"

using Compute = COMPUTE_TYPE;

constexpr int kRows = BLOCK_ROWS * THREAD_ROWS;  // of a block
static_assert(!AHEAD || !(HAS_RESIDUAL || PER_EXAMPLE), "x alone, of rows that follow each other");

using Moments = RowMoments<Compute, THREAD_ROWS>;

template <typename T>
__device__ inline Compute sum_of(const Chunks<T>& values) {
  Compute sum = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const auto wide = widen_all<Compute>(values[i]);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sum += wide.at[k];
  }
  return sum;
}

// Elements beyond the row's end are zeros, and no part of it.
template <typename T>
__device__ inline Compute square_sum(const Chunks<T>& values, Compute mean) {
  Compute sum = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    if (!inside(i)) continue;
    const auto wide = widen_again<Compute>(values[i]);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      const Compute centred = wide.at[k] - mean;
      sum += centred * centred;
    }
  }
  return sum;
}

#if NORMALIZE && HOLD && !PER_EXAMPLE
#define HELD 1
#else
#define HELD 0
#endif

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(const X_TYPE* x,
           // clang-format off
           IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual,)
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF(HAS_BIAS, const BIAS_TYPE* bias,)
           IF_NOT(STATISTICS, const Compute* mean, const Compute* rstd,)
           IF(NORMALIZE, Y_TYPE* y,)
           IF(HAS_RESIDUAL, H_TYPE* h,)
           IF(STATISTICS, IF(WITH_MEAN, Compute* mean,) IF(WITH_RSTD, Compute* rstd,))
           IF_NOT(NORMALIZE, Compute* squares,)
           long long rows, IF(PER_EXAMPLE, long long tokens,) Compute eps, Compute scale_offset) {
  // clang-format on
  bool aligned = aligned_16(x);
  IF(HAS_RESIDUAL, aligned = aligned && aligned_16(residual, h));
  IF(HAS_SCALE, aligned = aligned && aligned_16(scale));
  IF(HAS_BIAS, aligned = aligned && aligned_16(bias));
  IF(NORMALIZE, aligned = aligned && aligned_16(y));
  IF(STATISTICS, Moments moments(shared_memory()));
#if HELD
  IF(HAS_SCALE, Wide<Compute, VECTOR> weights[CHUNKS]);
  IF(HAS_BIAS, Wide<Compute, VECTOR> shifts[CHUNKS]);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    IF(HAS_SCALE, weights[i] = load_weight(scale, scale_offset, i, aligned));
    IF(HAS_BIAS, shifts[i] = load_columns<Compute>(bias, i, aligned));
  }
#endif
  const long long stride = 1LL * gridDim.x * kRows;
#if AHEAD
  const auto slots_of = [&](int r) {
    return Slots<X_TYPE>{shared_memory() + lines(Moments::kBytes) + r * kSlots<X_TYPE>};
  };
  const auto fetch = [&](long long which) {
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      if (which + r < rows) slots_of(r).fetch(x + (which + r) * FEATURES, aligned);
    }
    commit_copies();
  };
  fetch(1LL * blockIdx.x * kRows + row_group() * THREAD_ROWS);
#endif
#if PER_EXAMPLE
  // Groups of THREAD_ROWS rows; what the last one of an example has past its rows is nothing.
  const long long all = rows, groups = (tokens + THREAD_ROWS - 1) / THREAD_ROWS;
  const long long last = all / tokens * groups * THREAD_ROWS;
  for (long long first = 1LL * blockIdx.x * kRows; first < last; first += stride) {
    const long long group = first / THREAD_ROWS + row_group(), example = group / groups;
    const long long mine = example * tokens + group % groups * THREAD_ROWS;
    const long long at = example * FEATURES;  // of scale and bias
    rows = mine < all ? (example + 1) * tokens : 0;
#else
  for (long long first = 1LL * blockIdx.x * kRows; first < rows; first += stride) {
    const long long mine = first + row_group() * THREAD_ROWS;  // the first of this thread's rows
    [[maybe_unused]] constexpr long long at = 0;
#endif

    Chunks<X_TYPE> xs[THREAD_ROWS];
#if AHEAD
    wait_copies<0>();
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) xs[r][i] = slots_of(r).read(i, mine + r < rows);
    }
    fetch(mine + stride);  // into slots that were read
#else
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      load_row(x + (mine + r) * FEATURES, mine + r < rows, aligned, xs[r]);
    }
#endif
#if HAS_RESIDUAL
    Chunks<RESIDUAL_TYPE> residuals[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      load_row(residual + (mine + r) * FEATURES, mine + r < rows, aligned, residuals[r]);
    }
    Chunks<H_TYPE> hs[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      add_residual<Compute>(xs[r], residuals[r], h + (mine + r) * FEATURES, mine + r < rows,
                            aligned, hs[r]);
    }
#else
    auto& hs = xs;
#endif

    Wide<Compute, THREAD_ROWS> means, inverse;
#if STATISTICS
    moments([&](int r) { return sum_of(hs[r]); },
            [&](int r, Compute mean) { return square_sum(hs[r], mean); }, means, inverse);
#endif
#if !NORMALIZE
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      if (mine + r >= rows || row_thread() != 0) continue;
      mean[(mine + r) * SLICES + slice()] = means.at[r];
      squares[(mine + r) * SLICES + slice()] = inverse.at[r];
    }
#else
#if STATISTICS
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      inverse.at[r] = inverse_root(inverse.at[r] * (Compute(1) / FEATURES) + eps);
      [[maybe_unused]] const bool writes = mine + r < rows && row_thread() == 0 && slice() == 0;
      IF(WITH_MEAN, if (writes) mean[mine + r] = means.at[r]);
      IF(WITH_RSTD, if (writes) rstd[mine + r] = inverse.at[r]);
    }
#else
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      means.at[r] = mine + r < rows ? mean[mine + r] : Compute(0);
      inverse.at[r] = mine + r < rows ? rstd[mine + r] : Compute(0);
    }
#endif
    if (mine >= rows) continue;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#if HELD
      IF(HAS_SCALE, const auto& weight = weights[i]);
      IF(HAS_BIAS, const auto& shift = shifts[i]);
#else
      IF(HAS_SCALE, const auto weight = load_weight(scale + at, scale_offset, i, aligned));
      IF(HAS_BIAS, const auto shift = load_columns<Compute>(bias + at, i, aligned));
#endif
#pragma unroll
      for (int r = 0; r < THREAD_ROWS; ++r) {
        auto out = widen_again<Compute>(hs[r][i]);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
          out.at[k] = (out.at[k] - means.at[r]) * inverse.at[r];
          IF(HAS_SCALE, out.at[k] *= weight.at[k]);
          IF(HAS_BIAS, out.at[k] += shift.at[k]);
        }
        if (mine + r < rows) {
          store_chunk(y + (mine + r) * FEATURES, i, aligned, narrow_all<Y_TYPE>(out));
        }
      }
    }
#endif
  }
  IF(STATISTICS, moments.finish());
}
