#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver.h"
#include "cuda/library.h"
#include "signature.h"

namespace ffi = xla::ffi;

namespace normfuse::cuda {
namespace {

constexpr size_t kMaxParameters = 64;
constexpr int kDefaultSharedBytes = 48 << 10;  // what a block may use without asking for more
constexpr uint32_t kPortableClusterSize = 8;
constexpr int64_t kMostSize = std::numeric_limits<uint32_t>::max();
constexpr int64_t kMostCluster = 1024;  // more than any GPU has; the product of three fits

using Dims = std::array<uint32_t, 3>;

// One call site.
struct Launch {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  std::string name;
  std::string digest;
  Library* library = nullptr;
  Signature signature;
  std::vector<int64_t> elements;  // of each operand and result
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
  if (!DecodeDims(grid, 0, kMostSize, &launch->grid) ||
      !DecodeDims(block, 1, kMostSize, &launch->block) ||
      !DecodeDims(cluster, 1, kMostCluster, &launch->cluster) || shared < 0 ||
      shared > std::numeric_limits<int>::max()) {
    return ffi::Unexpected(
        Failure(*launch, "grid, block and cluster need three sizes each, and shared a byte count"));
  }
  launch->shared_bytes = static_cast<uint32_t>(shared);
  launch->ints.assign(ints.begin(), ints.end());
  launch->floats.assign(floats.begin(), floats.end());
  launch->doubles.assign(doubles.begin(), doubles.end());
  std::string failure = launch->signature.Read(dtypes);
  launch->elements.assign(elements.begin(), elements.end());
  if (failure.empty() && launch->elements.size() != launch->signature.arrays()) {
    failure = "its attributes describe " + std::to_string(launch->signature.arrays()) +
              " dtypes and " + std::to_string(launch->elements.size()) + " sizes";
  }
  if (!failure.empty()) return ffi::Unexpected(Failure(*launch, failure));
  if (launch->Parameters() > kMaxParameters) {
    return ffi::Unexpected(Failure(*launch, "takes " + std::to_string(launch->Parameters()) +
                                                " parameters, more than " +
                                                std::to_string(kMaxParameters)));
  }
  launch->library = Library::Get(
      digest, std::string_view(reinterpret_cast<const char*>(image.begin()), image.size()));
  if (launch->library == nullptr) {
    return ffi::Unexpected(Failure(*launch, "was damaged: its SHA-256 is not its digest"));
  }
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
  const std::string failure = launch->signature.Check(args, rets, launch->elements);
  if (!failure.empty()) return Failure(*launch, failure);
  return launch->Empty() ? ffi::Error::Success() : PrepareOnce(launch, stream, ordinal);
}

// The addresses of a kernel's parameters, as cuLaunchKernelEx takes them.
struct Parameters {
  std::array<void*, kMaxParameters> pointers;
  std::array<void*, kMaxParameters> addresses;
  size_t count = 0;

  void AddPointer(void* pointer) {
    pointers[count] = pointer;
    addresses[count] = &pointers[count];
    ++count;
  }
  template <typename T>
  void AddScalars(std::vector<T>& values) {
    for (T& value : values) addresses[count++] = &value;
  }
};

ffi::Error Collect(Launch* launch, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                   Parameters* parameters) {
  const std::string failure = launch->signature.Check(args, rets, launch->elements);
  if (!failure.empty()) return Failure(*launch, failure);
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    parameters->AddPointer(buffer->untyped_data());
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    parameters->AddPointer((*buffer)->untyped_data());
  }
  parameters->AddScalars(launch->ints);
  parameters->AddScalars(launch->floats);
  parameters->AddScalars(launch->doubles);
  return ffi::Error::Success();
}

ffi::Error Execute(Stream stream, int32_t ordinal, Launch* launch, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  if (launch->Empty()) return ffi::Error::Success();
  // Already done by initialize, except on a runtime that leaves that stage out.
  if (ffi::Error error = PrepareOnce(launch, stream, ordinal); error.failure()) return error;
  Parameters parameters;
  if (ffi::Error error = Collect(launch, args, rets, &parameters); error.failure()) return error;

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
  Result result =
      GetDriver().LaunchKernelEx(&config, launch->kernel, parameters.addresses.data(), nullptr);
  if (result == 0) return ffi::Error::Success();
  return Failure(*launch,
                 "launch of grid " + Text(launch->grid) + ", block " + Text(launch->block) +
                     ", cluster " + Text(launch->cluster) + ", " +
                     std::to_string(launch->shared_bytes) +
                     " bytes of dynamic shared memory failed: " + GetDriver().Describe(result));
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
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::PlatformStream<normfuse::cuda::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<normfuse::cuda::Launch>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(NormfuseLaunchExecute, normfuse::cuda::Execute,
                              ffi::Ffi::BindExecute()
                                  .Ctx<ffi::PlatformStream<normfuse::cuda::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<normfuse::cuda::Launch>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});
