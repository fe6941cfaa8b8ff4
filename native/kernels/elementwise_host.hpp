// What the functions of normfuse.elementwise are compiled with for the CPU: CUDA's names for
// mathematics, and conversions of every dtype. The loops are written by native/elementwise_code.py
// around the user's function.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef USES_COMPLEX
#include <complex>
#endif

namespace normfuse_user {

template <typename T>
struct RealOf {
  using Type = T;
};
template <typename T>
using real_t = typename RealOf<T>::Type;

#ifdef USES_COMPLEX
using std::complex;
using std::polar;
template <typename T>
struct RealOf<complex<T>> {
  using Type = T;
};
#endif

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

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <typename Value, typename Stored>
inline Value widen(const Stored& stored) {
  return static_cast<Value>(stored);
}
template <typename Value>
inline Value widen(const BFloat16& stored) {
  const uint32_t bits = static_cast<uint32_t>(stored.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return static_cast<Value>(value);
}

template <typename Stored>
struct Narrow {
  template <typename Value>
  static Stored from(const Value& value) {
    return static_cast<Stored>(value);
  }
};
template <>
struct Narrow<BFloat16> {
  template <typename Value>
  static BFloat16 from(const Value& value) {
    const float single = static_cast<float>(value);
    uint32_t bits;
    memcpy(&bits, &single, sizeof(bits));
    if (single != single) return {static_cast<uint16_t>(bits >> 16 | 0x40)};  // quiet
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // ties to even
  }
};

#ifdef USES_HALF
template <typename Value>
inline Value widen(const Half& stored) {
  _Float16 value;
  memcpy(&value, &stored, sizeof(value));
  return static_cast<Value>(static_cast<float>(value));
}
template <>
struct Narrow<Half> {
  template <typename Value>
  static Half from(const Value& value) {
    const _Float16 rounded = static_cast<_Float16>(value);
    Half stored;
    memcpy(&stored, &rounded, sizeof(stored));
    return stored;
  }
};
#endif

// Where an operand that has the dimensions in kMask (bit 0: the last) keeps the result's element `at`.
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
