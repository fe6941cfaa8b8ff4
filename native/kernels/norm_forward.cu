// RMSNorm and, if CENTRED, LayerNorm along rows of FEATURES contiguous elements, in one pass over
// memory:
//
//   h = x + residual (or x)    rstd = 1 / sqrt(mean((h - mean)²) + eps)
//   y = (h - mean) · rstd · (scale + offset) (+ bias)
//
// (mean is 0 unless CENTRED; x̂ = (h - mean) · rstd is rounded to the type of h if CAST_BEFORE), and
// its two halves, for rows that lie on several devices or do not fit in one block's registers:
// each slice's statistics alone (NORMALIZE 0), and y for given ones (STATISTICS 0).
//
//   x, y     (rows, FEATURES)  X_TYPE, Y_TYPE
//   residual (rows, FEATURES)  RESIDUAL_TYPE, h (rows, FEATURES) H_TYPE     if HAS_RESIDUAL
//   scale    (FEATURES,)       SCALE_TYPE                                   if HAS_SCALE
//   bias     (FEATURES,)       BIAS_TYPE                                    if HAS_BIAS
//   mean     (rows,)           COMPUTE_TYPE   if CENTRED: operand, or result if WITH_MEAN
//   rstd     (rows,)           COMPUTE_TYPE   operand, or result if WITH_RSTD
//
//   [mean,] squares (rows, SLICES)  COMPUTE_TYPE   of each slice, where NORMALIZE is 0
//
// A thread has THREAD_ROWS neighbouring rows at once, which stay in registers between their
// statistics and their results; the statistics are those of h as stored. One block per BLOCK_ROWS *
// THREAD_ROWS rows and slice. If HOLD, registers have scale and bias too, so that they are there
// when the statistics are; otherwise they are read once for all rows of a thread. If PER_EXAMPLE,
// scale and bias are (rows / tokens, FEATURES), and `tokens` rows after one another have the same:
// the rows of a thread are of one example.
//
// If AHEAD, blocks go through the rows, and the next ones are on their way to shared memory while
// these are worked on.
#include "stage.cuh"

using Compute = COMPUTE_TYPE;
using Normalised = IF(HAS_RESIDUAL, H_TYPE) IF_NOT(HAS_RESIDUAL, X_TYPE);

constexpr int kRows = BLOCK_ROWS * THREAD_ROWS;  // a block's rows
static_assert(!AHEAD || !(HAS_RESIDUAL || PER_EXAMPLE), "x in order");

#if CENTRED
// Set if the mean may be so large that its rounding shows in y. Elements of 16 bits that differ
// are too far apart for that.
constexpr bool kShifted = sizeof(Normalised) > 2;
using Statistics = RowMoments<Compute, THREAD_ROWS, kShifted>;

// The sum of differences to `shift`. Elements beyond the row's end are zeros, and no part of it.
template <typename T>
__device__ inline Compute sum_of(const Chunks<T>& values, Compute shift) {
  Compute sum = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    if (kShifted && !inside(i)) continue;
    const auto wide = widen_all<Compute>(values[i]);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sum += wide.at[k] - shift;
  }
  return sum;
}

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
#else
using Statistics = RowSums<Compute, THREAD_ROWS>;

// The sum of squares of h.
template <typename T>
__device__ inline Compute square_sum(const Chunks<T>& values) {
  Compute sum = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const auto wide = widen_all<Compute>(values[i]);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      const Compute value = wide.at[k];
      sum += value * value;
    }
  }
  return sum;
}
#endif

#define HELD (NORMALIZE && HOLD && !PER_EXAMPLE)

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(const X_TYPE* x,
           // clang-format off
           IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual,)
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF(HAS_BIAS, const BIAS_TYPE* bias,)
           IF_NOT(STATISTICS, IF(CENTRED, const Compute* mean,) const Compute* rstd,)
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
  IF(STATISTICS, Statistics row_sums(shared_memory()));

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
    return Slots<X_TYPE>{shared_memory() + lines(Statistics::kBytes) + r * kSlots<X_TYPE>};
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
#if CENTRED && STATISTICS
  // A number near the mean where this is large: one of three elements of h, before it is rounded.
  const auto shift_of = [&](long long which) {
    if (!kShifted || which >= rows) return Compute(0);
    return middle_of_three<FEATURES>([&](int k) {
      const long long at = which * FEATURES + k;
      return widen<Compute>(x[at]) IF(HAS_RESIDUAL, +widen<Compute>(residual[at]));
    });
  };
  Wide<Compute, THREAD_ROWS> middle;
