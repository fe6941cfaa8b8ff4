// sums[j] = Σ_i partial[i][j], added in an order that depends on the shape alone.
//
//   partial (count, columns), sums (columns,)   COMPUTE_TYPE
//
// One block per 32 · VECTOR columns: warp w adds rows w, w + WARPS, ..., then trees add the warps.
#include "vector.cuh"

using Compute = COMPUTE_TYPE;

constexpr int kColumns = 32 * VECTOR;
constexpr int kPitch = kColumns + VECTOR;  // so that the lanes of a tree are in different banks

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    column_sum(const Compute* partial, Compute* sums, long long count, long long columns) {
  __shared__ Compute tile[WARPS * kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long first = blockIdx.x * 1LL * kColumns, mine = first + lane * VECTOR;
  const bool aligned = aligned_16(partial);
  Wide<Compute, VECTOR> sum{};
  if (mine < columns) {
#pragma unroll 8
    for (long long i = warp; i < count; i += WARPS) {
      const Compute* from = partial + i * columns + mine;
      const auto packed =
          VECTOR == 1 || aligned ? load_packed<VECTOR>(from) : load_elements<VECTOR>(from);
      const auto wide = widen_all<Compute>(packed);
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) sum.at[k] += wide.at[k];
    }
  }
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) tile[warp * kPitch + lane * VECTOR + k] = sum.at[k];
  __syncthreads();
#pragma unroll
  for (int column = warp; column < kColumns; column += WARPS) {
    Compute total = lane < WARPS ? tile[lane * kPitch + column] : Compute(0);
#pragma unroll
    for (int offset = WARPS / 2; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, offset);
    }
    if (lane == 0 && first + column < columns) sums[first + column] = total;
  }
}
