// Elements that move together: as they are stored, and widened to the compute type.
#pragma once

#include "machine.cuh"

// IF(FLAG, text): the text where the macro FLAG is 1, nothing where it is 0; IF_NOT: the reverse.
#define IF(flag, ...) IF_VALUE(1, flag)(__VA_ARGS__)
#define IF_NOT(flag, ...) IF_VALUE(0, flag)(__VA_ARGS__)
#define IF_VALUE(wanted, value) IF_PASTED(wanted, value)
#define IF_PASTED(wanted, value) TEXT_##wanted##value
#define TEXT_00(...) __VA_ARGS__
#define TEXT_11(...) __VA_ARGS__
#define TEXT_01(...)
#define TEXT_10(...)

template <typename To, typename From>
__device__ inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// The widest word that moves kBytes, or a part of them.
template <int kBytes>
using WordOf =
    ConditionalType<kBytes % 16 == 0, uint4,
                    ConditionalType<kBytes % 8 == 0, uint2,
                                    ConditionalType<kBytes % 4 == 0, unsigned, unsigned short>>>;

// kSize elements as stored, in whole registers: 16-bit elements held one by one would take two
// times the registers.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Packed {
  static constexpr int kBytes = sizeof(T) * kSize;
  using Unit = ConditionalType<kBytes % 4 == 0, unsigned, unsigned short>;
  using Word = WordOf<kBytes>;
  static constexpr int kUnits = kBytes / sizeof(Unit);

  Unit units[kUnits];
};

// kSize elements in the compute type.
template <typename C, int kSize>
struct Wide {
  C at[kSize];
};

template <typename C, typename T>
__device__ inline C widen(T value) {
  return static_cast<C>(value);
}
template <typename C>
__device__ inline C widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <typename C>
__device__ inline C widen(__half value) {
  return __half2float(value);
}

__device__ inline float inverse_root(float value) { return rsqrtf(value); }
__device__ inline double inverse_root(double value) { return rsqrt(value); }

// By two instructions, where CUDA's own function takes three.
__device__ inline float2 widen_pair(__nv_bfloat162 pair) {
  const unsigned bits = bit_cast<unsigned>(pair);
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
__device__ inline float2 widen_pair(__half2 pair) { return __half22float2(pair); }

// The same by other instructions: the compiler does not see it, and keeps the elements until here
// in one register a pair rather than their widened copies in two.
__device__ inline float2 widen_pair_again(__nv_bfloat162 pair) {
  const unsigned bits = bit_cast<unsigned>(pair);
  return {__uint_as_float(__byte_perm(bits, 0, 0x1044)),
          __uint_as_float(__byte_perm(bits, 0, 0x3244))};
}
__device__ inline float2 widen_pair_again(__half2 pair) {
  // Bytes in their own order, which depends on what only the launch knows: blockDim.z is 1.
  const unsigned bits = bit_cast<unsigned>(pair);
  return widen_pair(bit_cast<__half2>(__byte_perm(bits, 0, 0x320f + blockDim.z)));
}

template <typename T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ Type narrow(float low, float high) { return __floats2bfloat162_rn(low, high); }
};
template <>
struct PairOf<__half> {
  using Type = __half2;
  static __device__ Type narrow(float low, float high) { return __floats2half2_rn(low, high); }
};

template <typename C, bool kAgain = false, typename T, int kSize>
__device__ inline Wide<C, kSize> widen_all(const Packed<T, kSize>& packed) {
  Wide<C, kSize> wide;
  if constexpr (sizeof(T) == 2 && kSize % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const auto pair = bit_cast<typename PairOf<T>::Type>(packed.units[i]);
      const float2 both = kAgain ? widen_pair_again(pair) : widen_pair(pair);
      wide.at[2 * i] = both.x;
      wide.at[2 * i + 1] = both.y;
    }
  } else {
    T elements[kSize];
    memcpy(elements, &packed, sizeof(packed));
#pragma unroll
    for (int k = 0; k < kSize; ++k) wide.at[k] = widen<C>(elements[k]);
  }
  return wide;
}

// Widens what was widened before.
template <typename C, typename T, int kSize>
__device__ inline Wide<C, kSize> widen_again(const Packed<T, kSize>& packed) {
  return widen_all<C, true>(packed);
}

