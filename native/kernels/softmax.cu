// The softmax along rows of FEATURES logits: its statistics, and a gradient in the logits' place.
//
//   c = softcap · tanh(z / softcap) (or z)    most = max_j c_j    sum = Σ_j exp(c_j - most)
//   picked = Σ_j t_j · c_j
//   g_j = (a · exp(c_j - most) - b · t_j) · dc_j/dz_j
//
// with the target t_j = [j = label], or if SMOOTHING t_j = rest · [j = label] + share.
//
//   z, g               (rows, FEATURES)  Z_TYPE, G_TYPE; g may be where z is
//   label              (rows,)           int; one that is no column matches none, and picks 0
//   most, sum, picked  (rows,)           COMPUTE_TYPE   results if STATISTICS; else most is an
//                                                       operand
//   weight             (rows,)           COMPUTE_TYPE   if STATISTICS and GRADIENT: then
//                                                       b = weight, a = weight / sum,
//                                                       0 where label <= IGNORED and weight is 0
//   a, b               (rows,)           COMPUTE_TYPE   if GRADIENT alone
//
// A row is one block's, or one cluster's, which has BATCH of its CHUNKS vectors in registers at a
// time: all of them, so that the row is read once; or it is read again, the last batch first, from
// the L2 cache. Rows whose a and b are 0 have zeros, whatever their logits are.
#include "row.cuh"
#include "softmax.cuh"

// The larger number; with a NaN, the other operand.
__device__ inline float larger(float x, float y) { return fmaxf(x, y); }
__device__ inline double larger(double x, double y) { return fmax(x, y); }

// A maximum, and the sum of exponentials of what was below it. Finite, so that differences are, and
// the product with log2 e is.
struct Sum {
  Compute most = sizeof(Compute) == 4 ? Compute(-2e38) : Compute(-1e308);
  Compute sum = 0;
  Compute picked = 0;  // if SMOOTHING

  __device__ void raise(Compute top) {
    sum *= exponential(most - top, 0);
    most = top;
  }

  __device__ void merge(Compute other_most, Compute other_sum) {
    raise(larger(most, other_most));
    sum += other_sum * exponential(other_most - most, 0);
  }

  template <int kLanes>
  __device__ void merge_lanes() {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      const Compute other_most = __shfl_xor_sync(0xffffffffu, most, offset);
      merge(other_most, __shfl_xor_sync(0xffffffffu, sum, offset));
      if constexpr (SMOOTHING) picked += __shfl_xor_sync(0xffffffffu, picked, offset);
    }
  }
};

constexpr int kNumbers = SMOOTHING ? 3 : 2;

class RowTotals : public RowSums<Compute, kNumbers> {
 public:
  using RowSums<Compute, kNumbers>::RowSums;

  // Returns the sum of all threads of the row, in every one of them.
  __device__ Sum operator()(Sum mine) {
    mine.merge_lanes<(ROW_THREADS < 32 ? ROW_THREADS : 32)>();
    if constexpr (!kShared) return mine;
    Values values{{mine.most, mine.sum}};
    if constexpr (SMOOTHING) values.at[kNumbers - 1] = mine.picked;
    send(values);
    receive();
    Sum all;
    for (int i = threadIdx.x % 32; i < kSlots; i += 32) {
      all.merge(posted_[i], posted_[kSlots + i]);
      if constexpr (SMOOTHING) all.picked += posted_[2 * kSlots + i];
    }
    all.merge_lanes<32>();
    return all;
  }
};

static_assert(CHUNKS % BATCH == 0, "batches are whole");

using Batch = Packed<Z_TYPE, VECTOR>[BATCH];

__device__ inline void load_batch(const Z_TYPE* row, int first, bool aligned, Batch& batch) {
#pragma unroll
  for (int i = 0; i < BATCH; ++i) {
    batch[i] = {};
    if (!inside(first + i)) continue;
    const Z_TYPE* from = row + column(first + i);
    const bool whole = VECTOR == 1 || aligned;
    batch[i] = whole ? load_packed<VECTOR, true>(from) : load_elements<VECTOR>(from);
  }
}

// clang-format off
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(const Z_TYPE* z, const int* labels,
           IF_NOT(STATISTICS, const Compute* mosts, const Compute* as, const Compute* bs,)
           IF(STATISTICS, IF(GRADIENT, const Compute* weights,))
           IF(GRADIENT, G_TYPE* g,)
           IF(STATISTICS, Compute* mosts, Compute* sums, Compute* picked,)
           long long rows, Compute softcap, Compute rest, Compute share) {
  // clang-format on
  bool aligned = aligned_16(z) && FEATURES * sizeof(Z_TYPE) % 16 == 0;
  IF(GRADIENT, aligned = aligned && aligned_16(g) && FEATURES * sizeof(G_TYPE) % 16 == 0);
  IF(STATISTICS, RowTotals row_sum(shared_memory()));
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const Z_TYPE* const from = z + row * FEATURES;
    const int label = labels[row];
    Batch batch;

#if STATISTICS
    Sum sum;
    for (int first = 0; first < CHUNKS; first += BATCH) {
      load_batch(from, first, aligned, batch);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (!inside(first + i)) continue;
        const Vector c = capped(batch[i], softcap);
        Compute top = sum.most;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) top = larger(top, c.at[k]);
        sum.raise(top);
        const Compute scaled_top = scaled(top);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) sum.sum += exponential(c.at[k], scaled_top);
        const int at = label - column(first + i);
        if constexpr (SMOOTHING) {
#pragma unroll
          for (int k = 0; k < VECTOR; ++k) sum.picked += (share + (k == at ? rest : 0)) * c.at[k];
        } else if (at >= 0 && at < VECTOR) {
#pragma unroll
          for (int k = 0; k < VECTOR; ++k) {
            if (k == at) picked[row] = c.at[k];
          }
        }
      }
    }
    sum = row_sum(sum);
    const Compute most = sum.most;
    if (row_thread() == 0 && slice() == 0) {
      mosts[row] = most;
      sums[row] = sum.sum;
      if constexpr (SMOOTHING) {
        picked[row] = sum.picked;
      } else if (label < 0 || label >= FEATURES) {
        picked[row] = 0;
      }
    }
#else
    const Compute most = mosts[row];
#endif

#if GRADIENT
#if STATISTICS
    const Compute b = weights[row];
    const bool is_finite = sum.sum > 0 && sum.sum - sum.sum == 0;
    const bool is_zero = b == 0 && (is_finite || label <= IGNORED);  // else 0 · NaN
    const Compute a = is_zero ? 0 : b / sum.sum;
#else
    const Compute a = as[row], b = bs[row];
#endif
    const bool counts = !(a == 0 && b == 0);
    const Compute scaled_most = scaled(most);
    G_TYPE* const to = g + row * FEATURES;
    for (int first = CHUNKS - BATCH; first >= 0; first -= BATCH) {
      if (!STATISTICS || first != CHUNKS - BATCH) load_batch(from, first, aligned, batch);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (!inside(first + i)) continue;
        Vector out{};
        if (counts) {
          const int at = label - column(first + i);
          out = gradient(batch[i], a, b, scaled_most, at, softcap, rest, share);
        }
        store_chunk(to, first + i, aligned, narrow_all<G_TYPE>(out));
      }
    }
#endif
  }
  IF(STATISTICS, row_sum.finish());
}
