// Makes a call that fits into one that does not: what a damaged or foreign program could hold.
#pragma once

#include <algorithm>

#include "call.h"

namespace hostile {

constexpr int64_t kMostBytes = 1 << 20;  // most bytes of an array

inline std::vector<ffi::DataType> EveryType() {
  return {ffi::PRED, ffi::S4,  ffi::S8,   ffi::S16,   ffi::S32,      ffi::S64,    ffi::U4,
          ffi::U8,   ffi::U16, ffi::U32,  ffi::U64,   ffi::F16,      ffi::BF16,   ffi::F32,
          ffi::F64,  ffi::C64, ffi::C128, ffi::TOKEN, ffi::F8E4M3FN, ffi::F8E5M2, ffi::F8E8M0FNU};
}

// XLA would have allocated it, and its count of elements would not overflow.
inline bool IsPossible(const Array& array) {
  int64_t product = 1;
  for (int64_t n : array.dims) {
    if (n < 0 || (n > 0 && __builtin_mul_overflow(product, n, &product))) return false;
  }
  return array.Elements() <= kMostBytes && array.Bytes() <= kMostBytes;
}

inline void MutateDims(Array* array, Random& random) {
  const Array before = *array;
  std::vector<int64_t>& dims = array->dims;
  const int64_t rank = static_cast<int64_t>(dims.size());
  switch (random.Below(4)) {
    case 0:
      dims.insert(dims.begin() + random.Below(rank + 1), random.Below(3));
      break;
    case 1:
      if (rank > 0) dims.erase(dims.begin() + random.Below(rank));
      break;
    case 2:
      if (rank > 1) std::swap(dims[random.Below(rank)], dims[random.Below(rank)]);
      break;
    default:
      if (rank > 0) {
        int64_t& n = dims[random.Below(rank)];
        n = random.Of(std::vector<int64_t>{0, 1, n - 1, n + 1, 2 * n, n / 2, int64_t{1} << 40});
      }
  }
  if (!IsPossible(*array)) *array = before;
}

inline void MutateArrays(Call* call, Random& random) {
  std::vector<Array>& arrays = random.Once(2) ? call->args : call->rets;
  if (arrays.empty()) return;
  const int64_t count = static_cast<int64_t>(arrays.size()), i = random.Below(count);
  switch (random.Below(6)) {
    case 0:
      arrays.erase(arrays.begin() + i);
      break;
    case 1:
      arrays.insert(arrays.begin() + random.Below(count + 1), Array(arrays[i]));
      break;
    case 2:
      std::swap(arrays[i], arrays[random.Below(count)]);
      break;
    case 3:
      std::swap(call->args, call->rets);
      break;
    case 4: {
      Array changed = {random.Of(EveryType()), arrays[i].dims};
      if (IsPossible(changed)) arrays[i] = changed;
      break;
    }
    default:
      MutateDims(&arrays[i], random);
  }
}

inline void MutateAttribute(Call* call, Random& random) {
  if (call->attributes.empty()) return;
  const int64_t i = random.Below(static_cast<int64_t>(call->attributes.size()));
  Attribute& attribute = call->attributes[i];
  std::vector<char>& bytes = attribute.bytes;
  const int64_t size = static_cast<int64_t>(bytes.size());
  const int64_t width = attribute.type == XLA_FFI_AttrType_ARRAY
                            ? static_cast<int64_t>(ffi::ByteWidth(attribute.dtype))
                            : 1;
  const bool is_scalar = attribute.type == XLA_FFI_AttrType_SCALAR;
  switch (random.Below(6)) {
    case 0:
      call->attributes.erase(call->attributes.begin() + i);
      return;
    case 1:  // one bit; of a bool the only one
      if (size > 0)
        bytes[random.Below(size)] ^= attribute.dtype == ffi::PRED ? 1 : 1 << random.Below(8);
      return;
    case 2:
      if (!is_scalar && size > 0) bytes.resize(random.Below(size / width) * width);
      return;
    case 3:
      if (!is_scalar) bytes.resize(size + random.Below(4) * width);
      return;
    case 4:  // extreme integers
      if (attribute.dtype == ffi::S64 && size > 0) {
        const int64_t value =
            random.Of(std::vector<int64_t>{0, -1, 1, INT64_MAX, INT64_MIN, int64_t{1} << 32});
        std::memcpy(bytes.data() + random.Below(size / 8) * 8, &value, 8);
      }
      return;
    default:  // another kind, of the same bytes
      attribute.type =
          random.Of(std::vector<XLA_FFI_AttrType>{XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_STRING});
  }
}

// Returns `call` damaged, or with some attributes of `other`, a call of the same handler.
inline Call Mutated(Call call, const Call& other, Random& random) {
  if (random.Once(4) && call.attributes.size() == other.attributes.size()) {
    for (size_t i = 0; i < call.attributes.size(); ++i) {
      if (random.Once(2)) call.attributes[i] = other.attributes[i];
    }
    return call;
  }
  for (int64_t times = 1 + random.Below(3); times > 0; --times) {
    if (random.Once(2)) {
      MutateArrays(&call, random);
    } else {
      MutateAttribute(&call, random);
    }
  }
  return call;
}

}  // namespace hostile
