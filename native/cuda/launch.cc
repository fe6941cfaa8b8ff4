#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver.h"
#include "sha256.h"
#include "signature.h"

namespace ffi = xla::ffi;

namespace normfuse::cuda {
namespace {

constexpr size_t kMaxParameters = 64;
constexpr int kDefaultSharedBytes = 48 << 10;  // a block may use them without asking
constexpr uint32_t kPortableClusterSize = 8;
constexpr int64_t kMostSize = std::numeric_limits<uint32_t>::max();
constexpr int64_t kMostCluster = 1024;  // more than any GPU has; the product of three fits

// A cubin or PTX text (without its final zero), one per digest however many call sites carry it. It
// is loaded on first use and kept for the life of the process: unloading would have to wait for
// every stream of every device, and an image is small.
class Library {
 public:
  // The one library of `digest`. `image` is copied by the first caller, who must give the one with
  // that SHA-256, and ignored for the others. Null if it is not.
  static Library* Get(std::string_view digest, ffi::Span<const uint8_t> image) {
    static std::mutex* mutex = new std::mutex;  // neither is destroyed: XLA may launch at exit
    static auto* libraries = new std::map<std::string, Library*, std::less<>>;
    std::lock_guard<std::mutex> lock(*mutex);
    auto found = libraries->find(digest);
    if (found == libraries->end()) {
      if (Sha256(image.begin(), image.size()) != digest) return nullptr;
      found = libraries->emplace(std::string(digest), new Library(image)).first;
    }
    return found->second;
  }

  // Finds `name` in the image, loading that if need be; the handle is good for every device.
  // Returns what went wrong, or an empty string.
  std::string GetKernel(const std::string& name, KernelHandle* kernel) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (handle_ == nullptr) {
      if (std::string failure = Load(); !failure.empty()) return failure;
    }
    Result result = GetDriver().LibraryGetKernel(kernel, handle_, name.c_str());
    return result == 0 ? "" : "not found in the image: " + GetDriver().Describe(result);
  }

 private:
  explicit Library(ffi::Span<const uint8_t> image) : image_(image.begin(), image.end()) {}

  std::string Load() {
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

  std::mutex mutex_;
  std::string image_;  // released once loaded
  LibraryHandle handle_ = nullptr;
};

using Dims = std::array<uint32_t, 3>;

// One call site.
struct Launch {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  std::string name;
  std::string digest;
  Library* library = nullptr;
  Signature signature;
  std::vector<int64_t> elements;  // count in each operand and result
  Dims grid, block, cluster;
  uint32_t shared_bytes = 0;
  std::vector<int64_t> ints;
  std::vector<float> floats;
  std::vector<double> doubles;

  std::mutex mutex;                   // guards preparing a device
  KernelHandle kernel = nullptr;      // one handle serves every device
  std::atomic<uint64_t> prepared{0};  // a bit for each device that is ready, by XLA's ordinal

