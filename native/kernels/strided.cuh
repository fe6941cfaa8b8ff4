// Rows along the middle of (outer, FEATURES, inner): a row's elements are `inner` apart.
//
// A block takes one `outer` and BLOCK_X neighbouring rows at a time, so that neighbouring threads
// read neighbouring memory; BLOCK_Y threads share a row. Macros: FEATURES, BLOCK_X (a power of two
// up to 32), BLOCK_Y.
#pragma once

#include "vector.cuh"

constexpr int kThreads = BLOCK_X * BLOCK_Y;

static_assert(32 % BLOCK_X == 0 && kThreads % 32 == 0, "warps hold whole lines of BLOCK_X");

__device__ inline int thread_x() { return threadIdx.x % BLOCK_X; }
__device__ inline int thread_y() { return threadIdx.x / BLOCK_X; }

// The rows a block has at a time.
struct Tile {
  long long start;  // the first element of this thread's row
  long long row;    // that row's number
  long long inner;  // elements between neighbours
  bool active;      // true if there is such a row

  __device__ Tile(long long number, long long inner) : inner(inner) {
    const long long per_outer = (inner + BLOCK_X - 1) / BLOCK_X;
    const long long outer = number / per_outer;
    const long long along = (number - outer * per_outer) * BLOCK_X + thread_x();
    active = along < inner;
    start = outer * FEATURES * inner + along;
    row = outer * inner + along;
  }

  static __device__ long long count(long long outer, long long inner) {
    return outer * ((inner + BLOCK_X - 1) / BLOCK_X);
  }

  __device__ long long at(int feature) const { return start + feature * inner; }
};

// The sum over the threads of each row, in order; every thread of the block must call it.
template <typename C>
__device__ inline C tile_sum(C value) {
  C* const sums = reinterpret_cast<C*>(shared_memory());  // BLOCK_Y * BLOCK_X of them
  sums[threadIdx.x] = value;
  __syncthreads();
  C total = 0;
#pragma unroll 8
  for (int i = 0; i < BLOCK_Y; ++i) total += sums[i * BLOCK_X + thread_x()];
  __syncthreads();
  return total;
}

// Sums over a block's rows, one for each feature, each always by the same thread.
template <typename C>
__device__ inline void clear_columns(C* columns) {
  if (thread_x() == 0) {
    for (int k = thread_y(); k < FEATURES; k += BLOCK_Y) columns[k] = 0;
  }
}

// The sum over the lanes of a line; all threads of a warp must call it.
template <typename C>
__device__ inline C line_sum(C share) {
#pragma unroll
  for (int offset = BLOCK_X / 2; offset > 0; offset /= 2) {
    share += __shfl_xor_sync(0xffffffffu, share, offset);
  }
  return share;
}
