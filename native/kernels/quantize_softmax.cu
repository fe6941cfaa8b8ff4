// FP8 codes of the softmax's gradient, as it lies and transposed, in one pass over the logits:
//
//   q[i][j] = qt[j][i] = round((a_i · exp(c_ij - most_i) - b_i · t_ij) · dc_ij/dz_ij)
//
// round is up or down at random, so that the mean of the codes is the number
// (docs/quantization.md).
//
//   z            (rows, columns)  Z_TYPE: float, __nv_bfloat16 or __half; c and t as in softmax.cu
//   label        (rows,)          int; one that is no column matches none
//   most, a, b   (rows,)          float; a and b divided by the codes' scale
//   seed         (rows,)          unsigned; random bits of the row
//   q            (rows, columns)  e5m2; where HAS_Q
//   qt           (columns, rows)  where HAS_QT
//
// Rows whose a and b are 0 have zeros, whatever their logits are. A block reads what its rows have
// in common once, into shared memory.
#include "fp8_tile.cuh"
#include "softmax.cuh"

using Element = Z_TYPE;
static_assert(VECTOR == kColumns, "a thread has a vector of each row");
static_assert(E5M2, "its codes are the upper bytes of float16 numbers");

struct alignas(16) Row {
  float a, b, scaled_most;
  int label;
  unsigned seed;
};

// Bits each of which depends on all bits of x: the last step of MurmurHash3.
__device__ inline unsigned mixed(unsigned x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// The codes of eight numbers: float16 with eight random bits added below e5m2's last, and cut. Four
// columns share a word of random bits. Numbers beyond the largest become NaN.
__device__ inline void encode_at_random(const Vector& values, unsigned seed, unsigned column,
                                        unsigned (&codes)[2]) {
  constexpr float kLargest = 57344.0f;
  float size = 0;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) size += fabsf(values.at[k]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* four = values.at + 4 * half;
    const unsigned random = mixed(seed ^ (column / 4 + half));
    const unsigned low = bit_cast<unsigned>(__floats2half2_rn(four[0], four[1]));
    const unsigned high = bit_cast<unsigned>(__floats2half2_rn(four[2], four[3]));
    codes[half] = __byte_perm(low + __byte_perm(random, 0, 0x4140),
                              high + __byte_perm(random, 0, 0x4342), 0x7531);
  }
  if (size <= kLargest) return;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const unsigned byte = 0xffu << k % 4 * 8;
    const bool fits = fabsf(values.at[k]) <= kLargest;
    if (!fits) codes[k / 4] = (codes[k / 4] & ~byte) | (kNan * 0x01010101u & byte);
  }
}

template <bool kVectors>
__device__ inline void run(const Element* z, const int* labels, const float* mosts, const float* as,
                           const float* bs, const unsigned* seeds, Fp8* q, Fp8* qt, long long rows,
                           long long columns, int group, float softcap, float rest, float share) {
  __shared__ Row shared_rows[kRows * BLOCK_Y];
  // The pass for the statistics has read the last rows last.
  const Tile first = tile_of(rows, columns, group, gridDim.x - 1 - blockIdx.x);
  const Part part = part_of(first, rows, columns);
  Packed<Element, kColumns> loaded[BATCH];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      loaded[i] = load_row<kVectors>(z, part, begin + i, columns);
    }
  };
  load(0);
  for (int i = threadIdx.x; i < kRows * BLOCK_Y && first.row + i < rows; i += kThreads) {
    const long long row = first.row + i;
    shared_rows[i] = {as[row], bs[row], scaled(mosts[row]), labels[row], seeds[row]};
  }
  __syncthreads();
  const Row* const own = shared_rows + threadIdx.x / BLOCK_X * kRows;
  const int column = static_cast<int>(first.column) + threadIdx.x % BLOCK_X * kColumns;
  const auto encode_row = [&](int step, int i, unsigned (&codes)[2]) {
    Vector out{};
    unsigned seed = 0;
    if (step + i < part.rows) {
      const Row row = own[step + i];
      seed = row.seed;
      if (!(row.a == 0 && row.b == 0)) {
        const int at = row.label - column;
        out = gradient(loaded[i % BATCH], row.a, row.b, row.scaled_most, at, softcap, rest, share);
      }
    }
    encode_at_random(out, seed, column, codes);
  };
  write_codes<kVectors>(load, encode_row, q, qt, first, part, rows, columns);
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    quantize_softmax(const Element* z, const int* labels, const float* mosts, const float* as,
                     const float* bs, const unsigned* seeds,
#if HAS_Q
                     Fp8* q,
#endif
#if HAS_QT
                     Fp8* qt,
#endif
                     long long rows, long long columns, long long group, float softcap, float rest,
                     float share) {
#if !HAS_Q
  Fp8* q = nullptr;
#endif
#if !HAS_QT
  Fp8* qt = nullptr;
#endif
#if VECTORS
  if (aligned_16(z) && (q == nullptr || aligned_16(q)) && (qt == nullptr || aligned_16(qt))) {
    return run<true>(z, labels, mosts, as, bs, seeds, q, qt, rows, columns, group, softcap, rest,
                     share);
  }
#endif
  run<false>(z, labels, mosts, as, bs, seeds, q, qt, rows, columns, group, softcap, rest, share);
}
