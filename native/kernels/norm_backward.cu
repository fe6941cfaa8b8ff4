// The derivative of RMSNorm and, if CENTRED, LayerNorm along rows of FEATURES contiguous elements,
// in one pass over memory:
//
//   normal = (x - mean) · rstd    g = dy · (scale + offset)
//   a = Σ g / count    b = Σ g · (x - mean) / count
//   dx = rstd · (g - a - normal · rstd · b) (+ dh)
//   dscale = Σ_rows dy · normal   dbias = Σ_rows dy
//
// (mean and a are 0 unless CENTRED), and its two halves, for rows that lie on several devices or in
// no single block: the sums over rows alone (GRADIENT 0), and dx, dscale and dbias for given sums
// (DOTS 0).
//
//   dy, x, dh, dx  (rows, FEATURES)      DY_TYPE, X_TYPE, DH_TYPE (if HAS_RESIDUAL), X_TYPE
//   scale          (FEATURES,)           SCALE_TYPE, if HAS_SCALE
//   mean, rstd     (rows,)               COMPUTE_TYPE; mean if CENTRED
//   [sums,] dots   (rows, SLICES)        COMPUTE_TYPE   a if CENTRED, and b, of each slice, times
//                                        count; as operands (rows,)
//   partial        (gridDim.x, of each: FEATURES) COMPUTE_TYPE   over each block's rows: dscale if
//                                        WITH_DSCALE, then dbias if WITH_DBIAS
//
// If PER_EXAMPLE, `tokens` rows after one another have the scale of an example, (rows / tokens,
// FEATURES), and block i has rows of example i % (rows / tokens) alone: examples divide gridDim.x,
// and the sums over one example's blocks are its own dscale and dbias.
//
// A persistent grid: a block goes through the rows with a stride, keeps its columns' scale and sums
// for dscale in registers, and has STAGES rows in shared memory or on their way there. Each thread
// reads only what it copied itself, so that copies need no barrier. If HOLD it keeps the row in
// registers between the sums and dx, and the next row is fetched meanwhile. Otherwise, where
// registers are short, it reads the row from shared memory again; and the sums of the next row are
// on their way (through the block, or the cluster) while dx of this one is computed. If
// SHARE_WEIGHT the scale is in shared memory, for registers have no room for three vectors of long
// rows. Every block adds its rows in order, and column_sum.cu adds the blocks in order: the result
// does not depend on timing.
#include "stage.cuh"
#include "sums.cuh"

using Compute = COMPUTE_TYPE;

// One row's slots: dy, x and z, which the sum is of, and dh.
constexpr int kDy = 0;
constexpr int kX = kDy + kSlots<DY_TYPE>;
constexpr int kDh = kX + kSlots<X_TYPE>;
constexpr int kStageBytes = kDh IF(GRADIENT, IF(HAS_RESIDUAL, +kSlots<DH_TYPE>));

using PartDy = Part<DY_TYPE, HOLD>;
using PartX = Part<X_TYPE, HOLD>;

using Columns = ColumnsOf<Compute>;
using Sums = Wide<Compute, 1 + CENTRED>;  // Σ g if CENTRED, and Σ g · (x - mean)

// scale + offset at this thread's columns, which only it reads.
#if SHARE_WEIGHT
struct Weight {
  using Values = Wide<Compute, VECTOR>;
  using Word = typename Packed<Compute, VECTOR>::Word;
  static constexpr int kWords = sizeof(Values) / sizeof(Word);
  static constexpr int kBytes = kThreads * CHUNKS * sizeof(Values);

  Word* words;

  __device__ Values operator[](int chunk) const {
    Word values[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) values[i] = at(chunk, i);
    return bit_cast<Values>(values);
  }

  __device__ void set(int chunk, const Values& values) const {
    Word from[kWords];
    memcpy(from, &values, sizeof(values));
#pragma unroll
    for (int i = 0; i < kWords; ++i) at(chunk, i) = from[i];
  }

  // Neighbouring threads' words lie side by side: they are in different banks.
  __device__ Word& at(int chunk, int i) const {
    return words[(chunk * kWords + i) * kThreads + threadIdx.x];
  }
};
constexpr int kWeightBytes = Weight::kBytes;
#else
struct Weight {
  Columns values;

