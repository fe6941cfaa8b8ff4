// The operands and results of a norm's handler, taken in order and checked.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cpu/convert.h"
#include "cpu/plan.h"
#include "xla/ffi/api/ffi.h"

namespace normfuse {

// Shapes: (outer, n, inner), (n,) or (heads, n), and (outer, inner).
// Statistics, and a scale that is a result, have the compute type.
enum Kind { kActivation, kScale, kStatistics };

// The first mistake is kept and every later take returns an absent array: check `error()` once.
class Operands {
 public:
  Operands(const char* target, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets)
      : target_(target), args_(args), rets_(rets) {}

  // The next operand, or result. Absent where `wanted` is false. The first one fixes the shape.
  Array Operand(Kind kind, const char* name, bool wanted = true);
  Array Result(Kind kind, const char* name, bool wanted = true);

  const Shape& shape() const { return shape_; }
  bool compute_in_double() const { return has_double_; }

  // To be called when all are taken: counts, dtypes, and the mistakes met on the way.
  std::optional<xla::ffi::Error> error();

 private:
  using Dims = std::vector<int64_t>;

  void TakeShape(const char* name, const Dims& dims);
  Array Check(const char* name, const xla::ffi::AnyBuffer& buffer, Kind kind, bool of_compute_type);
  void Fail(const std::string& message);

  const std::string target_;
  const xla::ffi::RemainingArgs args_;
  const xla::ffi::RemainingRets rets_;
  size_t next_arg_ = 0, next_ret_ = 0;
  Shape shape_;
  bool has_shape_ = false, has_double_ = false, has_scale_ = false;
  std::vector<std::pair<std::string, xla::ffi::DataType>> of_compute_type_;
  std::string message_;
};

}  // namespace normfuse