template <typename T, typename C, int kSize>
__device__ inline Packed<T, kSize> narrow_all(const Wide<C, kSize>& wide) {
  Packed<T, kSize> packed;
  if constexpr (sizeof(T) == 2 && sizeof(C) == 4 && kSize % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      packed.units[i] = bit_cast<unsigned>(PairOf<T>::narrow(wide.at[2 * i], wide.at[2 * i + 1]));
    }
  } else {
    T elements[kSize];
#pragma unroll
    for (int k = 0; k < kSize; ++k) elements[k] = T(wide.at[k]);
    memcpy(&packed, elements, sizeof(packed));
  }
  return packed;
}

// A stream of elements, each read once; `from` is aligned as Packed is. kOverwritten: a result may
// be written there.
template <int kSize, bool kOverwritten = false, typename T>
__device__ inline Packed<T, kSize> load_packed(const T* from) {
  using Word = typename Packed<T, kSize>::Word;
  constexpr int kWords = Packed<T, kSize>::kBytes / sizeof(Word);
  Word words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const Word* at = reinterpret_cast<const Word*>(from) + i;
    words[i] = kOverwritten ? load_overwritten(at) : load_streaming(at);
  }
  return bit_cast<Packed<T, kSize>>(words);
}

// A word of its parts, one by one: of a memcpy the compiler may make a store for each of them.
template <typename Word, typename Unit>
__device__ inline Word word_of(const Unit* units) {
  if constexpr (sizeof(Word) == 4 * sizeof(Unit)) {
    return Word{units[0], units[1], units[2], units[3]};
  } else if constexpr (sizeof(Word) == 2 * sizeof(Unit)) {
    return Word{units[0], units[1]};
  } else {
    static_assert(sizeof(Word) == sizeof(Unit), "whole parts");
    return units[0];
  }
}

enum class Store { kPlain, kWhole, kEvicted };

template <int kSize, Store kHow = Store::kPlain, typename T>
__device__ inline void store_packed(T* to, const Packed<T, kSize>& packed) {
  using Word = typename Packed<T, kSize>::Word;
  using Unit = typename Packed<T, kSize>::Unit;
#pragma unroll
  for (int i = 0; i < Packed<T, kSize>::kBytes / sizeof(Word); ++i) {
    const Word word = word_of<Word>(packed.units + i * (sizeof(Word) / sizeof(Unit)));
    Word* at = reinterpret_cast<Word*>(to) + i;
    if constexpr (kHow == Store::kWhole) {
      store_whole(at, word);
    } else if constexpr (kHow == Store::kEvicted) {
      store_evicted(at, word);
    } else {
      store_streaming(at, word);
    }
  }
}

// Bytes of shared memory, in whole lines. What is copied goes behind whole lines: a copy's sectors
// of 32 bytes that land across the bounds of two are each fetched twice.
__device__ constexpr int lines(int bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Begins copying from global to shared memory; both are aligned as Packed is, to 4 bytes or more.
template <typename T, int kSize>
__device__ inline void copy_packed_async(Packed<T, kSize>* shared, const T* global) {
  using Word = typename Packed<T, kSize>::Word;
  constexpr int kWords = Packed<T, kSize>::kBytes / sizeof(Word);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    copy_async<sizeof(Word)>(reinterpret_cast<Word*>(shared) + i,
                             reinterpret_cast<const Word*>(global) + i);
  }
}

// Loads and stores as above, wherever the pointers are.
template <int kSize, typename T>
__device__ inline Packed<T, kSize> load_elements(const T* from) {
  T elements[kSize];
#pragma unroll
  for (int k = 0; k < kSize; ++k) elements[k] = from[k];
  return bit_cast<Packed<T, kSize>>(elements);
}

template <int kSize, typename T>
__device__ inline void store_elements(T* to, const Packed<T, kSize>& packed) {
  T elements[kSize];
  memcpy(elements, &packed, sizeof(packed));
#pragma unroll
  for (int k = 0; k < kSize; ++k) to[k] = elements[k];
}

template <typename T>
__device__ inline bool aligned_16(const T* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % 16 == 0;
}
template <typename T, typename... Others>
__device__ inline bool aligned_16(const T* first, const Others*... others) {
  return aligned_16(first) && aligned_16(others...);
}

// The middle one of the first, the middle and the last of n values: one that is far from all others
// is not chosen.
template <int n, typename Value>
__device__ inline auto middle_of_three(Value value) {
  const auto a = value(0), b = value(n / 2), c = value(n - 1);
  const auto least = a < b ? a : b, most = a < b ? b : a;
  return c < least ? least : c > most ? most : c;
}
