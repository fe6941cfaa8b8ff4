// Machine-specific code: shared memory, asynchronous copies, tensor cores, clusters of blocks,
// cache hints.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

// The same number, which the compiler has to keep: it may not compute it again in each turn of a
// loop.
__device__ inline int kept(int value) {
  asm("" : "+r"(value));
  return value;
}
__device__ inline long long kept(long long value) {
  asm("" : "+l"(value));
  return value;
}

// 2^x and 1 / x, off by about 2 units in the last place; 0 where they are below 2^-126, for which
// the compiler would add three instructions.
__device__ inline float exp2_of(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
__device__ inline float reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// The block's dynamic shared memory, aligned to a line of kLine bytes.
constexpr int kLine = 128;
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(kLine) unsigned char bytes[];
  return bytes;
}

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Begins copying kBytes (4, 8 or 16, and both pointers so aligned) from global to shared memory.
// The thread that began a copy sees its bytes after wait_copies; no register holds them meanwhile.
template <int kBytes>
__device__ inline void copy_async(void* shared, const void* global) {
  if constexpr (kBytes == 16) {  // past L1: nothing here is read twice
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "n"(kBytes)
                 : "memory");
  }
}

// Closes a group of copies; a group may be empty.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are still on their way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Read once, by the path for what nobody writes: 1 to 4 % faster than loads that mark their lines
// as the first to be evicted, and those than loads past L1 with a hint for L2 (benchmarks/results).
template <typename T>
__device__ inline T load_streaming(const T* pointer) {
  return __ldg(pointer);
}

// Read once, before a result is written in the same place: by the path above the compiler may put
// off a load until after a store.
template <typename T>
__device__ inline T load_overwritten(const T* pointer) {
  return __ldcs(pointer);
}

// Written once. Marking such lines as the first to be evicted gains nothing in most kernels.
template <typename T>
__device__ inline void store_streaming(T* pointer, T value) {
  *pointer = value;
}

// The same by an intrinsic: of a plain store of 16 bytes the compiler may make four.
template <typename T>
__device__ inline void store_whole(T* pointer, T value) {
  __stwb(pointer, value);
}

// Written once, as lines that are the first to be evicted.
template <typename T>
__device__ inline void store_evicted(T* pointer, T value) {
  __stcs(pointer, value);
}

// Adds to `sums` a warp's product of 16 rows and 8 columns, whose parts lie as the tensor cores
// have them: lane l has two elements of row l / 4 in `low`, of row l / 4 + 8 in `high`, and of
// column l / 4 in `by`. Products are exact; sums in float32, whose last digits are cut off.
#define DEFINE_MULTIPLY(T, NAME)                                                                   \
  __device__ inline void multiply(float (&sums)[4], unsigned low, unsigned high, unsigned by, T) { \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME                             \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                        \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                      \
                 : "r"(low), "r"(high), "r"(by));                                                  \
  }
DEFINE_MULTIPLY(__nv_bfloat16, "bf16")
DEFINE_MULTIPLY(__half, "f16")
#undef DEFINE_MULTIPLY

// Sums of squares of eight rows, by a warp: lane l adds words of row l / 4, so that four lanes have
// a row. Of 16-bit elements they are the diagonal of the product of the rows and themselves, which
// takes a fifth of the instructions of widening, squares and sums over lanes.
template <typename T>
class SquaredRows {
 public:
  __device__ void add(uint4 words) {
    add(words.x, words.y);
    add(words.z, words.w);
  }
  // True if this lane has its row's sum: the diagonal crosses one of a row's four lanes.
  __device__ static bool has_sum() { return threadIdx.x % 4 == threadIdx.x % 32 / 8; }
  __device__ float sum() const {
    const bool odd = threadIdx.x / 4 % 2;
    return odd ? low_[1] + high_[3] : low_[0] + high_[2];
  }

 private:
  // Each product has the squares of one of the two in half of its rows.
  __device__ void add(unsigned low, unsigned high) {
    multiply(low_, low, high, low, T{});
    multiply(high_, low, high, high, T{});
  }

  float low_[4] = {}, high_[4] = {};
};

template <>
class SquaredRows<float> {
 public:
  __device__ void add(uint4 words) {
    const unsigned each[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (unsigned word : each) sum_ += __uint_as_float(word) * __uint_as_float(word);
  }
  __device__ static bool has_sum() { return threadIdx.x % 4 == 0; }
  __device__ float sum() const {
    const float pair = sum_ + __shfl_xor_sync(0xffffffffu, sum_, 1);
    return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
  }

 private:
  float sum_ = 0;
};

#if CLUSTER > 1
// A barrier of all threads of the cluster, in two halves.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same, without waiting for what this thread has begun to read or write.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Counts bytes that other blocks send into this block's shared memory (an mbarrier). A cluster
// barrier would do, but with its release every store to global memory would have to be over first.
using Inbox = unsigned long long;

// By one thread, before a cluster barrier.
__device__ inline void inbox_open(Inbox* inbox) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(inbox)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By one thread, once for each round: how many bytes will come.
__device__ inline void inbox_expect(Inbox* inbox, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(inbox)),
      "r"(bytes)
      : "memory");
}

// Until all bytes of round 0, 1, 2, ... are there; the parity is that of the round.
__device__ inline void inbox_wait(Inbox* inbox, int parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred there; mbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;"
        "  selp.u32 %0, 1, 0, there; }"
        : "=r"(done)
        : "r"(shared_address(inbox)), "r"(parity)
        : "memory");
  }
}

// Sends a value to where `slot` is in block `rank`, counted by the inbox that is where `inbox` is.
__device__ inline void inbox_send(float* slot, Inbox* inbox, int rank, float value) {
  asm volatile(
      "{ .reg .u32 there, count;"
      "  mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 count, %1, %2;"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [count]; }" ::"r"(
          shared_address(slot)),
      "r"(shared_address(inbox)), "r"(rank), "f"(value)
      : "memory");
}
__device__ inline void inbox_send(double* slot, Inbox* inbox, int rank, double value) {
  asm volatile(
      "{ .reg .u32 there, count;"
      "  mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 count, %1, %2;"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [there], %3, [count]; }" ::"r"(
          shared_address(slot)),
      "r"(shared_address(inbox)), "r"(rank), "d"(value)
      : "memory");
}
#endif
