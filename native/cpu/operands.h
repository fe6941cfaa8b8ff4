// The operands and results of an RMSNorm handler, taken in order and checked.
#ifndef NORMFUSE_CPU_OPERANDS_H_
#define NORMFUSE_CPU_OPERANDS_H_

#include <optional>
#include <string>
#include <vector>

#include "cpu/convert.h"
#include "cpu/plan.h"
#include "xla/ffi/api/ffi.h"

namespace normfuse {

// The first mistake is kept and every later take returns an absent array: check `error()` once.
class Operands {
 public:
  Operands(const char* target, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets)
      : target_(target), args_(args), rets_(rets) {}

  // A (outer, n, inner) operand; the first one taken fixes the shape. Absent where `wanted` is
  // false.
  Array Activation(const char* name, bool wanted = true);
  Array Scale(const char* name, bool wanted = true);       // (n,)
  Array Statistics(const char* name, bool wanted = true);  // (outer, inner), of the compute type

  Array ActivationResult(const char* name, bool wanted = true);
  Array ScaleResult(const char* name, bool wanted = true);  // (n,), of the compute type
  Array StatisticsResult(const char* name, bool wanted = true);

  const Shape& shape() const { return shape_; }
  bool compute_in_double() const { return has_double_; }

  // To be called when all are taken: counts, dtypes, and the mistakes met on the way.
  std::optional<xla::ffi::Error> error();

 private:
  using Dims = std::vector<int64_t>;

  Array Arg(const char* name, const Dims& expected, bool of_compute_type, bool wanted);
  Array Ret(const char* name, const Dims& expected, bool of_compute_type, bool wanted);
  Array Check(const char* name, const xla::ffi::AnyBuffer& buffer, const Dims& expected,
              bool of_compute_type);
  void Fail(const std::string& message);
  Dims activation() const { return {shape_.outer, shape_.n, shape_.inner}; }
  Dims statistics() const { return {shape_.outer, shape_.inner}; }

  const std::string target_;
  const xla::ffi::RemainingArgs args_;
  const xla::ffi::RemainingRets rets_;
  size_t next_arg_ = 0, next_ret_ = 0;
  Shape shape_;
  bool has_shape_ = false, has_double_ = false;
  std::vector<std::pair<std::string, xla::ffi::DataType>> of_compute_type_;
  std::string message_;
};

}  // namespace normfuse

#endif  // NORMFUSE_CPU_OPERANDS_H_
