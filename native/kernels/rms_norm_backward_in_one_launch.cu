// The derivative of RMSNorm of few rows of FEATURES contiguous elements, whose rstd is known, in
// one launch; the formulas, macros and operands are those of norm_backward.cu, and dscale is
// (FEATURES,).
//
// The sums along rows and those over rows do not need each other, so the first COLUMN_BLOCKS blocks
// make dscale, each that of LANES vectors' columns, and the others dx, each that of BLOCK_ROWS
// rows. What is read twice comes from the cache the second time, and nothing waits for a second
// launch. Unlike norm_backward.cu, dx may not be the memory of dy.
#include "row.cuh"

using Compute = COMPUTE_TYPE;

constexpr int kColumns = LANES * VECTOR;  // columns of a block that computes dscale
constexpr int kGroups = kThreads / LANES;
constexpr int kWarps = kThreads / 32;

static_assert(SLICES == 1, "a block has whole rows");
static_assert(kThreads % 32 == 0 && 32 % LANES == 0, "warps have whole rows of lanes");

// dscale of the block's columns: each group of LANES threads adds up every kGroups-th row, and then
// the groups are added in their order.
__device__ inline void add_columns(const DY_TYPE* dy, const X_TYPE* x, const Compute* rstd,
                                   long long rows, bool aligned, Compute* dscale) {
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / 32;
  const int column = blockIdx.x * kColumns + lane * VECTOR;
  Wide<Compute, VECTOR> sums{};
  if (column < FEATURES) {
#pragma unroll 4
    for (long long row = threadIdx.x / LANES; row < rows; row += kGroups) {
      const long long at = row * FEATURES + column;
      Packed<DY_TYPE, VECTOR> dys;
      Packed<X_TYPE, VECTOR> xs;
      if (VECTOR == 1 || aligned) {
        dys = load_packed<VECTOR>(dy + at);
        xs = load_packed<VECTOR>(x + at);
      } else {
        dys = load_elements<VECTOR>(dy + at);
        xs = load_elements<VECTOR>(x + at);
      }
      const auto wide_dy = widen_all<Compute>(dys);
      const auto wide_x = widen_all<Compute>(xs);
      const Compute inverse = rstd[row];
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) sums.at[k] += wide_dy.at[k] * (wide_x.at[k] * inverse);
    }
  }
  Compute* const tile = reinterpret_cast<Compute*>(shared_memory());
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) {
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) {
      sums.at[k] += __shfl_xor_sync(0xffffffffu, sums.at[k], offset);
    }
    if (threadIdx.x % 32 < LANES) tile[warp * kColumns + lane * VECTOR + k] = sums.at[k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kColumns; i += kThreads) {
    Compute sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += tile[w * kColumns + i];
    if (blockIdx.x * kColumns + i < FEATURES) dscale[blockIdx.x * kColumns + i] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(const DY_TYPE* dy, const X_TYPE* x,
           // clang-format off
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           const Compute* rstd, IF(HAS_RESIDUAL, const DH_TYPE* dh,)
           X_TYPE* dx, Compute* dscale, long long rows, Compute scale_offset, Compute count) {
  // clang-format on
  bool aligned = aligned_16(dy, x, dx);
  IF(HAS_SCALE, aligned = aligned && aligned_16(scale));
  IF(HAS_RESIDUAL, aligned = aligned && aligned_16(dh));
  if (blockIdx.x < COLUMN_BLOCKS) {
    add_columns(dy, x, rstd, rows, aligned, dscale);
    return;
  }

  const long long row = (blockIdx.x - COLUMN_BLOCKS) * 1LL * BLOCK_ROWS + row_group();
  const bool active = row < rows;
  Chunks<DY_TYPE> dys;
  Chunks<X_TYPE> xs;
  load_row(dy + row * FEATURES, active, aligned, dys);
  load_row(x + row * FEATURES, active, aligned, xs);
  IF(HAS_RESIDUAL, Chunks<DH_TYPE> dhs);
  IF(HAS_RESIDUAL, load_row(dh + row * FEATURES, active, aligned, dhs));
  const Compute inverse = active ? rstd[row] : Compute(0);

  Wide<Compute, VECTOR> gs[CHUNKS];
  Compute dot = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    gs[i] = widen_all<Compute>(dys[i]);
    const auto wide_x = widen_all<Compute>(xs[i]);
    IF(HAS_SCALE, const auto weight = load_weight(scale, scale_offset, i, aligned));
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      IF(HAS_SCALE, gs[i].at[k] *= weight.at[k]);
      dot += gs[i].at[k] * wide_x.at[k];
    }
  }
  RowSum<Compute> row_sum(shared_memory());
  const Compute pull = row_sum(dot) / count * inverse * inverse;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const auto wide_x = widen_all<Compute>(xs[i]);
    IF(HAS_RESIDUAL, const auto wide_dh = widen_all<Compute>(dhs[i]));
    Wide<Compute, VECTOR> out;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      out.at[k] = inverse * gs[i].at[k] - wide_x.at[k] * inverse * pull;
      IF(HAS_RESIDUAL, out.at[k] += wide_dh.at[k]);
    }
    if (active) store_chunk(dx + row * FEATURES, i, aligned, narrow_all<X_TYPE>(out));
  }
}
