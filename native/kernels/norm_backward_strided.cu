// The derivative of RMSNorm and, if CENTRED, LayerNorm along the middle of (outer, FEATURES,
// inner); the formulas, macros and operands are those of norm_backward.cu, with statistics (outer,
// inner).
//
// A block adds up dscale and dbias over its rows in its own row of `partial`, each element always
// by the same thread, and column_sum.cu adds the blocks: the result does not depend on timing.
#include "strided.cuh"
#include "sums.cuh"

using Compute = COMPUTE_TYPE;

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(const DY_TYPE* dy, const X_TYPE* x,
           // clang-format off
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF(CENTRED, const Compute* mean,)
           IF(GRADIENT, const Compute* rstd, IF(HAS_RESIDUAL, const DH_TYPE* dh,))
           IF_NOT(DOTS, IF(CENTRED, const Compute* sums,) const Compute* dots,)
           IF(GRADIENT, X_TYPE* dx,)
           IF(GRADIENT, IF(HAS_PARTIAL, Compute* partial,))
           IF_NOT(GRADIENT, IF(CENTRED, Compute* sums,) Compute* dots,)
           long long outer, long long inner, Compute scale_offset, Compute count) {
  // clang-format on
#if GRADIENT
  const Compute per_count = Compute(1) / count;
#if HAS_PARTIAL
  Compute* const dscale = partial + 1LL * blockIdx.x * SUMS * FEATURES;
  IF(WITH_DSCALE, clear_columns(dscale));
#endif
#if WITH_DBIAS
  Compute* const dbias = dscale + WITH_DSCALE * FEATURES;
  clear_columns(dbias);
#endif
#endif
  const long long tiles = Tile::count(outer, inner);
  for (long long number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile(number, inner);
    IF(CENTRED, const Compute middle = tile.active ? mean[tile.row] : Compute(0));

#if DOTS
    IF(CENTRED, Compute sum = 0);
    Compute dot = 0;
    if (tile.active) {
#pragma unroll 4
      for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
        Compute g = widen<Compute>(dy[tile.at(k)]);
        IF(HAS_SCALE, g *= widen<Compute>(scale[k]) + scale_offset);
        IF(CENTRED, sum += g);
        dot += g * (widen<Compute>(x[tile.at(k)]) IF(CENTRED, -middle));
      }
    }
    IF(CENTRED, sum = tile_sum(sum));
    dot = tile_sum(dot);
#else
    IF(CENTRED, const Compute sum = tile.active ? sums[tile.row] : Compute(0));
    const Compute dot = tile.active ? dots[tile.row] : Compute(0);
#endif
#if !GRADIENT
    if (tile.active && thread_y() == 0) {
      IF(CENTRED, sums[tile.row] = sum);
      dots[tile.row] = dot;
    }
#else
    const Compute rstd_row = tile.active ? rstd[tile.row] : Compute(0);
    const Compute pull = dot * per_count * rstd_row * rstd_row;
    IF(CENTRED, const Compute rest = sum * per_count * rstd_row);
    // All threads of a warp go round together: the lanes of a line add up their share of dscale.
#pragma unroll 2
    for (int begin = 0; begin < FEATURES; begin += BLOCK_Y) {
      const int k = begin + thread_y();
      [[maybe_unused]] Compute share = 0;
      IF(WITH_DBIAS, Compute more = 0);
      if (tile.active && k < FEATURES) {
        const Compute wide_dy = widen<Compute>(dy[tile.at(k)]);
        const Compute normal = (widen<Compute>(x[tile.at(k)]) IF(CENTRED, -middle)) * rstd_row;
        share = wide_dy * normal;
        IF(WITH_DBIAS, more = wide_dy);
        Compute weight = 1;
        IF(HAS_SCALE, weight = widen<Compute>(scale[k]) + scale_offset);
        const Compute g = wide_dy * weight;
        Compute out =
            rstd_row * g - IF_NOT(CENTRED, normal * pull) IF(CENTRED, (normal * pull + rest));
        IF(HAS_RESIDUAL, out += widen<Compute>(dh[tile.at(k)]));
        dx[tile.at(k)] = X_TYPE(out);
      }
#if WITH_DSCALE
      share = line_sum(share);
      if (thread_x() == 0 && k < FEATURES) dscale[k] += share;
#endif
#if WITH_DBIAS
      more = line_sum(more);
      if (thread_x() == 0 && k < FEATURES) dbias[k] += more;
#endif
    }
#endif
  }
}
