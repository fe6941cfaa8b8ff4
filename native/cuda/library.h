// Images loaded into the process: one per digest, however many call sites carry it.
#pragma once

#include <mutex>
#include <string>
#include <string_view>

#include "cuda/driver.h"

namespace normfuse::cuda {

// A cubin or PTX text (without its final zero), loaded on first use and kept for the life of the
// process: unloading would have to wait for every stream of every device, and an image is small.
class Library {
 public:
  // The one library of `digest`. `image` is copied by the first caller, who must give the one with
  // that SHA-256, and ignored for the others. Null if it is not.
  static Library* Get(std::string_view digest, std::string_view image);

  // Finds `name` in the image, loading that if need be; the handle is good for every device.
  // Returns what went wrong, or an empty string.
  std::string GetKernel(const std::string& name, KernelHandle* kernel);

 private:
  explicit Library(std::string_view image) : image_(image) {}
  std::string Load();

  std::mutex mutex_;
  std::string image_;  // released once loaded
  LibraryHandle handle_ = nullptr;
};

}  // namespace normfuse::cuda
