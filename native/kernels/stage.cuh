// Rows on their way through shared memory to the threads that asked for them, and sums over rows.
//
// Every thread reads only what it copied itself, so that copies need no barrier. A stage is one
// row's slots: kSlots<T> bytes for each operand of type T. Macros: those of row.cuh.
#pragma once

#include "row.cuh"

// Bytes of a block's part of one operand of a row (of BLOCK_ROWS rows).
template <typename T>
constexpr int kSlots = kThreads * CHUNKS * sizeof(Packed<T, VECTOR>);

// One operand of one row, by chunk.
template <typename T>
struct Slots {
  unsigned char* bytes;

  __device__ Packed<T, VECTOR>& slot(int chunk) const {
    return reinterpret_cast<Packed<T, VECTOR>*>(bytes)[chunk * kThreads + threadIdx.x];
  }

  // Begins to copy this thread's part of `row`; commit_copies closes the group.
  __device__ void fetch(const T* row, bool aligned) const {
    // In one loop with the copies, loads that are not taken cost their turns all the same: a 25th
    // to a seventh of LayerNorm's time where many threads have a row. Where few have one, a loop of
    // their own costs more (benchmarks/results).
    constexpr bool kApart = VECTOR > 1 && ROW_THREADS > 256;
    if (kApart && !aligned) {
#pragma unroll 1
      for (int i = 0; i < CHUNKS; ++i) {
        if (inside(i)) slot(i) = load_elements<VECTOR>(row + column(i));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      if (!inside(i)) continue;
      const T* from = row + column(i);
      if constexpr (VECTOR == 1 && sizeof(T) < 4) {
        slot(i) = load_packed<VECTOR, true>(from);
      } else if (VECTOR == 1 || kApart || aligned) {
        copy_packed_async(&slot(i), from);
      } else {
        slot(i) = load_elements<VECTOR>(from);
      }
    }
  }

  // Returns the values that arrived; zeros beyond the row's end, or if not `active`.
  __device__ Packed<T, VECTOR> read(int chunk, bool active) const {
    Packed<T, VECTOR> values{};
    if (active && inside(chunk)) values = slot(chunk);
    return values;
  }
};

// This thread's part of what arrived, by chunk: in registers if kHold, else read when asked for.
template <typename T, bool kHold>
class Part {
 public:
  __device__ Part(unsigned char* slots, bool active) : from_{slots}, active_(active) {
    if constexpr (kHold) {
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) held_[i] = from_.read(i, active);
    }
  }

  __device__ Packed<T, VECTOR> operator[](int chunk) const {
    if constexpr (kHold) return held_[chunk];
    return from_.read(chunk, active_);
  }

 private:
  Slots<T> from_;
  bool active_;
  Chunks<T> held_;
};

template <typename C>
using ColumnsOf = Wide<C, VECTOR>[CHUNKS];  // a value for each column of this thread

// Writes sums over the block's rows at `row`, adding up the rows it works on at a time. Overwrites
// shared memory.
template <typename C>
__device__ inline void store_columns(const ColumnsOf<C>& columns, bool aligned, C* row) {
  if constexpr (BLOCK_ROWS == 1) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      store_chunk(row, i, aligned, narrow_all<C>(columns[i]));
    }
    return;
  }
  C* sums = reinterpret_cast<C*>(shared_memory());
  __syncthreads();
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      sums[row_group() * kTile + i * kStep + row_thread() * VECTOR + k] = columns[i].at[k];
    }
  }
  __syncthreads();
  const int begin = slice() * kTile;
  for (int at = threadIdx.x; at < kTile && begin + at < FEATURES; at += kThreads) {
    C sum = 0;
#pragma unroll 4
    for (int group = 0; group < BLOCK_ROWS; ++group) sum += sums[group * kTile + at];
    row[begin + at] = sum;
  }
}
