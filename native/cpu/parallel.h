// Loops on XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace normfuse {

// One loop's state. A pool task may start after the loop is over, when nothing of the caller's
// frame is left, so it holds this by shared_ptr and calls `body_` only for an iteration it has
// claimed: the caller stays until every claimed one is done.
class Loop {
 public:
  using Body = void (*)(const void* context, int64_t i);

  Loop(int64_t count, Body body, const void* context)
      : count_(count), body_(body), context_(context) {}

  void Run() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      body_(context_, i);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load(std::memory_order_acquire) == count_; });
  }

 private:
  const int64_t count_;
  const Body body_;
  const void* const context_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

// Calls body(0) ... body(count - 1), in any order and on any thread. The caller works too and never
// waits for a task to start, so a pool that is busy, or waiting for this very call, cannot hang it.
template <typename F>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, const F& body) {
  const int64_t helpers = std::min(pool.num_threads(), count) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto call = [](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); };
  auto loop = std::make_shared<Loop>(count, call, &body);
  for (int64_t h = 0; h < helpers; ++h) pool.Schedule([loop] { loop->Run(); });
  loop->Run();
  loop->Wait();
}

}  // namespace normfuse
