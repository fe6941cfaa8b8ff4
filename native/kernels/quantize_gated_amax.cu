// The largest magnitudes that each block finds, among finite numbers, 0 without any:
//
//   maxima[0][b] of activation(a) · up,  [1][b] of a,  [2][b] of up,  [3][b] of activation(a)
//
//   a, up   (size,)               X_TYPE: float, __nv_bfloat16 or __half
//   maxima  (kMaxima, gridDim.x)  float; without HAS_UP up is 1, and there are the first two rows
//
// The text of `activation` comes before this file. As in quantize_amax.cu, nothing is initialised,
// the order of blocks does not matter, and the last elements are read first.
#include "scalar.cuh"
#include "vector.cuh"

using Element = X_TYPE;

constexpr int kVector = 16 / sizeof(Element), kMaxima = HAS_UP ? 4 : 2;
constexpr unsigned kOne = 0x00800000u;  // in the exponent: see quantize_amax.cu

__device__ inline int raised(int largest, float value) {
  const int bits = static_cast<int>((bit_cast<unsigned>(value) & 0x7fffffffu) + kOne);
  return largest < bits ? bits : largest;
}

__device__ inline void raise(int (&largest)[kMaxima], float a, float up) {
  const float value = activation(a);
#if HAS_UP
  largest[0] = raised(largest[0], value * up);
  largest[2] = raised(largest[2], up);
  largest[3] = raised(largest[3], value);
#else
  largest[0] = raised(largest[0], value);
#endif
  largest[1] = raised(largest[1], a);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_gated_amax(const Element* a,
#if HAS_UP
                        const Element* up,
#endif
                        float* maxima, long long size) {
#if !HAS_UP
  const Element* up = a;
#endif
  __shared__ int warps[kMaxima][THREADS / 32];
  int largest[kMaxima];
#pragma unroll
  for (int m = 0; m < kMaxima; ++m) largest[m] = kOne;
  const bool aligned = aligned_16(a, up);
  const long long vectors = aligned ? size / kVector : 0, stride = 1LL * gridDim.x * THREADS;
  const long long thread = 1LL * blockIdx.x * THREADS + threadIdx.x;
  for (long long i = thread; i < vectors; i += UNROLL * stride) {
    Packed<Element, kVector> as[UNROLL]{}, ups[UNROLL]{};
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      // Beyond the first vector the last is taken again: it changes no maximum.
      const long long before = i + u * stride < vectors ? i + u * stride : 0;
      const long long at = (vectors - 1 - before) * kVector;
      as[u] = load_packed<kVector>(a + at);
#if HAS_UP
      ups[u] = load_packed<kVector>(up + at);
#endif
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const auto wide_a = widen_all<float>(as[u]), wide_up = widen_all<float>(ups[u]);
#pragma unroll
      for (int k = 0; k < kVector; ++k) raise(largest, wide_a.at[k], wide_up.at[k]);
    }
  }
  for (long long i = vectors * kVector + thread; i < size; i += stride) {
    raise(largest, widen<float>(a[i]), widen<float>(up[i]));
  }
#pragma unroll
  for (int m = 0; m < kMaxima; ++m) {
    int bits = largest[m] - static_cast<int>(kOne);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const int other = __shfl_xor_sync(0xffffffffu, bits, offset);
      bits = bits < other ? other : bits;
    }
    if (threadIdx.x % 32 == 0) warps[m][threadIdx.x / 32] = bits;
  }
  __syncthreads();
  if (threadIdx.x < kMaxima) {
    int bits = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) {
      const int other = warps[threadIdx.x][warp];
      bits = bits < other ? other : bits;
    }
    maxima[1LL * threadIdx.x * gridDim.x + blockIdx.x] = bit_cast<float>(bits);
  }
}
