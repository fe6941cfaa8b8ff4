// Runs CUDA C++ on the CPU: takes the place of native/kernels/machine.cuh, the one file that talks
// to the machine. Every CUDA thread is a fibre, and changes place with others at barriers only; all
// threads of a cluster live at the same time. Asynchronous copies happen only when they are
// waited for, and their destinations hold NaN until then: a missing wait or a slot that is filled
// again too early shows in the result. Shared memory begins as NaN as well. A launch whose copies
// land across the sectors of shared memory, so that a GPU would fetch most of them twice, fails.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#undef __device__
#undef __global__
#undef __shared__
#undef __launch_bounds__
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

constexpr int kLine = 128;  // bytes: to which shared memory is aligned

struct Dim3 {
  unsigned x, y, z;
};

namespace emulator {

constexpr size_t kStackBytes = 48 << 10;

// A barrier that can be passed again and again.
struct Barrier {
  int expected = 0, arrived = 0;
  long generation = 0;

  long Arrive() {
    const long mine = generation;
    if (++arrived == expected) {
      arrived = 0;
      ++generation;
    }
    return mine;
  }
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Warp {
  Barrier barrier;
  unsigned char slots[2][32][8];
};

struct Block {
  Dim3 index;
  Barrier barrier;
  std::vector<unsigned char> shared;
  std::vector<Warp> warps;
};

struct Cluster {
  Barrier barrier;
  std::vector<Block> blocks;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  Dim3 index;
  bool done = false;
  int parity = 0;  // the next exchange within the warp has this parity
  long cluster_ticket = 0;
  std::deque<std::vector<Copy>> groups;  // committed copies, oldest first
  std::vector<Copy> open;
};

// Sectors of global memory whose halves two threads copied, and how many landed in two sectors of
// shared memory: all of them where the copies of a block begin in the middle of one, half where
// rows do. (Where one thread copies both, its layout may want them apart.) Each is copied once.
struct Sectors {
  struct Half {
    uintptr_t to;
    const Thread* by;
  };
  std::map<uintptr_t, Half> half;
  long whole = 0, split = 0;

