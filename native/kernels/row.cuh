// How threads share rows of FEATURES contiguous elements, and sums over such rows.
//
// Macros:
//   FEATURES     elements in a row
//   VECTOR       elements that move together; divides FEATURES
//   CHUNKS       vectors of one row that a thread holds
//   ROW_THREADS  threads of a block on one row; a power of two up to 32, or a multiple of 32
//   BLOCK_ROWS   groups of threads in a block, each with rows of its own
//   SLICES       blocks side by side along a row (the grid's y): a block has ROW_THREADS * VECTOR *
//                CHUNKS columns of it
//   CLUSTER      1, or SLICES when these blocks add their sums in one cluster
#pragma once

#include "vector.cuh"

constexpr int kThreads = ROW_THREADS * BLOCK_ROWS;
constexpr int kStep = ROW_THREADS * VECTOR;  // columns between the chunks of a thread
constexpr int kTile = kStep * CHUNKS;
constexpr int kRowWarps = (ROW_THREADS + 31) / 32;

static_assert(FEATURES % VECTOR == 0, "rows hold whole vectors");
static_assert(ROW_THREADS % 32 == 0 || 32 % ROW_THREADS == 0, "rows end where warps do");
static_assert(CLUSTER == 1 || CLUSTER == SLICES, "a cluster is one row");
static_assert((SLICES - 1LL) * kTile < FEATURES && SLICES * 1LL * kTile >= FEATURES, "slices fit");

__device__ inline int row_thread() {
  return BLOCK_ROWS == 1 ? threadIdx.x : threadIdx.x % ROW_THREADS;
}
__device__ inline int row_group() { return BLOCK_ROWS == 1 ? 0 : threadIdx.x / ROW_THREADS; }
__device__ inline int slice() { return SLICES == 1 ? 0 : blockIdx.y; }
__device__ inline int column(int chunk) {
  return slice() * kTile + chunk * kStep + row_thread() * VECTOR;
}
__device__ inline bool inside(int chunk) {
  const bool whole = SLICES * 1LL * kTile == FEATURES;
  return whole || (SLICES == 1 && (chunk + 1) * kStep <= FEATURES) || column(chunk) < FEATURES;
}

template <typename T>
using Chunks = Packed<T, VECTOR>[CHUNKS];

// This thread's part of a row that begins at `row`; zeros beyond the row's end, or if not `active`.
template <typename T>
__device__ inline void load_row(const T* row, bool active, bool aligned, Chunks<T>& values) {
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) values[i] = Packed<T, VECTOR>{};
  if (!active) return;
  if (VECTOR == 1 || aligned) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      if (inside(i)) values[i] = load_packed<VECTOR>(row + column(i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      if (inside(i)) values[i] = load_elements<VECTOR>(row + column(i));
    }
  }
}

// The compiler makes four stores of a thread's first chunk, which loses 2 % where there are no
// others or rows are short, and gains as much elsewhere (benchmarks/results).
constexpr Store kStore = CHUNKS == 1 || ROW_THREADS < 32 ? Store::kWhole : Store::kPlain;

template <typename T>
__device__ inline void store_chunk(T* row, int chunk, bool aligned,
                                   const Packed<T, VECTOR>& values) {
  if (!inside(chunk)) return;
  if (VECTOR == 1 || aligned) {
    store_packed<VECTOR, kStore>(row + column(chunk), values);
  } else {
    store_elements<VECTOR>(row + column(chunk), values);
  }
}

// h = x + residual, written at `to` if `active`.
template <typename C, typename X, typename R, typename H>
__device__ inline void add_residual(const Chunks<X>& xs, const Chunks<R>& residuals, H* to,
                                    bool active, bool aligned, Chunks<H>& hs) {
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    auto sum = widen_all<C>(xs[i]);
    const auto more = widen_all<C>(residuals[i]);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sum.at[k] += more.at[k];
    hs[i] = narrow_all<H>(sum);
    if (active) store_chunk(to, i, aligned, hs[i]);
  }
}

// A parameter at this thread's columns; read often: it may stay in the caches.
template <typename C, typename S>
__device__ inline Wide<C, VECTOR> load_columns(const S* parameter, int chunk, bool aligned) {
  Packed<S, VECTOR> values{};
  if (inside(chunk)) {
    if (VECTOR == 1 || aligned) {
      values = *reinterpret_cast<const Packed<S, VECTOR>*>(parameter + column(chunk));
    } else {
      values = load_elements<VECTOR>(parameter + column(chunk));
    }
  }
  return widen_all<C>(values);
}

