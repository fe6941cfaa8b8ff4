// The derivative of RMSNorm along rows of FEATURES contiguous elements, in one pass over memory:
//
//   g = dy · (scale + offset)    c = Σ g · x / count    dx = rstd · g - x · rstd³ · c (+ dh)
//   dscale = Σ_rows dy · x · rstd             dbias = Σ_rows dy
//   value = x · rstd · (scale + offset), what dy is of
//
// (with a = activation(z) of a gate: if GATE_AFTER dy above stands for dy · a, and dz = dy · a' ·
// value; if GATE_BEFORE x stands for x · a, and dx for dh, of which dx = dh · a, dz = dh · a' · x),
// and its two halves, for rows that lie on several devices or in no single block: the sums over
// rows alone (GRADIENT 0), and dx and dscale for given sums (DOTS 0).
//
//   dy, x, dh, dx  (rows, FEATURES)      DY_TYPE, X_TYPE, DH_TYPE (if HAS_RESIDUAL), X_TYPE
//   z, dz          (rows, FEATURES)      Z_TYPE, if gated
//   scale          (HEADS, FEATURES)     SCALE_TYPE, if HAS_SCALE
//   rstd           (rows,)               COMPUTE_TYPE
//   dots           (rows, SLICES)        COMPUTE_TYPE   Σ g · x of each slice; operand: (rows,)
//   partial        (gridDim.x, of each: FEATURES) COMPUTE_TYPE   over each block's rows: dscale if
//                                        WITH_DSCALE, then dbias if WITH_DBIAS
//   value          (rows, FEATURES)      DY_TYPE        if WITH_VALUE
//
// With more than one head, row i has the scale of head i % HEADS. HEADS divides gridDim.x *
// BLOCK_ROWS: all rows of a group of threads are of one head, and partial has
// gridDim.x * BLOCK_ROWS rows, the sums of each group.
//
// If PER_EXAMPLE, `tokens` rows after one another have the scale of an example, (rows / tokens,
// FEATURES), and block i has rows of example i % (rows / tokens) alone: examples divide gridDim.x,
// and the sums over one example's blocks are its own dscale and dbias.
//
// dx, or value, may be the memory of dy: every element is read once, by the thread that then writes
// its place.
//
// A persistent grid: a block goes through the rows with a stride, keeps its columns' scale and sums
// for dscale in registers, and has STAGES rows in shared memory or on their way there. Each thread
// reads only what it copied itself, so that copies need no barrier. If HOLD it keeps the row in
// registers between the sum and dx, and the next row is fetched meanwhile. Otherwise, where
// registers are short, it reads the row from shared memory again; and the sum of the next row is on
// its way (through the block, or the cluster) while dx of this one is computed. Every block adds
// its rows in order, and column_sum.cu adds the blocks in order: the result does not depend on
// timing.
#ifndef PER_EXAMPLE
#define PER_EXAMPLE 0
#endif
#include "gate.cuh"
#include "stage.cuh"
#include "sums.cuh"

using Compute = COMPUTE_TYPE;

// One row's slots: dy, x and z, which the sum is of, and dh.
constexpr int kDy = 0;
constexpr int kX = kDy + kSlots<DY_TYPE>;
IF(HAS_GATE, constexpr int kZ = kX + kSlots<X_TYPE>;)
constexpr int kDh = IF(HAS_GATE, kZ + kSlots<Z_TYPE>) IF_NOT(HAS_GATE, kX + kSlots<X_TYPE>);
constexpr int kStageBytes = kDh IF(GRADIENT, IF(HAS_RESIDUAL, +kSlots<DH_TYPE>));

using PartDy = Part<DY_TYPE, HOLD>;
using PartX = Part<X_TYPE, HOLD>;
IF(HAS_GATE, using PartZ = Part<Z_TYPE, HOLD>;)

using Columns = ColumnsOf<Compute>;

// Σ dy · w · x over this thread's part of a row; gated, one of them times the gate.
__device__ inline Compute dot_of(const PartDy& dys, const PartX& xs,
                                 IF(HAS_GATE, const PartZ& zs, )
                                     [[maybe_unused]] const Columns& weight) {
  Compute dot = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const auto wide_dy = widen_all<Compute>(dys[i]);
    const auto wide_x = widen_all<Compute>(xs[i]);
    IF(HAS_GATE, const auto wide_z = widen_all<Compute>(zs[i]));
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      const Compute g = wide_dy.at[k] IF(HAS_SCALE, *weight[i].at[k]);
      dot += g * wide_x.at[k] IF(HAS_GATE, *gate_of(wide_z.at[k]));
    }
  }
  return dot;
}

