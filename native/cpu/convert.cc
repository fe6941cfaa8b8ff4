#include "cpu/convert.h"

#include <cstring>

#include "cpu/vec.h"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

// XLA may run with subnormals flushed to zero, so no step below has a subnormal float as a value
// that matters.

NORMFUSE_INLINE uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

NORMFUSE_INLINE float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// condition ? a : b, in integers: a branch around floating-point arithmetic is not vectorised.
NORMFUSE_INLINE uint32_t Select(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

NORMFUSE_INLINE float ToFloat(BFloat16 value) { return FromBits(uint32_t{value.bits} << 16); }

NORMFUSE_INLINE float ToFloat(Half value) {
  constexpr uint32_t kTopExponent = 0x7c00u << 13;
  constexpr uint32_t kBias = (127 - 15) << 23;
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{value.bits & 0x7fffu} << 13;
  const uint32_t normal = magnitude + kBias;
  const uint32_t special = normal + kBias;  // infinity and NaN: the top exponent of float
  // A subnormal: read its fraction as that of 2^-14 * (1 + f), then take the 2^-14 away.
  const uint32_t subnormal = Bits(FromBits(normal + (1u << 23)) - FromBits(113u << 23));
  const uint32_t exponent = magnitude & kTopExponent;
  const uint32_t finite = Select(exponent == 0, subnormal, normal);
  return FromBits(Select(exponent == kTopExponent, special, finite) | sign);
}

NORMFUSE_INLINE void FromFloat(float value, BFloat16* to) {
  const uint32_t bits = Bits(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t quiet = bits | 0x400000u;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to->bits = static_cast<uint16_t>(Select(nan, quiet, rounded) >> 16);
}

NORMFUSE_INLINE void FromFloat(float value, Half* to) {
  constexpr uint32_t kOverflow = (127 + 16) << 23;  // 65536; from 65520 on the rounding carries
  constexpr uint32_t kSmallestNormal = (127 - 14) << 23;
  const uint32_t bits = Bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded =
      (magnitude - ((127 - 15) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Added to 0.5, a number below 2^-14 is rounded to units of 2^-24 by the addition itself.
  const uint32_t subnormal = Bits(FromBits(magnitude) + 0.5f) - Bits(0.5f);
  const uint32_t special = Select(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);
  const uint32_t finite = Select(magnitude < kSmallestNormal, subnormal, rounded);
  const uint32_t half = Select(magnitude >= kOverflow, special, finite);
  to->bits = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// A double on its way to 16 bits passes through float rounded to odd: rounding to nearest twice
// would miss, by a unit in the last place, numbers close to the middle of two.
NORMFUSE_INLINE float ToOdd(double value) {
  constexpr uint64_t kLost = (uint64_t{1} << 29) - 1;  // the bits that float does not have
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = (bits | ((bits & kLost) + kLost)) & ~kLost;  // the last bit kept is set if any was lost
  std::memcpy(&value, &bits, sizeof(bits));
  return static_cast<float>(value);
}

NORMFUSE_INLINE float ToFloat(float value) { return value; }
NORMFUSE_INLINE double ToFloat(double value) { return value; }

template <typename C, typename T>
NORMFUSE_INLINE void Assign(C value, T* to) {
  if constexpr (std::is_floating_point_v<T>) {
    *to = static_cast<T>(value);
  } else if constexpr (std::is_same_v<C, double>) {
    FromFloat(ToOdd(value), to);
  } else {
    FromFloat(value, to);
  }
}

struct WidenLoop {
  template <int kBytes, typename C, typename T>
  static NORMFUSE_INLINE void Run(const T* from, int64_t count, C* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<C>(ToFloat(from[i]));
  }
};

struct NarrowLoop {
  template <int kBytes, typename C, typename T>
  static NORMFUSE_INLINE void Run(const C* from, int64_t count, T* to) {
    for (int64_t i = 0; i < count; ++i) Assign(from[i], to + i);
  }
};

// Calls fn with the array's elements from `offset`, in the type they have.
template <typename F>
void Visit(const Array& array, int64_t offset, const F& fn) {
  switch (array.dtype) {
    case ffi::F64:
      return fn(static_cast<double*>(array.data) + offset);
    case ffi::F32:
      return fn(static_cast<float*>(array.data) + offset);
    case ffi::BF16:
      return fn(static_cast<BFloat16*>(array.data) + offset);
    default:
      return fn(static_cast<Half*>(array.data) + offset);
  }
}

}  // namespace

template <typename C>
void Widen(const Array& from, int64_t offset, int64_t count, C* to) {
  Visit(from, offset, [&](const auto* elements) { Dispatch<WidenLoop>(elements, count, to); });
}

template <typename C>
void Narrow(const C* from, const Array& to, int64_t offset, int64_t count) {
  Visit(to, offset, [&](auto* elements) { Dispatch<NarrowLoop>(from, count, elements); });
}

template void Widen(const Array&, int64_t, int64_t, float*);
template void Widen(const Array&, int64_t, int64_t, double*);
template void Narrow(const float*, const Array&, int64_t, int64_t);
template void Narrow(const double*, const Array&, int64_t, int64_t);

}  // namespace normfuse
