#include "cpu/convert.h"

#include "cpu/vec.h"
#include "kernels/elementwise_host.hpp"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

using normfuse_loop::BFloat16;
using normfuse_loop::Half;

struct WidenLoop {
  template <int kBytes, typename C, typename T>
  static NORMFUSE_INLINE void Run(const T* from, int64_t count, C* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = normfuse_loop::widen<C>(from[i]);
  }
};

struct NarrowLoop {
  template <int kBytes, typename C, typename T>
  static NORMFUSE_INLINE void Run(const C* from, int64_t count, T* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = normfuse_loop::Narrow<T>::from(from[i]);
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
