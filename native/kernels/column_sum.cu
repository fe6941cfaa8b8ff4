// sums[j] = Σ_i partial[i][j], added in an order that depends on the shape alone.
//
//   partial (count, columns), sums (columns,)   COMPUTE_TYPE
//
// One block per 32 columns: warp w adds rows w, w + 32, ..., then a tree adds the 32 warps.
using Compute = COMPUTE_TYPE;

constexpr int kWarps = 32;

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    column_sum(const Compute* partial, Compute* sums, long long count, long long columns) {
  __shared__ Compute tile[kWarps][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long column = blockIdx.x * 32LL + lane;
  Compute sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (long long i = warp; i < count; i += kWarps) sum += partial[i * columns + column];
  }
  tile[warp][lane] = sum;
  __syncthreads();
  sum = tile[lane][warp];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  const long long mine = blockIdx.x * 32LL + warp;
  if (lane == 0 && mine < columns) sums[mine] = sum;
}
