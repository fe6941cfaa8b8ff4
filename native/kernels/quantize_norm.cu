// FP8 codes of RMSNorm and, if CENTRED, LayerNorm along rows, as they lie and transposed, in one
// pass over memory:
//
//   h = x + residual (or x)    rstd = 1 / sqrt(mean((h - mean)²) + eps)
//   y = (h - mean) · rstd · (scale + offset) (+ bias)
//   q[i][j] = qt[j][i] = round(y[i][j] / code_scale)    code_scale: a power of two, from the bound
//
// (mean is 0 unless CENTRED).
//
//   x         (rows, columns)  X_TYPE
//   residual  (rows, columns)  RESIDUAL_TYPE, h (rows, columns) H_TYPE     if HAS_RESIDUAL
//   scale     (columns,)       SCALE_TYPE                                  if HAS_SCALE
//   bias      (columns,)       BIAS_TYPE                                   if HAS_BIAS
//   mean      (rows,)          float, if CENTRED
//   rstd      (rows,)          float
//   bound     (1,)             float: no |y| exceeds it
//   per_column                 float: 1 / columns
//   q, qt, code_scale          as q, qt and scale in quantize_cast.cu
//
// If PER_EXAMPLE, scale and bias are (rows / tokens, columns), and `tokens` rows after one another
// have the same: a multiple of the 16 rows of a thread.
//
// A thread holds its 16 rows and 8 columns of h as they are stored, in shared memory, where x comes
// without taking registers; and the CLUSTER blocks side by side that have a row add their sums up
// in one cluster; the grid is as many blocks wide.
#include "fp8_tile.cuh"

using X = X_TYPE;
#if HAS_RESIDUAL
using H = H_TYPE;
#else
using H = X_TYPE;
#endif

constexpr int kTileRows = kRows * BLOCK_Y;
constexpr int kLanes = BLOCK_X < 32 ? BLOCK_X : 32;  // a warp's lanes on one row
constexpr int kWarps = BLOCK_X / kLanes;             // a block's warps on one row
static_assert(BLOCK_X % 32 == 0 || 32 % BLOCK_X == 0, "rows end where warps do");

// 2^50. Below it the bound holds; above it squares may have underflowed, and y may be infinite.
constexpr float kLargestInverse = 1125899906842624.0f;

// Set if the mean may be so large that its rounding shows in y. Elements of 16 bits that differ are
// too far apart for that.
constexpr bool kShifted = CENTRED && sizeof(H) > 2;

struct Operands {
  const X* x;
  IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual; H * h;)
  IF(HAS_SCALE, const SCALE_TYPE* scale;)
  IF(HAS_BIAS, const BIAS_TYPE* bias;)
  const float* bound;
  float *code_scale, *mean, *rstd, eps, offset, per_column;
  Fp8 *q, *qt;
  long long rows, columns;
};

// A row's normalisation is (h - mean) · inverse + rest, where rest undoes the rounding of the mean.
struct Moments {
  float inverse, mean, rest;
};

__device__ inline float normalised(float h, const Moments& of) {
  IF(CENTRED, h -= of.mean);
  h *= of.inverse;
  if (kShifted) h += of.rest;
  return h;
}

static_assert(kThreads % 32 == 0, "whole warps add up");

// The moments of the block's rows, from each warp's sums: of squares and, if CENTRED, also of
// elements, both of differences to the row's first element. It is one of them, so that squares lose
// no more to cancellation than as many roundings as there are elements. Of a cluster's rows each
// block adds its share up and sends all blocks the results: little memory, and the same bits
// everywhere.
class RowStatistics {
 public:
  static constexpr int kOwned = kTileRows / CLUSTER;   // rows that a block adds up
  static constexpr int kSums = 1 + CENTRED;            // a row's: of squares, of elements
  static constexpr int kValues = CENTRED ? 3 : 1;      // and the shift; in the end the moments
  static constexpr int kFound = kShifted ? 3 : kSums;  // values of the moments
  static constexpr int kArrived = kSums * kOwned * (CLUSTER - 1);
  static constexpr int kInboxes = CLUSTER > 1 ? 16 : 0;
  static constexpr int kStride = kTileRows * kWarps;  // between values
  static constexpr int kBytes = kInboxes + 4 * (kValues * kStride + kArrived);

