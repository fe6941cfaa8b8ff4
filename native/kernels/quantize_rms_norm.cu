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
// memory, where x comes without taking registers; and the CLUSTER blocks side by side that have a
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
static_assert(kThreads % 32 == 0, "whole warps add squares up");

// 1 / sqrt(mean(h²) + eps) of the block's rows, from each warp's sums of squares. Of a cluster's
// rows each block adds its share up and sends all blocks the results: little memory, and the same
// bits everywhere.
class RowStatistics {
 public:
  static constexpr int kOwned = kTileRows / CLUSTER;  // rows that a block adds up
  static constexpr int kArrived = kOwned * (CLUSTER - 1);
  static constexpr int kInboxes = CLUSTER > 1 ? 16 : 0;
  static constexpr int kBytes = kInboxes + 4 * (kTileRows * kWarps + kArrived);

  __device__ explicit RowStatistics(unsigned char* shared)
      : inboxes_(shared),
        partial_(reinterpret_cast<float*>(shared + kInboxes)),
        arrived_(partial_ + kTileRows * kWarps) {
#if CLUSTER > 1
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) inbox_open(inbox(i));
    }
    __syncwarp();  // for racecheck, which orders by barriers alone what one thread does
    if (threadIdx.x == 0) {
      inbox_expect(inbox(0), 4 * kArrived);
      inbox_expect(inbox(1), 4 * kTileRows);
    }
    cluster_arrive_relaxed();  // a block may be sent to only once its inboxes are open
#endif
  }

  // A warp's share of the sum of squares of a row of the block.
  __device__ void add(int row, float sum) {
    partial_[threadIdx.x % BLOCK_X / kLanes * kTileRows + row] = sum;
  }

  // Once all are added.
  __device__ void find(const Operands& given, const Tile& first) {
    __syncthreads();
#if CLUSTER > 1
    cluster_wait();
    exchange(given, first);
#else
#pragma unroll
    for (int begin = 0; begin < kTileRows; begin += kThreads) {
      const int row = begin + threadIdx.x;
      if (row < kTileRows) partial_[row] = finish(given, first, row, row_sum(row));
    }
#endif
    __syncthreads();
  }

  // That of row i of the thread's part.
  __device__ float inverse(int i) const { return partial_[threadIdx.x / BLOCK_X * kRows + i]; }

 private:
  __device__ float row_sum(int row) const {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += partial_[warp * kTileRows + row];
    return sum;
  }

  __device__ float finish(const Operands& given, const Tile& first, int row, float sum) const {
    const float inverse = inverse_root(sum * given.per_column + given.eps);
    if (first.row + row < given.rows) given.rstd[first.row + row] = inverse;
    return inverse;
  }

#if CLUSTER > 1
  // One thread a row: its results come where the thread alone has read.
  __device__ void exchange(const Operands& given, const Tile& first) {
    static_assert(kTileRows % CLUSTER == 0 && kTileRows <= kThreads, "threads for all rows");
    const int row = threadIdx.x, rank = blockIdx.x % CLUSTER, owner = row / kOwned;
    const bool there = row < kTileRows;
    float sum = there ? row_sum(row) : 0;
    if (there && owner != rank) {
      const int sender = rank < owner ? rank : rank - 1;
      inbox_send(arrived_ + sender * kOwned + row % kOwned, inbox(0), owner, sum);
    }
    __syncwarp();  // sent before anyone waits
    if (there && owner == rank) {
      inbox_wait(inbox(0), 0);
#pragma unroll
      for (int i = 0; i < CLUSTER - 1; ++i) sum += arrived_[i * kOwned + row % kOwned];
      const float inverse = finish(given, first, row, sum);
#pragma unroll
      for (int to = 0; to < CLUSTER; ++to) inbox_send(partial_ + row, inbox(1), to, inverse);
    }
    if (there) inbox_wait(inbox(1), 0);
  }

  __device__ Inbox* inbox(int i) const { return reinterpret_cast<Inbox*>(inboxes_) + i; }
#endif

  unsigned char* inboxes_;
  float *partial_, *arrived_;
};
#endif

#if HAS_SCALE
using Scales = Packed<SCALE_TYPE, kColumns>;

