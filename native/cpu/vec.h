// Vectors of 64 bytes, in the compilers' own vector language: one loop for AVX-512, AVX2, SSE2,
// NEON.
#ifndef NORMFUSE_CPU_VEC_H_
#define NORMFUSE_CPU_VEC_H_

#include <cstdint>

// A hot loop is compiled three times and the machine's best is bound when the library loads, so
// that one wheel serves them all. Helpers called from such a loop must be NORMFUSE_INLINE: a
// function of its own would be the baseline's.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NORMFUSE_CLONES \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define NORMFUSE_CLONES
#endif
#define NORMFUSE_INLINE inline __attribute__((always_inline))

namespace normfuse {

template <typename C>
struct Vec {
  typedef C Type __attribute__((vector_size(64)));
  static constexpr int64_t kLanes = 64 / sizeof(C);
};

// Through memcpy: XLA's buffers need not be aligned to 64 bytes.
template <typename C>
NORMFUSE_INLINE typename Vec<C>::Type LoadVec(const C* from) {
  typename Vec<C>::Type v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <typename C>
NORMFUSE_INLINE void StoreVec(C* to, const typename Vec<C>::Type& v) {
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

// The sum of `size` terms in an order that depends on `size` only: four vectors of running sums, so
// that additions overlap and each lane adds few numbers. `Term` has `at(i)` and `vector(i)`.
template <typename C, typename Term>
NORMFUSE_INLINE C SumTerms(const Term& term, int64_t size) {
  using V = typename Vec<C>::Type;
  constexpr int64_t kLanes = Vec<C>::kLanes;
  V a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    a += term.vector(i);
    b += term.vector(i + kLanes);
    c += term.vector(i + 2 * kLanes);
    d += term.vector(i + 3 * kLanes);
  }
  for (; i + kLanes <= size; i += kLanes) a += term.vector(i);
  a = (a + b) + (c + d);
  C lanes[kLanes];
  StoreVec(lanes, a);
  C sum = SumLanes<kLanes>(lanes);
  for (; i < size; ++i) sum += term.at(i);
  return sum;
}

}  // namespace normfuse

#endif  // NORMFUSE_CPU_VEC_H_