  __device__ explicit RowStatistics(unsigned char* shared)
      : inboxes_(shared),
        partial_(reinterpret_cast<float*>(shared + kInboxes)),
        arrived_(partial_ + kValues * kStride) {
#if CLUSTER > 1
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) inbox_open(inbox(i));
    }
    __syncwarp();  // for racecheck, which orders by barriers alone what one thread does
    if (threadIdx.x == 0) {
      inbox_expect(inbox(0), 4 * kArrived);
      inbox_expect(inbox(1), 4 * kFound * kTileRows);
    }
    cluster_arrive_relaxed();  // a block may be sent to only once its inboxes are open
#endif
  }

  // A warp's share of a sum of a row of the block: 0 that of squares, 1 of elements; 2 is the
  // shift.
  __device__ void add(int row, int which, float sum) {
    partial_[which * kStride + threadIdx.x % BLOCK_X / kLanes * kTileRows + row] = sum;
  }

  // To be called once all sums are added.
  __device__ void find(const Operands& given, const Tile& first) {
    __syncthreads();
#if CLUSTER > 1
    cluster_wait();
    exchange(given, first);
#else
#pragma unroll
    for (int begin = 0; begin < kTileRows; begin += kThreads) {
      const int row = begin + threadIdx.x;
      if (row < kTileRows) keep(row, finish(given, first, row, row_sums(row)));
    }
#endif
    __syncthreads();
  }

  // Returns the moments of row i of the thread's part.
  __device__ Moments moments(int i) const {
    const float* row = partial_ + threadIdx.x / BLOCK_X * kRows + i;
    return {row[0], CENTRED ? row[CENTRED * kStride] : 0,
            kShifted ? row[2 * CENTRED * kStride] : 0};
  }

 private:
  using Sums = Wide<float, kSums>;

  __device__ Sums row_sums(int row) const {
    Sums sums{};
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        sums.at[i] += partial_[i * kStride + warp * kTileRows + row];
      }
    }
    return sums;
  }

  __device__ Moments finish(const Operands& given, const Tile& first, int row,
                            const Sums& sums) const {
    Moments found{};
    float squares = sums.at[0] * given.per_column;
#if CENTRED
    const float apart = sums.at[1] * given.per_column, shift = partial_[2 * kStride + row];
    squares -= apart * apart;
    if (squares < 0) squares = 0;  // a NaN stays one
    found.mean = shift + apart;
#endif
    found.inverse = inverse_root(squares + given.eps);
    IF(CENTRED, found.rest = (found.mean - shift - apart) * found.inverse);
    if (first.row + row < given.rows) {
      IF(CENTRED, given.mean[first.row + row] = found.mean);
      given.rstd[first.row + row] = found.inverse;
    }
    return found;
  }

#if CLUSTER > 1
  // One thread a row: its results come where the thread alone has read.
  __device__ void exchange(const Operands& given, const Tile& first) {
    static_assert(kTileRows % CLUSTER == 0 && kTileRows <= kThreads, "threads for all rows");
    const int row = threadIdx.x, rank = blockIdx.x % CLUSTER, owner = row / kOwned;
    const bool there = row < kTileRows;
    Sums sums{};
    if (there) sums = row_sums(row);
    if (there && owner != rank) {
      const int sender = rank < owner ? rank : rank - 1;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float* const to = arrived_ + (sender * kSums + i) * kOwned + row % kOwned;
        inbox_send(to, inbox(0), owner, sums.at[i]);
      }
    }
    __syncwarp();  // sent before anyone waits
    if (there && owner == rank) {
      inbox_wait(inbox(0), 0);
#pragma unroll
      for (int i = 0; i < (CLUSTER - 1) * kSums; ++i) {
        sums.at[i % kSums] += arrived_[i * kOwned + row % kOwned];
      }
      const Moments found = finish(given, first, row, sums);
      const float values[] = {found.inverse, found.mean, found.rest};
#pragma unroll
      for (int to = 0; to < CLUSTER; ++to) {
#pragma unroll
        for (int i = 0; i < kFound; ++i) {
          inbox_send(partial_ + i * kStride + row, inbox(1), to, values[i]);
        }
      }
    }
    if (there) inbox_wait(inbox(1), 0);
  }

  __device__ Inbox* inbox(int i) const { return reinterpret_cast<Inbox*>(inboxes_) + i; }