  __device__ const Wide<Compute, VECTOR>& operator[](int chunk) const { return values[chunk]; }
  __device__ void set(int chunk, const Wide<Compute, VECTOR>& of) { values[chunk] = of; }
};
constexpr int kWeightBytes = 0;
#endif

// Over this thread's part of a row; beyond the row's end dy is zero.
__device__ inline Sums sums_of(const PartDy& dys, const PartX& xs,
                               IF(CENTRED, Compute mean, ) [[maybe_unused]] const Weight& weight) {
  Sums sums{};
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const auto wide_dy = widen_all<Compute>(dys[i]);
    const auto wide_x = widen_all<Compute>(xs[i]);
    IF(HAS_SCALE, const auto of_columns = weight[i]);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      const Compute g = wide_dy.at[k] IF(HAS_SCALE, *of_columns.at[k]);
      IF(CENTRED, sums.at[0] += g);
      const Compute centred = wide_x.at[k] IF(CENTRED, -mean);
      sums.at[CENTRED] += g * centred;
    }
  }
  return sums;
}

// Set if the sums of the next row are begun before dx of this one.
#define AHEAD (DOTS && GRADIENT && !HOLD)
static_assert(!AHEAD || STAGES > 1, "the next row is there");

// Set if a row's slots are free once its sums are known: what was in them is in registers, and
// used.
constexpr bool kEarly = DOTS && HOLD;