// Whether the sum of the next row is begun before dx of this one.
#define AHEAD (DOTS && GRADIENT && !HOLD)
static_assert(!AHEAD || STAGES > 1, "the next row is there");

// Whether a row's slots are free once its sum is known: what was in them is in registers, and used.
constexpr bool kEarly = DOTS && HOLD;

static_assert(lines(RowSum<Compute>::kBytes) + STAGES * kStageBytes <= SHARED_BYTES, "rows fit");
static_assert(BLOCK_ROWS == 1 || BLOCK_ROWS * kTile * sizeof(Compute) <= SHARED_BYTES, "sums fit");

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(const DY_TYPE* dy, const X_TYPE* x,
           // clang-format off
           IF(HAS_GATE, const Z_TYPE* z,)
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF(GRADIENT, const Compute* rstd, IF(HAS_RESIDUAL, const DH_TYPE* dh,))
           IF_NOT(DOTS, const Compute* dots,)
           IF(GRADIENT, X_TYPE* dx, IF(HAS_GATE, Z_TYPE* dz,))
           IF(GRADIENT, IF(HAS_PARTIAL, Compute* partial,) IF(WITH_VALUE, DY_TYPE* value,))
           IF_NOT(GRADIENT, Compute* dots,)
           long long rows, IF(PER_EXAMPLE, long long tokens,) Compute scale_offset, Compute count) {
  // clang-format on
  bool aligned = aligned_16(dy, x);
  IF(HAS_GATE, aligned = aligned && aligned_16(z, dz));
  IF(HAS_SCALE, aligned = aligned && aligned_16(scale));
#if GRADIENT
  aligned = aligned && aligned_16(dx);
  IF(HAS_RESIDUAL, aligned = aligned && aligned_16(dh));
  IF(WITH_VALUE, aligned = aligned && aligned_16(value));
  IF(HAS_PARTIAL, const bool partial_aligned = aligned_16(partial));
#endif

  unsigned char* const stages = shared_memory() + lines(RowSum<Compute>::kBytes);
  IF(DOTS, RowSum<Compute> row_sum(shared_memory()));
#if PER_EXAMPLE
  const long long examples = rows / tokens, example = blockIdx.x % examples;
  const long long stride = gridDim.x / examples * BLOCK_ROWS;
  long long row = example * tokens + blockIdx.x / examples * BLOCK_ROWS + row_group();
  rows = (example + 1) * tokens;
  IF(HAS_SCALE, scale += example * FEATURES);
#else
  const long long stride = 1LL * gridDim.x * BLOCK_ROWS;
  long long row = 1LL * blockIdx.x * BLOCK_ROWS + row_group();
#endif

  // Begin to copy what the sum is of, and the rest, of row `which`.
  const auto fetch_terms = [&](long long which, int stage) {
    if (which >= rows) return;
    unsigned char* const to = stages + stage * kStageBytes;
    Slots<DY_TYPE>{to + kDy}.fetch(dy + which * FEATURES, aligned);
    Slots<X_TYPE>{to + kX}.fetch(x + which * FEATURES, aligned);
    IF(HAS_GATE, Slots<Z_TYPE>{to + kZ}.fetch(z + which * FEATURES, aligned));
  };
  const auto fetch_rest = [&](long long which, int stage) {
#if GRADIENT && HAS_RESIDUAL
    const Slots<DH_TYPE> to{stages + stage * kStageBytes + kDh};
    if (which < rows) to.fetch(dh + which * FEATURES, aligned);
#endif
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    fetch_terms(row + s * stride, s);
    fetch_rest(row + s * stride, s);
  }

  Columns weight;
#if HEADS > 1
  IF(GRADIENT, IF(HAS_PARTIAL, Compute* const share = partial + row * SUMS * FEATURES));
  scale += row % HEADS * FEATURES;
#endif
#if HAS_SCALE
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) weight[i] = load_weight(scale, scale_offset, i, aligned);
#endif
#if GRADIENT
  Columns dscale{};
  IF(WITH_DBIAS, Columns dbias{});
  const Compute per_count = Compute(1) / count;
  Compute next_rstd = row < rows ? rstd[row] : Compute(0);
  IF_NOT(DOTS, Compute next_dot = row < rows ? dots[row] : Compute(0));
#endif

  int stage = 0;
#if AHEAD
  wait_copies<STAGES - 1>();
  row_sum.post(dot_of(PartDy(stages + kDy, row < rows), PartX(stages + kX, row < rows),
                      IF(HAS_GATE, PartZ(stages + kZ, row < rows), ) weight));