#if AHEAD
#pragma unroll
  for (int r = 0; r < THREAD_ROWS; ++r) {
    middle.at[r] = shift_of(1LL * blockIdx.x * kRows + row_group() * THREAD_ROWS + r);
  }
#endif
#endif
#if PER_EXAMPLE
  // Groups of THREAD_ROWS rows; the last group of an example skips those past its rows.
  const long long all = rows, groups = (tokens + THREAD_ROWS - 1) / THREAD_ROWS;
  const long long last = all / tokens * groups * THREAD_ROWS;
  for (long long first = 1LL * blockIdx.x * kRows; first < last; first += stride) {
    const long long group = first / THREAD_ROWS + row_group(), owner = group / groups;
    const long long mine = owner * tokens + group % groups * THREAD_ROWS;
    rows = mine < all ? (owner + 1) * tokens : 0;
#else
  for (long long first = 1LL * blockIdx.x * kRows; first < rows; first += stride) {
    const long long mine = first + row_group() * THREAD_ROWS;  // the first of this thread's rows
    [[maybe_unused]] constexpr long long owner = 0;            // the example of scale and bias
#endif
    const auto row = [&](int r) { return mine + r; };

    Chunks<X_TYPE> xs[THREAD_ROWS];
#if AHEAD
    wait_copies<0>();
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) xs[r][i] = slots_of(r).read(i, row(r) < rows);
    }
    fetch(mine + stride);  // into slots that were read
#else
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      load_row(x + row(r) * FEATURES, row(r) < rows, aligned, xs[r]);
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
    IF(CENTRED, Wide<Compute, THREAD_ROWS> means);
#if STATISTICS && CENTRED
#if !AHEAD
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) middle.at[r] = shift_of(row(r));
#endif
    Wide<Compute, THREAD_ROWS> rest = middle;  // then what rounding adds to means
#if AHEAD
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) middle.at[r] = shift_of(row(r) + stride);
#endif
    row_sums([&](int r, Compute shift) { return sum_of(hs[r], shift); },
             [&](int r, Compute mean) { return square_sum(hs[r], mean); }, rest, means, inverse);
#elif STATISTICS
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) inverse.at[r] = square_sum(hs[r]);
    row_sums.post(inverse);
    inverse = row_sums.total();
#endif
#if !NORMALIZE
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      if (row(r) >= rows || row_thread() != 0) continue;
      IF(CENTRED, mean[row(r) * SLICES + slice()] = means.at[r]);
      squares[row(r) * SLICES + slice()] = inverse.at[r];
    }
#else
#if STATISTICS
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      inverse.at[r] = inverse_root(inverse.at[r] * (Compute(1) / FEATURES) + eps);
      [[maybe_unused]] const bool writes = row(r) < rows && row_thread() == 0 && slice() == 0;
      IF(WITH_MEAN, if (writes) mean[row(r)] = means.at[r]);
      IF(WITH_RSTD, if (writes) rstd[row(r)] = inverse.at[r]);
      IF(CENTRED, if (kShifted) rest.at[r] *= inverse.at[r]);
    }
#else
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) {
      IF(CENTRED, means.at[r] = row(r) < rows ? mean[row(r)] : Compute(0));
      inverse.at[r] = row(r) < rows ? rstd[row(r)] : Compute(0);
    }
#endif
    if (mine >= rows) continue;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#if HELD
      IF(HAS_SCALE, const auto& weight = weights[i]);
      IF(HAS_BIAS, const auto& shift = shifts[i]);
#else
      IF(HAS_SCALE,
         const auto weight = load_weight(scale + owner * FEATURES, scale_offset, i, aligned));
      IF(HAS_BIAS, const auto shift = load_columns<Compute>(bias + owner * FEATURES, i, aligned));
#endif
#pragma unroll
      for (int r = 0; r < THREAD_ROWS; ++r) {
        auto out = widen_again<Compute>(hs[r][i]);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
          IF(CENTRED, out.at[k] -= means.at[r]);
          out.at[k] *= inverse.at[r];
          IF(CENTRED, IF(STATISTICS, if (kShifted) out.at[k] += rest.at[r]));
          IF(CAST_BEFORE, out.at[k] = widen<Compute>(Normalised(out.at[k])));
          IF(HAS_SCALE, out.at[k] *= weight.at[k]);
          IF(HAS_BIAS, out.at[k] += shift.at[k]);
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
