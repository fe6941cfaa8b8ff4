// The largest magnitudes that each block finds, among finite numbers, 0 without any:
//
//   maxima[0][b] of activation(a) · up,  [1][b] of activation(a),  [2][b] of up
//
//   raw_a, raw_up  (size,)              X_TYPE: float, __nv_bfloat16 or __half
//   scales         (1 + HAS_UP,)        float: a = scales[0] · raw_a, up = scales[1] · raw_up
//   maxima         (kMaxima, gridDim.x) float; without HAS_UP the first row alone
//
// The text of `activation` comes before this file. As in quantize_amax.cu, nothing is initialised
// and the order of blocks does not matter.
#include "scalar.cuh"
#include "vector.cuh"

using Element = X_TYPE;

constexpr int kVector = 16 / sizeof(Element), kMaxima = HAS_UP ? 3 : 1;
constexpr unsigned kOne = 0x00800000u;  // in the exponent: see quantize_amax.cu

__device__ inline int raised(int largest, float value) {
  const int bits = static_cast<int>((bit_cast<unsigned>(value) & 0x7fffffffu) + kOne);
  return largest < bits ? bits : largest;
}

__device__ inline void raise(int (&largest)[kMaxima], float a, float up) {
  const float value = activation(a);
#if HAS_UP
  largest[0] = raised(largest[0], value * up);
  largest[1] = raised(largest[1], value);
  largest[2] = raised(largest[2], up);
#else
  largest[0] = raised(largest[0], value);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_gated_amax(const Element* raw_a,
#if HAS_UP
                        const Element* raw_up,
#endif
                        const float* scales, float* maxima, long long size) {
#if !HAS_UP
  const Element* raw_up = raw_a;
#endif
  __shared__ int warps[kMaxima][THREADS / 32];
  int largest[kMaxima];
#pragma unroll
  for (int m = 0; m < kMaxima; ++m) largest[m] = kOne;
  const float a_scale = scales[0], up_scale = scales[HAS_UP];
  const bool aligned = aligned_16(raw_a, raw_up);
  const long long vectors = aligned ? size / kVector : 0, stride = 1LL * gridDim.x * THREADS;
  const long long thread = 1LL * blockIdx.x * THREADS + threadIdx.x;
  for (long long i = thread; i < vectors; i += UNROLL * stride) {
    Packed<Element, kVector> as[UNROLL]{}, ups[UNROLL]{};
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      // Beyond the end the first vector is taken again: it changes no maximum.
      const long long at = i + u * stride < vectors ? (i + u * stride) * kVector : 0;
      as[u] = load_packed<kVector>(raw_a + at);
#if HAS_UP
      ups[u] = load_packed<kVector>(raw_up + at);
#endif
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const auto a = widen_all<float>(as[u]), up = widen_all<float>(ups[u]);
#pragma unroll
      for (int k = 0; k < kVector; ++k) raise(largest, a.at[k] * a_scale, up.at[k] * up_scale);
    }
  }
  for (long long i = vectors * kVector + thread; i < size; i += stride) {
    raise(largest, widen<float>(raw_a[i]) * a_scale, widen<float>(raw_up[i]) * up_scale);
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
