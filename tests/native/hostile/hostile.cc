// Calls every handler of the extension, first as its lowering does, which must succeed, then in
// ways that it never does, which must be an error or a result and nothing else: built with
// AddressSanitizer and UndefinedBehaviourSanitizer, any other outcome ends the program.
//
//   hostile IMAGES CALLS        IMAGES: a folder of element-wise libraries, each NAME.so with
//                               NAME.txt (layout and sizes, a line each)
//
// A new handler is one more entry in Targets().
#include <dirent.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "call.h"
#include "cpu/handlers.h"
#include "cuda.h"
#include "cuda/launch.h"
#include "mutate.h"
#include "sha256.h"

namespace hostile {
namespace {

struct Target {
  std::string name;
  std::vector<Stage> stages;
  std::function<Call(Random&)> call;  // one that fits
};

std::vector<Stage> Execute(XLA_FFI_Handler* handler) {
  return {{handler, XLA_FFI_ExecutionStage_EXECUTE}};
}

const std::vector<int64_t> kLengths = {1, 2, 3, 7, 8, 17, 64, 65, 300, 3000};

// ---------------------------------------------------------------- norms

// Arrays of one call, in dtypes of their own.
struct NormArrays {
  int64_t outer, n, inner, heads = 1;
  bool centred;
  std::vector<ffi::DataType> dtypes;
  ffi::DataType compute = ffi::F32;

  explicit NormArrays(Random& random)
      : outer(random.Below(6)),
        n(random.Of(kLengths)),
        inner(random.Of(std::vector<int64_t>{1, 1, 1, 2, 9})),
        centred(random.Once(2)) {
    for (int i = 0; i < 8; ++i) {
      dtypes.push_back(random.Of(std::vector<ffi::DataType>{ffi::F32, ffi::BF16, ffi::F16}));
    }
    if (random.Once(4)) dtypes[0] = compute = ffi::F64;  // x or dy, which is always there
    if (random.Once(4) && inner == 1) {
      heads = std::max<int64_t>(outer, 1), outer *= random.Below(3);
    }
  }

