#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/convert.h"
#include "cpu/handlers.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "kernels/elementwise_host.hpp"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

using normfuse_loop::bit_cast;

constexpr int64_t kElementsPerTask = 1 << 16;
constexpr int64_t kSide = 64;    // rows and columns of a tile, whose codes fit in the cache
constexpr int64_t kBlock = 512;  // a task's rows and columns, whose pages fit in the TLB
constexpr int kLargestShift = 100;

ffi::Error Invalid(const char* target, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(target) + ": " + what);
}

bool IsInput(ffi::DataType dtype) {
  return dtype == ffi::F32 || dtype == ffi::BF16 || dtype == ffi::F16;
}

// The largest magnitude of finite elements, as bits of the element's own type. An infinity or NaN
// has the largest exponent: with one more its sign bit is set, so that as a signed number it is
// less than any finite element.
struct MaximumLoop {
  template <int kBytes, typename U, typename S>
  static NORMFUSE_INLINE void Run(const U* from, int64_t count, U one, S* result) {
    constexpr U kMagnitude = static_cast<U>(~U{0}) >> 1;
    S largest = static_cast<S>(one);
    for (int64_t i = 0; i < count; ++i) {
      const S raised = static_cast<S>(static_cast<U>((from[i] & kMagnitude) + one));
      largest = largest < raised ? raised : largest;
    }
    *result = static_cast<S>(largest - static_cast<S>(one));
  }
};

template <typename U, typename S>
U Maximum(ffi::ThreadPool& pool, const void* data, int64_t count, U one) {
  const U* from = static_cast<const U*>(data);
  const int64_t tasks = (count + kElementsPerTask - 1) / kElementsPerTask;
  std::vector<S> maxima(tasks);
  ParallelFor(pool, tasks, [&](int64_t task) {
    const int64_t begin = task * kElementsPerTask;
    Dispatch<MaximumLoop>(from + begin, std::min(kElementsPerTask, count - begin), one,
                          &maxima[task]);
  });
  S largest = 0;
  for (S maximum : maxima) largest = std::max(largest, maximum);
  return static_cast<U>(largest);
}

ffi::Error AmaxImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const char* target = "normfuse_quantize_amax";
  if (args.size() != 1 || rets.size() != 1) return Invalid(target, "takes x, gives the maximum");
  const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0);
  auto maximum = *rets.get<ffi::AnyBuffer>(0);  // not const: the oldest headers have no such ->
  if (maximum->element_type() != ffi::F32) return Invalid(target, "the maximum is float32");
  const int64_t count = static_cast<int64_t>(x.element_count());
  if (!IsInput(x.element_type())) return Invalid(target, "x has a dtype that is not quantized");
  if (maximum->element_count() != 1) return Invalid(target, "the maximum is one number");
  float* to = static_cast<float*>(maximum->untyped_data());
  if (x.element_type() == ffi::F32) {
    *to = bit_cast<float>(Maximum<uint32_t, int32_t>(pool, x.untyped_data(), count, 0x00800000u));
    return ffi::Error::Success();
  }
  const uint16_t one = x.element_type() == ffi::BF16 ? 0x0080 : 0x0400;
  uint16_t bits = Maximum<uint16_t, int16_t>(pool, x.untyped_data(), count, one);
  Widen(Array{&bits, x.element_type()}, 0, 1, to);
  return ffi::Error::Success();
}

struct Format {
  uint32_t mantissa_bits, exponent_bias;
  int largest_exponent;
  float beyond;  // the smallest magnitude that rounds beyond the largest number
};
constexpr Format kFormatE4m3 = {3, 7, 8, 464.00003f};
constexpr Format kFormatE5m2 = {2, 15, 15, 61440.0f};

struct Scale {
  float multiplier, scale;
};

Scale ScaleOf(uint32_t bound, const Format& format) {
  const int exponent = static_cast<int>(bound >> 23);
  if (exponent == 255) return {bit_cast<float>(0x7fc00000), bit_cast<float>(0x7fc00000)};
  const int shift = std::min(
      format.largest_exponent + 127 - exponent - ((bound & 0x7fffff) > 0x600000), kLargestShift);
  return {bit_cast<float>((127 + shift) << 23), bit_cast<float>((127 - shift) << 23)};
}

// codes[i] = the code of from[i] · multiplier: rounded to nearest, ties to even; NaN where that is
// beyond the largest number.
template <bool kE5m2>
struct EncodeLoop {
  template <int kBytes>
  static NORMFUSE_INLINE void Run(const float* from, int64_t count, float multiplier,
                                  uint8_t* codes) {
    constexpr Format format = kE5m2 ? kFormatE5m2 : kFormatE4m3;
    constexpr uint32_t shift = 23 - format.mantissa_bits;
    constexpr uint32_t magic = (127 + 24 - format.exponent_bias - format.mantissa_bits) << 23;
    constexpr uint32_t smallest_normal = (128 - format.exponent_bias) << 23;
    constexpr uint32_t half = (1u << (shift - 1)) - 1;
    const uint32_t beyond = bit_cast<uint32_t>(format.beyond);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = bit_cast<uint32_t>(from[i] * multiplier);
      const uint32_t top = bits & 0x7fffffffu, rebased = top - smallest_normal + (1u << 23);
      const uint32_t normal = (rebased + half + (rebased >> shift & 1)) >> shift;
      // A number below the smallest normal is added to one whose last bit is the smallest
      // subnormal.
      const uint32_t sum = bit_cast<uint32_t>(bit_cast<float>(top) + bit_cast<float>(magic));
      const uint32_t below = -static_cast<uint32_t>(top < smallest_normal);
      const uint32_t is_nan = -static_cast<uint32_t>(top >= beyond);
      const uint32_t code = (below & (sum - magic)) | (~below & normal) | (bits >> 24 & 0x80u);
      codes[i] = static_cast<uint8_t>((is_nan & 0x7fu) | (~is_nan & code));
    }
  }
};