#endif
  // All threads of the block leave together: `row - row_group()` is the same for each.
  for (; row - row_group() < rows; row += stride) {
    const bool active = row < rows;
    unsigned char* const from = stages + stage * kStageBytes;
#if AHEAD
    const Compute dot = row_sum.total();
    if (row - row_group() + stride < rows) {
      wait_copies<STAGES - 2>();
      unsigned char* const next = stages + (stage + 1 == STAGES ? 0 : stage + 1) * kStageBytes;
      const bool there = row + stride < rows;
      row_sum.post(dot_of(PartDy(next + kDy, there), PartX(next + kX, there),
                          IF(HAS_GATE, PartZ(next + kZ, there), ) weight));
    }
#else
    wait_copies<STAGES - 1>();
#endif
    const PartDy dys(from + kDy, active);
    const PartX xs(from + kX, active);
    IF(HAS_GATE, const PartZ zs(from + kZ, active));
#if GRADIENT
    IF(HAS_RESIDUAL, const Part<DH_TYPE, HOLD> dhs(from + kDh, active));
    const bool another = row + stride < rows;
    const Compute rstd_row = next_rstd;
    next_rstd = another ? rstd[row + stride] : Compute(0);
#endif
#if !DOTS
    const Compute dot = next_dot;
    next_dot = another ? dots[row + stride] : Compute(0);
#elif !AHEAD
    const Compute dot = row_sum(dot_of(dys, xs, IF(HAS_GATE, zs, ) weight));
    if (kEarly) fetch_terms(row + STAGES * stride, stage);
#endif
#if !GRADIENT
    if (active && row_thread() == 0) dots[row * SLICES + slice()] = dot;
#else
    const Compute pull = dot * per_count * rstd_row * rstd_row;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const auto wide_dy = widen_again<Compute>(dys[i]);
      const auto wide_x = widen_again<Compute>(xs[i]);
      IF(HAS_RESIDUAL, const auto wide_dh = widen_all<Compute>(dhs[i]));
      Wide<Compute, VECTOR> out;
      IF(HAS_GATE, const auto wide_z = widen_again<Compute>(zs[i]); Wide<Compute, VECTOR> of_z);
      IF(WITH_VALUE, Wide<Compute, VECTOR> again);
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        IF(HAS_GATE, const Compute gate = gate_of(wide_z.at[k]));
        IF(HAS_GATE, const Compute slope = gate_slope(wide_z.at[k]));
        const Compute normal = wide_x.at[k] IF(GATE_BEFORE, *gate) * rstd_row;  // x normalised
        IF(WITH_DSCALE, dscale[i].at[k] += wide_dy.at[k] IF(GATE_AFTER, *gate) * normal);
        IF(WITH_DBIAS, dbias[i].at[k] += wide_dy.at[k]);
        const Compute g = wide_dy.at[k] IF(GATE_AFTER, *gate) IF(HAS_SCALE, *weight[i].at[k]);
        IF(WITH_VALUE, again.at[k] = normal IF(HAS_SCALE, *weight[i].at[k]));
        out.at[k] = rstd_row * g - normal * pull;
        IF(HAS_RESIDUAL, out.at[k] += wide_dh.at[k]);
        IF(GATE_AFTER, of_z.at[k] = wide_dy.at[k] * normal IF(HAS_SCALE, *weight[i].at[k]) * slope);
        IF(GATE_BEFORE, of_z.at[k] = out.at[k] * wide_x.at[k] * slope);
        IF(GATE_BEFORE, out.at[k] *= gate);
      }
      if (active) store_chunk(dx + row * FEATURES, i, aligned, narrow_all<X_TYPE>(out));
      IF(
          HAS_GATE,
          if (active) { store_chunk(dz + row * FEATURES, i, aligned, narrow_all<Z_TYPE>(of_z)); })
#if WITH_VALUE
      if (active) store_chunk(value + row * FEATURES, i, aligned, narrow_all<DY_TYPE>(again));
#endif
    }
#endif
    // All that was read has been used, so the slots are free again.
    if (!kEarly) fetch_terms(row + STAGES * stride, stage);
    fetch_rest(row + STAGES * stride, stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  IF(DOTS, row_sum.finish());
#if GRADIENT && HAS_PARTIAL
  wait_copies<0>();
#if HEADS > 1
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    IF(WITH_DSCALE, store_chunk(share, i, partial_aligned, narrow_all<Compute>(dscale[i])));
    IF(WITH_DBIAS, store_chunk(share + WITH_DSCALE * FEATURES, i, partial_aligned,
                               narrow_all<Compute>(dbias[i])));
  }
#else
  Compute* const mine = partial + 1LL * blockIdx.x * SUMS * FEATURES;
  IF(WITH_DSCALE, store_columns(dscale, partial_aligned, mine));
  IF(WITH_DBIAS, store_columns(dbias, partial_aligned, mine + WITH_DSCALE * FEATURES));
#endif
#endif
}