#else
  __device__ void keep(int row, const Moments& found) {
    const float values[] = {found.inverse, found.mean, found.rest};
#pragma unroll
    for (int i = 0; i < kFound; ++i) partial_[i * kStride + row] = values[i];
  }
#endif

  unsigned char* inboxes_;
  float *partial_, *arrived_;
};

// A parameter at the thread's columns; all eight of them are there if kVectors.
template <bool kVectors, typename T>
__device__ inline Wide<float, kColumns> columns_of(const T* parameter, int columns) {
  if constexpr (kVectors) return widen_all<float>(load_packed<kColumns>(parameter));
  Wide<float, kColumns> wide{};
  for (int k = 0; k < columns; ++k) wide.at[k] = widen<float>(parameter[k]);
  return wide;
}

// The thread's rows in its own slots of shared memory, four rows a group: first x, then h. With
// SHARED_PARAMETERS the block's columns of scale and bias come behind them, which threads would ask
// the cache for more than once.
class HeldRows {
 public:
  static constexpr int kRowSlots = sizeof(Packed<H, kColumns>) / 16, kGroupSlots = 4 * kRowSlots;
  static constexpr int kSlots = kRows * kRowSlots * kThreads;
  template <typename T>
  static constexpr int kSlotsOf = BLOCK_X * sizeof(Packed<T, kColumns>) / 16;
  static constexpr int kScale = kSlots, kBias = kScale IF(HAS_SCALE, +kSlotsOf<SCALE_TYPE>);
  static constexpr int kAll = SHARED_PARAMETERS ? kBias IF(HAS_BIAS, +kSlotsOf<BIAS_TYPE>) : kSlots;
  static constexpr int kBytes = 16 * kAll;

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

  // Begins to bring x, zeros beyond the edge, and where vectors move the parameters. There all 16
  // rows are there or none.
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
#if SHARED_PARAMETERS
    if (kVectors) {
      IF(HAS_SCALE, bring_columns(given.scale, kScale, first, stride));
      IF(HAS_BIAS, bring_columns(given.bias, kBias, first, stride));
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
    Part rest = {0, part.rows, part.columns};  // not loaded
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

  // Adds up the squares, and if CENTRED the elements, of what the warp's threads have brought: of
  // eight rows at once, of each of which four lanes take a share.
  template <bool kVectors>
  __device__ void sum(RowStatistics& statistics, const Operands& given, const Tile& tile) {
    wait_copies<0>();
    __syncwarp();
    const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
#pragma unroll
    for (int begin = 0; begin < kRows * 32; begin += 8 * kLanes) {  // rows of each thread's part
      const int thread = warp + begin / (kRows * kLanes) * kLanes, y = thread / BLOCK_X;
      const int row = begin / kLanes % kRows + lane / 4;
#if CENTRED
      const long long global = tile.row + y * kRows + row;
      const float shift = global < given.rows ? first_of(given, global) : 0.0f;
      float sum = 0, squares = 0;
      const int own = thread % BLOCK_X + lane % 4;
      const int columns = limited(given.columns - tile.column, kColumns * BLOCK_X);
#pragma unroll 2
      for (int x = 0; x < kLanes; x += 4) {  // x threads further
        const int there = columns - (own + x) * kColumns;
        if (there <= 0) break;  // zeros, and no part of the row
        uint4 words[kRowSlots];
#pragma unroll
        for (int n = 0; n < kRowSlots; ++n) {
          words[n] = slots_[slot(kRowSlots * row + n, own, y) ^ x];
        }
        const auto wide = widen_all<float>(bit_cast<Packed<H, kColumns>>(words));
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          const float apart = kVectors || k < there ? wide.at[k] - shift : 0.0f;
          sum += apart;
          squares += apart * apart;
        }
      }
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        squares += __shfl_xor_sync(0xffffffffu, squares, offset);
      }
      if (lane % 4 == 0) {
        statistics.add(y * kRows + row, 0, squares);
        statistics.add(y * kRows + row, 1, sum);
        statistics.add(y * kRows + row, 2, shift);
      }
#else
      SquaredRows<H> squares;
#pragma unroll
      for (int n = 0; n < kRowSlots; ++n) {
        const int first = slot(kRowSlots * row + n, thread % BLOCK_X + lane % 4, y);
#pragma unroll
        for (int x = 0; x < kLanes; x += 4) squares.add(slots_[first ^ x]);  // x threads further
      }
      const float sum = squares.sum();
      if (squares.has_sum()) statistics.add(y * kRows + row, 0, sum);
#endif
    }
  }

