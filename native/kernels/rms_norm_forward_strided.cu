// RMSNorm along the middle of (outer, FEATURES, inner); the formulas, macros and operands are those
// of rms_norm_forward.cu, with rstd and sums (outer, inner). Each row is read twice.
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#include "strided.cuh"

using Compute = COMPUTE_TYPE;
using Normalised = IF(HAS_RESIDUAL, H_TYPE) IF_NOT(HAS_RESIDUAL, X_TYPE);

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(const X_TYPE* x,
           // clang-format off
           IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual,)
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF(HAS_BIAS, const BIAS_TYPE* bias,)
           IF_NOT(STATISTICS, const Compute* rstd,)
           IF(NORMALIZE, Y_TYPE* y,)
           IF(HAS_RESIDUAL, H_TYPE* h,)
           IF(STATISTICS, IF(WITH_RSTD, Compute* rstd,))
           IF_NOT(NORMALIZE, Compute* sums,)
           long long outer, long long inner, Compute eps, Compute scale_offset) {
  // clang-format on
  const long long tiles = Tile::count(outer, inner);
  for (long long number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile(number, inner);

#if STATISTICS
    Compute sum = 0;
    if (tile.active) {
#pragma unroll 4
      for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
        Compute value = widen<Compute>(x[tile.at(k)]);
#if HAS_RESIDUAL
        const H_TYPE stored = H_TYPE(value + widen<Compute>(residual[tile.at(k)]));
        h[tile.at(k)] = stored;
        value = widen<Compute>(stored);
#endif
        sum += value * value;
      }
    }
    sum = tile_sum(sum);
#endif
#if !NORMALIZE
    if (tile.active && thread_y() == 0) sums[tile.row] = sum;
#else
    if (!tile.active) continue;
    const Compute inverse = IF(STATISTICS, inverse_root(sum * (Compute(1) / FEATURES) + eps))
        IF_NOT(STATISTICS, rstd[tile.row]);
    IF(STATISTICS, IF(WITH_RSTD, if (thread_y() == 0) rstd[tile.row] = inverse));
    const Normalised* normalised = IF(HAS_RESIDUAL, h) IF_NOT(HAS_RESIDUAL, x);  // h: written above
#pragma unroll 4
    for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
      Compute out = widen<Compute>(normalised[tile.at(k)]) * inverse;
      IF(CAST_BEFORE, out = widen<Compute>(Normalised(out)));
      IF(HAS_SCALE, out *= widen<Compute>(scale[k]) + scale_offset);
      IF(HAS_BIAS, out += widen<Compute>(bias[k]));
      y[tile.at(k)] = Y_TYPE(out);
    }
#endif
  }
}
