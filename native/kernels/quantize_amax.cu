// maxima[b] = the largest magnitude among the finite elements that block b reads, 0 without any.
//
//   x       (size,)        X_TYPE: float, __nv_bfloat16 or __half
//   maxima  (gridDim.x,)   float
//
// One value a block: nothing is initialised, and no two blocks write one place. Maxima do not
// depend on an order, so the result depends on x alone. Blocks go through x together, UNROLL
// vectors of 16 bytes of a thread on their way at once, from the last to the first: what made x has
// most likely left the end in the cache, and the pass for codes, which begins at x's first element,
// finds the beginning there.
//
// Magnitudes are compared as integers. An infinity or NaN has the largest exponent: with one more
// its sign bit is set, so that as a signed number it is less than any finite element.
#include "vector.cuh"

using Element = X_TYPE;

constexpr int kVector = 16 / sizeof(Element);

// One in the exponent, to add to the bits of a magnitude.
template <typename T>
struct ExponentOf;
template <>
struct ExponentOf<float> {
  static constexpr unsigned kOne = 0x00800000u;
};
template <>
struct ExponentOf<__nv_bfloat16> {
  static constexpr unsigned kOne = 0x0080u;
};
template <>
struct ExponentOf<__half> {
  static constexpr unsigned kOne = 0x0400u;
};
constexpr unsigned kOne = ExponentOf<Element>::kOne;

__device__ inline int max_of(int a, int b) { return a < b ? b : a; }

// The larger of each of the two signed halves.
__device__ inline unsigned max_of_halves(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__)
  return __vmaxs2(a, b);
#else
  const int low = max_of(static_cast<short>(a), static_cast<short>(b));
  const int high = max_of(static_cast<short>(a >> 16), static_cast<short>(b >> 16));
  return (low & 0xffffu) | static_cast<unsigned>(high) << 16;
#endif
}

// The running maximum of what a register holds: one element, or two.
__device__ inline unsigned raise(unsigned largest, unsigned unit) {
  if constexpr (sizeof(Element) == 4) {
    return max_of(static_cast<int>(largest), static_cast<int>((unit & 0x7fffffffu) + kOne));
  } else {
    return max_of_halves(largest, (unit & 0x7fff7fffu) + (kOne | kOne << 16));
  }
}

// From the running maximum the bits of one magnitude, as stored.
__device__ inline int finish(unsigned largest) {
  if constexpr (sizeof(Element) == 4) return static_cast<int>(largest) - kOne;
  const int low = static_cast<short>(largest), high = static_cast<short>(largest >> 16);
  return max_of(low, high) - static_cast<int>(kOne);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_amax(const Element* x, float* maxima, long long size) {
  __shared__ int warps[THREADS / 32];
  using Vector = Packed<Element, kVector>;
  constexpr unsigned kNone = sizeof(Element) == 4 ? kOne : kOne | kOne << 16;
  unsigned largest = kNone;
  // Elements before and after the vectors are read one by one.
  const unsigned long long address = reinterpret_cast<unsigned long long>(x);
  const long long to_boundary = (16 - address % 16) % 16 / sizeof(Element);
  const long long head = to_boundary < size ? to_boundary : size;
  const long long vectors = (size - head) / kVector, tail = head + vectors * kVector;
  const Element* const last = x + tail - kVector;  // the last whole vector, if there is one
  const long long stride = 1LL * gridDim.x * THREADS;
  long long i = 1LL * blockIdx.x * THREADS + threadIdx.x;
  for (; i + (UNROLL - 1) * stride < vectors; i += UNROLL * stride) {
    Vector loaded[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      loaded[u] = load_packed<kVector>(last - (i + u * stride) * kVector);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int k = 0; k < Vector::kUnits; ++k) largest = raise(largest, loaded[u].units[k]);
    }
  }
  for (; i < vectors; i += stride) {
    const Vector loaded = load_packed<kVector>(last - i * kVector);
#pragma unroll
    for (int k = 0; k < Vector::kUnits; ++k) largest = raise(largest, loaded.units[k]);
  }
  if (blockIdx.x == 0) {
    const long long rest = head + size - tail;
    for (long long k = threadIdx.x; k < rest; k += THREADS) {
      const Element value = x[k < head ? k : tail + k - head];
      if constexpr (sizeof(Element) == 4) {
        largest = raise(largest, bit_cast<unsigned>(value));
      } else {
        largest = raise(largest, bit_cast<unsigned short>(value));
      }
    }
  }
  int bits = finish(largest);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    bits = max_of(bits, __shfl_xor_sync(0xffffffffu, bits, offset));
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) bits = max_of(bits, warps[warp]);
    if constexpr (sizeof(Element) == 4) {
      maxima[blockIdx.x] = bit_cast<float>(bits);
    } else {
      maxima[blockIdx.x] = widen<float>(bit_cast<Element>(static_cast<unsigned short>(bits)));
    }
  }
}