// to[j][i] = from[i][j] of 8 x 8 bytes, whose rows are kSide bytes apart: halves of words change
// places, then quarters, then bytes. (Little-endian, as every platform of XLA is.)
inline void Transpose8(const uint8_t* from, uint8_t* to) {
  uint64_t words[8];
  for (int i = 0; i < 8; ++i) std::memcpy(&words[i], from + i * kSide, 8);
  auto exchange = [&words](int distance, uint64_t mask) {
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      uint64_t& low = words[i];
      uint64_t& high = words[i + distance];
      const uint64_t moved = (low >> (8 * distance) ^ high) & mask;
      high ^= moved;
      low ^= moved << (8 * distance);
    }
  };
  exchange(4, 0x00000000ffffffffu);
  exchange(2, 0x0000ffff0000ffffu);
  exchange(1, 0x00ff00ff00ff00ffu);
  for (int j = 0; j < 8; ++j) std::memcpy(to + j * kSide, &words[j], 8);
}

// The codes of one tile, written to where q and qt are not null.
template <bool kE5m2>
void CastTile(const Array& x, int64_t rows, int64_t columns, int64_t row, int64_t column,
              float multiplier, uint8_t* q, uint8_t* qt) {
  const int64_t height = std::min(kSide, rows - row), width = std::min(kSide, columns - column);
  float wide[kSide];
  uint8_t codes[kSide * kSide] = {}, turned[kSide * kSide];
  for (int64_t i = 0; i < height; ++i) {
    const int64_t offset = (row + i) * columns + column;
    uint8_t* to = codes + i * kSide;
    Widen(x, offset, width, wide);
    Dispatch<EncodeLoop<kE5m2>>(static_cast<const float*>(wide), width, multiplier, to);
    if (q != nullptr) std::memcpy(q + offset, to, width);
  }
  if (qt == nullptr) return;
  for (int64_t i = 0; i < height; i += 8) {  // never writes beyond the edges
    for (int64_t j = 0; j < width; j += 8) {
      Transpose8(codes + i * kSide + j, turned + j * kSide + i);
    }
  }
  for (int64_t j = 0; j < width; ++j) {
    std::memcpy(qt + (column + j) * rows + row, turned + j * kSide, height);
  }
}

ffi::Error CastImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    bool has_q, bool has_qt) {
  const char* target = "normfuse_quantize_cast";
  if (args.size() != 2) return Invalid(target, "takes x and maxima");
  const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), maxima = *args.get<ffi::AnyBuffer>(1);
  if (maxima.element_type() != ffi::F32) return Invalid(target, "maxima are float32");
  if (!IsInput(x.element_type())) return Invalid(target, "x has a dtype that is not quantized");
  if (x.dimensions().size() != 2) return Invalid(target, "x is no matrix");
  if (rets.size() != size_t{1} + has_q + has_qt) return Invalid(target, "wrong count of results");
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
  uint8_t* codes[2] = {nullptr, nullptr};
  ffi::DataType type = ffi::F8E4M3FN;
  size_t next = 0;
  for (int which = 0; which < 2; ++which) {
    if (!(which == 0 ? has_q : has_qt)) continue;
    auto result = rets.get<ffi::AnyBuffer>(next);
    if (result.has_error()) return result.error();
    const ffi::DataType found = (*result)->element_type();
    if ((found != ffi::F8E4M3FN && found != ffi::F8E5M2) || (next > 0 && found != type)) {
      return Invalid(target, "codes are float8_e4m3fn or float8_e5m2");
    }
    const auto shape = (*result)->dimensions();
    if (shape.size() != 2 || shape[which] != rows || shape[1 - which] != columns) {
      return Invalid(target, which == 0 ? "q must have x's shape" : "qt must be x's transpose");
    }
    type = found;
    codes[which] = static_cast<uint8_t*>((*result)->untyped_data());
    ++next;
  }
  auto scale = *rets.get<ffi::AnyBuffer>(next);
  if (scale->element_type() != ffi::F32) return Invalid(target, "the scale is float32");
  if (scale->element_count() != 1) return Invalid(target, "the scale is one number");
  if (maxima.element_count() == 0) return Invalid(target, "there are no maxima");

  uint32_t bound = 0;
  const float* const each = static_cast<const float*>(maxima.untyped_data());
  for (size_t i = 0; i < maxima.element_count(); ++i) {
    bound = std::max(bound, bit_cast<uint32_t>(each[i]) & 0x7fffffffu);
  }
  const bool e5m2 = type == ffi::F8E5M2;
  const Scale by = ScaleOf(bound, e5m2 ? kFormatE5m2 : kFormatE4m3);
  const auto cast = e5m2 ? CastTile<true> : CastTile<false>;
  *static_cast<float*>(scale->untyped_data()) = by.scale;
  const Array from{x.untyped_data(), x.element_type()};
  const int64_t across = (columns + kBlock - 1) / kBlock, down = (rows + kBlock - 1) / kBlock;
  ParallelFor(pool, down * across, [&](int64_t task) {
    const int64_t row = task / across * kBlock, column = task % across * kBlock;
    const int64_t bottom = std::min(row + kBlock, rows), right = std::min(column + kBlock, columns);
    for (int64_t j = column; j < right; j += kSide) {
      for (int64_t i = row; i < bottom; i += kSide) {
        cast(from, rows, columns, i, j, by.multiplier, codes[0], codes[1]);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace normfuse

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    NormfuseQuantizeAmax, normfuse::AmaxImpl,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseQuantizeCast, normfuse::CastImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("has_q")
                                  .Attr<bool>("has_qt"));
