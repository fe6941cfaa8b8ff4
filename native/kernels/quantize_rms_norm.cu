// FP8 codes of RMSNorm along rows, as they lie and transposed, in one pass over memory:
//
//   h = x + residual (or x)    rstd = 1 / sqrt(mean(h²) + eps)    y = h · rstd · (scale + offset)
//   q[i][j] = qt[j][i] = round(y[i][j] / code_scale)    code_scale: a power of two, from the bound
//
// or, with STATISTICS 0, from an rstd that is already known.
//
//   x         (rows, columns)  X_TYPE
//   residual  (rows, columns)  RESIDUAL_TYPE, h (rows, columns) H_TYPE     if HAS_RESIDUAL
//   scale     (columns,)       SCALE_TYPE                                  if HAS_SCALE
//   rstd      (rows,)          float: operand, or result if STATISTICS
//   bound     (1,)             float: no |y| exceeds it
//   per_column                 float: 1 / columns
//   q, qt, code_scale          as q, qt and scale in quantize_cast.cu
//
// With STATISTICS a thread holds its 16 rows and 8 columns of h as they are stored, in shared
// memory, where x comes without taking registers (beside a residual it comes through them: two
// arrays keep enough bytes on their way); and the CLUSTER blocks side by side that have a
// row add their sums of squares up in one cluster; the grid is as many blocks wide. Otherwise
// blocks know nothing of each other.
#include "fp8_tile.cuh"

using X = X_TYPE;
#if HAS_RESIDUAL
using H = H_TYPE;
#else
using H = X_TYPE;
#endif

constexpr int kTileRows = kRows * BLOCK_Y;
constexpr int kLanes = BLOCK_X < 32 ? BLOCK_X : 32;  // of a warp, on one row
constexpr int kWarps = BLOCK_X / kLanes;             // of a block, on one row
static_assert(BLOCK_X % 32 == 0 || 32 % BLOCK_X == 0, "rows end where warps do");

// 2^50. Below it the bound holds; above it squares may have underflowed, and y may be infinite.
constexpr float kLargestInverse = 1125899906842624.0f;

struct Operands {
  const X* x;
  IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual; H * h;)
  IF(HAS_SCALE, const SCALE_TYPE* scale;)
  const float *bound, *known_rstd;
  float *code_scale, *rstd, eps, offset, per_column;
  Fp8 *q, *qt;
  long long rows, columns;
};

#if STATISTICS
// Adds up a warp's sums for kCount rows. At each step but the last ones a lane gives away half of
// them. A recursion, because the compiler holds `sums` in local memory where the bounds of an inner
// loop change.
template <int kOffset, int kCount, int kSums>
__device__ inline void add_lanes(float (&sums)[kSums]) {
  if constexpr (kOffset > 0) {
    constexpr int kHalf = kCount / 2;
    if constexpr (kHalf == 0) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], kOffset);
    const bool upper = threadIdx.x & kOffset;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float given = upper ? sums[i] : sums[i + kHalf];
      const float kept = upper ? sums[i + kHalf] : sums[i];
      sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, kOffset);
    }
    add_lanes<kOffset / 2, (kHalf > 0 ? kHalf : kCount)>(sums);
  }
}

// 1 / sqrt(mean(h²) + eps) of the block's rows, from each thread's sums of squares. All blocks of a
// cluster come to the same bits.
class RowStatistics {
 public:
  static constexpr int kInbox = CLUSTER > 1 ? 16 : 0;
  static constexpr int kArrived = CLUSTER > 1 ? kTileRows * CLUSTER : 0;  // a row's sums
  static constexpr int kBytes = kInbox + 4 * (kTileRows * (kWarps + 1) + kArrived);

  __device__ explicit RowStatistics(unsigned char* shared)
      : inbox_(shared),
        inverse_(reinterpret_cast<float*>(shared + kInbox)),
        partial_(inverse_ + kTileRows),
        arrived_(partial_ + kTileRows * kWarps) {
#if CLUSTER > 1
    if (threadIdx.x == 0) {
      inbox_open(inbox());
      inbox_expect(inbox(), 4 * kArrived);
    }
    cluster_arrive_relaxed();  // a block may be sent to only once its inbox is open
#endif
  }