#if SHARED_PARAMETERS
  // A parameter at the thread's columns, after a barrier: that of type T that begins at `slot`.
  template <typename T>
  __device__ Wide<float, kColumns> columns(int slot) const {
    const auto* parameter = reinterpret_cast<const Packed<T, kColumns>*>(slots_ + slot);
    return widen_all<float>(parameter[threadIdx.x % BLOCK_X]);
  }
#endif

 private:
#if CENTRED
  // The first element of a row of h, before it is rounded.
  __device__ static float first_of(const Operands& given, long long row) {
    const long long at = row * given.columns;
    return widen<float>(given.x[at]) IF(HAS_RESIDUAL, +widen<float>(given.residual[at]));
  }
#endif

#if SHARED_PARAMETERS
  template <typename T>
  __device__ void bring_columns(const T* parameter, int slot, const Tile& first, long long stride) {
    constexpr int kWord = 16 / sizeof(T);
    const int there = limited(stride - first.column, kColumns * BLOCK_X) / kWord;
    const uint4* from = reinterpret_cast<const uint4*>(parameter + first.column);
#pragma unroll
    for (int begin = 0; begin < kSlotsOf<T>; begin += kThreads) {
      const int i = begin + threadIdx.x;
      if (i < there) copy_async<16>(slots_ + slot + i, from + i);
    }
  }
#endif

  __device__ uint4& at(int i, int n) const { return slots_[own_slot(kRowSlots * i + n)]; }

  uint4* slots_;
};

// The codes of four rows of y. kBounded: the bound holds for all of them.
template <bool kBounded>
__device__ inline void encode_rows(const Packed<H, kColumns> (&rows)[4],
                                   const Moments (&moments)[4], const Wide<float, kColumns>& weight,
                                   const Wide<float, kColumns>& shift, Codes& codes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Wide<float, kColumns> wide = widen_all<float>(rows[i]);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      wide.at[k] = normalised(wide.at[k], moments[i]) * weight.at[k];
      IF(HAS_BIAS, wide.at[k] += shift.at[k]);
    }
    encode<kBounded>(wide, codes[i]);
  }
}