  void Add(const void* shared, const void* global, const Thread* by) {
    const uintptr_t to = reinterpret_cast<uintptr_t>(shared) / 32;
    const auto [at, first] =
        half.try_emplace(reinterpret_cast<uintptr_t>(global) / 32, Half{to, by});
    if (first) return;
    if (at->second.by != by) ++(at->second.to == to ? whole : split);
    half.erase(at);
  }
};

inline Sectors sectors;
inline ucontext_t scheduler;
inline Thread* current = nullptr;
inline Cluster* cluster = nullptr;
inline Dim3 grid_dim, block_dim;
inline long progress = 0;
inline void (*body)(void*) = nullptr;
inline void* body_argument = nullptr;

inline void Yield() { swapcontext(&current->context, &scheduler); }

inline void WaitFor(const Barrier& barrier, long ticket) {
  while (barrier.generation == ticket) Yield();
  ++progress;
}

inline void Enter() {
  body(body_argument);
  current->done = true;
  ++progress;
  swapcontext(&current->context, &scheduler);
}

inline void Die(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

// Lets each thread of a warp run to its next barrier; how many ended.
inline int RunWarp(std::vector<Thread>& fibres, size_t begin, size_t end) {
  int ended = 0;
  for (size_t i = begin; i < end; ++i) {
    Thread& thread = fibres[i];
    if (thread.done) continue;
    current = &thread;
    swapcontext(&scheduler, &thread.context);
    if (!thread.done) continue;
    ++ended;
    for (const auto& group : thread.groups) {
      if (!group.empty()) Die("a thread ended with copies on their way");
    }
  }
  return ended;
}

// Runs one warp for as long as it can, then another, in random order: warps drift apart as far as
// the barriers let them.
inline void Run(std::vector<Thread>& fibres) {
  const size_t threads = block_dim.x * block_dim.y * block_dim.z;
  std::vector<std::pair<size_t, size_t>> warps;
  for (size_t block = 0; block < fibres.size(); block += threads) {
    for (size_t t = 0; t < threads; t += 32) {
      warps.push_back({block + t, block + std::min(t + 32, threads)});
    }
  }
  std::mt19937 random(static_cast<unsigned>(fibres.size()));
  for (size_t left = fibres.size(); left > 0;) {
    const long before = progress;
    std::shuffle(warps.begin(), warps.end(), random);
    for (auto [begin, end] : warps) {
      for (long last = -1; last != progress;) {
        last = progress;
        left -= RunWarp(fibres, begin, end);
      }
    }
    if (progress == before) Die("deadlock: a barrier that not every thread reaches");
  }
}

// Runs all blocks of one cluster, whose first block is (x, y, z).
inline void RunCluster(Dim3 first, Dim3 size, int shared_bytes) {
  const int threads = block_dim.x * block_dim.y * block_dim.z;
  Cluster here;
  cluster = &here;
  here.blocks.resize(size.x * size.y * size.z);
  here.barrier.expected = threads * static_cast<int>(here.blocks.size());
  std::vector<Thread> fibres(here.barrier.expected);
  size_t at = 0;
  for (size_t b = 0; b < here.blocks.size(); ++b) {
    Block& block = here.blocks[b];
    const unsigned n = static_cast<unsigned>(b);
    block.index = {first.x + n % size.x, first.y + n / size.x % size.y,
                   first.z + n / (size.x * size.y)};
    block.barrier.expected = threads;
    block.shared.assign(shared_bytes + kLine, 0xff);
    block.warps.resize((threads + 31) / 32);
    for (auto& warp : block.warps) warp.barrier.expected = std::min(32, threads);
    for (int t = 0; t < threads; ++t, ++at) {
      Thread& thread = fibres[at];
      thread.block = &block;
      const unsigned u = static_cast<unsigned>(t);
      thread.index = {u % block_dim.x, u / block_dim.x % block_dim.y,
                      u / (block_dim.x * block_dim.y)};
      thread.stack.reset(new char[kStackBytes]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = &scheduler;
      makecontext(&thread.context, Enter, 0);
    }
  }
  Run(fibres);
}

template <typename... A, size_t... I>
void Unpack(void (*kernel)(A...), void** parameters, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(parameters[I])...);
}

template <typename... A>
void Launch(void (*kernel)(A...), const unsigned* sizes, int shared_bytes, void** parameters) {
  struct Call {
    void (*kernel)(A...);
    void** parameters;
  } call{kernel, parameters};
  body_argument = &call;
  body = [](void* argument) {
    Call* call = static_cast<Call*>(argument);
    Unpack(call->kernel, call->parameters, std::index_sequence_for<A...>());
  };
  grid_dim = {sizes[0], sizes[1], sizes[2]};
  block_dim = {sizes[3], sizes[4], sizes[5]};
  const Dim3 size = {sizes[6], sizes[7], sizes[8]};
  sectors = {};
  for (unsigned z = 0; z < grid_dim.z; z += size.z) {
    for (unsigned y = 0; y < grid_dim.y; y += size.y) {
      for (unsigned x = 0; x < grid_dim.x; x += size.x) RunCluster({x, y, z}, size, shared_bytes);
    }
  }
  if (sectors.split > 3 * sectors.whole + 64) Die("sectors are copied across two");
}

inline unsigned char* SharedOf(const Block& block) {
  auto* bytes = const_cast<unsigned char*>(block.shared.data());
  return bytes + (kLine - reinterpret_cast<uintptr_t>(bytes) % kLine) % kLine;
}

template <typename T>
T Exchange(T value, int lane_mask) {
  const int thread = static_cast<int>(current->index.x);  // blocks are one-dimensional
  Warp& warp = current->block->warps[thread / 32];
  const int lane = thread % 32;
  auto& slots = warp.slots[current->parity];
  current->parity ^= 1;
  std::memcpy(slots[lane], &value, sizeof(T));
  WaitFor(warp.barrier, warp.barrier.Arrive());
  T other;
  std::memcpy(&other, slots[lane ^ lane_mask], sizeof(T));
  return other;
}

}  // namespace emulator

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block->index)
#define gridDim (emulator::grid_dim)
#define blockDim (emulator::block_dim)

inline void __syncthreads() {
  auto& barrier = emulator::current->block->barrier;
  emulator::WaitFor(barrier, barrier.Arrive());
}
inline void __syncwarp() {
  auto& barrier = emulator::current->block->warps[emulator::current->index.x / 32].barrier;
  emulator::WaitFor(barrier, barrier.Arrive());
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask) {
  return emulator::Exchange(value, lane_mask);
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float exp2_of(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline double rsqrt(double value) { return 1.0 / std::sqrt(value); }

template <bool kChoice, typename A, typename B>
struct ConditionalOf {
  using Type = A;
};
template <typename A, typename B>
struct ConditionalOf<false, A, B> {
  using Type = B;
};
template <bool kChoice, typename A, typename B>
using ConditionalType = typename ConditionalOf<kChoice, A, B>::Type;

template <typename T>
T kept(T value) {
  return value;
}

// By shuffles; a lane that may not use its sum has NaN.
template <typename T>
class SquaredRows {
 public:
  void add(uint4 words) {
    T elements[16 / sizeof(T)];
    std::memcpy(elements, &words, sizeof(words));
    for (T element : elements) sum_ += static_cast<float>(element) * static_cast<float>(element);
  }
  static bool has_sum() { return threadIdx.x % 4 == (sizeof(T) == 2 ? threadIdx.x % 32 / 8 : 0); }
  float sum() const {
    const float pair = sum_ + __shfl_xor_sync(0xffffffffu, sum_, 1);
    const float four = pair + __shfl_xor_sync(0xffffffffu, pair, 2);
    return has_sum() ? four : std::nanf("");
  }

 private:
  float sum_ = 0;
};

inline unsigned char* shared_memory() { return emulator::SharedOf(*emulator::current->block); }

template <int kBytes>
void copy_async(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if (reinterpret_cast<uintptr_t>(shared) % kBytes ||
      reinterpret_cast<uintptr_t>(global) % kBytes) {
    emulator::Die("misaligned copy");
  }
  std::memset(shared, 0xff, kBytes);
  if (kBytes == 16) emulator::sectors.Add(shared, global, emulator::current);
  emulator::current->open.push_back({shared, global, kBytes});
}
inline void commit_copies() {
  emulator::current->groups.push_back(std::move(emulator::current->open));
  emulator::current->open.clear();
}
template <int kPending>
void wait_copies() {
  auto& groups = emulator::current->groups;
  while (groups.size() > kPending) {
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    groups.pop_front();
  }
}

template <typename T>
T load_streaming(const T* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T)) emulator::Die("misaligned load");
  return *pointer;
}
template <typename T>
T load_overwritten(const T* pointer) {
  return load_streaming(pointer);
}
template <typename T>
void store_streaming(T* pointer, T value) {
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T)) emulator::Die("misaligned store");
  *pointer = value;
}