  bool Empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
  uint32_t ClusterSize() const { return cluster[0] * cluster[1] * cluster[2]; }
  size_t Parameters() const {
    return signature.arrays() + ints.size() + floats.size() + doubles.size();
  }
};

ffi::TypeId Launch::id = {};
ffi::TypeInfo Launch::info = ffi::MakeTypeInfo<Launch>();

std::string Text(const Dims& d) {
  return std::to_string(d[0]) + "x" + std::to_string(d[1]) + "x" + std::to_string(d[2]);
}

ffi::Error Failure(const Launch& launch, const std::string& what) {
  return ffi::Error::Internal("normfuse kernel '" + launch.name + "' (image " +
                              launch.digest.substr(0, 12) + "): " + what);
}

ffi::Error Failure(const Launch& launch, const char* what, Result result) {
  return Failure(launch, std::string(what) + ": " + GetDriver().Describe(result));
}

bool DecodeDims(ffi::Span<const int64_t> values, int64_t least, int64_t most, Dims* dims) {
  if (values.size() != 3) return false;
  for (size_t i = 0; i < 3; ++i) {
    if (values[i] < least || values[i] > most) return false;
    (*dims)[i] = static_cast<uint32_t>(values[i]);
  }
  return true;
}

ffi::ErrorOr<std::unique_ptr<Launch>> Instantiate(
    ffi::Span<const uint8_t> image, std::string_view digest, std::string_view dtypes,
    ffi::Span<const int64_t> elements, std::string_view kernel, ffi::Span<const int64_t> grid,
    ffi::Span<const int64_t> block, ffi::Span<const int64_t> cluster, int64_t shared,
    ffi::Span<const int64_t> ints, ffi::Span<const float> floats, ffi::Span<const double> doubles) {
  auto launch = std::make_unique<Launch>();
  launch->name = kernel;
  launch->digest = digest;
  auto fail = [&](const std::string& what) { return ffi::Unexpected(Failure(*launch, what)); };
  if (!DecodeDims(grid, 0, kMostSize, &launch->grid) ||
      !DecodeDims(block, 1, kMostSize, &launch->block) ||
      !DecodeDims(cluster, 1, kMostCluster, &launch->cluster) || shared < 0 ||
      shared > std::numeric_limits<int>::max()) {
    return fail("grid, block and cluster need three sizes each, and shared a byte count");
  }
  launch->shared_bytes = static_cast<uint32_t>(shared);
  launch->ints.assign(ints.begin(), ints.end());
  launch->floats.assign(floats.begin(), floats.end());
  launch->doubles.assign(doubles.begin(), doubles.end());
  launch->elements.assign(elements.begin(), elements.end());
  if (std::string failure = launch->signature.Read(dtypes); !failure.empty()) return fail(failure);
  if (launch->elements.size() != launch->signature.arrays()) {
    return fail("its attributes describe " + std::to_string(launch->signature.arrays()) +
                " dtypes and " + std::to_string(launch->elements.size()) + " sizes");
  }
  if (launch->Parameters() > kMaxParameters) {
    return fail("takes " + std::to_string(launch->Parameters()) + " parameters, more than " +
                std::to_string(kMaxParameters));
  }
  launch->library = Library::Get(digest, image);
  if (launch->library == nullptr) return fail("was damaged: its SHA-256 is not its digest");
  return launch;
}

// Makes the stream's context current for as long as it lives: which context that is when a handler
// runs is XLA's business.
class ScopedContext {
 public:
  explicit ScopedContext(Stream stream) {
    Context context = nullptr;
    result_ = GetDriver().StreamGetCtx(stream, &context);
    if (result_ == 0) result_ = GetDriver().CtxPushCurrent(context);
  }
  ~ScopedContext() {
    Context popped = nullptr;
    if (result_ == 0) GetDriver().CtxPopCurrent(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  Result result() const { return result_; }

 private:
  Result result_;
};

// Lets blocks use the shared memory and cluster size the launch asks for. The limit belongs to the
// kernel and is shared by its call sites, so it is raised to the most the device has.
ffi::Error RaiseLimits(const Launch& launch, Device device) {
  const Driver& driver = GetDriver();
  int fixed = 0, most = 0;
  Result result = driver.KernelGetAttribute(&fixed, kSharedSizeBytes, launch.kernel, device);
  if (result != 0) return Failure(launch, "reading its shared memory", result);
  if (static_cast<int64_t>(launch.shared_bytes) + fixed > kDefaultSharedBytes) {
    result = driver.DeviceGetAttribute(&most, kMaxSharedMemoryPerBlockOptin, device);
    if (result == 0) {
      result = driver.KernelSetAttribute(kMaxDynamicSharedSizeBytes, most - fixed, launch.kernel,
                                         device);
    }
    if (result != 0) return Failure(launch, "raising its shared memory", result);
  }
  if (launch.ClusterSize() > kPortableClusterSize) {
    result = driver.KernelSetAttribute(kNonPortableClusterSizeAllowed, 1, launch.kernel, device);
    if (result != 0) return Failure(launch, "allowing its cluster size", result);
  }
  return ffi::Error::Success();
}

// Compares what the kernel takes with what it will be given: the driver reads as many addresses as
// the kernel has parameters. Drivers older than 12.4 do not say.
ffi::Error CheckParameters(const Launch& launch) {
  const Driver& driver = GetDriver();
  if (driver.KernelGetParamInfo == nullptr) return ffi::Error::Success();
  const size_t doubles = launch.Parameters() - launch.doubles.size();
  const size_t floats = doubles - launch.floats.size();
  for (size_t i = 0; i <= launch.Parameters(); ++i) {
    size_t offset = 0, size = 0;
    const bool taken = driver.KernelGetParamInfo(launch.kernel, i, &offset, &size) == 0;
    const bool given = i < launch.Parameters();
    if (taken != given || (given && size != (i >= floats && i < doubles ? 4 : 8))) {
      return Failure(launch, "does not take the " + std::to_string(launch.Parameters()) +
                                 " parameters that it is given: see number " + std::to_string(i));
    }
  }
  return ffi::Error::Success();
}

ffi::Error Prepare(Launch* launch, Stream stream) {
  const Driver& driver = GetDriver();
  if (!driver.missing.empty()) return Failure(*launch, driver.missing);
  ScopedContext context(stream);
  if (context.result() != 0) return Failure(*launch, "entering the context", context.result());
  if (launch->kernel == nullptr) {
    std::string failure = launch->library->GetKernel(launch->name, &launch->kernel);
    if (!failure.empty()) return Failure(*launch, failure);
    if (ffi::Error error = CheckParameters(*launch); error.failure()) {
      launch->kernel = nullptr;
      return error;
    }
  }
  Device device = 0;
  Result result = driver.CtxGetDevice(&device);
  if (result != 0) return Failure(*launch, "finding the device", result);
  // CUDA loads lazily; asking for an attribute of the function is what loads it here and now.
  Function function = nullptr;
  int registers = 0;
  result = driver.KernelGetFunction(&function, launch->kernel);
  if (result == 0) result = driver.FuncGetAttribute(&registers, kNumRegs, function);
  if (result != 0) return Failure(*launch, "loading onto the device failed", result);
  return RaiseLimits(*launch, device);
}

ffi::Error PrepareOnce(Launch* launch, Stream stream, int32_t ordinal) {
  uint64_t bit = ordinal >= 0 && ordinal < 64 ? uint64_t{1} << ordinal : 0;
  if (launch->prepared.load(std::memory_order_acquire) & bit) return ffi::Error::Success();
  std::lock_guard<std::mutex> lock(launch->mutex);
  if (launch->prepared.load(std::memory_order_relaxed) & bit) return ffi::Error::Success();
  ffi::Error error = Prepare(launch, stream);
  if (error.success()) launch->prepared.fetch_or(bit, std::memory_order_release);
  return error;
}

ffi::Error Initialize(Stream stream, int32_t ordinal, Launch* launch, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, ffi::Dictionary) {
  const std::string failure = launch->signature.Check(args, rets, launch->elements, nullptr);
  if (!failure.empty()) return Failure(*launch, failure);
  return launch->Empty() ? ffi::Error::Success() : PrepareOnce(launch, stream, ordinal);
}

ffi::Error Execute(Stream stream, int32_t ordinal, Launch* launch, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  if (launch->Empty()) return ffi::Error::Success();
  // Already done by initialize, except on a runtime that leaves that stage out.
  if (ffi::Error error = PrepareOnce(launch, stream, ordinal); error.failure()) return error;
  std::array<void*, kMaxParameters> arrays, parameters;  // the latter: addresses of the former
  std::string failure = launch->signature.Check(args, rets, launch->elements, arrays.data());
  if (!failure.empty()) return Failure(*launch, failure);
  size_t count = 0;
  auto add = [&](auto* values, size_t size) {
    for (size_t i = 0; i < size; ++i) parameters[count++] = values + i;
  };
  add(arrays.data(), launch->signature.arrays());
  add(launch->ints.data(), launch->ints.size());
  add(launch->floats.data(), launch->floats.size());
  add(launch->doubles.data(), launch->doubles.size());

  LaunchConfig config{};
  std::copy(launch->grid.begin(), launch->grid.end(), config.grid);
  std::copy(launch->block.begin(), launch->block.end(), config.block);
  config.shared_bytes = launch->shared_bytes;
  config.stream = stream;
  LaunchAttribute cluster{};
  if (launch->ClusterSize() > 1) {
    cluster.id = kClusterDimension;
    cluster.value.cluster = {launch->cluster[0], launch->cluster[1], launch->cluster[2]};
    config.attributes = &cluster;
    config.num_attributes = 1;
  }
  Result result = GetDriver().LaunchKernelEx(&config, launch->kernel, parameters.data(), nullptr);
  if (result == 0) return ffi::Error::Success();
  return Failure(*launch,
                 "launch of grid " + Text(launch->grid) + ", block " + Text(launch->block) +
                     ", cluster " + Text(launch->cluster) + ", " +
                     std::to_string(launch->shared_bytes) +
                     " bytes of dynamic shared memory failed: " + GetDriver().Describe(result));
}

template <ffi::ExecutionStage kStage>
auto Bind() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::PlatformStream<Stream>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::State<Launch>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

ffi::TypeId* LaunchTypeId() { return &Launch::id; }
ffi::TypeInfo* LaunchTypeInfo() { return &Launch::info; }

}  // namespace normfuse::cuda

XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLaunchInstantiate, normfuse::cuda::Instantiate,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<ffi::Span<const uint8_t>>("image")
                                  .Attr<std::string_view>("digest")
                                  .Attr<std::string_view>("dtypes")
                                  .Attr<ffi::Span<const int64_t>>("elements")
                                  .Attr<std::string_view>("kernel")
                                  .Attr<ffi::Span<const int64_t>>("grid")
                                  .Attr<ffi::Span<const int64_t>>("block")
                                  .Attr<ffi::Span<const int64_t>>("cluster")
                                  .Attr<int64_t>("shared")
                                  .Attr<ffi::Span<const int64_t>>("ints")
                                  .Attr<ffi::Span<const float>>("floats")
                                  .Attr<ffi::Span<const double>>("doubles"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLaunchInitialize, normfuse::cuda::Initialize,
                              normfuse::cuda::Bind<ffi::ExecutionStage::kInitialize>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLaunchExecute, normfuse::cuda::Execute,
                              normfuse::cuda::Bind<ffi::ExecutionStage::kExecute>(),
                              {ffi::Traits::kCmdBufferCompatible});
