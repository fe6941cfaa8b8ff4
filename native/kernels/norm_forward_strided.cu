// RMSNorm and, if CENTRED, LayerNorm along the middle of (outer, FEATURES, inner); the formulas,
// macros and operands are those of norm_forward.cu, with statistics (outer, inner). Each row is
// read twice, or three times if CENTRED.
#include "strided.cuh"

using Compute = COMPUTE_TYPE;
using Normalised = IF(HAS_RESIDUAL, H_TYPE) IF_NOT(HAS_RESIDUAL, X_TYPE);

extern "C" __global__ void __launch_bounds__(kThreads)
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
           long long outer, long long inner, Compute eps, Compute scale_offset) {
  // clang-format on
  const long long tiles = Tile::count(outer, inner);
  for (long long number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile(number, inner);
    const Normalised* normalised = IF(HAS_RESIDUAL, h) IF_NOT(HAS_RESIDUAL, x);  // h: written below
    IF(CENTRED, Compute middle = 0; [[maybe_unused]] Compute rest = 0);  // their sum is the mean

#if STATISTICS
    Compute sum = 0;
    // A number near the mean where this is large; all sums are of differences to it.
    IF(CENTRED, Compute shift = 0);
    if (tile.active) {
      [[maybe_unused]] const auto element = [&](int k) {
        return widen<Compute>(x[tile.at(k)])
            IF(HAS_RESIDUAL, +widen<Compute>(residual[tile.at(k)]));
      };
      IF(CENTRED, shift = middle_of_three<FEATURES>(element));
#pragma unroll 4
      for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
        Compute value = widen<Compute>(x[tile.at(k)]);
#if HAS_RESIDUAL
        const H_TYPE stored = H_TYPE(value + widen<Compute>(residual[tile.at(k)]));
        h[tile.at(k)] = stored;
        value = widen<Compute>(stored);
#endif
        sum += IF(CENTRED, value - shift) IF_NOT(CENTRED, value * value);
      }
    }
    sum = tile_sum(sum);
#if CENTRED
    const Compute apart = sum / Compute(FEATURES);
    middle = shift + apart;
    rest = apart - (middle - shift);
    sum = 0;
    if (tile.active) {
#pragma unroll 4
      for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
        const Compute centred = widen<Compute>(normalised[tile.at(k)]) - middle - rest;
        sum += centred * centred;
      }
    }
    sum = tile_sum(sum);
#endif
#endif
#if !NORMALIZE
    if (tile.active && thread_y() == 0) {
      IF(CENTRED, mean[tile.row] = middle);
      squares[tile.row] = sum;
    }
#else
    if (!tile.active) continue;
    IF_NOT(STATISTICS, IF(CENTRED, middle = mean[tile.row]));
    const Compute inverse = IF(STATISTICS, inverse_root(sum * (Compute(1) / FEATURES) + eps))
        IF_NOT(STATISTICS, rstd[tile.row]);
    IF(STATISTICS, IF(WITH_MEAN, if (thread_y() == 0) mean[tile.row] = middle));
    IF(STATISTICS, IF(WITH_RSTD, if (thread_y() == 0) rstd[tile.row] = inverse));
#pragma unroll 4
    for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
      Compute out = widen<Compute>(normalised[tile.at(k)]);
      IF(CENTRED, out = out - middle IF(STATISTICS, -rest));
      out *= inverse;
      IF(CAST_BEFORE, out = widen<Compute>(Normalised(out)));
      IF(HAS_SCALE, out *= widen<Compute>(scale[k]) + scale_offset);
      IF(HAS_BIAS, out += widen<Compute>(bias[k]));
      y[tile.at(k)] = Y_TYPE(out);
    }
#endif
  }
}
