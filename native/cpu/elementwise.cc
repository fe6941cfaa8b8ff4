#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/handlers.h"
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

// The dynamic linker takes two files with one path for one library, and numbers of closed files are
// reused: so each path is spelt differently, with the bits of `serial` as "/." or "/".
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

// A function's arrays, read from the text of an attribute (handlers.h).
struct Layout {
  std::string text;
  Signature signature;
  std::vector<int64_t> masks;  // operands', then results' (with every dimension)
  size_t dimensions = 0;
};

// Returns what is wrong, or "".
std::string Read(std::string_view text, Layout* layout) {
  const std::string wrong = "its layout cannot be read: '" + std::string(text) + "'";
  const size_t first = text.find(';'), second = text.rfind(';');
  if (first == second) return wrong;
  if (std::string failure = layout->signature.Read(text.substr(0, first)); !failure.empty()) {
    return failure;
  }
  std::istringstream masks(std::string(text.substr(first + 1, second - first - 1)));
  std::istringstream dimensions(std::string(text.substr(second + 1)));
  layout->masks.assign(std::istream_iterator<int64_t>(masks), {});
  dimensions >> layout->dimensions;
  if (!masks.eof() || !dimensions || !dimensions.eof()) return wrong;
  if (layout->dimensions < 1 || layout->dimensions > kMostDimensions ||
      layout->masks.size() != layout->signature.operands() ||
      layout->signature.arrays() == layout->masks.size()) {
    return wrong;
  }
  const int64_t every = (int64_t{1} << layout->dimensions) - 1;
  for (int64_t mask : layout->masks) {
    if (mask < 0 || mask > every) return wrong;
  }
  layout->masks.resize(layout->signature.arrays(), every);
  layout->text = text;
  return "";
}

// Returns what does not fit about a call's sizes and buffers, or "" and where the buffers are.
std::string Check(const Layout& layout, ffi::Span<const int64_t> sizes,
                  const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  std::vector<void*>* arrays) {
  if (sizes.size() != layout.dimensions) {
    return "has " + std::to_string(layout.dimensions) + " dimensions; got " +
           std::to_string(sizes.size()) + " sizes";
  }
  std::vector<int64_t> elements;
  elements.reserve(layout.masks.size());
  for (int64_t mask : layout.masks) {
    int64_t count = 1;
    for (size_t bit = 0; bit < sizes.size(); ++bit) {
      const int64_t size = sizes[sizes.size() - 1 - bit];
      if (!(mask >> bit & 1)) continue;
      if (size < 0 || __builtin_mul_overflow(count, size, &count)) return "has impossible sizes";
    }
    elements.push_back(count);
  }
  arrays->resize(elements.size());
  return layout.signature.Check(args, rets, elements, arrays->data());
}

// A loaded image.
struct Library {
  Function function = nullptr;
  Layout layout;
};

// Loads the image, which need not be a file; if that fails, says why.
Library Load(ffi::Span<const uint8_t> image, uint32_t serial, std::string* failure) {
  int file = memfd_create("normfuse_elementwise", MFD_CLOEXEC);
  if (file < 0 || !WriteAll(file, reinterpret_cast<const char*>(image.begin()), image.size())) {
    *failure = "no memory for a compiled function";
    if (file >= 0) close(file);
    return {};
  }
  void* handle = dlopen(PathOf(file, serial).c_str(), RTLD_NOW | RTLD_LOCAL);
  close(file);  // the mapping stays
  void* function = handle != nullptr ? dlsym(handle, "normfuse_elementwise") : nullptr;
  void* layout = function != nullptr ? dlsym(handle, "normfuse_layout") : nullptr;
  if (layout == nullptr) {
    const char* reason = dlerror();
    *failure = std::string("cannot be loaded: ") + (reason != nullptr ? reason : "unknown reason");
    return {};
  }
  Library library{reinterpret_cast<Function>(function), {}};
  *failure = Read(static_cast<const char*>(layout), &library.layout);
  return library;
}

// The library of an image that fits a call; it is loaded once in the process and never unloaded.
// Null, and says why, if the call does not fit or the image is not what the call says.
const Library* Get(std::string_view digest, ffi::Span<const uint8_t> image, std::string_view layout,
                   ffi::Span<const int64_t> sizes, const ffi::RemainingArgs& args,
                   const ffi::RemainingRets& rets, std::vector<void*>* arrays,
                   std::string* failure) {
  static auto* mutex = new std::mutex;
  static auto* loaded = new std::unordered_map<std::string, Library>;
  static uint32_t serial = 0;
  std::lock_guard<std::mutex> lock(*mutex);
  const std::string key(digest);
  auto found = loaded->find(key);
  Library library;
  if (found == loaded->end()) *failure = Read(layout, &library.layout);
  if (!failure->empty()) return nullptr;
  const Library& described = found == loaded->end() ? library : found->second;
  *failure = Check(described.layout, sizes, args, rets, arrays);
  if (failure->empty() && found == loaded->end()) {
    if (Sha256(image.begin(), image.size()) == digest) {
      library = Load(image, ++serial, failure);
    } else {
      *failure = "was damaged: its SHA-256 is not its digest";
    }
    if (failure->empty()) found = loaded->emplace(key, std::move(library)).first;
  }
  if (failure->empty() && found->second.layout.text != layout) {
    *failure = "was compiled for other arrays: " + found->second.layout.text;
  }
  return failure->empty() ? &found->second : nullptr;
}

ffi::Error ElementwiseImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Span<const uint8_t> image, std::string_view digest,
                           std::string_view layout, ffi::Span<const int64_t> sizes) {
  std::string failure;
  std::vector<void*> arrays;
  const Library* library = Get(digest, image, layout, sizes, args, rets, &arrays, &failure);
  if (library == nullptr) return Failure(digest, failure);
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
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
                                  .Attr<std::string_view>("layout")
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes"));