  // A warp's share of the sums of squares of rows begin to begin + BATCH - 1 of the thread's part.
  __device__ void add(float (&sums)[BATCH], int begin) {
    constexpr int kEach = BATCH > kLanes ? BATCH / kLanes : 1;
    add_lanes<kLanes / 2, BATCH>(sums);
    const int y = threadIdx.x / BLOCK_X, lane = threadIdx.x % BLOCK_X;
    const int first = y * kRows + begin + lane % kLanes * BATCH / kLanes;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {  // lanes that have the same row write the same
      partial_[(first + i) * kWarps + lane / kLanes] = sums[i];
    }
  }

  // Once all are added.
  __device__ void find(const Operands& given, const Tile& first) {
    __syncthreads();
#if CLUSTER > 1
    cluster_wait();
    float* const mine = arrived_ + blockIdx.x % CLUSTER * kTileRows;
    share<kArrived>([&](int i) {
      inbox_send(mine + i % kTileRows, inbox(), i / kTileRows, row_sum(i % kTileRows));
    });
    if (threadIdx.x < kTileRows) inbox_wait(inbox(), 0);
#endif
    share<kTileRows>([&](int row) {
      float sum = CLUSTER > 1 ? 0 : row_sum(row);
#if CLUSTER > 1
#pragma unroll
      for (int rank = 0; rank < CLUSTER; ++rank) sum += arrived_[rank * kTileRows + row];
#endif
      inverse_[row] = inverse_root(sum * given.per_column + given.eps);
      const bool writes = first.column == 0 && first.row + row < given.rows;
      if (writes) given.rstd[first.row + row] = inverse_[row];
    });
    __syncthreads();
  }

  // That of row i of the thread's part.
  __device__ float inverse(int i) const { return inverse_[threadIdx.x / BLOCK_X * kRows + i]; }

 private:
  // Calls `run` for 0 to kCount - 1, by all threads.
  template <int kCount, typename Run>
  __device__ static void share(Run run) {
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kThreads) {
      const int i = begin + threadIdx.x;
      if (kCount % kThreads == 0 || i < kCount) run(i);
    }
  }

  __device__ float row_sum(int row) const {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += partial_[row * kWarps + warp];
    return sum;
  }
#if CLUSTER > 1
  __device__ Inbox* inbox() const { return reinterpret_cast<Inbox*>(inbox_); }
#endif

  unsigned char* inbox_;
  float *inverse_, *partial_, *arrived_;
};
#endif

// What the thread's columns are multiplied with, and their codes' multiplier: a power of two, so
// that it changes no bit of a product whose code is not zero. Read often: it may stay in the
// caches.
template <bool kVectors>
__device__ inline Wide<float, kColumns> weights(const Operands& given, const Part& part,
                                                long long column, float multiplier) {
  Wide<float, kColumns> weight{};
#if HAS_SCALE
  using Scales = Packed<SCALE_TYPE, kColumns>;
  const SCALE_TYPE* from = given.scale + column;
  if constexpr (kVectors) {
    if (part.columns > 0) {
      const Scales packed = *reinterpret_cast<const Scales*>(from);  // whole words of it
      weight = widen_all<float>(packed);
    }
  } else {
    for (int k = 0; k < part.columns; ++k) weight.at[k] = widen<float>(from[k]);
  }
#if HAS_OFFSET
#pragma unroll
  for (int k = 0; k < kColumns; ++k) weight.at[k] += given.offset;
#endif
#endif
#pragma unroll
  for (float& each : weight.at) each = (HAS_SCALE ? each : 1.0f) * multiplier;
  return weight;
}

#if STATISTICS
// The thread's rows of h in its own slots of shared memory, four rows a group.
class HeldRows {
 public:
  static constexpr int kRowSlots = sizeof(Packed<H, kColumns>) / 16, kGroupSlots = 4 * kRowSlots;

  __device__ explicit HeldRows(uint4* slots) : slots_(slots) {}

