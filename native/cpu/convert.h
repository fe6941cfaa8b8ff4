// Numbers of any dtype, read into and written from a compute type (float or double).
//
// Kernels are templates over the compute type only. A few thousand elements at a time go through a
// buffer that stays in the first-level cache; where the dtype is the compute type, no copy is made.
#pragma once

#include <cstdint>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace normfuse {

// An operand or a result of any shape; `data` is null where an optional one is absent.
struct Array {
  void* data = nullptr;
  xla::ffi::DataType dtype = xla::ffi::DataType::INVALID;

  explicit operator bool() const { return data != nullptr; }
};

template <typename C>
constexpr xla::ffi::DataType kComputeDtype =
    std::is_same_v<C, double> ? xla::ffi::F64 : xla::ffi::F32;

// Conversions of `count` elements from `offset`. To a narrower dtype they round to nearest, ties to
// even; NaN stays NaN.
template <typename C>
void Widen(const Array& from, int64_t offset, int64_t count, C* to);
template <typename C>
void Narrow(const C* from, const Array& to, int64_t offset, int64_t count);

// The elements themselves where they have the compute type, else a copy in `buffer`.
template <typename C>
const C* Read(const Array& array, int64_t offset, int64_t count, C* buffer) {
  if (array.dtype == kComputeDtype<C>) return static_cast<const C*>(array.data) + offset;
  Widen(array, offset, count, buffer);
  return buffer;
}

// Returns the address for elements that Commit then stores in the array.
template <typename C>
C* Target(const Array& array, int64_t offset, C* buffer) {
  return array.dtype == kComputeDtype<C> ? static_cast<C*>(array.data) + offset : buffer;
}

template <typename C>
void Commit(const C* written, const Array& array, int64_t offset, int64_t count) {
  if (array.dtype != kComputeDtype<C>) Narrow(written, array, offset, count);
}

}  // namespace normfuse