using RowTotals = RowSums<Compute, 1 + CENTRED>;
constexpr int kSumBytes = lines(RowTotals::kBytes);
static_assert(kSumBytes + kWeightBytes + STAGES * kStageBytes <= SHARED_BYTES, "rows fit");
static_assert(BLOCK_ROWS == 1 || BLOCK_ROWS * kTile * sizeof(Compute) <= SHARED_BYTES, "sums fit");

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(const DY_TYPE* dy, const X_TYPE* x,
           // clang-format off
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF(CENTRED, const Compute* mean,)
           IF(GRADIENT, const Compute* rstd, IF(HAS_RESIDUAL, const DH_TYPE* dh,))
           IF_NOT(DOTS, IF(CENTRED, const Compute* sums,) const Compute* dots,)
           IF(GRADIENT, X_TYPE* dx,)
           IF(GRADIENT, IF(HAS_PARTIAL, Compute* partial,))
           IF_NOT(GRADIENT, IF(CENTRED, Compute* sums,) Compute* dots,)
           long long rows, IF(PER_EXAMPLE, long long tokens,) Compute scale_offset, Compute count) {
  // clang-format on
  bool aligned = aligned_16(dy, x);
  IF(HAS_SCALE, aligned = aligned && aligned_16(scale));
#if GRADIENT
  aligned = aligned && aligned_16(dx);
  IF(HAS_RESIDUAL, aligned = aligned && aligned_16(dh));
  IF(HAS_PARTIAL, const bool partial_aligned = aligned_16(partial));
#endif

  unsigned char* const stages = shared_memory() + kSumBytes + kWeightBytes;
  IF(DOTS, RowTotals row_sums(shared_memory()));
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

  // Begin to copy what the sums are of, and the rest, of row `which`.
  const auto fetch_terms = [&](long long which, int stage) {
    if (which >= rows) return;
    unsigned char* const to = stages + stage * kStageBytes;
    Slots<DY_TYPE>{to + kDy}.fetch(dy + which * FEATURES, aligned);
    Slots<X_TYPE>{to + kX}.fetch(x + which * FEATURES, aligned);
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

  // A statistic of row `which`; 0 beyond the last, where dy and x are too.
  [[maybe_unused]] const auto of_row = [&](const Compute* values, long long which) {
    return which < rows ? values[which] : Compute(0);
  };

#if SHARE_WEIGHT
  const Weight weight{reinterpret_cast<Weight::Word*>(shared_memory() + kSumBytes)};
#else
  Weight weight;
#endif
#if HAS_SCALE
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) weight.set(i, load_weight(scale, scale_offset, i, aligned));
#endif
  // Means are read two rows ahead: sums may be begun one row ahead.
  IF(CENTRED, Compute mean_row = of_row(mean, row); Compute next_mean = of_row(mean, row + stride));
#if GRADIENT
  IF(WITH_DSCALE, Columns dscale{});
  IF(WITH_DBIAS, Columns dbias{});
  const Compute per_count = Compute(1) / count;
  Compute next_rstd = of_row(rstd, row);
  IF_NOT(DOTS, Sums next_sums{{IF(CENTRED, of_row(sums, row), ) of_row(dots, row)}});
#endif

  int stage = 0;
#if AHEAD
  wait_copies<STAGES - 1>();
  row_sums.post(sums_of(PartDy(stages + kDy, row < rows), PartX(stages + kX, row < rows),
                        IF(CENTRED, mean_row, ) weight));
#endif
  // All threads of the block leave together: `row - row_group()` is the same for each.
  for (; row - row_group() < rows; row += stride) {
    const bool active = row < rows;
    unsigned char* const from = stages + stage * kStageBytes;
    IF(CENTRED, const Compute later_mean = of_row(mean, row + 2 * stride));
#if AHEAD
    const Sums totals = row_sums.total();
    if (row - row_group() + stride < rows) {
      wait_copies<STAGES - 2>();
      unsigned char* const next = stages + (stage + 1 == STAGES ? 0 : stage + 1) * kStageBytes;
      const bool there = row + stride < rows;
      row_sums.post(sums_of(PartDy(next + kDy, there), PartX(next + kX, there),
                            IF(CENTRED, next_mean, ) weight));
    }
#else
    wait_copies<STAGES - 1>();
#endif
    const PartDy dys(from + kDy, active);
    const PartX xs(from + kX, active);
#if GRADIENT
    IF(HAS_RESIDUAL, const Part<DH_TYPE, HOLD> dhs(from + kDh, active));
    const Compute rstd_row = next_rstd;
    next_rstd = of_row(rstd, row + stride);
#endif
#if !DOTS
    const Sums totals = next_sums;
    next_sums = Sums{{IF(CENTRED, of_row(sums, row + stride), ) of_row(dots, row + stride)}};
#elif !AHEAD
    row_sums.post(sums_of(dys, xs, IF(CENTRED, mean_row, ) weight));
    const Sums totals = row_sums.total();
    if (kEarly) fetch_terms(row + STAGES * stride, stage);
#endif
#if !GRADIENT
    if (active && row_thread() == 0) {
      IF(CENTRED, sums[row * SLICES + slice()] = totals.at[0]);
      dots[row * SLICES + slice()] = totals.at[CENTRED];
    }
#else
    // dx = rstd · g - normal · pull - rest
    const Compute pull = totals.at[CENTRED] * per_count * rstd_row * rstd_row;
    IF(CENTRED, const Compute rest = totals.at[0] * per_count * rstd_row);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const auto wide_dy = widen_again<Compute>(dys[i]);
      const auto wide_x = widen_again<Compute>(xs[i]);
      IF(HAS_RESIDUAL, const auto wide_dh = widen_all<Compute>(dhs[i]));
      IF(HAS_SCALE, const auto of_columns = weight[i]);
      Wide<Compute, VECTOR> out;
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        const Compute centred = wide_x.at[k] IF(CENTRED, -mean_row);
        const Compute normal = centred * rstd_row;
        IF(WITH_DSCALE, dscale[i].at[k] += wide_dy.at[k] * normal);
        IF(WITH_DBIAS, dbias[i].at[k] += wide_dy.at[k]);
        const Compute g = wide_dy.at[k] IF(HAS_SCALE, *of_columns.at[k]);
        out.at[k] =
            rstd_row * g - IF_NOT(CENTRED, normal * pull) IF(CENTRED, (normal * pull + rest));
        IF(HAS_RESIDUAL, out.at[k] += wide_dh.at[k]);
      }
      if (active) store_chunk(dx + row * FEATURES, i, aligned, narrow_all<X_TYPE>(out));
    }
#endif
    // All that was read has been used, so the slots are free again.
    if (!kEarly) fetch_terms(row + STAGES * stride, stage);
    fetch_rest(row + STAGES * stride, stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    IF(CENTRED, mean_row = next_mean; next_mean = later_mean);
  }
  IF(DOTS, row_sums.finish());
#if GRADIENT && HAS_PARTIAL
  wait_copies<0>();
  Compute* const mine = partial + 1LL * blockIdx.x * SUMS * FEATURES;
  IF(WITH_DSCALE, store_columns(dscale, partial_aligned, mine));
  IF(WITH_DBIAS, store_columns(dbias, partial_aligned, mine + WITH_DSCALE * FEATURES));
#endif
}