  __device__ Packed<H, kColumns> row(int i) const {
    uint4 words[kRowSlots];
#pragma unroll
    for (uint4& word : words) word = at(i, &word - words);
    return bit_cast<Packed<H, kColumns>>(words);
  }

  __device__ void keep(int i, const Packed<H, kColumns>& row) {
    uint4 words[kRowSlots];
    memcpy(words, &row, sizeof(row));
#pragma unroll
    for (const uint4& word : words) at(i, &word - words) = word;
  }

#if HAS_RESIDUAL
  // Makes h of x and residual, which is written, and adds its squares up.
  template <bool kVectors>
  __device__ void square(const Operands& given, const Part& part, RowStatistics& statistics) {
    struct Loaded {
      Packed<X, kColumns> x[BATCH];
      Packed<RESIDUAL_TYPE, kColumns> residual[BATCH];
    };
    // Pointers go along: an address from a row's number would take a product for each array.
    const long long stride = given.columns, jump = BATCH * stride;
    const X* x = given.x + part.first;
    const RESIDUAL_TYPE* residual = given.residual + part.first;
    H* h = given.h + part.first;
    Part rest = {0, part.rows, part.columns};  // of which nothing is loaded
    const auto load = [&] {
      Loaded loaded;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        loaded.x[i] = load_row<kVectors>(x, rest, i, stride);
        loaded.residual[i] = load_row<kVectors>(residual, rest, i, stride);
      }
      x += jump, residual += jump, rest.rows -= BATCH;
      return loaded;
    };
    Loaded next = load();
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += BATCH, h += jump) {
      const Loaded now = next;
      if (begin + BATCH < kRows) next = load();
      const Part left = {0, part.rows - begin, part.columns};
      float sums[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        Wide<float, kColumns> wide = widen_all<float>(now.x[i]);
        const Wide<float, kColumns> more = widen_all<float>(now.residual[i]);
#pragma unroll
        for (int k = 0; k < kColumns; ++k) wide.at[k] += more.at[k];
        const Packed<H, kColumns> stored = narrow_all<H>(wide);
        keep(begin + i, stored);
        store_row<kVectors>(stored, i, h, left, stride);
        sums[i] = squares(stored);
      }
      statistics.add(sums, begin);
    }
  }
#else
  // Begins to bring x; zeros beyond the edge. Where vectors move, all 16 rows are there or none.
  template <bool kVectors>
  __device__ void bring(const X* x, const Part& part, long long stride) {
    if (kVectors && part.rows > 0) {
#pragma unroll 4
      for (int i = 0; i < kRows; ++i) {
        const uint4* from = reinterpret_cast<const uint4*>(x + part.first + i * stride);
#pragma unroll
        for (int n = 0; n < kRowSlots; ++n) copy_async<16>(&at(i, n), from + n);
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < kRows; ++i) keep(i, load_row<kVectors>(x, part, i, stride));
    }
    commit_copies();
  }

  // Adds the squares of what was brought up.
  __device__ void square(RowStatistics& statistics) {
    wait_copies<0>();
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += BATCH) {
      float sums[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) sums[i] = squares(row(begin + i));
      statistics.add(sums, begin);
    }
  }
#endif

 private:
  __device__ static float squares(const Packed<H, kColumns>& row) {
    const Wide<float, kColumns> wide = widen_all<float>(row);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) sum += wide.at[k] * wide.at[k];
    return sum;
  }

  __device__ uint4& at(int i, int n) const { return slots_[own_slot(kRowSlots * i + n)]; }

  uint4* slots_;
};
#endif

// The codes of four rows of y. kBounded: the bound holds for all of them.
template <bool kBounded>
__device__ inline void encode_rows(const Packed<H, kColumns> (&rows)[4], const float (&inverse)[4],
                                   const Wide<float, kColumns>& weight, Codes& codes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Wide<float, kColumns> wide = widen_all<float>(rows[i]);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      wide.at[k] *= inverse[i];
      wide.at[k] *= weight.at[k];
    }
    encode<kBounded>(wide, codes[i]);
  }
}

