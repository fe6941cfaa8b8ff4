#include "cpu/operands.h"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

std::string Text(const std::vector<int64_t>& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + (dims.size() == 1 ? ",)" : ")");
}

// The name of a dtype that the kernels take, else nullptr.
const char* Name(ffi::DataType dtype) {
  if (dtype == ffi::F64) return "float64";
  if (dtype == ffi::F32) return "float32";
  if (dtype == ffi::BF16) return "bfloat16";
  return dtype == ffi::F16 ? "float16" : nullptr;
}

std::string Text(ffi::DataType dtype) {
  const char* name = Name(dtype);
  return name ? name : "XLA data type " + std::to_string(static_cast<int>(dtype));
}

}  // namespace

Array Operands::Operand(Kind kind, const char* name, bool wanted) {
  if (!wanted || !message_.empty()) return {};
  auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
  if (buffer.has_value()) return Check(name, *buffer, kind, kind == kStatistics);
  Fail("the operand " + std::string(name) + " is missing: got " + std::to_string(args_.size()));
  return {};
}

Array Operands::Result(Kind kind, const char* name, bool wanted) {
  if (!wanted || !message_.empty()) return {};
  auto buffer = rets_.get<ffi::AnyBuffer>(next_ret_++);
  if (buffer.has_value()) return Check(name, **buffer, kind, kind != kActivation);
  Fail("the result " + std::string(name) + " is missing: got " + std::to_string(rets_.size()));
  return {};
}

void Operands::TakeShape(const char* name, const Dims& dims) {
  if (dims.size() != 3) {
    return Fail(std::string(name) + " must have shape (outer, n, inner); got " + Text(dims));
  }
  if (dims[1] < 1) Fail(std::string(name) + " must have n >= 1; got n = 0");
  shape_ = {dims[0], dims[1], dims[2]};
  has_shape_ = true;
}

Array Operands::Check(const char* name, const ffi::AnyBuffer& buffer, Kind kind,
                      bool of_compute_type) {
  const auto span = buffer.dimensions();
  const Dims dims(span.begin(), span.end());
  if (!has_shape_) TakeShape(name, dims);
  // The first parameter says how many heads there are.
  const bool of_heads = dims.size() == 2;
  if (kind == kScale && !has_scale_ && of_heads && dims[0] > 1) {
    if (shape_.inner == 1 && shape_.outer % dims[0] == 0) shape_.heads = dims[0];
  }
  has_scale_ |= kind == kScale;
  const auto [outer, n, inner, heads] = shape_;
  const Dims scale = heads > 1 || of_heads ? Dims{heads, n} : Dims{n};
  const Dims shapes[] = {{outer, n, inner}, scale, {outer, inner}};
  const ffi::DataType dtype = buffer.element_type();
  if (dims != shapes[kind]) {
    Fail(std::string(name) + " must have shape " + Text(shapes[kind]) + "; got " + Text(dims));
  } else if (!Name(dtype)) {
    Fail(std::string(name) + " must be float64, float32, bfloat16 or float16; got " + Text(dtype));
  }
  has_double_ |= dtype == ffi::F64;
  if (of_compute_type) of_compute_type_.emplace_back(name, dtype);
  // An empty buffer may have no address, and is present all the same.
  static char empty;
  void* data = buffer.untyped_data();
  return {data != nullptr ? data : &empty, dtype};
}

void Operands::Fail(const std::string& message) {
  if (message_.empty()) message_ = target_ + ": " + message + ".";
}

std::optional<ffi::Error> Operands::error() {
  if (next_arg_ < args_.size() || next_ret_ < rets_.size()) {
    Fail("expected " + std::to_string(next_arg_) + " operands and " + std::to_string(next_ret_) +
         " results for these attributes; got " + std::to_string(args_.size()) + " and " +
         std::to_string(rets_.size()));
  }
  const ffi::DataType compute = has_double_ ? ffi::F64 : ffi::F32;
  for (const auto& [name, dtype] : of_compute_type_) {
    if (dtype != compute) {
      Fail(name + " must be " + Text(compute) + ", the type these dtypes are computed in; got " +
           Text(dtype));
    }
  }
  if (message_.empty()) return std::nullopt;
  return ffi::Error::InvalidArgument(message_);
}

}  // namespace normfuse
