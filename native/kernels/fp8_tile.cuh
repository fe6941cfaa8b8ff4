// A matrix in tiles, whose FP8 codes are written as they lie and transposed.
//
// A block has a tile of 16 BLOCK_Y rows and 8 BLOCK_X columns, a thread 16 rows and 8 columns of
// it, BATCH rows of them on their way at once. Vectors have 16 bytes on all sides: two neighbours
// exchange halves of two rows of q, and a column of the thread's 16 rows goes through shared
// memory. There the place of such a chunk is xor-ed with the thread's column, so that neither
// writing nor reading has bank conflicts.
//
// Tiles are taken in groups of `group` rows of tiles, in which they go down before they go right:
// what is on its way at once is a compact piece of both layouts. With `backwards` the last tile is
// first: what a pass for the maxima has read last is still in the cache.
//
// kVectors is for shapes that are multiples of 16, and aligned pointers: others are moved one by
// one.
#pragma once

#include "fp8.cuh"

constexpr int kThreads = BLOCK_X * BLOCK_Y, kRows = 16, kColumns = 8;
static_assert(BLOCK_X % 8 == 0, "the xor stays within the tile");
static_assert(kRows % BATCH == 0 && BATCH % 2 == 0, "rows are loaded in whole batches of pairs");

struct Tile {
  long long row, column;  // of the first element
};

__device__ inline Tile tile_of(long long rows, long long columns, int group, bool backwards) {
  const int down = static_cast<int>((rows + kRows * BLOCK_Y - 1) / (kRows * BLOCK_Y));
  const int across = static_cast<int>((columns + kColumns * BLOCK_X - 1) / (kColumns * BLOCK_X));
  const int index = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int begin = index / (group * across) * group, within = index % (group * across);
  const int height = down - begin < group ? down - begin : group;
  const long long y = begin + within % height, x = within / height;
  return {y * kRows * BLOCK_Y, x * kColumns * BLOCK_X};
}

// The place in shared memory of column `column` of the tile, rows 16 chunk to 16 chunk + 15.
__device__ inline int place(int column, int chunk) {
  if constexpr (BLOCK_Y % 8 == 0) return column * BLOCK_Y + (chunk ^ (column / kColumns & 7));
  return (column * BLOCK_Y + chunk) ^ (column / kColumns & 7);  // the same, in more instructions
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

// The thread's codes: two words of four columns for each of 16 rows.
using Codes = unsigned[kRows][2];

// Rows i and i + 1 of the part.
template <bool kVectors>
__device__ inline void store_rows(const Codes& codes, int i, Fp8* q, const Part& part,
                                  long long stride) {
  if constexpr (kVectors) {
    // The even thread of two stores row i, the odd one row i + 1, sixteen columns each.
    const bool odd = threadIdx.x % 2;
    unsigned given[2], got[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      given[half] = odd ? codes[i][half] : codes[i + 1][half];
      got[half] = __shfl_xor_sync(0xffffffffu, given[half], 1);
    }
    const uint4 words = odd ? uint4{got[0], got[1], codes[i + 1][0], codes[i + 1][1]}
                            : uint4{codes[i][0], codes[i][1], got[0], got[1]};
    Fp8* to = q + part.first - (odd ? kColumns : 0) + (i + odd) * stride;
    if (i + odd < part.rows) store_streaming(reinterpret_cast<uint4*>(to), words);
  } else {
    for (int r = i; r < i + 2 && r < part.rows; ++r) {
      for (int k = 0; k < part.columns; ++k) {
        q[part.first + r * stride + k] = codes[r][k / 4] >> 8 * (k % 4);
      }
    }
  }
}

// Writes the tile's transpose, whose first element is x[first.row][first.column].
template <bool kVectors>
__device__ inline void store_transposed(const Codes& codes, uint4* tile, Fp8* qt, const Tile& first,
                                        long long rows, long long columns) {
  const int x = threadIdx.x % BLOCK_X, y = threadIdx.x / BLOCK_X;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned four[4][4];  // [rows 4 g to 4 g + 3][column]
#pragma unroll
    for (int g = 0; g < 4; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) four[g][i] = codes[4 * g + i][half];
      transpose(four[g]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      tile[place(x * kColumns + half * 4 + j, y)] =
          uint4{four[0][j], four[1][j], four[2][j], four[3][j]};
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int chunk = threadIdx.x % BLOCK_Y, column = threadIdx.x / BLOCK_Y + i * BLOCK_X;
    const uint4 words = tile[place(column, chunk)];
    const long long row = first.row + chunk * kRows, to = first.column + column;
    if (to >= columns || row >= rows) continue;
    Fp8* at = qt + to * rows + row;
    if constexpr (kVectors) {
      store_streaming(reinterpret_cast<uint4*>(at), words);
    } else {
      Fp8 bytes[kRows];
      memcpy(bytes, &words, sizeof(words));
      for (int k = 0; k < kRows && row + k < rows; ++k) at[k] = bytes[k];
    }
  }
}
