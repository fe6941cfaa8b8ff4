#include "cuda/driver.h"

#include <dlfcn.h>

namespace normfuse::cuda {
namespace {

template <typename F>
void Find(void* library, const char* name, F** entry, std::string* missing) {
  *entry = reinterpret_cast<F*>(dlsym(library, name));
  if (*entry != nullptr || !missing->empty()) return;
  *missing = std::string("libcuda.so.1 has no ") + name +
             ": the NVIDIA driver is older than 525 (CUDA 12.0), update it";
}

Driver Open() {
  Driver d{};
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    d.missing = std::string("the NVIDIA driver cannot be opened: ") + dlerror();
    return d;
  }
  Find(library, "cuLibraryLoadData", &d.LibraryLoadData, &d.missing);
  Find(library, "cuLibraryGetKernel", &d.LibraryGetKernel, &d.missing);
  Find(library, "cuKernelGetFunction", &d.KernelGetFunction, &d.missing);
  Find(library, "cuKernelGetAttribute", &d.KernelGetAttribute, &d.missing);
  Find(library, "cuKernelSetAttribute", &d.KernelSetAttribute, &d.missing);
  Find(library, "cuFuncGetAttribute", &d.FuncGetAttribute, &d.missing);
  std::string older;
  Find(library, "cuKernelGetParamInfo", &d.KernelGetParamInfo, &older);
  Find(library, "cuLaunchKernelEx", &d.LaunchKernelEx, &d.missing);
  Find(library, "cuStreamGetCtx", &d.StreamGetCtx, &d.missing);
  Find(library, "cuCtxPushCurrent_v2", &d.CtxPushCurrent, &d.missing);
  Find(library, "cuCtxPopCurrent_v2", &d.CtxPopCurrent, &d.missing);
  Find(library, "cuCtxGetDevice", &d.CtxGetDevice, &d.missing);
  Find(library, "cuDeviceGetAttribute", &d.DeviceGetAttribute, &d.missing);
  Find(library, "cuGetErrorName", &d.GetErrorName, &d.missing);
  Find(library, "cuGetErrorString", &d.GetErrorString, &d.missing);
  return d;
}

}  // namespace

std::string Driver::Describe(Result result) const {
  const char *name = nullptr, *text = nullptr;
  GetErrorName(result, &name);
  GetErrorString(result, &text);
  if (name == nullptr) return "CUDA error " + std::to_string(result);
  return std::string(name) + (text == nullptr ? "" : std::string(" (") + text + ")");
}

const Driver& GetDriver() {
  static const Driver* driver = new Driver(Open());  // never destroyed: XLA may launch at exit
  return *driver;
}

}  // namespace normfuse::cuda
