// Shared by the kernels of normfuse.elementwise: loads, stores and conversions of every dtype, and
// the place of a broadcast operand's element. layers/elementwise/code.py writes the kernels
// themselves around the user's function.
#pragma once

#include "machine.cuh"

#ifndef INFINITY
#define INFINITY (__int_as_float(0x7f800000))
#endif
#ifndef NAN
#define NAN (__int_as_float(0x7fffffff))
#endif
#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif

namespace normfuse_user {

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long long;
using uint64_t = unsigned long long;

}  // namespace normfuse_user

namespace normfuse_loop {

// From and to the type in memory; what is computed with is one of the same, but for half precision.
template <typename Value, typename Stored>
__device__ inline Value widen(const Stored& stored) {
  return static_cast<Value>(stored);
}
template <typename Value>
__device__ inline Value widen(const __half& stored) {
  return static_cast<Value>(__half2float(stored));
}
template <typename Value>
__device__ inline Value widen(const __nv_bfloat16& stored) {
  return static_cast<Value>(__bfloat162float(stored));
}

template <typename Stored>
struct Narrow {
  template <typename Value>
  static __device__ Stored from(const Value& value) {
    return static_cast<Stored>(value);
  }
};
template <>
struct Narrow<__half> {
  template <typename Value>
  static __device__ __half from(const Value& value) {
    return __float2half_rn(static_cast<float>(value));
  }
  static __device__ __half from(double value) { return __double2half(value); }
};
template <>
struct Narrow<__nv_bfloat16> {
  template <typename Value>
  static __device__ __nv_bfloat16 from(const Value& value) {
    return __float2bfloat16_rn(static_cast<float>(value));
  }
  static __device__ __nv_bfloat16 from(double value) { return __double2bfloat16(value); }
};

// The widest word that moves kBytes, or a part of them.
template <int kBytes>
using WordOf = ConditionalType<
    kBytes % 16 == 0, uint4,
    ConditionalType<
        kBytes % 8 == 0, uint2,
        ConditionalType<kBytes % 4 == 0, unsigned,
                        ConditionalType<kBytes % 2 == 0, unsigned short, unsigned char>>>>;

// kSize neighbours as they are in memory.
template <typename Stored, int kSize>
struct Pack {
  using Word = WordOf<sizeof(Stored) * kSize>;
  static constexpr int kWords = sizeof(Stored) * kSize / sizeof(Word);

  Word words[kWords];

  __device__ Stored at(int k) const {
    Stored stored;
    memcpy(&stored, reinterpret_cast<const char*>(words) + k * sizeof(Stored), sizeof(Stored));
    return stored;
  }
  __device__ void set(int k, const Stored& stored) {
    memcpy(reinterpret_cast<char*>(words) + k * sizeof(Stored), &stored, sizeof(Stored));
  }
};

// `from` is aligned to the words.
template <int kSize, typename Stored>
__device__ inline Pack<Stored, kSize> load(const Stored* from) {
  Pack<Stored, kSize> pack;
#pragma unroll
  for (int i = 0; i < pack.kWords; ++i) {
    pack.words[i] =
        load_streaming(reinterpret_cast<const typename Pack<Stored, kSize>::Word*>(from) + i);
  }
  return pack;
}

// kSize times one element.
template <int kSize, typename Stored>
__device__ inline Pack<Stored, kSize> repeat(const Stored* from) {
  Pack<Stored, kSize> pack;
#pragma unroll
  for (int k = 0; k < kSize; ++k) pack.set(k, *from);
  return pack;
}

template <typename Stored, int kSize>
__device__ inline void store(Stored* to, const Pack<Stored, kSize>& pack) {
#pragma unroll
  for (int i = 0; i < pack.kWords; ++i) {
    store_streaming(reinterpret_cast<typename Pack<Stored, kSize>::Word*>(to) + i, pack.words[i]);
  }
}

template <typename... Pointers>
__device__ inline bool aligned_16(const Pointers*... pointers) {
  return ((reinterpret_cast<unsigned long long>(pointers) | ... | 0ull) & 15) == 0;
}

template <typename Index, int kDimensions>
struct Sizes {
  Index n[kDimensions];
};

// The index in an operand with the dimensions in kMask (bit 0: the last) for the result's `at`.
template <unsigned kMask, typename Index, int kDimensions>
__device__ inline Index place(Index at, const Sizes<Index, kDimensions>& sizes) {
  Index offset = 0, stride = 1;
#pragma unroll
  for (int bit = 0; bit < kDimensions; ++bit) {
    const Index n = sizes.n[kDimensions - 1 - bit];
    const Index index = bit + 1 < kDimensions ? at % n : at;
    at /= n;
    if (kMask >> bit & 1) {
      offset += index * stride;
      stride *= n;
    }
  }
  return offset;
}

}  // namespace normfuse_loop
