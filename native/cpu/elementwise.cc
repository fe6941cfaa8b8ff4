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
#include <vector>

#include "cpu/parallel.h"

namespace normfuse {
namespace {

namespace ffi = ::xla::ffi;

constexpr int64_t kElementsPerTask = 1 << 14;

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

// Loads the image, which need not be a file anywhere; returns null and says why where it cannot.
Function Load(ffi::Span<const uint8_t> image, uint32_t serial, std::string* failure) {
  int file = memfd_create("normfuse_elementwise", MFD_CLOEXEC);
  if (file < 0 || !WriteAll(file, reinterpret_cast<const char*>(image.begin()), image.size())) {
    *failure = "no memory for a compiled function";
    if (file >= 0) close(file);
    return nullptr;
  }
  void* library = dlopen(PathOf(file, serial).c_str(), RTLD_NOW | RTLD_LOCAL);
  close(file);  // what is mapped stays
  void* function = library != nullptr ? dlsym(library, "normfuse_elementwise") : nullptr;
  if (function == nullptr) *failure = std::string("cannot be loaded: ") + dlerror();
  return reinterpret_cast<Function>(function);
}

// The function of an image, loaded once in the process and never unloaded.
Function Get(std::string_view digest, ffi::Span<const uint8_t> image, std::string* failure) {
  static auto* mutex = new std::mutex;
  static auto* loaded = new std::unordered_map<std::string, Function>;
  static uint32_t serial = 0;
  std::lock_guard<std::mutex> lock(*mutex);
  Function& function = (*loaded)[std::string(digest)];
  if (function == nullptr) function = Load(image, ++serial, failure);
  return function;
}

ffi::Error ElementwiseImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Span<const uint8_t> image, std::string_view digest,
                           ffi::Span<const int64_t> sizes) {
  std::string failure;
  Function function = Get(digest, image, &failure);
  if (function == nullptr) return Failure(digest, failure);
  std::vector<void*> arrays;
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    arrays.push_back(buffer->untyped_data());
  }
  int64_t count = 0;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    arrays.push_back((*buffer)->untyped_data());
    count = static_cast<int64_t>((*buffer)->element_count());
  }
  const int64_t tasks = (count + kElementsPerTask - 1) / kElementsPerTask;
  ParallelFor(pool, tasks, [&](int64_t task) {
    const int64_t begin = task * kElementsPerTask;
    function(arrays.data(), sizes.begin(), begin, std::min(begin + kElementsPerTask, count));
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
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes"));
