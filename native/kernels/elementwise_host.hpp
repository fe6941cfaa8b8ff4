// The functions of normfuse.elementwise are compiled with this for the CPU: CUDA's names for
// mathematics, and conversions of every dtype, which cpu/convert.cc has too.
// layers/elementwise/code.py writes the loops around the user's function.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NORMFUSE_INLINE inline __attribute__((always_inline))

namespace normfuse_user {

template <typename A, typename B>
inline auto min(A a, B b) -> decltype(a + b) {
  return b < a ? b : a;
}
template <typename A, typename B>
inline auto max(A a, B b) -> decltype(a + b) {
  return a < b ? b : a;
}
inline float rsqrt(float x) { return 1.f / sqrt(x); }
inline double rsqrt(double x) { return 1. / sqrt(x); }
inline float rcbrt(float x) { return 1.f / cbrt(x); }
inline double rcbrt(double x) { return 1. / cbrt(x); }
inline float exp10(float x) { return pow(10.f, x); }
inline double exp10(double x) { return pow(10., x); }
inline float sinpi(float x) { return static_cast<float>(sin(M_PI * x)); }
inline double sinpi(double x) { return sin(M_PI * x); }
inline float cospi(float x) { return static_cast<float>(cos(M_PI * x)); }
inline double cospi(double x) { return cos(M_PI * x); }

}  // namespace normfuse_user

namespace normfuse_loop {

template <typename To, typename From>
NORMFUSE_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Neither branches nor depends on whether the processor flushes subnormal numbers: loops over
// either become vector instructions.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

NORMFUSE_INLINE float widened(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
NORMFUSE_INLINE float widened(Half value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16, exponents = 0x7c00u << 13;
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13, bias = (127u - 15) << 23;
  const uint32_t normal = magnitude + bias;
  // A subnormal: its fraction as that of 2^-14 (1 + f), less the 2^-14.
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(normal + (1u << 23)) - bit_cast<float>(113u << 23));
  const uint32_t exponent = magnitude & exponents;
  const uint32_t finite = exponent == 0 ? subnormal : normal;
  return bit_cast<float>((exponent == exponents ? normal + bias : finite) | sign);
}

NORMFUSE_INLINE void narrowed(float value, BFloat16* to) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // ties to even
  to->bits = static_cast<uint16_t>(value != value ? bits >> 16 | 0x40 : rounded);
}
NORMFUSE_INLINE void narrowed(float value, Half* to) {
  const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = (magnitude - ((127u - 15) << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  // Added to 0.5, a number below 2^-14 is rounded to units of 2^-24 by the addition itself.
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < (127u - 14) << 23 ? subnormal : rounded;
  const uint32_t half = magnitude >= (127u + 16) << 23 ? special : finite;
  to->bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}
// By way of float rounded to odd: rounding to nearest twice would miss numbers near a middle.
template <typename Stored>
NORMFUSE_INLINE void narrowed(double value, Stored* to) {
  const uint64_t lost = (uint64_t{1} << 29) - 1;  // the bits that float does not have
  const uint64_t bits = bit_cast<uint64_t>(value);
  narrowed(static_cast<float>(bit_cast<double>((bits | ((bits & lost) + lost)) & ~lost)), to);
}

template <typename Stored>
NORMFUSE_INLINE Stored widened(Stored stored) {
  return stored;
}
template <typename Value, typename Stored>
NORMFUSE_INLINE Value widen(const Stored& stored) {
  return static_cast<Value>(widened(stored));
}

template <typename Stored>
struct Narrow {
  template <typename Value>
  static NORMFUSE_INLINE Stored from(const Value& value) {
    return static_cast<Stored>(value);
  }
};
template <typename Stored>
struct NarrowFloat {
  template <typename Value>
  static NORMFUSE_INLINE Stored from(const Value& value) {
    Stored stored;
    narrowed(static_cast<float>(value), &stored);
    return stored;
  }
  static NORMFUSE_INLINE Stored from(double value) {
    Stored stored;
    narrowed(value, &stored);
    return stored;
  }
};
template <>
struct Narrow<BFloat16> : NarrowFloat<BFloat16> {};
template <>
struct Narrow<Half> : NarrowFloat<Half> {};

// The index in an operand with the dimensions in kMask (bit 0: the last) for the result's `at`.
template <unsigned kMask, int kDimensions>
inline int64_t place(int64_t at, const int64_t* sizes) {
  int64_t offset = 0, stride = 1;
  for (int bit = 0; bit < kDimensions; ++bit) {
    const int64_t n = sizes[kDimensions - 1 - bit];
    if (kMask >> bit & 1) {
      offset += at % n * stride;
      stride *= n;
    }
    at /= n;
  }
  return offset;
}

}  // namespace normfuse_loop
