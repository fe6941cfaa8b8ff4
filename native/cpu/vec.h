// Inner loops for several widths of vectors: one wheel for AVX-512, AVX2, SSE2 and NEON.
#pragma once

#include <cstdint>

#define NORMFUSE_INLINE inline __attribute__((always_inline))

namespace normfuse {

// kBytes bytes of elements, in the compilers' own vector language; a single one is a plain C.
template <typename C, int kBytes, bool kSingle = kBytes == sizeof(C)>
struct Vec {
  typedef C Type __attribute__((vector_size(kBytes)));
  static constexpr int64_t kLanes = kBytes / sizeof(C);
};
template <typename C, int kBytes>
struct Vec<C, kBytes, true> {
  using Type = C;
  static constexpr int64_t kLanes = 1;
};

// Through memcpy: rows begin anywhere.
template <int kBytes, typename C>
NORMFUSE_INLINE typename Vec<C, kBytes>::Type Load(const C* from) {
  typename Vec<C, kBytes>::Type v;
  __builtin_memcpy(&v, from, kBytes);
  return v;
}

template <typename V, typename C>
NORMFUSE_INLINE void Store(C* to, const V& v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

// The sum of kSize numbers, by halves.
template <int64_t kSize, typename C>
NORMFUSE_INLINE C SumLanes(const C* lanes) {
  if constexpr (kSize == 1) {
    return lanes[0];
  } else {
    return SumLanes<kSize / 2>(lanes) + SumLanes<kSize / 2>(lanes + kSize / 2);
  }
}

// The sum of `size` terms, in an order that depends on `size` only: four vectors of running sums,
// so that additions overlap and each lane adds few numbers. `term` has At<kBytes>(i).
template <int kBytes, typename C, typename Term>
NORMFUSE_INLINE C SumTerms(const Term& term, int64_t size) {
  using V = typename Vec<C, kBytes>::Type;
  constexpr int64_t kLanes = Vec<C, kBytes>::kLanes;
  V a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    a += term.template At<kBytes>(i);
    b += term.template At<kBytes>(i + kLanes);
    c += term.template At<kBytes>(i + 2 * kLanes);
    d += term.template At<kBytes>(i + 3 * kLanes);
  }
  for (; i + kLanes <= size; i += kLanes) a += term.template At<kBytes>(i);
  a = (a + b) + (c + d);
  C lanes[kLanes];
  Store(lanes, a);
  C sum = SumLanes<kLanes>(lanes);
  for (; i < size; ++i) sum += term.template At<sizeof(C)>(i);
  return sum;
}

// A loop is a struct with `template <int kBytes, ...> static NORMFUSE_INLINE void Run(...)`.
// Dispatch runs it compiled for the best instructions of this machine. What Run calls must be
// NORMFUSE_INLINE as well: a function of its own would be compiled for the baseline.
#if defined(__x86_64__) && defined(__GNUC__)
template <typename Loop, typename... A>
__attribute__((target("avx2,fma"))) void RunAvx2(A... a) {
  Loop::template Run<32>(a...);
}

template <typename Loop, typename... A>
__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))) void RunAvx512(A... a) {
  Loop::template Run<64>(a...);
}

inline int VectorBytes() {
  static const int bytes = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 16;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? 64 : 32;
  }();
  return bytes;
}

#endif

template <typename Loop, typename... A>
void Dispatch(A... a) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (VectorBytes() == 64) return RunAvx512<Loop>(a...);
  if (VectorBytes() == 32) return RunAvx2<Loop>(a...);
#endif
  Loop::template Run<16>(a...);
}

}  // namespace normfuse