// The scale at the thread's columns; all eight of them are there if kVectors.
template <bool kVectors>
__device__ inline Wide<float, kColumns> weights(const SCALE_TYPE* scale, int columns) {
  if constexpr (kVectors) return widen_all<float>(load_packed<kColumns>(scale));
  Wide<float, kColumns> weight{};
  for (int k = 0; k < columns; ++k) weight.at[k] = widen<float>(scale[k]);
  return weight;
}
#endif

#if STATISTICS
// The thread's rows in its own slots of shared memory, four rows a group: first x, then h. With
// SHARED_SCALE the block's columns of the scale come behind them, which threads would ask the cache
// for more than once.
class HeldRows {
 public:
  static constexpr int kRowSlots = sizeof(Packed<H, kColumns>) / 16, kGroupSlots = 4 * kRowSlots;
  static constexpr int kSlots = kRows * kRowSlots * kThreads;
  static constexpr int kScaleSlots = 0 IF(SHARED_SCALE, +BLOCK_X * sizeof(Scales) / 16);
  static constexpr int kBytes = 16 * (kSlots + kScaleSlots);

  __device__ explicit HeldRows(uint4* slots) : slots_(slots) {}

  template <typename T>
  __device__ Packed<T, kColumns> row(int i) const {
    uint4 words[sizeof(Packed<T, kColumns>) / 16];
#pragma unroll
    for (uint4& word : words) word = at(i, &word - words);
    return bit_cast<Packed<T, kColumns>>(words);
  }

  template <typename T>
  __device__ void keep(int i, const Packed<T, kColumns>& row) {
    uint4 words[sizeof(row) / 16];
    memcpy(words, &row, sizeof(row));
#pragma unroll
    for (const uint4& word : words) at(i, &word - words) = word;
  }

  // Begins to bring x, zeros beyond the edge, and where vectors move the scale. There all 16 rows
  // are there or none.
  template <bool kVectors>
  __device__ void bring(const Operands& given, const Part& part, const Tile& first) {
    const long long stride = given.columns;
    if (kVectors && part.rows > 0) {
      const X* from = given.x + part.first;
#pragma unroll
      for (int i = 0; i < kRows; ++i, from += stride) {
#pragma unroll
        for (int n = 0; n < sizeof(Packed<X, kColumns>) / 16; ++n) {
          copy_async<16>(&at(i, n), reinterpret_cast<const uint4*>(from) + n);
        }
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < kRows; ++i) keep(i, load_row<kVectors>(given.x, part, i, stride));
    }
#if SHARED_SCALE
    constexpr int kWord = 16 / sizeof(SCALE_TYPE);
    const int there = limited(stride - first.column, kColumns * BLOCK_X) / kWord;
    const uint4* from = reinterpret_cast<const uint4*>(given.scale + first.column);
#pragma unroll
    for (int begin = 0; kVectors && begin < kScaleSlots; begin += kThreads) {
      const int i = begin + threadIdx.x;
      if (i < there) copy_async<16>(slots_ + kSlots + i, from + i);
    }
#endif
    commit_copies();
  }

#if HAS_RESIDUAL
  // Makes h of x and residual, and writes it.
  template <bool kVectors>
  __device__ void add(const Operands& given, const Part& part) {
    using Residual = Packed<RESIDUAL_TYPE, kColumns>;
    struct Loaded {
      Residual rows[BATCH];
    };
    // Pointers go along: an address from a row's number would take a product for each array.
    const long long stride = given.columns, jump = BATCH * stride;
    const RESIDUAL_TYPE* residual = given.residual + part.first;
    H* h = given.h + part.first;
    Part rest = {0, part.rows, part.columns};  // of which nothing is loaded
    const auto load = [&] {
      Loaded loaded;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        loaded.rows[i] = load_row<kVectors>(residual, rest, i, stride);
      }
      residual += jump, rest.rows -= BATCH;
      return loaded;
    };
    Loaded next = load();
    wait_copies<0>();
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += BATCH, h += jump) {
      const Loaded now = next;
      if (begin + BATCH < kRows) next = load();
      const Part left = {0, part.rows - begin, part.columns};
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        Wide<float, kColumns> wide = widen_all<float>(row<X>(begin + i));
        const Wide<float, kColumns> more = widen_all<float>(now.rows[i]);
#pragma unroll
        for (int k = 0; k < kColumns; ++k) wide.at[k] += more.at[k];
        const Packed<H, kColumns> stored = narrow_all<H>(wide);
        keep(begin + i, stored);
        store_row<kVectors>(stored, i, h, left, stride);
      }
    }
  }
