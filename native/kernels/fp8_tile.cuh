// A matrix in tiles, whose FP8 codes are written as they lie and transposed.
//
// A block has a tile of 16 BLOCK_Y rows and 8 BLOCK_X columns, a thread 16 rows and 8 columns of
// it, in turns of kStep rows: unrolled for all 16, the instructions would not fit their caches.
// Vectors have 16 bytes, and of q eight, with which a warp still writes whole lines: a column of
// the thread's 16 rows goes through shared memory.
//
// Tiles are taken in groups of `group` rows of tiles, in which they go down before they go right:
// what is on its way at once is a compact piece of both layouts. Blocks take the tile of their own
// number as `index`, or count from the end where the pass before has left the end in the cache.
//
// kVectors is for shapes that are multiples of 16, and aligned pointers: others are moved one by
// one.
#pragma once

#include "fp8.cuh"

constexpr int kThreads = BLOCK_X * BLOCK_Y, kRows = 16, kColumns = 8;
constexpr int kStep = BATCH < 4 ? 4 : BATCH;  // rows of one turn of a loop
static_assert(BLOCK_X % 8 == 0 && (BLOCK_Y & (BLOCK_Y - 1)) == 0, "turned within a row of threads");
static_assert(kRows % BATCH == 0 && BATCH % 2 == 0, "rows are loaded in whole batches of pairs");

struct Tile {
  long long row, column;  // the first element's
};

__device__ inline Tile tile_of(long long rows, long long columns, int group, int index) {
  const int down = static_cast<int>((rows + kRows * BLOCK_Y - 1) / (kRows * BLOCK_Y));
  const int across = static_cast<int>((columns + kColumns * BLOCK_X - 1) / (kColumns * BLOCK_X));
  const int begin = index / (group * across) * group, within = index % (group * across);
  const int height = down - begin < group ? down - begin : group;
  const long long y = begin + within % height, x = within / height;
  return {y * kRows * BLOCK_Y, x * kColumns * BLOCK_X};
}

// Shared memory is slots of 16 bytes. Slot n of the thread at (x, y) of the block is written by
// that thread alone. Slots n of neighbours lie side by side, turned so that words of neighbouring
// columns are in different banks, as slots of neighbouring threads are.
__device__ inline int slot(int n, int x, int y) {
  const int turn = BLOCK_Y < 8 ? y * (4 / BLOCK_Y) ^ (n % 2 * 4) : y % 8;
  return n * kThreads + ((y * BLOCK_X + x) ^ turn);
}
__device__ inline int own_slot(int n) {
  return slot(n, threadIdx.x % BLOCK_X, threadIdx.x / BLOCK_X);
}

// Four words of four bytes, transposed.
__device__ inline void transpose(unsigned (&w)[4]) {
  const unsigned a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[0], w[1], 0x7362);
  const unsigned c = __byte_perm(w[2], w[3], 0x5140), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, c, 0x5410);
  w[1] = __byte_perm(a, c, 0x7632);
  w[2] = __byte_perm(b, d, 0x5410);
  w[3] = __byte_perm(b, d, 0x7632);
}

// The part of the matrix that a thread has: its first element, how many of its 16 rows and 8
// columns there are.
struct Part {
  long long first;  // row * columns + column
  int rows, columns;
};

__device__ inline int limited(long long size, int most) {
  return size < 0 ? 0 : size < most ? static_cast<int>(size) : most;
}

__device__ inline Part part_of(const Tile& tile, long long rows, long long columns) {
  const long long row = tile.row + threadIdx.x / BLOCK_X * kRows;
  const long long column = tile.column + threadIdx.x % BLOCK_X * kColumns;
  Part part = {row * columns + column, limited(rows - row, kRows),
               limited(columns - column, kColumns)};
  if (part.columns == 0) part.rows = 0;
  return part;
}

// Row i of the part; zero beyond the edge.
template <bool kVectors, typename Element>
__device__ inline Packed<Element, kColumns> load_row(const Element* x, const Part& part, int i,
                                                     long long stride) {
  Packed<Element, kColumns> packed{};
  const Element* from = x + part.first + i * stride;
  if constexpr (kVectors) {
    if (i < part.rows) packed = load_packed<kColumns>(from);
  } else {
    Element elements[kColumns];
    memcpy(elements, &packed, sizeof(packed));
    for (int k = 0; k < kColumns; ++k) {
      if (i < part.rows && k < part.columns) elements[k] = from[k];
    }
    memcpy(&packed, elements, sizeof(packed));
  }
  return packed;
}

// Writes row i of the part.
template <bool kVectors, typename Element>
__device__ inline void store_row(const Packed<Element, kColumns>& packed, int i, Element* x,
                                 const Part& part, long long stride) {
  Element* to = x + part.first + i * stride;
  if (i >= part.rows) return;
  if constexpr (kVectors) {
    store_packed<kColumns>(to, packed);
  } else {
    Element elements[kColumns];
    memcpy(elements, &packed, sizeof(packed));
    for (int k = 0; k < part.columns; ++k) to[k] = elements[k];
  }
}

