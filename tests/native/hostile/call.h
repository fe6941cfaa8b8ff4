// Calls of FFI handlers without XLA: frames made by hand, whose arrays have exactly the memory that
// their shapes say, so that AddressSanitizer sees every access beyond them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace hostile {

namespace ffi = ::xla::ffi;

struct Random {
  std::mt19937_64 engine{20240607};

  uint64_t Bits() { return engine(); }
  int64_t Below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }
  bool Once(int64_t in) { return Below(in) == 0; }
  template <typename T>
  const T& Of(const std::vector<T>& some) {
    return some[Below(static_cast<int64_t>(some.size()))];
  }
};

struct Array {
  ffi::DataType dtype;
  std::vector<int64_t> dims;

  int64_t Elements() const {
    int64_t count = 1;
    for (int64_t n : dims) count = n == 0 ? 0 : count * n;
    return count;
  }
  int64_t Bytes() const {
    const int64_t width = static_cast<int64_t>(ffi::ByteWidth(dtype));
    return Elements() * (width > 0 ? width : 1);
  }
};

// A scalar, an array or a string.
struct Attribute {
  std::string name;
  XLA_FFI_AttrType type;
  ffi::DataType dtype;
  std::vector<char> bytes;
};

template <typename T>
constexpr ffi::DataType kType = std::is_same_v<T, bool>      ? ffi::PRED
                                : std::is_same_v<T, uint8_t> ? ffi::U8
                                : std::is_same_v<T, int64_t> ? ffi::S64
                                : std::is_same_v<T, float>   ? ffi::F32
                                                             : ffi::F64;

template <typename T>
Attribute Scalar(std::string name, T value) {
  const char* bytes = reinterpret_cast<const char*>(&value);
  return {std::move(name), XLA_FFI_AttrType_SCALAR, kType<T>, {bytes, bytes + sizeof(T)}};
}

template <typename T>
Attribute Numbers(std::string name, const std::vector<T>& values) {
  std::vector<char> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return {std::move(name), XLA_FFI_AttrType_ARRAY, kType<T>, std::move(bytes)};
}

inline Attribute Text(std::string name, const std::string& text) {
  return {std::move(name), XLA_FFI_AttrType_STRING, ffi::U8, {text.begin(), text.end()}};
}

struct Call {
  std::vector<Array> args, rets;
  std::vector<Attribute> attributes;
};

struct Stage {
  XLA_FFI_Handler* handler;
  XLA_FFI_ExecutionStage stage;
};

