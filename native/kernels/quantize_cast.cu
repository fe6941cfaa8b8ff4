// FP8 codes of a matrix, as it lies and transposed, in one pass over memory:
//
//   q[i][j] = qt[j][i] = round(x[i][j] / scale)      scale = a power of two, from max(maxima)
//
//   x       (rows, columns)   X_TYPE: float, __nv_bfloat16 or __half
//   maxima  (count,)          float: their largest is a bound on the magnitudes of x
//   q       (rows, columns)   e4m3 or, with E5M2, e5m2; where HAS_Q
//   qt      (columns, rows)   where HAS_QT
//   scale   (1,)              float: x ≈ scale · q
//
// A block has a tile of 16 BLOCK_Y rows and 8 BLOCK_X columns, a thread 16 rows and 8 columns of
// it. Vectors have 16 bytes on all sides: two neighbours exchange halves of two rows of q, and a
// column of the thread's 16 rows goes through shared memory. There the place of such a chunk is
// xor-ed with the thread's column, so that neither writing nor reading has bank conflicts.
//
// Tiles are taken in groups of `group` rows of tiles, in which they go down before they go right:
// what is on its way at once is a compact piece of both layouts. With `backwards` the last tile is
// first: what a pass for the maxima has read last is still in the cache.
//
// VECTORS says that rows and columns are multiples of 16; with other shapes, or with pointers that
// are not aligned, elements are moved one by one.
#include "fp8.cuh"

using Element = X_TYPE;

constexpr int kThreads = BLOCK_X * BLOCK_Y, kRows = 16, kColumns = 8;
static_assert(BLOCK_X % 8 == 0 && BLOCK_Y % 8 == 0, "the xor stays within the tile");
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
  return column * BLOCK_Y + (chunk ^ (column / kColumns & 7));
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

__device__ inline int clamp(long long size, int most) {
  return size < 0 ? 0 : size < most ? static_cast<int>(size) : most;
}

// Row i of the part; zero beyond the edge.
template <bool kVectors>
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

template <bool kVectors>
__device__ inline void run(const Element* x, const float* maxima, Fp8* q, Fp8* qt, float* scale,
                           long long rows, long long columns, long long count, int group,
                           bool backwards) {
  __shared__ int warps[kThreads / 32];
  const Tile first = tile_of(rows, columns, group, backwards);
  const long long row = first.row + threadIdx.x / BLOCK_X * kRows;
  const long long column = first.column + threadIdx.x % BLOCK_X * kColumns;
  Part part = {row * columns + column, clamp(rows - row, kRows), clamp(columns - column, kColumns)};
  if (part.columns == 0) part.rows = 0;
  Scale by;
  Codes codes;
#pragma unroll
  for (int begin = 0; begin < kRows; begin += BATCH) {
    Packed<Element, kColumns> loaded[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      loaded[i] = load_row<kVectors>(x, part, begin + i, columns);
    }
    if (begin == 0) {  // while the first elements are on their way
      by = scale_of(largest_of<kThreads>(maxima, count, warps));
      if (blockIdx.x == 0 && threadIdx.x == 0) *scale = by.scale;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      Wide<float, kColumns> wide = widen_all<float>(loaded[i]);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) wide.at[k] *= by.multiplier;
      encode(wide, codes[begin + i]);
    }
#if HAS_Q
#pragma unroll
    for (int i = 0; i < BATCH; i += 2) {
      store_rows<kVectors>(codes, begin + i, q, part, columns);
    }
#endif
  }
#if HAS_QT
  uint4* tile = reinterpret_cast<uint4*>(shared_memory());
  store_transposed<kVectors>(codes, tile, qt, first, rows, columns);
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    quantize_cast(const Element* x, const float* maxima,
#if HAS_Q
                  Fp8* q,
#endif
#if HAS_QT
                  Fp8* qt,
#endif
                  float* scale, long long rows, long long columns, long long count, long long group,
                  long long backwards) {
#if !HAS_Q
  Fp8* q = nullptr;
#endif
#if !HAS_QT
  Fp8* qt = nullptr;
#endif
#if VECTORS
  if (aligned_16(x) && (q == nullptr || aligned_16(q)) && (qt == nullptr || aligned_16(qt))) {
    return run<true>(x, maxima, q, qt, scale, rows, columns, count, group, backwards);
  }
#endif
  run<false>(x, maxima, q, qt, scale, rows, columns, count, group, backwards);
}
