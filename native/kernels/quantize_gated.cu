// FP8 codes of an activation of raw products, or of its gradients, as they lie and transposed:
//
//   h  = activation(a) · up                  a = a_scale · raw_a, up = up_scale · raw_up
//   da = dh · up · activation'(a)            dh = dh_scale · raw_dh
//   dup = dh · activation(a)
//
//   raw_dh, raw_a, raw_up  (rows, columns)   X_TYPE: float, __nv_bfloat16 or __half
//   scales                 (count,)          float: of raw_dh, raw_a, raw_up in this order
//   bounds                 (rows_b, count_b) float: the largest of a row bounds |h|; or |da|, |dup|
//   q, qt, scale           as in quantize_cast.cu, of h; or of da, then of dup
//
// The text of `activation` and `activation_derivative` comes before this file. GRADIENT chooses the
// last two lines, HAS_UP whether there is an up, HAS_Q and HAS_QT which layouts are written.
#include "fp8_tile.cuh"
#include "scalar.cuh"

using Element = X_TYPE;

constexpr int kInputs = 1 + GRADIENT + HAS_UP;  // [dh], a, [up]
constexpr int kOutputs = GRADIENT && HAS_UP ? 2 : 1;

using Loaded = Packed<Element, kColumns>[kInputs][BATCH];

struct Inputs {
  const Element* at[kInputs];
};
struct Outputs {
  Fp8 *q, *qt;
  float* scale;
};

// Computes the values to encode from a row of the inputs.
__device__ inline void compute(const Wide<float, kColumns> (&in)[kInputs],
                               Wide<float, kColumns> (&out)[kOutputs]) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const float a = in[GRADIENT].at[k];
    const float up = HAS_UP ? in[kInputs - 1].at[k] : 1.0f;
#if GRADIENT
    const float dh = in[0].at[k];
    out[0].at[k] = dh * up * activation_derivative(a);
#if HAS_UP
    out[1].at[k] = dh * activation(a);
#endif
#else
    out[0].at[k] = activation(a) * up;
#endif
  }
}

__device__ inline uint4* slots_of(int output) {
  return reinterpret_cast<uint4*>(shared_memory()) + output * 4 * kCodeSlots * kThreads;
}

template <bool kVectors>
__device__ inline void run(const Inputs& inputs, const float* scales, const float* bounds,
                           const Outputs (&outputs)[kOutputs], long long rows, long long columns,
                           long long count, int group, bool backwards) {
  __shared__ int warps[kOutputs][kThreads / 32];
  const Tile first = tile_of(rows, columns, group, backwards);
  const Part part = part_of(first, rows, columns);
  const auto load = [&](int begin, Loaded& loaded) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
#pragma unroll
      for (int n = 0; n < kInputs; ++n) {
        loaded[n][i] = load_row<kVectors>(inputs.at[n], part, begin + i, columns);
      }
    }
  };
  Loaded next;
  load(0, next);
  // While the first elements are on their way.
  Scale by[kOutputs];
  float given[kInputs];
#pragma unroll
  for (int n = 0; n < kInputs; ++n) given[n] = scales[n];
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    by[o] = scale_of(largest_of<kThreads>(bounds + o * count, count, warps[o]));
    if (blockIdx.x == 0 && threadIdx.x == 0) *outputs[o].scale = by[o].scale;
  }
  Codes codes[kOutputs];
#pragma unroll 1
  for (int step = 0; step < kRows; step += kStep) {
#pragma unroll
    for (int begin = 0; begin < kStep; begin += BATCH) {
      Loaded now;
      memcpy(now, next, sizeof(now));
      if (step + begin + BATCH < kRows) load(step + begin + BATCH, next);
#pragma unroll
      for (int i = begin; i < begin + BATCH; ++i) {
        Wide<float, kColumns> in[kInputs], out[kOutputs];
#pragma unroll
        for (int n = 0; n < kInputs; ++n) {
          in[n] = widen_all<float>(now[n][i - begin]);
#pragma unroll
          for (int k = 0; k < kColumns; ++k) in[n].at[k] *= given[n];
        }
        compute(in, out);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) out[o].at[k] *= by[o].multiplier;
          encode(out[o], codes[o][i % 4]);
          if (HAS_Q && i % 2 == 1) {
            store_pair<kVectors>(codes[o], i % 4 - 1, step + i - 1, outputs[o].q, part, columns);
          }
          if (HAS_QT && i % 4 == 3) {
            place_group<kCodeSlots>(codes[o], (step + i) / 4, slots_of(o));
          }
        }
      }
    }
  }
#if HAS_QT
  __syncthreads();
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    store_tile<kVectors, kCodeSlots>(slots_of(o), outputs[o].qt, first, rows, columns);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) quantize_gated(
#if GRADIENT
    const Element* dh,
#endif
    const Element* a,
#if HAS_UP
    const Element* up,
#endif
    const float* scales, const float* bounds,
#if HAS_Q
    Fp8* q,
#endif
#if HAS_QT
    Fp8* qt,
#endif
    float* scale,
#if GRADIENT && HAS_UP
#if HAS_Q
    Fp8* q_up,
#endif
#if HAS_QT
    Fp8* qt_up,
#endif
    float* scale_up,
#endif
    long long rows, long long columns, long long count, long long group, long long backwards) {
#if !HAS_Q
  Fp8* q = nullptr;
  Fp8* q_up = nullptr;
#endif
#if !HAS_QT
  Fp8* qt = nullptr;
  Fp8* qt_up = nullptr;
#endif
  const Inputs inputs = {{
#if GRADIENT
      dh,
#endif
      a,
#if HAS_UP
      up,
#endif
  }};
  const Outputs outputs[kOutputs] = {
      {q, qt, scale},
#if GRADIENT && HAS_UP
      {q_up, qt_up, scale_up},
#endif
  };
  bool aligned = VECTORS;
#pragma unroll
  for (int n = 0; n < kInputs; ++n) aligned = aligned && aligned_16(inputs.at[n]);
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    aligned = aligned && aligned_16(outputs[o].q) && aligned_16(outputs[o].qt);
  }
  if (aligned) {
    run<true>(inputs, scales, bounds, outputs, rows, columns, count, group, backwards);
  } else {
    run<false>(inputs, scales, bounds, outputs, rows, columns, count, group, backwards);
  }
}