// Plays XLA to a handler. One call at a time; its tasks may outlive it.
class Runtime {
 public:
  Runtime() {
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Work(); });
    api_.struct_size = sizeof(api_);
    api_.api_version = {sizeof(XLA_FFI_Api_Version), nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    api_.XLA_FFI_Error_Create = [](auto* args) {
      return reinterpret_cast<XLA_FFI_Error*>(new std::string(args->message));
    };
    api_.XLA_FFI_Error_Destroy = [](auto* args) {
      delete reinterpret_cast<std::string*>(args->error);
    };
    api_.XLA_FFI_Stream_Get = [](auto* args) -> XLA_FFI_Error* {
      args->stream = Of(args->ctx);
      return nullptr;
    };
    api_.XLA_FFI_DeviceOrdinal_Get = [](auto* args) -> XLA_FFI_Error* {
      args->device_ordinal = 0;
      return nullptr;
    };
    api_.XLA_FFI_State_Set = [](auto* args) -> XLA_FFI_Error* {
      Of(args->ctx)->state = args->state;
      return nullptr;
    };
    api_.XLA_FFI_State_Get = [](auto* args) -> XLA_FFI_Error* {
      args->state = Of(args->ctx)->state;
      return nullptr;
    };
    api_.XLA_FFI_ThreadPool_NumThreads = [](auto* args) -> XLA_FFI_Error* {
      *args->num_threads = kThreads;
      return nullptr;
    };
    api_.XLA_FFI_ThreadPool_Schedule = [](auto* args) -> XLA_FFI_Error* {
      Of(args->ctx)->Schedule([task = args->task, data = args->data] { task(data); });
      return nullptr;
    };
  }

  ~Runtime() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void* state = nullptr;  // the call site's, made by its first stage

  // Runs one stage of a call; returns the error's message, or "".
  std::string Run(const Stage& stage, const Call& call, Random& random) {
    std::vector<Memory> memory;
    std::vector<XLA_FFI_Buffer> buffers;
    std::vector<std::vector<int64_t>> shapes;  // copies: a handler must not write to them
    for (const auto* arrays : {&call.args, &call.rets}) {
      for (const Array& array : *arrays) {
        shapes.push_back(array.dims);
        memory.push_back(Allocate(array.Bytes(), random));
        buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
                           static_cast<XLA_FFI_DataType>(array.dtype), memory.back().get(),
                           static_cast<int64_t>(array.dims.size()), shapes.back().data()});
      }
    }
    std::vector<void*> args, rets;
    for (size_t i = 0; i < buffers.size(); ++i) {
      (i < call.args.size() ? args : rets).push_back(&buffers[i]);
    }
    std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
    Attributes attributes(call.attributes);

    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api_;
    frame.ctx = reinterpret_cast<decltype(frame.ctx)>(this);
    frame.stage = stage.stage;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()),
                  arg_types.data(), args.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()),
                  ret_types.data(), rets.data()};
    if (stage.stage == XLA_FFI_ExecutionStage_INSTANTIATE) frame.args.size = frame.rets.size = 0;
    frame.attrs = attributes.frame();
    auto* error = reinterpret_cast<std::string*>(stage.handler(&frame));
    const std::string message = error == nullptr ? "" : *error + " ";
    delete error;
    return message;
  }

 private:
  static constexpr int kThreads = 3;
  using Memory = std::unique_ptr<void, decltype(&std::free)>;

  template <typename Context>
  static Runtime* Of(Context* context) {
    return reinterpret_cast<Runtime*>(context);
  }

  static Memory Allocate(int64_t bytes, Random& random) {
    void* data = nullptr;  // null for no bytes, as in XLA
    if (bytes > 0 && posix_memalign(&data, 64, bytes) != 0) std::abort();
    char* to = static_cast<char*>(data);
    for (int64_t i = 0; i < bytes; i += 8) {
      const uint64_t bits = random.Bits();
      std::memcpy(to + i, &bits, std::min<int64_t>(8, bytes - i));
    }
    return Memory(data, &std::free);
  }

  // Sorted by name, as XLA gives them; each in memory of its own.
  class Attributes {
   public:
    explicit Attributes(std::vector<Attribute> attributes) : attributes_(std::move(attributes)) {
      std::stable_sort(attributes_.begin(), attributes_.end(),
                       [](const Attribute& a, const Attribute& b) { return a.name < b.name; });
      for (Attribute& attribute : attributes_) {
        attribute.bytes.shrink_to_fit();
        char* data = attribute.bytes.empty() ? nullptr : attribute.bytes.data();
        const auto dtype = static_cast<XLA_FFI_DataType>(attribute.dtype);
        const size_t size = attribute.bytes.size();
        names_.push_back({attribute.name.data(), attribute.name.size()});
        types_.push_back(attribute.type);
        scalars_.push_back({dtype, data});
        arrays_.push_back(
            {dtype, size / std::max<size_t>(1, ffi::ByteWidth(attribute.dtype)), data});
        texts_.push_back({data, size});
      }
      for (size_t i = 0; i < attributes_.size(); ++i) {
        name_pointers_.push_back(&names_[i]);
        void* values[] = {&arrays_[i], nullptr, &scalars_[i], &texts_[i]};
        values_.push_back(values[types_[i] - XLA_FFI_AttrType_ARRAY]);
      }
    }

    XLA_FFI_Attrs frame() {
      return {XLA_FFI_Attrs_STRUCT_SIZE,
              nullptr,
              static_cast<int64_t>(types_.size()),
              types_.data(),
              name_pointers_.data(),
              values_.data()};
    }

   private:
    std::vector<Attribute> attributes_;
    std::vector<XLA_FFI_ByteSpan> names_, texts_;
    std::vector<XLA_FFI_AttrType> types_;
    std::vector<XLA_FFI_Scalar> scalars_;
    std::vector<XLA_FFI_Array> arrays_;
    std::vector<XLA_FFI_ByteSpan*> name_pointers_;
    std::vector<void*> values_;
  };

  void Schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return over_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  XLA_FFI_Api api_{};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool over_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hostile
