#include "cpu/elementwise.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "sha256.h"
#include "signature.h"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

constexpr int64_t kElementsPerTask = 1 << 14;
constexpr size_t kMostDimensions = 62;  // a mask has a bit for each

using Function = void (*)(void* const* arrays, const int64_t* sizes, int64_t begin, int64_t end);

ffi::Error Failure(std::string_view digest, const std::string& what) {
  return ffi::Error::Internal("normfuse_elementwise (image " + std::string(digest.substr(0, 12)) +
                              "): " + what);
}

// The dynamic linker takes two files of one path for one library, and the numbers of closed files
// come back: each path is spelt differently, with the bits of `serial` as "/." or "/".
std::string PathOf(int file, uint32_t serial) {
  std::string path = "/proc/self/fd";
  for (; serial != 0; serial >>= 1) path += serial & 1 ? "/." : "/";
  return path + "/" + std::to_string(file);
}

bool WriteAll(int file, const char* data, size_t size) {
  while (size > 0) {
    ssize_t written = write(file, data, size);
    if (written <= 0) return false;
    data += written;
    size -= written;
  }
  return true;
}

// A loaded image.
struct Library {
  Function function = nullptr;
  std::string layout;  // of the arrays that the function was compiled for
};

// Loads the image, which need not be a file anywhere; says why where it cannot.
Library Load(ffi::Span<const uint8_t> image, uint32_t serial, std::string* failure) {
  int file = memfd_create("normfuse_elementwise", MFD_CLOEXEC);
  if (file < 0 || !WriteAll(file, reinterpret_cast<const char*>(image.begin()), image.size())) {
    *failure = "no memory for a compiled function";
    if (file >= 0) close(file);
    return {};
  }
  void* handle = dlopen(PathOf(file, serial).c_str(), RTLD_NOW | RTLD_LOCAL);
  close(file);  // what is mapped stays
  void* function = handle != nullptr ? dlsym(handle, "normfuse_elementwise") : nullptr;
  void* layout = function != nullptr ? dlsym(handle, "normfuse_layout") : nullptr;
  if (layout == nullptr) {
    const char* reason = dlerror();
    *failure = std::string("cannot be loaded: ") + (reason != nullptr ? reason : "unknown reason");
    return {};
  }
  return {reinterpret_cast<Function>(function), static_cast<const char*>(layout)};
}

// The library of an image, loaded once in the process and never unloaded.
const Library* Get(std::string_view digest, ffi::Span<const uint8_t> image, std::string* failure) {
  static auto* mutex = new std::mutex;
  static auto* loaded = new std::unordered_map<std::string, Library>;
  static uint32_t serial = 0;
  std::lock_guard<std::mutex> lock(*mutex);
  const std::string key(digest);
  auto found = loaded->find(key);
  if (found != loaded->end()) return &found->second;
  if (Sha256(image.begin(), image.size()) != digest) {
    *failure = "was damaged: its SHA-256 is not its digest";
    return nullptr;
  }
  Library library = Load(image, ++serial, failure);
  return library.function != nullptr ? &loaded->emplace(key, std::move(library)).first->second
                                     : nullptr;
}

// How many elements the operands have, and then the results, as the attributes say.
std::string Elements(ffi::Span<const int64_t> masks, ffi::Span<const int64_t> sizes, size_t results,
                     std::vector<int64_t>* elements) {
  if (results == 0) return "has no result";
  if (sizes.size() == 0 || sizes.size() > kMostDimensions) return "has no or too many dimensions";
  const int64_t every = (int64_t{1} << sizes.size()) - 1;
  std::vector<int64_t> all(masks.begin(), masks.end());
  all.insert(all.end(), results, every);
  for (int64_t mask : all) {
    int64_t count = 1;
    if (mask < 0 || mask > every) return "has no such dimensions: mask " + std::to_string(mask);
    for (size_t bit = 0; bit < sizes.size(); ++bit) {
      if (!(mask >> bit & 1)) continue;
      const int64_t size = sizes[sizes.size() - 1 - bit];
      if (size < 0 || __builtin_mul_overflow(count, size, &count)) return "has impossible sizes";
    }
    elements->push_back(count);
  }
  return "";
}

// The layout as the library has it, in the words of layers/elementwise/code.py.
std::string Layout(std::string_view dtypes, ffi::Span<const int64_t> masks, size_t dimensions) {
  std::string text = std::string(dtypes) + ";";
  for (int64_t mask : masks) text += " " + std::to_string(mask);
  return text + "; " + std::to_string(dimensions);
}

ffi::Error ElementwiseImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Span<const uint8_t> image, std::string_view digest,
                           std::string_view dtypes, ffi::Span<const int64_t> masks,
                           ffi::Span<const int64_t> sizes) {
  Signature signature;
  std::vector<int64_t> elements;
  std::string failure = Elements(masks, sizes, rets.size(), &elements);
  if (failure.empty()) failure = signature.Read(dtypes, elements);
  if (failure.empty() && signature.operands() != masks.size()) failure = "needs a mask an operand";
  if (failure.empty()) failure = signature.Check(args, rets);
  if (!failure.empty()) return Failure(digest, failure);
  const Library* library = Get(digest, image, &failure);
  if (library == nullptr) return Failure(digest, failure);
  if (library->layout != Layout(dtypes, masks, sizes.size())) {
    return Failure(digest, "was compiled for other arrays: " + library->layout);
  }
  std::vector<void*> arrays;
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    arrays.push_back(buffer->untyped_data());
  }
  const int64_t count = elements.back();
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    arrays.push_back((*buffer)->untyped_data());
  }
  const int64_t tasks = (count + kElementsPerTask - 1) / kElementsPerTask;
  ParallelFor(pool, tasks, [&](int64_t task) {
    const int64_t begin = task * kElementsPerTask;
    library->function(arrays.data(), sizes.begin(), begin,
                      std::min(begin + kElementsPerTask, count));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace normfuse

XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseElementwise, normfuse::ElementwiseImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const uint8_t>>("image")
                                  .Attr<std::string_view>("digest")
                                  .Attr<std::string_view>("dtypes")
                                  .Attr<xla::ffi::Span<const int64_t>>("masks")
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes"));