#endif

  // Adds up the squares of what the warp's threads have brought: of eight rows at once, of each of
  // which four lanes take a share.
  __device__ void square(RowStatistics& statistics) {
    wait_copies<0>();
    __syncwarp();
    const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
#pragma unroll
    for (int begin = 0; begin < kRows * 32; begin += 8 * kLanes) {  // rows of each thread's part
      const int thread = warp + begin / (kRows * kLanes) * kLanes, y = thread / BLOCK_X;
      const int row = begin / kLanes % kRows + lane / 4;
      SquaredRows<H> squares;
#pragma unroll
      for (int n = 0; n < kRowSlots; ++n) {
        const int first = slot(kRowSlots * row + n, thread % BLOCK_X + lane % 4, y);
#pragma unroll
        for (int x = 0; x < kLanes; x += 4) squares.add(slots_[first ^ x]);  // x threads further
      }
      const float sum = squares.sum();
      if (squares.has_sum()) statistics.add(y * kRows + row, sum);
    }
  }

#if SHARED_SCALE
  // The scale at the thread's columns, after a barrier.
  __device__ Wide<float, kColumns> weights() const {
    const Scales* scale = reinterpret_cast<const Scales*>(slots_ + kSlots);
    return widen_all<float>(scale[threadIdx.x % BLOCK_X]);
  }
#endif

 private:
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
#if STATISTICS
  constexpr long long kWidth = kColumns * BLOCK_X;
  const Tile first = {blockIdx.x / CLUSTER * (long long)kTileRows, blockIdx.x % CLUSTER * kWidth};
#else
  const Tile first = tile_of(given.rows, columns, group, false);
#endif
  const Part part = part_of(first, given.rows, columns);
#if STATISTICS
  constexpr int kGroupSlots = HeldRows::kGroupSlots;
  uint4* slots = reinterpret_cast<uint4*>(shared_memory());
  HeldRows held(slots);
  held.bring<kVectors>(given, part, first);
  RowStatistics statistics(shared_memory() + HeldRows::kBytes);
#else
  constexpr int kGroupSlots = kCodeSlots;
  uint4* slots = reinterpret_cast<uint4*>(shared_memory());
#endif
  // While the first elements are on their way.
  const float bound = *given.bound;
  const Scale by = scale_of(bit_cast<int>(bound) & 0x7fffffff);
  if (blockIdx.x == 0 && threadIdx.x == 0) *given.code_scale = by.scale;
#if STATISTICS
  IF(HAS_RESIDUAL, held.add<kVectors>(given, part));
  held.square(statistics);
#endif
  Wide<float, kColumns> weight{};
#if HAS_SCALE
  constexpr bool kHeld = kVectors && SHARED_SCALE;
  if (!kHeld && part.columns > 0) {
    const long long column = first.column + threadIdx.x % BLOCK_X * kColumns;
    weight = weights<kVectors>(given.scale + column, part.columns);
  }
#endif
  IF(STATISTICS, statistics.find(given, first));
  IF(SHARED_SCALE, if (kHeld) weight = held.weights());
  // Codes' multiplier with it: a power of two changes no bit of a product whose code is not zero.
#pragma unroll
  for (float& each : weight.at) {
    IF(HAS_OFFSET, each += given.offset);
    each = HAS_SCALE ? each * by.multiplier : by.multiplier;
  }
  Codes codes;
  long long at = kept(part.first);  // the element that comes next, of `left` rows
  int left = kept(part.rows);
#pragma unroll 1
  for (int step = 0; step < kRows; step += 4) {
    Packed<H, kColumns> rows[4];
    float inverse[4];
    bool bounded = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if STATISTICS
      rows[i] = held.row<H>(step + i);
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
    store_rows<kVectors, 4>(codes, 0, given.q + at, left, part.columns, columns);
    at += 4 * columns, left -= 4;
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