// The thread's codes of four rows: two words of four columns for each.
using Codes = unsigned[4][2];

// Writes codes[at] and those after it: kCount rows of the matrix, of which `rows` and `columns` are
// there.
template <bool kVectors, int kCount>
__device__ inline void store_rows(const Codes& codes, int at, Fp8* to, int rows, int columns,
                                  long long stride) {
  if constexpr (kVectors) {  // all 16 rows are there or none
    if (rows <= 0) return;
#pragma unroll
    for (int r = 0; r < kCount; ++r, to += stride) {
      store_streaming(reinterpret_cast<uint2*>(to), uint2{codes[at + r][0], codes[at + r][1]});
    }
  } else {
    for (int r = 0; r < kCount && r < rows; ++r, to += stride) {
      for (int k = 0; k < columns; ++k) to[k] = codes[at + r][k / 4] >> 8 * (k % 4);
    }
  }
}

// Writes rows i and i + 1 of the part from codes[at] and codes[at + 1].
template <bool kVectors>
__device__ inline void store_pair(const Codes& codes, int at, int i, Fp8* q, const Part& part,
                                  long long stride) {
  store_rows<kVectors, 2>(codes, at, q + part.first + i * stride, part.rows - i, part.columns,
                          stride);
}

constexpr int kCodeSlots = 2;  // a group of four rows has so many if only codes have slots

// Places codes of rows 4 group to 4 group + 3, transposed, in two slots of the thread: the first of
// the kGroupSlots that the group has.
template <int kGroupSlots>
__device__ inline void place_group(const Codes& codes, int group, uint4* slots) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned columns[4] = {codes[0][half], codes[1][half], codes[2][half], codes[3][half]};
    transpose(columns);
    slots[own_slot(kGroupSlots * group + half)] =
        uint4{columns[0], columns[1], columns[2], columns[3]};
  }
}

// Writes what the block's threads have placed, after a barrier: the transpose whose first element
// is x[first.row][first.column].
template <bool kVectors, int kGroupSlots>
__device__ inline void store_tile(const uint4* slots, Fp8* qt, const Tile& first, long long rows,
                                  long long columns) {
  static_assert(kGroupSlots % 2 == 0, "all groups are turned the same way");
  const unsigned* words = reinterpret_cast<const unsigned*>(slots);
  const int y = threadIdx.x % BLOCK_Y, own = threadIdx.x / BLOCK_Y;  // the thread's first column
  const long long row = first.row + y * kRows, step = BLOCK_X * rows;
  constexpr int kWidth = kColumns * BLOCK_X;
  const int left = row < rows ? limited(columns - first.column, kWidth) : 0;
  Fp8* from = qt + (first.column + own) * rows + row;
  const int half = own / 4 % 2, x = own / kColumns, at = own % 4;
  const auto store = [&](int i) {
    constexpr int kStride = BLOCK_X / kColumns;
    // A stride of eight slots or more turns as none does: the compiler adds it to the address.
    const int there =
        kStride % 8 == 0 ? slot(half, x, y) + i * kStride : slot(half, x + i * kStride, y);
    unsigned run[4];
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      run[group] = words[4 * (there + kGroupSlots * kThreads * group) + at];
    }
    if constexpr (kVectors) {
      store_streaming(reinterpret_cast<uint4*>(from), uint4{run[0], run[1], run[2], run[3]});
    } else {
      Fp8 bytes[kRows];
      memcpy(bytes, run, sizeof(run));
      for (int k = 0; k < kRows && row + k < rows; ++k) from[k] = bytes[k];
    }
    from += step;
  };
  if (kVectors && left == kWidth) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) store(i);
  } else {
#pragma unroll 1
    for (int i = 0; own + i * BLOCK_X < left; ++i) store(i);
  }
}

// Writes the codes of a part in both layouts, as far as HAS_Q and HAS_QT want them: `load(begin)`
// loads BATCH rows from `begin` on, and `encode_row(step, i, codes)` encodes row step + i, which
// was loaded as the i % BATCH-th. The first rows are on their way.
template <bool kVectors, typename Load, typename EncodeRow>
__device__ inline void write_codes(const Load& load, const EncodeRow& encode_row, Fp8* q, Fp8* qt,
                                   const Tile& first, const Part& part, long long rows,
                                   long long columns) {
  uint4* slots = reinterpret_cast<uint4*>(shared_memory());
  Codes codes;
#pragma unroll 1
  for (int step = 0; step < kRows; step += kStep) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      encode_row(step, i, codes[i % 4]);
      if (HAS_Q && i % 2 == 1) {
        store_pair<kVectors>(codes, i % 4 - 1, step + i - 1, q, part, columns);
      }
      if (HAS_QT && i % 4 == 3) place_group<kCodeSlots>(codes, (step + i) / 4, slots);
      if (i % BATCH == BATCH - 1 && step + i + 1 < kRows) load(step + i + 1);
    }
  }
#if HAS_QT
  __syncthreads();
  store_tile<kVectors, kCodeSlots>(slots, qt, first, rows, columns);
#endif
}
