#include "cuda/library.h"

#include <array>
#include <cstdint>
#include <map>

#include "sha256.h"

namespace normfuse::cuda {

Library* Library::Get(std::string_view digest, std::string_view image) {
  static std::mutex* mutex = new std::mutex;  // neither is destroyed: XLA may launch at exit
  static auto* libraries = new std::map<std::string, Library*, std::less<>>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = libraries->find(digest);
  if (found == libraries->end()) {
    if (Sha256(image.data(), image.size()) != digest) return nullptr;
    found = libraries->emplace(std::string(digest), new Library(image)).first;
  }
  return found->second;
}

std::string Library::Load() {
  const Driver& driver = GetDriver();
  if (!driver.missing.empty()) return driver.missing;
  std::array<char, 4096> log{};  // filled when PTX does not assemble
  int options[] = {kErrorLogBuffer, kErrorLogBufferSizeBytes};
  void* values[] = {log.data(), reinterpret_cast<void*>(uintptr_t{log.size()})};
  Result result =
      driver.LibraryLoadData(&handle_, image_.c_str(), options, values, 2, nullptr, nullptr, 0);
  if (result != 0) {
    handle_ = nullptr;
    std::string text = "loading the image failed: " + driver.Describe(result);
    return log[0] == '\0' ? text : text + "\n" + log.data();
  }
  image_ = std::string();
  return "";
}

std::string Library::GetKernel(const std::string& name, KernelHandle* kernel) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (handle_ == nullptr) {
    if (std::string failure = Load(); !failure.empty()) return failure;
  }
  Result result = GetDriver().LibraryGetKernel(kernel, handle_, name.c_str());
  if (result != 0) return "not found in the image: " + GetDriver().Describe(result);
  return "";
}

}  // namespace normfuse::cuda