template <typename T>
void store_whole(T* pointer, T value) {
  store_streaming(pointer, value);
}
template <typename T>
void store_evicted(T* pointer, T value) {
  store_streaming(pointer, value);
}

inline void cluster_arrive() {
  emulator::current->cluster_ticket = emulator::cluster->barrier.Arrive();
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
  emulator::WaitFor(emulator::cluster->barrier, emulator::current->cluster_ticket);
}

// Counts the bytes that are still to come; laid out in the eight bytes of the real one.
using Inbox = unsigned long long;
struct InboxState {
  int bytes;
  short expected, round;

  void Settle() {
    if (!expected || bytes != 0) return;
    expected = 0;
    round ^= 1;
  }
};

inline void inbox_open(Inbox* inbox) { *reinterpret_cast<InboxState*>(inbox) = {0, 0, 0}; }
inline void inbox_expect(Inbox* inbox, int bytes) {
  auto* state = reinterpret_cast<InboxState*>(inbox);
  state->bytes += bytes;
  state->expected = 1;
  state->Settle();
}
inline void inbox_wait(Inbox* inbox, int parity) {
  while (reinterpret_cast<InboxState*>(inbox)->round == parity) emulator::Yield();
  ++emulator::progress;
}
template <typename T>
T* there(T* here, int rank) {
  const auto offset = reinterpret_cast<unsigned char*>(here) - shared_memory();
  return reinterpret_cast<T*>(emulator::SharedOf(emulator::cluster->blocks.at(rank)) + offset);
}
template <typename C>
void inbox_send(C* slot, Inbox* inbox, int rank, C value) {
  *there(slot, rank) = value;
  auto* state = reinterpret_cast<InboxState*>(there(inbox, rank));
  state->bytes -= sizeof(C);
  state->Settle();
}
