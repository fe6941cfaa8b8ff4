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
//   q, qt, code_scale          as q, qt and scale in quantize_cast.cu
//
// With STATISTICS a thread holds its 16 rows and 8 columns of h as they are stored, and the CLUSTER
// blocks side by side that have a row add their sums of squares up in one cluster; the grid is as
// many blocks wide. Otherwise blocks know nothing of each other.
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

struct Operands {
  const X* x;
  IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual; H * h;)
  IF(HAS_SCALE, const SCALE_TYPE* scale;)
  const float *bound, *known_rstd;
  float *code_scale, *rstd, eps, offset;
  Fp8 *q, *qt;
  long long rows, columns;
};

#if STATISTICS
// Adds up a warp's sums for 16 rows. At each step but the last ones a lane gives away half of them,
// so that in the end it has those of the rows from `row_of_lane` on.
constexpr int kLaneRows = kRows > kLanes ? kRows / kLanes : 1;
__device__ inline int row_of_lane() { return threadIdx.x % kLanes * kRows / kLanes; }
__device__ inline void add_lanes(float (&sums)[kRows]) {
#pragma unroll
  for (int offset = kLanes / 2, count = kRows; offset > 0; offset /= 2) {
    const bool upper = threadIdx.x & offset;
    const int half = count / 2;
    if (half == 0) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], offset);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? sums[i] : sums[i + half];
      const float kept = upper ? sums[i + half] : sums[i];
      sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, offset);
    }
    if (half > 0) count = half;
  }
}

// 1 / sqrt(mean(h²) + eps) of the block's rows, from each thread's sums of squares. All blocks of a
// cluster come to the same bits.
class RowStatistics {
 public:
  static constexpr int kInbox = CLUSTER > 1 ? 16 : 0;
  static constexpr int kBytes = kInbox + 4 * kTileRows * (kWarps + 1 + (CLUSTER > 1 ? CLUSTER : 0));

  __device__ explicit RowStatistics(unsigned char* shared)
      : inbox_(shared),
        inverse_(reinterpret_cast<float*>(shared + kInbox)),
        partial_(inverse_ + kTileRows),
        arrived_(partial_ + kTileRows * kWarps) {
#if CLUSTER > 1
    if (threadIdx.x == 0) {
      inbox_open(inbox());
      inbox_expect(inbox(), 4 * kTileRows * CLUSTER);
    }
    cluster_arrive();  // a block may be sent to only once its inbox is open
#endif
  }

  __device__ void find(float (&sums)[kRows], const Operands& given, const Tile& first) {
    add_lanes(sums);
    const int y = threadIdx.x / BLOCK_X, warp = threadIdx.x % BLOCK_X / kLanes;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {  // lanes that have the same row write the same
      partial_[(y * kRows + row_of_lane() + i) * kWarps + warp] = sums[i];
    }
    __syncthreads();
#if CLUSTER > 1
    cluster_wait();
    const int mine = blockIdx.x % CLUSTER;
    for (int row = threadIdx.x; row < kTileRows; row += kThreads) {
      const float sum = row_sum(row);
      for (int rank = 0; rank < CLUSTER; ++rank) {
        inbox_send(arrived_ + mine * kTileRows + row, inbox(), rank, sum);
      }
    }
    if (threadIdx.x < kTileRows) inbox_wait(inbox(), 0);
#endif
    for (int row = threadIdx.x; row < kTileRows; row += kThreads) {
      float sum = CLUSTER > 1 ? 0 : row_sum(row);
#if CLUSTER > 1
      for (int rank = 0; rank < CLUSTER; ++rank) sum += arrived_[rank * kTileRows + row];
#endif
      inverse_[row] = inverse_root(sum / given.columns + given.eps);
      const bool writes = first.column == 0 && first.row + row < given.rows;
      if (writes) given.rstd[first.row + row] = inverse_[row];
    }
    __syncthreads();
  }

  // That of row i of the thread's part.
  __device__ float inverse(int i) const { return inverse_[threadIdx.x / BLOCK_X * kRows + i]; }