template <bool kVectors>
__device__ inline void run(const Operands& given IF(PER_EXAMPLE, , long long tokens)) {
  const long long columns = given.columns;
  constexpr long long kWidth = kColumns * BLOCK_X;
  // The last rows first: of what was written last, the end is still in the cache.
  const long long row = (gridDim.x - 1 - blockIdx.x) / CLUSTER * (long long)kTileRows;
  const Tile first = {row, blockIdx.x % CLUSTER * kWidth};
  const Part part = part_of(first, given.rows, columns);
  constexpr int kGroupSlots = HeldRows::kGroupSlots;
  uint4* slots = reinterpret_cast<uint4*>(shared_memory());
  HeldRows held(slots);
  held.bring<kVectors>(given, part, first);
  RowStatistics statistics(shared_memory() + HeldRows::kBytes);
  // While the first elements are on their way.
  const float bound = *given.bound;
  const Scale by = scale_of(bit_cast<int>(bound) & 0x7fffffff);
  if (blockIdx.x == 0 && threadIdx.x == 0) *given.code_scale = by.scale;
  IF(HAS_RESIDUAL, held.add<kVectors>(given, part));
  held.sum<kVectors>(statistics, given, first);
  Wide<float, kColumns> weight{}, shift{};
  constexpr bool kHeld = kVectors && SHARED_PARAMETERS;
  if (!kHeld && part.rows > 0) {
    long long column = first.column + threadIdx.x % BLOCK_X * kColumns;
    IF(PER_EXAMPLE, column += (first.row + threadIdx.x / BLOCK_X * kRows) / tokens * columns);
    IF(HAS_SCALE, weight = columns_of<kVectors>(given.scale + column, part.columns));
    IF(HAS_BIAS, shift = columns_of<kVectors>(given.bias + column, part.columns));
  }
  statistics.find(given, first);
#if SHARED_PARAMETERS
  if (kHeld) {
    IF(HAS_SCALE, weight = held.columns<SCALE_TYPE>(HeldRows::kScale));
    IF(HAS_BIAS, shift = held.columns<BIAS_TYPE>(HeldRows::kBias));
  }
#endif
  // Codes' multiplier with them: a power of two changes no bit of a code that is not zero.
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    IF(HAS_OFFSET, weight.at[k] += given.offset);
    weight.at[k] = HAS_SCALE ? weight.at[k] * by.multiplier : by.multiplier;
    shift.at[k] *= by.multiplier;
  }
  Codes codes;
  long long at = kept(part.first);  // the element that comes next, of `left` rows
  int left = kept(part.rows);
#pragma unroll 1
  for (int step = 0; step < kRows; step += 4) {
    Packed<H, kColumns> rows[4];
    Moments moments[4];
    bool bounded = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = held.row<H>(step + i);
      moments[i] = statistics.moments(step + i);
      bounded = bounded && moments[i].inverse < kLargestInverse;
    }
    if (bounded) {
      encode_rows<true>(rows, moments, weight, shift, codes);
    } else {
      encode_rows<false>(rows, moments, weight, shift, codes);
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
    quantize_norm(const X* x,
                  // clang-format off
           IF(HAS_RESIDUAL, const RESIDUAL_TYPE* residual,)
           IF(HAS_SCALE, const SCALE_TYPE* scale,)
           IF(HAS_BIAS, const BIAS_TYPE* bias,)
           const float* bound,
           IF(HAS_Q, Fp8* q,)
           IF(HAS_QT, Fp8* qt,)
           float* code_scale,
           IF(HAS_RESIDUAL, H* h,)
           IF(CENTRED, float* mean,)
           float* rstd,
           long long rows, long long columns, IF(PER_EXAMPLE, long long tokens,)
           float eps, float offset, float per_column) {
  // clang-format on
  Operands given{};
  given.x = x;
  IF(HAS_RESIDUAL, given.residual = residual; given.h = h);
  IF(HAS_SCALE, given.scale = scale);
  IF(HAS_BIAS, given.bias = bias);
  given.rstd = rstd;
  IF(CENTRED, given.mean = mean);
  IF(HAS_Q, given.q = q);
  IF(HAS_QT, given.qt = qt);
  given.bound = bound, given.code_scale = code_scale;
  given.rows = rows, given.columns = columns, given.eps = eps, given.offset = offset;
  given.per_column = per_column;
  bool aligned = VECTORS && aligned_16(x, given.q, given.qt);
  IF(HAS_RESIDUAL, aligned = aligned && aligned_16(residual, h));
  IF(HAS_SCALE, aligned = aligned && aligned_16(scale));
  IF(HAS_BIAS, aligned = aligned && aligned_16(bias));
  if (aligned) {
    run<true>(given IF(PER_EXAMPLE, , tokens));
  } else {
    run<false>(given IF(PER_EXAMPLE, , tokens));
  }
}
