// LayerNorm along the middle of (outer, FEATURES, inner); the formulas, macros and operands are
// those of layer_norm_forward.cu, with statistics (outer, inner). Each row is read three times.
#include "strided.cuh"

using Compute = COMPUTE_TYPE;

extern "C" __global__ void __launch_bounds__(kThreads)
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
           long long outer, long long inner, Compute eps, Compute scale_offset) {
  // clang-format on
  const long long tiles = Tile::count(outer, inner);
  for (long long number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile(number, inner);
    const auto* normalised = IF(HAS_RESIDUAL, h) IF_NOT(HAS_RESIDUAL, x);  // h: written below

#if STATISTICS
    Compute sum = 0, squared = 0;
    if (tile.active) {
#pragma unroll 4
      for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
        Compute value = widen<Compute>(x[tile.at(k)]);
#if HAS_RESIDUAL
        const H_TYPE stored = H_TYPE(value + widen<Compute>(residual[tile.at(k)]));
        h[tile.at(k)] = stored;
        value = widen<Compute>(stored);
#endif
        sum += value;
      }
    }
    const Compute middle = tile_sum(sum) / Compute(FEATURES);
    if (tile.active) {
#pragma unroll 4
      for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
        const Compute centred = widen<Compute>(normalised[tile.at(k)]) - middle;
        squared += centred * centred;
      }
    }
    squared = tile_sum(squared);
#endif
#if !NORMALIZE
    if (tile.active && thread_y() == 0) {
      mean[tile.row] = middle;
      squares[tile.row] = squared;
    }
#else
    if (!tile.active) continue;
#if STATISTICS
    const Compute inverse = inverse_root(squared * (Compute(1) / FEATURES) + eps);
    IF(WITH_MEAN, if (thread_y() == 0) mean[tile.row] = middle);
    IF(WITH_RSTD, if (thread_y() == 0) rstd[tile.row] = inverse);
#else
    const Compute middle = mean[tile.row], inverse = rstd[tile.row];
#endif
#pragma unroll 4
    for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
      Compute out = (widen<Compute>(normalised[tile.at(k)]) - middle) * inverse;
      IF(HAS_SCALE, out *= widen<Compute>(scale[k]) + scale_offset);
      IF(HAS_BIAS, out += widen<Compute>(bias[k]));
      y[tile.at(k)] = Y_TYPE(out);
    }
#endif
  }
}