// scale (+ offset if HAS_OFFSET) at this thread's columns.
template <typename C, typename S>
__device__ inline Wide<C, VECTOR> load_weight(const S* scale, C offset, int chunk, bool aligned) {
  Wide<C, VECTOR> weight = load_columns<C>(scale, chunk, aligned);
#if HAS_OFFSET
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) weight.at[k] += offset;
#endif
  return weight;
}

// The sum over kLanes neighbouring lanes, the same bits in each.
template <int kLanes, typename C>
__device__ inline C lane_sum(C value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Sums over kValues rows at once, those of ROW_THREADS threads. All threads of the block (of the
// cluster) must take part in each.
template <typename C, int kValues>
class RowSums {
 public:
  using Values = Wide<C, kValues>;
  static constexpr bool kShared = ROW_THREADS > 32 || CLUSTER > 1;
  static constexpr int kSlots = CLUSTER * kRowWarps;  // one sum per warp of the row
  // Two sets of slots: a warp may begin the next sum while another still reads this one. With a
  // cluster, an inbox for each set comes first.
  static constexpr int kInboxes = CLUSTER > 1 ? 16 : 0;
  static constexpr int kBytes =
      kShared ? kInboxes + 2 * BLOCK_ROWS * kValues * kSlots * sizeof(C) : 0;
  static_assert(CLUSTER == 1 || BLOCK_ROWS == 1, "a cluster has the same rows in all its threads");

  // `shared` has kBytes, at the same place in every block of the cluster.
  __device__ explicit RowSums(unsigned char* shared)
      : shared_(shared), slots_(reinterpret_cast<C*>(shared + kInboxes)) {
#if CLUSTER > 1
    if (threadIdx.x < 2) inbox_open(inbox(threadIdx.x));
    cluster_arrive();  // a block may be sent to only once its inboxes are open
#endif
  }

  // Adds this thread's values to the next sums.
  __device__ void post(Values values) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      values.at[v] = lane_sum<(ROW_THREADS < 32 ? ROW_THREADS : 32)>(values.at[v]);
    }
    send(values);
  }

  // Returns the sums posted last, in every thread of the rows; work in between hides their latency.
  // One post at a time is on its way.
  __device__ Values total() {
    if constexpr (!kShared) return alone_;
    receive();
    const int lane = threadIdx.x % 32;
    Values sums;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const C* const slots = posted_ + v * kSlots;
      sums.at[v] = 0;
      if constexpr (kSlots <= 8) {  // sooner than by shuffles
#pragma unroll
        for (int i = 0; i < kSlots; ++i) sums.at[v] += slots[i];
      } else {
#pragma unroll
        for (int i = 0; i < kSlots; i += 32) {
          if (i + lane < kSlots) sums.at[v] += slots[i + lane];
        }
        sums.at[v] = lane_sum<32>(sums.at[v]);
      }
    }
    return sums;
  }

  // At the end. No block is sent to any more: each has had all that its last sum waited for.
  __device__ void finish() {
#if CLUSTER > 1
    if (count_ == 0) cluster_wait();
#endif
  }

 protected:
  // Puts the values that a warp's lanes share into its slots.
  __device__ void send(const Values& values) {
    if constexpr (!kShared) {
      alone_ = values;
      return;
    }
    const int set = count_ % 2;
    C* slots = slots_ + (set * BLOCK_ROWS + row_group()) * kValues * kSlots;
    const int lane = threadIdx.x % 32, warp = row_thread() / 32;
#if CLUSTER > 1
    if (count_ == 0) cluster_wait();
    if (threadIdx.x == 0) inbox_expect(inbox(set), kValues * kSlots * sizeof(C));
#endif
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
#if CLUSTER > 1
      C* const slot = slots + v * kSlots + slice() * kRowWarps + warp;
      if (lane < CLUSTER) inbox_send(slot, inbox(set), lane, values.at[v]);
#else
      if (lane == 0) slots[v * kSlots + warp] = values.at[v];
#endif
    }
    posted_ = slots;
  }

  // Waits until `posted_` has what all warps of the row sent, kSlots numbers for each value.
  __device__ void receive() {
#if CLUSTER > 1
    inbox_wait(inbox(count_ % 2), count_ / 2 % 2);
#else
    __syncthreads();
#endif
    ++count_;
  }

  C* posted_;
  Values alone_;

 private:
#if CLUSTER > 1
  __device__ Inbox* inbox(int set) const { return reinterpret_cast<Inbox*>(shared_) + set; }
#endif

  unsigned char* shared_;
  C* slots_;
  unsigned count_ = 0;
};

