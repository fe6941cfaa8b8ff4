// The derivative of LayerNorm along the middle of (outer, FEATURES, inner); the formulas, macros
// and operands are those of layer_norm_backward.cu, with statistics (outer, inner). Here an element
// is read twice, and then its place written, by one thread; dscale and dbias are added up as in
// rms_norm_backward_strided.cu.
#include "strided.cuh"
#include "sums.cuh"

using Compute = COMPUTE_TYPE;

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(const DY_TYPE* dy, const X_TYPE* x,
           // clang-format off
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           const Compute* mean,
           IF(GRADIENT, const Compute* rstd, IF(HAS_RESIDUAL, const DH_TYPE* dh,))
           IF_NOT(DOTS, const Compute* sums, const Compute* dots,)
           IF(GRADIENT, X_TYPE* dx, IF(HAS_PARTIAL, Compute* partial,))
           IF_NOT(GRADIENT, Compute* sums, Compute* dots,)
           long long outer, long long inner, Compute scale_offset, Compute count) {
  // clang-format on
#if GRADIENT
  const Compute per_count = Compute(1) / count;
#if HAS_PARTIAL
  Compute* const mine = partial + 1LL * blockIdx.x * SUMS * FEATURES;
  [[maybe_unused]] Compute* const dbias = mine + WITH_DSCALE * FEATURES;
  IF(WITH_DSCALE, clear_columns(mine));
  IF(WITH_DBIAS, clear_columns(dbias));
#endif
#endif
  const long long tiles = Tile::count(outer, inner);
  for (long long number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile(number, inner);
    const Compute middle = tile.active ? mean[tile.row] : Compute(0);

#if DOTS
    Compute sum = 0, dot = 0;
    if (tile.active) {
#pragma unroll 4
      for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
        Compute g = widen<Compute>(dy[tile.at(k)]);
        IF(HAS_SCALE, g *= widen<Compute>(scale[k]) + scale_offset);
        sum += g;
        dot += g * (widen<Compute>(x[tile.at(k)]) - middle);
      }
    }
    sum = tile_sum(sum);
    dot = tile_sum(dot);
#else
    const Compute sum = tile.active ? sums[tile.row] : Compute(0);
    const Compute dot = tile.active ? dots[tile.row] : Compute(0);
#endif
#if !GRADIENT
    if (tile.active && thread_y() == 0) {
      sums[tile.row] = sum;
      dots[tile.row] = dot;
    }
#else
    const Compute rstd_row = tile.active ? rstd[tile.row] : Compute(0);
    const Compute of_g = sum * per_count, pull = dot * per_count * rstd_row;
    // All threads of a warp go round together: the lanes of a line add up their share of dscale.
#pragma unroll 2
    for (int begin = 0; begin < FEATURES; begin += BLOCK_Y) {
      const int k = begin + thread_y();
      [[maybe_unused]] Compute share = 0, wide_dy = 0;
      if (tile.active && k < FEATURES) {
        wide_dy = widen<Compute>(dy[tile.at(k)]);
        const Compute normal = (widen<Compute>(x[tile.at(k)]) - middle) * rstd_row;
        share = wide_dy * normal;
        Compute g = wide_dy;
        IF(HAS_SCALE, g *= widen<Compute>(scale[k]) + scale_offset);
        Compute out = rstd_row * (g - of_g - normal * pull);
        IF(HAS_RESIDUAL, out += widen<Compute>(dh[tile.at(k)]));
        dx[tile.at(k)] = X_TYPE(out);
      }
      [[maybe_unused]] const bool writes = thread_x() == 0 && k < FEATURES;
      IF(WITH_DSCALE, share = line_sum(share); if (writes) mine[k] += share);
      IF(WITH_DBIAS, wide_dy = line_sum(wide_dy); if (writes) dbias[k] += wide_dy);
    }
#endif
  }
}