 private:
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

// What the thread's columns are multiplied with; read often: it may stay in the caches.
template <bool kVectors>
__device__ inline Wide<float, kColumns> weights(const Operands& given, const Part& part,
                                                long long column) {
  Wide<float, kColumns> weight{};
#if HAS_SCALE
  using Scales = Packed<SCALE_TYPE, kColumns>;
  const SCALE_TYPE* from = given.scale + column;
  if constexpr (kVectors) {
    if (part.columns > 0) weight = widen_all<float>(*reinterpret_cast<const Scales*>(from));
  } else {
    for (int k = 0; k < part.columns; ++k) weight.at[k] = widen<float>(from[k]);
  }
#if HAS_OFFSET
#pragma unroll
  for (int k = 0; k < kColumns; ++k) weight.at[k] += given.offset;
#endif
#endif
  return weight;
}

#if HAS_RESIDUAL
// Rows begin to begin + BATCH - 1 of h = x + residual, rounded, and written.
template <bool kVectors>
__device__ inline void add_residual(const Operands& given, const Part& part, int begin,
                                    Packed<H, kColumns> (&held)[kRows]) {
  Packed<X, kColumns> xs[BATCH];
  Packed<RESIDUAL_TYPE, kColumns> residuals[BATCH];
#pragma unroll
  for (int i = 0; i < BATCH; ++i) {
    xs[i] = load_row<kVectors>(given.x, part, begin + i, given.columns);
    residuals[i] = load_row<kVectors>(given.residual, part, begin + i, given.columns);
  }
#pragma unroll
  for (int i = 0; i < BATCH; ++i) {
    Wide<float, kColumns> sum = widen_all<float>(xs[i]);
    const Wide<float, kColumns> more = widen_all<float>(residuals[i]);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) sum.at[k] += more.at[k];
    const auto stored = held[begin + i] = narrow_all<H>(sum);
    H* to = given.h + part.first + (begin + i) * given.columns;
    if (begin + i >= part.rows) continue;
    if constexpr (kVectors) {
      store_packed<kColumns>(to, stored);
    } else {
      H elements[kColumns];
      memcpy(elements, &stored, sizeof(stored));
      for (int k = 0; k < part.columns; ++k) to[k] = elements[k];
    }
  }
}
#endif

template <bool kVectors>
__device__ inline void run(const Operands& given, int group) {
  const long long columns = given.columns;
  const Tile first = tile_of(given.rows, columns, group, false);
  const Part part = part_of(first, given.rows, columns);
  unsigned char* shared = shared_memory();
#if STATISTICS
  RowStatistics statistics(shared);
  shared += RowStatistics::kBytes;
  Packed<H, kColumns> held[kRows];
#if HAS_RESIDUAL
#pragma unroll
  for (int begin = 0; begin < kRows; begin += BATCH) {
    add_residual<kVectors>(given, part, begin, held);
  }
#else
#pragma unroll
  for (int i = 0; i < kRows; ++i) held[i] = load_row<kVectors>(given.x, part, i, columns);
#endif
#endif
  // While the first elements are on their way.
  const Scale by = scale_of(bit_cast<int>(*given.bound) & 0x7fffffff);
  if (blockIdx.x == 0 && threadIdx.x == 0) *given.code_scale = by.scale;
  const long long column = first.column + threadIdx.x % BLOCK_X * kColumns;
  const Wide<float, kColumns> weight = weights<kVectors>(given, part, column);
#if STATISTICS
  float sums[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Wide<float, kColumns> wide = widen_all<float>(held[i]);
    sums[i] = 0;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) sums[i] += wide.at[k] * wide.at[k];
  }
  statistics.find(sums, given, first);
#endif
  Codes codes;
#pragma unroll
  for (int begin = 0; begin < kRows; begin += BATCH) {
#if !STATISTICS
    Packed<H, kColumns> loaded[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      loaded[i] = load_row<kVectors>(given.x, part, begin + i, columns);
    }
#endif
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
#if STATISTICS
      Wide<float, kColumns> wide = widen_again<float>(held[begin + i]);
      const float inverse = statistics.inverse(begin + i);
#else
      Wide<float, kColumns> wide = widen_all<float>(loaded[i]);
      const long long row = first.row + threadIdx.x / BLOCK_X * kRows + begin + i;
      const float inverse = begin + i < part.rows ? given.known_rstd[row] : 0.0f;
#endif
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        wide.at[k] *= inverse;
        IF(HAS_SCALE, wide.at[k] *= weight.at[k]);
        wide.at[k] *= by.multiplier;
      }
      encode(wide, codes[begin + i]);
    }
#if HAS_Q
#pragma unroll
    for (int i = 0; i < BATCH; i += 2) {
      store_rows<kVectors>(codes, begin + i, given.q, part, columns);
    }
#endif
  }
#if HAS_QT
  store_transposed<kVectors>(codes, reinterpret_cast<uint4*>(shared), given.qt, first, given.rows,
                             columns);
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
           long long rows, long long columns, long long group, float eps, float offset) {
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
  bool aligned = VECTORS && aligned_16(x, given.q, given.qt);
  IF(HAS_RESIDUAL, aligned = aligned && aligned_16(residual, h));
  IF(HAS_SCALE, aligned = aligned && aligned_16(scale));
  if (aligned) {
    run<true>(given, group);
  } else {
    run<false>(given, group);
  }
}