// Sums over one row at a time.
template <typename C>
class RowSum : public RowSums<C, 1> {
 public:
  using RowSums<C, 1>::RowSums;

  __device__ void post(C value) { RowSums<C, 1>::post({{value}}); }
  __device__ C total() { return RowSums<C, 1>::total().at[0]; }
  __device__ C operator()(C value) {
    post(value);
    return total();
  }
};

// How many elements of a row a warp has, or all threads of the row where they are fewer.
__device__ inline int elements_of(int slice, int warp) {
  if constexpr (ROW_THREADS <= 32) {
    const int rest = FEATURES - slice * kTile;
    return rest < kTile ? rest : kTile;
  }
  int elements = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int rest = FEATURES - slice * kTile - i * kStep - warp * 32 * VECTOR;
    elements += rest < 0 ? 0 : rest < 32 * VECTOR ? rest : 32 * VECTOR;
  }
  return elements;
}

// Means of kRows rows at once, and sums of squared differences to them. No digit is lost where a
// mean is large: all sums are of differences to a number near the row if kShifted, and each warp
// has both of its own elements. What the warps sent is combined as Chan, Golub and LeVeque do
// ("Updating formulae and a pairwise algorithm for computing sample variances"). So all threads of
// a row wait for each other once, not twice.
template <typename C, int kRows, bool kShifted>
class RowMoments : public RowSums<C, 2 * kRows> {
  using Sums = RowSums<C, 2 * kRows>;

 public:
  using Sums::Sums;
  using Each = Wide<C, kRows>;

  // `sum_of(r, shift)` is the sum of differences to `shift`, and `squares_of(r, mean)` that of
  // squared differences, of this thread's elements of its r-th row. `rest` is the shift of each row
  // on entry, 0 unless kShifted; on return it is what rounding has added to `means`.
  // In a block of a row that is no cluster, all are of the block's elements.
  template <typename SumOf, typename SquaresOf>
  __device__ void operator()(SumOf sum_of, SquaresOf squares_of, Each& rest, Each& means,
                             Each& squares) {
    constexpr int kLanes = ROW_THREADS < 32 ? ROW_THREADS : 32;
    constexpr int kSlots = Sums::kSlots;
    typename Sums::Values values;
    const int own = elements_of(slice(), row_thread() / 32);
    const C size = own == 0 ? C(1) : C(own);  // whole numbers: means of equal values are exact
#pragma unroll
    for (int r = 0; r < kRows; ++r) values.at[r] = lane_sum<kLanes>(sum_of(r, rest.at[r]));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      C mean, above = rest.at[r];
      set_mean(values.at[r] / size, mean, above);
      values.at[kRows + r] = lane_sum<kLanes>(squares_of(r, mean));
      if (kShifted) values.at[kRows + r] -= C(own) * above * above;
    }
    if constexpr (!Sums::kShared) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        set_mean(values.at[r] / size, means.at[r], rest.at[r]);
        squares.at[r] = values.at[kRows + r];
      }
      return;
    }
    this->send(values);
    this->receive();
    const int columns = FEATURES - slice() * kTile;
    const C whole = CLUSTER == SLICES ? FEATURES : columns < kTile ? columns : kTile;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const C* const sums = this->posted_ + r * kSlots;
      const C* const parts = this->posted_ + (kRows + r) * kSlots;
      const C mean = over_slots([&](int slot) { return sums[slot]; }) / whole;
      set_mean(mean, means.at[r], rest.at[r]);
      squares.at[r] = over_slots([&](int slot) {
        const int count = elements_of(CLUSTER == 1 ? slice() : slot / kRowWarps, slot % kRowWarps);
        const C apart = count == 0 ? C(0) : sums[slot] / C(count) - mean;
        return parts[slot] + C(count) * apart * apart;
      });
    }
  }

 private:
  // The mean that is `apart` from the shift in `rest`, and what rounding has added to it.
  __device__ static void set_mean(C apart, C& mean, C& rest) {
    mean = kShifted ? rest + apart : apart;
    if (kShifted) rest = mean - rest - apart;
  }

  // The sum of `term(slot)` over what the warps sent.
  template <typename Term>
  __device__ static C over_slots(Term term) {
    constexpr int kSlots = Sums::kSlots;
    C sum = 0;
    if constexpr (kSlots <= 8) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) sum += term(i);
      return sum;
    } else {
#pragma unroll
      for (int i = 0; i < kSlots; i += 32) {
        const int slot = i + threadIdx.x % 32;
        if (slot < kSlots) sum += term(slot);
      }
      return lane_sum<32>(sum);
    }
  }
};