template <bool kVectors>
__device__ inline void run(const Operands& given, int group) {
  const long long columns = given.columns;
  const Tile first = tile_of(given.rows, columns, group, false);
  const Part part = part_of(first, given.rows, columns);
#if STATISTICS
  constexpr int kGroupSlots = HeldRows::kGroupSlots;
  uint4* slots = reinterpret_cast<uint4*>(shared_memory() + RowStatistics::kBytes);
  HeldRows held(slots);
  IF_NOT(HAS_RESIDUAL, held.bring<kVectors>(given.x, part, columns));
  RowStatistics statistics(shared_memory());
#else
  constexpr int kGroupSlots = kCodeSlots;
  uint4* slots = reinterpret_cast<uint4*>(shared_memory());
#endif
  // While the first elements are on their way.
  const float bound = *given.bound;
  const Scale by = scale_of(bit_cast<int>(bound) & 0x7fffffff);
  if (blockIdx.x == 0 && threadIdx.x == 0) *given.code_scale = by.scale;
#if STATISTICS
#if HAS_RESIDUAL
  held.square<kVectors>(given, part, statistics);
#else
  held.square(statistics);
#endif
#endif
  const long long column = first.column + threadIdx.x % BLOCK_X * kColumns;
  const auto weight = weights<kVectors>(given, part, column, by.multiplier);
  IF(STATISTICS, statistics.find(given, first));
  Codes codes;
#pragma unroll 1
  for (int step = 0; step < kRows; step += 4) {
    Packed<H, kColumns> rows[4];
    float inverse[4];
    bool bounded = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if STATISTICS
      rows[i] = held.row(step + i);
      inverse[i] = statistics.inverse(step + i);
#else
      rows[i] = load_row<kVectors>(given.x, part, step + i, columns);
      const long long row = first.row + threadIdx.x / BLOCK_X * kRows + step + i;
      inverse[i] = step + i < part.rows ? given.known_rstd[row] : 0.0f;
#endif
      bounded = bounded && inverse[i] < kLargestInverse;
    }
    if (bounded) {
      encode_rows<true>(rows, inverse, weight, codes);
    } else {
      encode_rows<false>(rows, inverse, weight, codes);
    }
#if HAS_Q
    store_rows<kVectors>(codes, 0, step, given.q, part, columns);
    store_rows<kVectors>(codes, 2, step + 2, given.q, part, columns);
#endif
    // In slots of rows whose codes these are: nobody reads those any more.
    if (HAS_QT) place_group<kGroupSlots>(codes, step / 4, slots);
  }
#if HAS_QT
  __syncthreads();
  store_tile<kVectors, kGroupSlots>(slots, given.qt, first, given.rows, columns);
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(const X* x,
           // clang-format off
           IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual,)
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF_NOT(STATISTICS, const float* rstd,)
           const float* bound,
           IF(HAS_Q, Fp8* q,)
           IF(HAS_QT, Fp8* qt,)
           float* code_scale,
           IF(HAS_RESIDUAL, H* h,)
           IF(STATISTICS, float* rstd,)
           long long rows, long long columns, long long group, float eps, float offset,
           float per_column) {
  // clang-format on
  Operands given{};
  given.x = x;
  IF(HAS_RESIDUAL, given.residual = residual; given.h = h);
  IF(HAS_SCALE, given.scale = scale);
  IF_NOT(STATISTICS, given.known_rstd = rstd);
  IF(STATISTICS, given.rstd = rstd);
  IF(HAS_Q, given.q = q);
  IF(HAS_QT, given.qt = qt);
  given.bound = bound, given.code_scale = code_scale;
  given.rows = rows, given.columns = columns, given.eps = eps, given.offset = offset;
  given.per_column = per_column;
  bool aligned = VECTORS && aligned_16(x, given.q, given.qt);
  IF(HAS_RESIDUAL, aligned = aligned && aligned_16(residual, h));
  IF(HAS_SCALE, aligned = aligned && aligned_16(scale));
  if (aligned) {
    run<true>(given, group);
  } else {
    run<false>(given, group);
  }
}