  Array Activation(int i) const { return {dtypes[i], {outer, n, inner}}; }
  Array Scale(int i) const { return Scale(dtypes[i]); }
  Array Scale(ffi::DataType dtype) const {
    return {dtype, heads > 1 ? std::vector<int64_t>{heads, n} : std::vector<int64_t>{n}};
  }
  // A statistic of rows that every norm has, after one that only a centred norm has.
  void AddStatistics(std::vector<Array>& to, bool first = true, bool second = true) const {
    const Array statistic = {compute, {outer, inner}};
    if (centred && first) to.push_back(statistic);
    if (second) to.push_back(statistic);
  }
};

Call NormForward(Random& random) {
  const NormArrays a(random);
  const bool scale = random.Once(2), bias = random.Once(2), residual = random.Once(2);
  const bool mean = random.Once(2), rstd = random.Once(2);
  Call call{{a.Activation(0)}, {a.Activation(1)}, {}};
  if (residual) call.args.push_back(a.Activation(2)), call.rets.push_back(a.Activation(3));
  if (scale) call.args.push_back(a.Scale(4));
  if (bias) call.args.push_back(a.Scale(5));
  a.AddStatistics(call.rets, mean, rstd);
  call.attributes = {Scalar("centred", a.centred),     Scalar("scale_offset", 1.0),
                     Scalar("has_scale", scale),       Scalar("eps", 1e-6),
                     Scalar("has_bias", bias),         Scalar("cast_before", random.Once(2)),
                     Scalar("has_residual", residual), Scalar("with_mean", mean),
                     Scalar("with_rstd", rstd)};
  return call;
}

Call NormRowStatistics(Random& random) {
  const NormArrays a(random);
  Call call{{a.Activation(0)}, {}, {Scalar("centred", a.centred)}};
  a.AddStatistics(call.rets);
  return call;
}

Call NormApply(Random& random) {
  const NormArrays a(random);
  const bool scale = random.Once(2), bias = random.Once(2);
  Call call{{a.Activation(0)}, {a.Activation(1)}, {}};
  if (scale) call.args.push_back(a.Scale(2));
  if (bias) call.args.push_back(a.Scale(3));
  a.AddStatistics(call.args);
  call.attributes = {Scalar("centred", a.centred), Scalar("scale_offset", 0.0),
                     Scalar("has_scale", scale), Scalar("cast_before", random.Once(2)),
                     Scalar("has_bias", bias)};
  return call;
}

Call NormRowDots(Random& random) {
  const NormArrays a(random);
  const bool scale = random.Once(2);
  Call call{{a.Activation(0), a.Activation(1)}, {}, {}};
  if (scale) call.args.push_back(a.Scale(2));
  a.AddStatistics(call.args, true, false);
  a.AddStatistics(call.rets);
  call.attributes = {Scalar("centred", a.centred), Scalar("scale_offset", 0.0),
                     Scalar("has_scale", scale)};
  return call;
}

Call NormGradient(Random& random, bool apply) {
  const NormArrays a(random);
  const bool scale = random.Once(2), residual = random.Once(2);
  const bool dscale = random.Once(2), dbias = random.Once(2);
  Call call{{a.Activation(0), a.Activation(1)}, {a.Activation(2)}, {}};
  if (scale) call.args.push_back(a.Scale(3));
  a.AddStatistics(call.args);
  if (residual) call.args.push_back(a.Activation(4));
  if (apply) a.AddStatistics(call.args);
  for (const bool wanted : {dscale, dbias}) {
    if (wanted) call.rets.push_back(a.Scale(a.compute));
  }
  call.attributes = {Scalar("centred", a.centred),  Scalar("scale_offset", 0.0),
                     Scalar("has_scale", scale),    Scalar("has_residual", residual),
                     Scalar("with_dscale", dscale), Scalar("with_dbias", dbias)};
  if (apply) call.attributes.push_back(Scalar("count", 64.0));
  return call;
}

Call NormBackward(Random& random) { return NormGradient(random, false); }
Call NormBackwardApply(Random& random) { return NormGradient(random, true); }

// ---------------------------------------------------------------- FP8

ffi::DataType Quantized(Random& random) {
  return random.Of(std::vector<ffi::DataType>{ffi::F32, ffi::BF16, ffi::F16});
}

Call QuantizeAmax(Random& random) {
  std::vector<int64_t> dims;
  for (int64_t rank = random.Below(3); rank > 0; --rank) dims.push_back(random.Of(kLengths) % 301);
  return {{{Quantized(random), dims}}, {{ffi::F32, {1}}}, {}};
}

Call QuantizeCast(Random& random) {
  const int64_t rows = random.Of(kLengths) % 301, columns = random.Of(kLengths) % 301;
  const bool has_q = random.Once(2), has_qt = random.Once(2);
  const ffi::DataType codes = random.Once(2) ? ffi::F8E4M3FN : ffi::F8E5M2;
  Call call{{{Quantized(random), {rows, columns}}, {ffi::F32, {random.Of(kLengths)}}}, {}, {}};
  if (has_q) call.rets.push_back({codes, {rows, columns}});
  if (has_qt) call.rets.push_back({codes, {columns, rows}});
  call.rets.push_back({ffi::F32, {1}});
  call.attributes = {Scalar("has_q", has_q), Scalar("has_qt", has_qt)};
  return call;
}

// ---------------------------------------------------------------- element-wise

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<int64_t> Integers(const std::string& line) {
  std::istringstream words(line);
  return {std::istream_iterator<int64_t>(words), {}};
}

struct Library {
  std::string image, layout;
  std::vector<int64_t> sizes;
};

std::vector<Library> Libraries(const std::string& folder) {
  std::vector<std::string> names;
  DIR* entries = opendir(folder.c_str());
  while (const dirent* entry = entries ? readdir(entries) : nullptr) {
    const std::string name = entry->d_name;
    if (name.size() > 3 && name.substr(name.size() - 3) == ".so") {
      names.push_back(folder + "/" + name.substr(0, name.size() - 3));
    }
  }
  if (entries) closedir(entries);
  std::sort(names.begin(), names.end());
  std::vector<Library> libraries;
  for (const std::string& name : names) {
    std::istringstream lines(ReadFile(name + ".txt"));
    std::string layout, sizes;
    std::getline(lines, layout), std::getline(lines, sizes);
    libraries.push_back({ReadFile(name + ".so"), layout, Integers(sizes)});
  }
  return libraries;
}

ffi::DataType Named(const std::string& name) {
  const std::pair<const char*, ffi::DataType> types[] = {
      {"bool", ffi::PRED},   {"int32", ffi::S32},   {"float16", ffi::F16},  {"bfloat16", ffi::BF16},
      {"float32", ffi::F32}, {"float64", ffi::F64}, {"complex64", ffi::C64}};
  for (const auto& [known, type] : types) {
    if (name == known) return type;
  }
  std::fprintf(stderr, "hostile: no dtype %s\n", name.c_str());
  std::exit(2);
}

Call Elementwise(const Library& library) {
  Call call;
  bool results = false;
  const size_t end = library.layout.find(';');
  std::istringstream words(library.layout.substr(0, end));
  const std::vector<int64_t> masks = Integers(library.layout.substr(end + 1));
  for (std::string word; words >> word;) {
    if (word == "->") {
      results = true;
      continue;
    }
    Array array{Named(word), {}};
    const size_t rank = library.sizes.size();
    for (size_t d = 0; d < rank; ++d) {
      const bool has = results || masks[call.args.size()] >> (rank - 1 - d) & 1;
      if (has) array.dims.push_back(library.sizes[d]);
    }
    (results ? call.rets : call.args).push_back(array);
  }
  call.attributes = {Numbers<uint8_t>("image", {library.image.begin(), library.image.end()}),
                     Text("digest", normfuse::Sha256(library.image.data(), library.image.size())),
                     Text("layout", library.layout), Numbers("sizes", library.sizes)};
  return call;
}

// ---------------------------------------------------------------- CUDA launches

Call CudaLaunch(Random& random) {
  const int64_t n = 300;  // one image for all: what it is told to read is its own affair
  const std::vector<ffi::DataType> types = {ffi::F32, ffi::BF16, ffi::F32};
  Call call{{{types[0], {n}}, {types[1], {n}}}, {{types[2], {n}}}, {}};
  std::string image = "other 8\nkernel";
  for (const auto* arrays : {&call.args, &call.rets}) {
    for (const Array& array : *arrays) image += " 8:" + std::to_string(array.Bytes());
  }
  image += " 8 4 8";
  call.attributes = {Numbers<uint8_t>("image", {image.begin(), image.end()}),
                     Text("digest", normfuse::Sha256(image.data(), image.size())),
                     Text("dtypes", "float32 bfloat16 -> float32"),
                     Numbers<int64_t>("elements", {n, n, n}),
                     Text("kernel", "kernel"),
                     Numbers<int64_t>("grid", {n, 1, 1}),
                     Numbers<int64_t>("block", {32, 1, 1}),
                     Numbers<int64_t>("cluster", {random.Once(2) ? 1 : 16, 1, 1}),
                     Scalar<int64_t>("shared", random.Once(2) ? 0 : 100000),
                     Numbers<int64_t>("ints", {n}),
                     Numbers<float>("floats", {0.5f}),
                     Numbers<double>("doubles", {0.5})};
  return call;
}

// ---------------------------------------------------------------- all of them

std::vector<Target> Targets(const std::vector<Library>& libraries) {
  std::vector<Target> targets = {
      {"normfuse_norm_forward", Execute(NormfuseNormForward), NormForward},
      {"normfuse_norm_row_statistics", Execute(NormfuseNormRowStatistics), NormRowStatistics},
      {"normfuse_norm_apply", Execute(NormfuseNormApply), NormApply},
      {"normfuse_norm_backward", Execute(NormfuseNormBackward), NormBackward},
      {"normfuse_norm_row_dots", Execute(NormfuseNormRowDots), NormRowDots},
      {"normfuse_norm_backward_apply", Execute(NormfuseNormBackwardApply), NormBackwardApply},
      {"normfuse_quantize_amax", Execute(NormfuseQuantizeAmax), QuantizeAmax},
      {"normfuse_quantize_cast", Execute(NormfuseQuantizeCast), QuantizeCast},
      {"normfuse_launch",
       {{NormfuseLaunchInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE},
        {NormfuseLaunchInitialize, XLA_FFI_ExecutionStage_INITIALIZE},
        {NormfuseLaunchExecute, XLA_FFI_ExecutionStage_EXECUTE}},
       CudaLaunch},
  };
  if (!libraries.empty()) {
    targets.push_back({"normfuse_elementwise", Execute(NormfuseElementwise),
                       [&](Random& random) { return Elementwise(random.Of(libraries)); }});
  }
  return targets;
}

// Runs every stage; returns the first error's message, or "".
std::string RunStages(Runtime& runtime, const Target& target, const Call& call, Random& random) {
  std::string message;
  for (const Stage& stage : target.stages) {
    if (message.empty()) message = runtime.Run(stage, call, random);
  }
  if (runtime.state != nullptr) normfuse::cuda::LaunchTypeInfo()->deleter(runtime.state);
  runtime.state = nullptr;
  return message;
}

// An image with one bit flipped is refused, as long as no other of its digest has been loaded.
int CountDamagedImagesTaken(Runtime& runtime, const Target& target, Random& random) {
  int taken = 0;
  for (int i = 0; i < 50; ++i) {
    Call call = target.call(random);
    for (Attribute& attribute : call.attributes) {
      if (attribute.name != "image") continue;
      attribute.bytes[random.Below(static_cast<int64_t>(attribute.bytes.size()))] ^= 1 << (i % 8);
      taken += RunStages(runtime, target, call, random).empty();
    }
  }
  return taken;
}

int Main(const std::string& folder, int calls) {
  const std::vector<Library> libraries = Libraries(folder);
  normfuse::cuda::LaunchTypeId()->type_id = 1;  // XLA would register it
  Runtime runtime;
  Random random;
  int wrong = 0;
  for (const Target& target : Targets(libraries)) {
    const int taken = CountDamagedImagesTaken(runtime, target, random);
    int failed = 0, refused = 0;
    for (int i = 0; i < calls; ++i) {
      const Call call = target.call(random);
      const std::string message = RunStages(runtime, target, call, random);
      if (!message.empty() && failed++ == 0) {
        std::fprintf(stderr, "%s: %s\n", target.name.c_str(), message.c_str());
      }
      const Call mutated = Mutated(call, target.call(random), random);
      refused += !RunStages(runtime, target, mutated, random).empty();
    }
    std::printf("%s: %d calls, %d failed; %d hostile ones refused; %d damaged images taken\n",
                target.name.c_str(), calls, failed, refused, taken);
    wrong += failed + taken;
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace hostile

int main(int argc, char** argv) {
  return argc == 3 ? hostile::Main(argv[1], std::atoi(argv[2])) : 2;
}
