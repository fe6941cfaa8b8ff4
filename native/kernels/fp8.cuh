// FP8 codes of float32 numbers, and the power-of-two scale of an array (docs/quantization.md).
//
// E5M2 chooses the format: 0 is e4m3 (its largest number is 448), 1 is e5m2 (57344). No infinity is
// ever written, even if the format has one: numbers beyond it become NaN.
#pragma once

#include "vector.cuh"

using Fp8 = unsigned char;

#if E5M2
constexpr int kMantissaBits = 2, kExponentBias = 15, kLargestExponent = 15;
constexpr float kBeyond = 61440.0f;  // the smallest magnitude that rounds beyond the largest number
#else
constexpr int kMantissaBits = 3, kExponentBias = 7, kLargestExponent = 8;
constexpr float kBeyond = 464.00003f;  // the float after 464, which is rounded to even: to 448
#endif
constexpr unsigned kNan = 0x7f;
constexpr int kLargestShift = 100;  // scales are 2^-100 or more: subnormal numbers become zero

__device__ inline int max_of(int a, int b) { return a < b ? b : a; }
__device__ inline float magnitude(float value) {
  return bit_cast<float>(bit_cast<unsigned>(value) & 0x7fffffffu);
}

// The code of any float32: rounded to nearest, ties to even; NaN where that is beyond the largest
// number. NaN has one code.
__device__ inline unsigned encode_one(float value) {
  constexpr int kShift = 23 - kMantissaBits;
  // A number below the smallest normal is added to one whose last bit is the smallest subnormal.
  constexpr unsigned kMagic = (127u + 24 - kExponentBias - kMantissaBits) << 23;
  const unsigned bits = bit_cast<unsigned>(value), top = bits & 0x7fffffffu;
  unsigned code;
  if (top < (128u - kExponentBias) << 23) {
    code = bit_cast<unsigned>(bit_cast<float>(top) + bit_cast<float>(kMagic)) - kMagic;
  } else {
    const unsigned rebased = top - ((127u - kExponentBias) << 23);
    code = (rebased + ((1u << (kShift - 1)) - 1) + (rebased >> kShift & 1)) >> kShift;
  }
  return top >= bit_cast<unsigned>(kBeyond) ? kNan : code | (bits >> 24 & 0x80u);
}

// The number that an e4m3 code means.
__device__ inline float decode_one(unsigned code) {
  const unsigned top = code & 0x7f, sign = (code & 0x80) << 24;
  const float value = top < 8 ? top / 512.0f : bit_cast<float>((top << 20) + (120u << 23));
  return bit_cast<float>(bit_cast<unsigned>(top == kNan ? bit_cast<float>(0x7fc00000) : value) |
                         sign);
}

// The numbers that eight e4m3 codes mean.
__device__ inline Wide<float, 8> decode(const Packed<Fp8, 8>& codes) {
  Wide<float, 8> values;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const unsigned both = codes.units[pair / 2] >> 16 * (pair % 2);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(both)));
    const float2 wide = __half22float2(bit_cast<__half2>(halves));
    values.at[2 * pair] = wide.x;
    values.at[2 * pair + 1] = wide.y;
#else
    values.at[2 * pair] = decode_one(both & 0xff);
    values.at[2 * pair + 1] = decode_one(both >> 8 & 0xff);
#endif
  }
  return values;
}

// Numbers beyond e4m3's largest become the largest; infinities become NaN.
__device__ inline Wide<float, 8> within(Wide<float, 8> values) {
  constexpr float kLargest = 448.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float value = values.at[k];
    const bool finite = magnitude(value) < bit_cast<float>(0x7f800000);
    values.at[k] = finite ? fminf(fmaxf(value, -kLargest), kLargest) : bit_cast<float>(0x7fc00000);
  }
  return values;
}

// The codes of two numbers that are smaller than kBeyond in magnitude, or NaN: `low` in bits 0
// to 7.
__device__ inline unsigned encode_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short codes;
#if E5M2
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
#else
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
#endif
  return codes;
#else
  return encode_one(low) | encode_one(high) << 8;
#endif
}

// The codes of eight numbers, the first in the lowest byte of codes[0]. kBounded: none of them
// rounds beyond the largest number, or is infinite; NaN may be.
template <bool kBounded = false>
__device__ inline void encode(Wide<float, 8> values, unsigned (&codes)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (!kBounded) {
    float largest = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(values.at[k]));  // not a NaN
    if (largest >= kBeyond) {  // an infinity, or a bound that does not hold: NaN, not the largest
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (magnitude(values.at[k]) >= kBeyond) values.at[k] = bit_cast<float>(0x7fc00000);
      }
    }
  }
#endif
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* four = values.at + 4 * half;
    codes[half] = encode_pair(four[0], four[1]) | encode_pair(four[2], four[3]) << 16;
  }
}

// From a bound on the magnitudes, given as the bits of a float32, the power of two that values are
// multiplied with, and its inverse, the scale. NaN where the bound is not finite.
struct Scale {
  float multiplier, scale;
};
__device__ inline Scale scale_of(int bound) {
  const int exponent = bound >> 23;
  const float nan = bit_cast<float>(0x7fc00000);
  if (exponent == 255) return {nan, nan};
  int shift = kLargestExponent + 127 - exponent - ((bound & 0x7fffff) > 0x600000);
  if (shift > kLargestShift) shift = kLargestShift;
  return {bit_cast<float>((127 + shift) << 23), bit_cast<float>((127 - shift) << 23)};
}

// The largest of `count` magnitudes as bits, for every thread of a block of kThreads. `warps` is
// shared memory for one number a warp.
template <int kThreads>
__device__ inline int largest_of(const float* magnitudes, long long count, int* warps) {
  int largest = 0;
  for (long long i = threadIdx.x; i < count; i += kThreads) {
    const float magnitude = magnitudes[i];  // in one load: of memory bit_cast reads bytes
    largest = max_of(largest, bit_cast<int>(magnitude) & 0x7fffffff);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = max_of(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) largest = max_of(largest, warps[warp]);
  return largest;
}
