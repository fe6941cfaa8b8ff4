// The dtypes and sizes that a call's attributes declare for its operands and results. Handlers that
// run an image check their buffers against them, because the image cannot.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace normfuse {

class Signature {
 public:
  // Reads `dtypes`, such as "float32 bfloat16 -> float32": JAX's names, of the operands and then of
  // the results. Returns what is wrong, or "".
  std::string Read(std::string_view dtypes);

  // Returns what does not fit about the buffers of a call, or "". `elements` has how many elements
  // each operand has, and then each result; `addresses`, unless null, gets where each one is.
  std::string Check(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets,
                    const std::vector<int64_t>& elements, void** addresses) const;

  size_t operands() const { return operands_; }
  size_t arrays() const { return dtypes_.size(); }

 private:
  size_t operands_ = 0;
  std::vector<xla::ffi::DataType> dtypes_;
};

}  // namespace normfuse
