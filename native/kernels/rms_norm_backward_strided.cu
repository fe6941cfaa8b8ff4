// The derivative of RMSNorm along the middle of (outer, FEATURES, inner); the formulas, macros and
// operands are those of rms_norm_backward.cu, with rstd and dots (outer, inner). Here an element is
// read twice, and then its place written, by one thread.
//
// A block adds up dscale over its rows in its own row of `partial`, each element always by the same
// thread, and column_sum.cu adds the blocks: the result does not depend on timing.
#include "strided.cuh"

using Compute = COMPUTE_TYPE;

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(const DY_TYPE* dy, const X_TYPE* x,
#if HAS_SCALE
           const SCALE_TYPE* scale,
#endif
#if GRADIENT
           const Compute* rstd,
#if HAS_RESIDUAL
           const DH_TYPE* dh,
#endif
#endif
#if !DOTS
           const Compute* dots,
#endif
#if GRADIENT
           X_TYPE* dx,
#if WITH_DSCALE
           Compute* partial,
#endif
#if WITH_VALUE
           DY_TYPE* value,
#endif
#else
           Compute* dots,
#endif
           long long outer, long long inner, Compute scale_offset, Compute count) {
#if GRADIENT
  const Compute per_count = Compute(1) / count;
#if WITH_DSCALE
  Compute* const dscale = partial + static_cast<long long>(blockIdx.x) * FEATURES;
  if (thread_x() == 0) {
    for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) dscale[k] = 0;
  }
#endif
#endif
  const long long tiles = Tile::count(outer, inner);
  for (long long number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile(number, inner);

#if DOTS
    Compute dot = 0;
    if (tile.active) {
#pragma unroll 4
      for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) {
        Compute g = widen<Compute>(dy[tile.at(k)]);
#if HAS_SCALE
        g *= widen<Compute>(scale[k]) + scale_offset;
#endif
        dot += g * widen<Compute>(x[tile.at(k)]);
      }
    }
    dot = tile_sum(dot);
#else
    const Compute dot = tile.active ? dots[tile.row] : Compute(0);
#endif
#if !GRADIENT
    if (tile.active && thread_y() == 0) dots[tile.row] = dot;
#else
    const Compute rstd_row = tile.active ? rstd[tile.row] : Compute(0);
    const Compute pull = dot * per_count * rstd_row * rstd_row;
    // All threads of a warp go round together: the lanes of a line add up their share of dscale.
#pragma unroll 2
    for (int begin = 0; begin < FEATURES; begin += BLOCK_Y) {
      const int k = begin + thread_y();
      Compute share = 0;
      if (tile.active && k < FEATURES) {
        const Compute wide_dy = widen<Compute>(dy[tile.at(k)]);
        const Compute normal = widen<Compute>(x[tile.at(k)]) * rstd_row;
        share = wide_dy * normal;
        Compute weight = 1;
#if HAS_SCALE
        weight = widen<Compute>(scale[k]) + scale_offset;
#endif
        const Compute g = wide_dy * weight;
        Compute out = rstd_row * g - normal * pull;
#if HAS_RESIDUAL
        out += widen<Compute>(dh[tile.at(k)]);
#endif
        dx[tile.at(k)] = X_TYPE(out);
#if WITH_VALUE
        value[tile.at(k)] = DY_TYPE(normal * weight);
#endif
      }
#if WITH_DSCALE
#pragma unroll
      for (int offset = BLOCK_X / 2; offset > 0; offset /= 2) {
        share += __shfl_xor_sync(0xffffffffu, share, offset);
      }
      if (thread_x() == 0 && k < FEATURES) dscale[k] += share;
#endif
    }
#endif
  }
}
