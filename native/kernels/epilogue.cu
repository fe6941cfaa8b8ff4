// The epilogue of a dense layer's product, and its derivative, in one pass over memory:
//
//   y = activation(z + bias) · up
//
//   dz = dy · up · activation'(z + bias)    dup = dy · activation(z + bias)    dbias = Σ_rows dz
//
//   dy, z, up, y, dz, dup, value  (rows, columns)      DY_TYPE, Z_TYPE, UP_TYPE, ...
//   bias                          (columns,)           BIAS_TYPE, if HAS_BIAS
//   partial                       (gridDim.y, columns) COMPUTE_TYPE  dbias of each block's rows
//
// The text of `activation` and `activation_derivative` comes before this file. GRADIENT chooses the
// second line, HAS_UP whether there is an up, WITH_DBIAS and WITH_VALUE (y again) what else is
// written.
//
// A block has BLOCK_X vectors of VECTOR columns and goes through the rows BLOCK_Y at a time, UNROLL
// of those on their way together; without a bias an array is one long row. dz, dup and value may be
// where z, up and dy are: each thread has read what it overwrites. Every block adds its rows in
// order, and column_sum.cu adds the blocks in order: the result does not depend on timing.
#include "scalar.cuh"
#include "vector.cuh"

using Compute = COMPUTE_TYPE;
using Vector = Wide<Compute, VECTOR>;

#define VALUE_AT(k) activation(wide_z.at[k]) IF(HAS_UP, *wide_up.at[k])

constexpr int kThreads = BLOCK_X * BLOCK_Y;
IF(WITH_DBIAS, constexpr int kColumns = BLOCK_X * VECTOR);

template <typename T>
__device__ inline Packed<T, VECTOR> load(const T* from, bool aligned) {
  return VECTOR == 1 || aligned ? load_packed<VECTOR, true>(from) : load_elements<VECTOR>(from);
}

template <typename T>
__device__ inline void store(T* to, const Vector& values, bool aligned) {
  const auto packed = narrow_all<T>(values);
  if (VECTOR == 1 || aligned) {
    // Not in the place of what was read, forward: GELU alone takes 243 µs so on an H200, and 370
    // with ordinary stores (16384 x 14336 bfloat16).
    store_packed<VECTOR, GRADIENT ? Store::kPlain : Store::kEvicted>(to, packed);
  } else {
    store_elements<VECTOR>(to, packed);
  }
}

// clang-format off
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    KERNEL(IF(GRADIENT, const DY_TYPE* dy,)
           const Z_TYPE* z, IF(HAS_UP, const UP_TYPE* up,) IF(HAS_BIAS, const BIAS_TYPE* bias,)
           IF(GRADIENT, Z_TYPE* dz, IF(HAS_UP, UP_TYPE* dup,))
           IF(WITH_DBIAS, Compute* partial,)
           IF(WITH_VALUE, VALUE_TYPE* value,)
           IF_NOT(GRADIENT, Y_TYPE* y,)
           long long rows, long long columns) {
  // clang-format on
  bool aligned = IF(GRADIENT, aligned_16(dy, z, dz)) IF_NOT(GRADIENT, aligned_16(z, y));
  IF(HAS_UP, aligned = aligned && aligned_16(up));
  IF(HAS_UP, IF(GRADIENT, aligned = aligned && aligned_16(dup)));
  IF(WITH_VALUE, aligned = aligned && aligned_16(value));
  const int thread_x = threadIdx.x % BLOCK_X, thread_y = threadIdx.x / BLOCK_X;
  const long long column = (blockIdx.x * 1LL * BLOCK_X + thread_x) * VECTOR;
  const bool inside = column < columns;

#if HAS_BIAS
  Vector shift{};
  if (inside) shift = widen_all<Compute>(load_elements<VECTOR>(bias + column));
#endif
  IF(WITH_DBIAS, Vector sums{});
  const long long step = gridDim.y * 1LL * BLOCK_Y;
  for (long long row = blockIdx.y * 1LL * BLOCK_Y + thread_y; row < rows; row += UNROLL * step) {
    Packed<Z_TYPE, VECTOR> zs[UNROLL];
    IF(HAS_UP, Packed<UP_TYPE, VECTOR> ups[UNROLL]);
    IF(GRADIENT, Packed<DY_TYPE, VECTOR> dys[UNROLL]);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (!inside || row + i * step >= rows) continue;
      const long long at = (row + i * step) * columns + column;
      zs[i] = load(z + at, aligned);
      IF(HAS_UP, ups[i] = load(up + at, aligned));
      IF(GRADIENT, dys[i] = load(dy + at, aligned));
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (!inside || row + i * step >= rows) continue;
      const long long at = (row + i * step) * columns + column;
      Vector wide_z = widen_all<Compute>(zs[i]), out;
      [[maybe_unused]] Vector more;
      IF(HAS_UP, const Vector wide_up = widen_all<Compute>(ups[i]));
      IF(GRADIENT, const Vector wide_dy = widen_all<Compute>(dys[i]));
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        IF(HAS_BIAS, wide_z.at[k] += shift.at[k]);
        [[maybe_unused]] const Compute x = wide_z.at[k];
#if GRADIENT
        const Compute dh = wide_dy.at[k] IF(HAS_UP, *wide_up.at[k]);
        out.at[k] = dh * activation_derivative(x);
        IF(HAS_UP, more.at[k] = wide_dy.at[k] * activation(x));
#else
        out.at[k] = VALUE_AT(k);
#endif
        IF(WITH_DBIAS, sums.at[k] += out.at[k]);
      }
      IF_NOT(GRADIENT, store(y + at, out, aligned));
      IF(GRADIENT, store(dz + at, out, aligned));
      IF(GRADIENT, IF(HAS_UP, store(dup + at, more, aligned)));
#if WITH_VALUE
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        more.at[k] = VALUE_AT(k);
      }
      store(value + at, more, aligned);
#endif
    }
  }
#if WITH_DBIAS
  Compute* tile = reinterpret_cast<Compute*>(shared_memory());  // BLOCK_Y rows of kColumns
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) {
    tile[thread_y * kColumns + thread_x * VECTOR + k] = sums.at[k];
  }
  __syncthreads();
  for (int at = threadIdx.x; at < kColumns; at += kThreads) {
    const long long to = blockIdx.x * 1LL * kColumns + at;
    if (to >= columns) break;
    Compute sum = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_Y; ++i) sum += tile[i * kColumns + at];
    partial[blockIdx.y * columns + to] = sum;
  }
#endif
}
