#include "signature.h"

#include <utility>

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

constexpr std::pair<std::string_view, ffi::DataType> kNames[] = {
    {"bool", ffi::PRED},
    {"int1", ffi::S1},
    {"int2", ffi::S2},
    {"int4", ffi::S4},
    {"int8", ffi::S8},
    {"int16", ffi::S16},
    {"int32", ffi::S32},
    {"int64", ffi::S64},
    {"uint1", ffi::U1},
    {"uint2", ffi::U2},
    {"uint4", ffi::U4},
    {"uint8", ffi::U8},
    {"uint16", ffi::U16},
    {"uint32", ffi::U32},
    {"uint64", ffi::U64},
    {"float16", ffi::F16},
    {"bfloat16", ffi::BF16},
    {"float32", ffi::F32},
    {"float64", ffi::F64},
    {"complex64", ffi::C64},
    {"complex128", ffi::C128},
    {"float4_e2m1fn", ffi::F4E2M1FN},
    {"float8_e3m4", ffi::F8E3M4},
    {"float8_e4m3", ffi::F8E4M3},
    {"float8_e4m3b11fnuz", ffi::F8E4M3B11FNUZ},
    {"float8_e4m3fn", ffi::F8E4M3FN},
    {"float8_e4m3fnuz", ffi::F8E4M3FNUZ},
    {"float8_e5m2", ffi::F8E5M2},
    {"float8_e5m2fnuz", ffi::F8E5M2FNUZ},
    {"float8_e8m0fnu", ffi::F8E8M0FNU},
};

std::string Text(ffi::DataType dtype) {
  for (const auto& [name, known] : kNames) {
    if (known == dtype) return std::string(name);
  }
  return "XLA data type " + std::to_string(static_cast<int>(dtype));
}

ffi::ErrorOr<ffi::AnyBuffer> BufferOf(const ffi::RemainingRets& rets, size_t i) {
  auto result = rets.get<ffi::AnyBuffer>(i);
  if (result.has_error()) return ffi::Unexpected(result.error());
  return **result;
}

}  // namespace

std::string Signature::Read(std::string_view dtypes) {
  const std::string unreadable = "its dtypes cannot be read: '" + std::string(dtypes) + "'";
  bool has_arrow = false;
  while (!dtypes.empty()) {
    const size_t space = dtypes.find(' ');
    const std::string_view word = dtypes.substr(0, space);
    dtypes = space == std::string_view::npos ? "" : dtypes.substr(space + 1);
    if (word == "->" && !has_arrow) {
      has_arrow = true;
      operands_ = dtypes_.size();
      continue;
    }
    const size_t before = dtypes_.size();
    for (const auto& [name, dtype] : kNames) {
      if (name == word) dtypes_.push_back(dtype);
    }
    if (dtypes_.size() == before) return unreadable;
  }
  return has_arrow ? "" : unreadable;
}

std::string Signature::Check(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                             const std::vector<int64_t>& elements, void** addresses) const {
  const size_t results = dtypes_.size() - operands_;
  if (args.size() != operands_ || rets.size() != results) {
    return "takes " + std::to_string(operands_) + " operands and " + std::to_string(results) +
           " results; got " + std::to_string(args.size()) + " and " + std::to_string(rets.size());
  }
  for (size_t i = 0; i < dtypes_.size(); ++i) {
    const bool is_result = i >= operands_;
    const size_t number = is_result ? i - operands_ : i;
    auto buffer = is_result ? BufferOf(rets, number) : args.get<ffi::AnyBuffer>(number);
    if (buffer.has_error()) return buffer.error().message();
    const auto count = static_cast<int64_t>(buffer->element_count());
    if (buffer->element_type() != dtypes_[i] || count != elements[i]) {
      return (is_result ? "result " : "operand ") + std::to_string(number) + " must be " +
             std::to_string(elements[i]) + " of " + Text(dtypes_[i]) + "; got " +
             std::to_string(count) + " of " + Text(buffer->element_type());
    }
    if (addresses != nullptr) addresses[i] = buffer->untyped_data();
  }
  return "";
}

}  // namespace normfuse
