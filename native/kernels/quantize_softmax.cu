// FP8 codes of the softmax's gradient, as it lies and transposed, in one pass over the logits:
//
//   q[i][j] = qt[j][i] = round((a_i · exp(c_ij - most_i) - b_i · [j = label_i]) · dc_ij/dz_ij)
//
//   z            (rows, columns)  Z_TYPE: float, __nv_bfloat16 or __half; c as in softmax.cu
//   label        (rows,)          int; one that is no column matches none
//   most, a, b   (rows,)          float; a and b divided by the codes' scale
//   q            (rows, columns)  e4m3 or, with E5M2, e5m2; where HAS_Q
//   qt           (columns, rows)  where HAS_QT
//
// Rows whose a and b are 0 have zeros, whatever their logits are. A block reads what its rows have
// in common once, into shared memory.
#include "fp8_tile.cuh"
#include "softmax.cuh"

using Element = Z_TYPE;
static_assert(VECTOR == kColumns, "a thread has a vector of each row");

struct alignas(16) Row {
  float a, b, scaled_most;
  int label;
};

template <bool kVectors>
__device__ inline void run(const Element* z, const int* labels, const float* mosts, const float* as,
                           const float* bs, Fp8* q, Fp8* qt, long long rows, long long columns,
                           int group, bool backwards, float softcap) {
  __shared__ Row shared_rows[kRows * BLOCK_Y];
  const Tile first = tile_of(rows, columns, group, backwards);
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
    shared_rows[i] = {as[row], bs[row], scaled(mosts[row]), labels[row]};
  }
  __syncthreads();
  const Row* const own = shared_rows + threadIdx.x / BLOCK_X * kRows;
  const int column = static_cast<int>(first.column) + threadIdx.x % BLOCK_X * kColumns;
  uint4* slots = reinterpret_cast<uint4*>(shared_memory());
  Codes codes;
#pragma unroll 1
  for (int step = 0; step < kRows; step += kStep) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      Vector out{};
      if (step + i < part.rows) {
        const Row row = own[step + i];
        if (!(row.a == 0 && row.b == 0)) {
          const int at = row.label - column;
          out = gradient(loaded[i % BATCH], row.a, row.b, row.scaled_most, at, softcap);
        }
      }
      encode(out, codes[i % 4]);
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

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    quantize_softmax(const Element* z, const int* labels, const float* mosts, const float* as,
                     const float* bs,
#if HAS_Q
                     Fp8* q,
#endif
#if HAS_QT
                     Fp8* qt,
#endif
                     long long rows, long long columns, long long group, long long backwards,
                     float softcap) {
#if !HAS_Q
  Fp8* q = nullptr;
#endif
#if !HAS_QT
  Fp8* qt = nullptr;
#endif
#if VECTORS
  if (aligned_16(z) && (q == nullptr || aligned_16(q)) && (qt == nullptr || aligned_16(qt))) {
    return run<true>(z, labels, mosts, as, bs, q, qt, rows, columns, group, backwards, softcap);
  }
#endif
  run<false>(z, labels, mosts, as, bs, q, qt, rows, columns, group, backwards, softcap);
}
