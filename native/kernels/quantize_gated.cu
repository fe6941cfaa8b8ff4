// FP8 codes of an activation of products and of these, or of its gradients (e4m3):
//
//   h  = activation(a) · up
//   da = dh · up · activation'(a)
//   dup = dh · activation(a)
//
//   dh         (rows, columns)   X_TYPE: float, __nv_bfloat16 or __half; if GRADIENT
//   a, up      (rows, columns)   X_TYPE; if GRADIENT codes
//   numbers                      float: if GRADIENT, what the codes of a and up are multiplied
//                                with; then bounds of the magnitudes of each output
//   q, qt, scale                 as in quantize_cast.cu, of each output
//
// The outputs are h, a and up, each q and scale. If GRADIENT they are da and dup, each q, qt and
// scale, and h once more, qt and scale: computed from codes, and where it exceeds the largest
// code's number that number.
//
// The text of `activation` and `activation_derivative` comes before this file. HAS_UP: there is an
// up, otherwise it is 1.
#include "fp8_tile.cuh"
#include "scalar.cuh"

using Element = X_TYPE;
#if GRADIENT
using Given = Fp8;
#else
using Given = Element;
#endif

constexpr int kArrays = 1 + HAS_UP, kOutputs = 1 + kArrays, kTransposed = GRADIENT ? kOutputs : 0;
constexpr int kLying = GRADIENT ? kArrays : kOutputs;  // outputs that are written as they lie

struct Inputs {
  IF(GRADIENT, const Element* dh; const float* scales;)
  const Given* at[kArrays];
};
struct Outputs {
  Fp8 *q, *qt;
  float* scale;
};

// Rows that are on their way, and one of them.
struct Loaded {
  IF(GRADIENT, Packed<Element, kColumns> dh[BATCH];)
  Packed<Given, kColumns> at[kArrays][BATCH];
};
struct Row {
  IF(GRADIENT, Wide<float, kColumns> dh;)
  Wide<float, kColumns> at[kArrays];
};

// Computes the values to encode from a row of the inputs.
__device__ inline void compute(const Row& in, Wide<float, kColumns> (&out)[kOutputs]) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const float a = in.at[0].at[k], up = HAS_UP ? in.at[kArrays - 1].at[k] : 1.0f;
    const float value = activation(a);
#if GRADIENT
    out[0].at[k] = in.dh.at[k] * up * activation_derivative(a);
    IF(HAS_UP, out[1].at[k] = in.dh.at[k] * value;)
#else
    out[1].at[k] = a;
    IF(HAS_UP, out[2].at[k] = up;)
#endif
    out[GRADIENT ? kArrays : 0].at[k] = value * up;
  }
}

__device__ inline uint4* slots_of(int output) {
  return reinterpret_cast<uint4*>(shared_memory()) + output * 4 * kCodeSlots * kThreads;
}

template <bool kVectors>
__device__ inline void run(const Inputs& inputs, const float* bounds,
                           const Outputs (&outputs)[kOutputs], long long rows, long long columns,
                           int group) {
  const Tile first = tile_of(rows, columns, group, blockIdx.x);
  const Part part = part_of(first, rows, columns);
  const auto load = [&](int begin, Loaded& loaded) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      IF(GRADIENT, loaded.dh[i] = load_row<kVectors>(inputs.dh, part, begin + i, columns);)
#pragma unroll
      for (int n = 0; n < kArrays; ++n) {
        loaded.at[n][i] = load_row<kVectors>(inputs.at[n], part, begin + i, columns);
      }
    }
  };
  const auto widened = [&](const Loaded& loaded, int i) {
    Row row;
    IF(GRADIENT, row.dh = widen_all<float>(loaded.dh[i]);)
#pragma unroll
    for (int n = 0; n < kArrays; ++n) {
#if GRADIENT
      row.at[n] = decode(loaded.at[n][i]);
      const float scale = inputs.scales[n];
#pragma unroll
      for (int k = 0; k < kColumns; ++k) row.at[n].at[k] *= scale;
#else
      row.at[n] = widen_all<float>(loaded.at[n][i]);
#endif
    }
    return row;
  };
  Loaded next;
  load(0, next);
  Scale by[kOutputs];
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    const float bound = bounds[o];
    by[o] = scale_of(bit_cast<int>(bound) & 0x7fffffff);
    if (blockIdx.x == 0 && threadIdx.x == 0) *outputs[o].scale = by[o].scale;
  }
  Codes codes[kOutputs];
#pragma unroll 1
  for (int step = 0; step < kRows; step += kStep) {
#pragma unroll
    for (int begin = 0; begin < kStep; begin += BATCH) {
      Loaded now;
      memcpy(&now, &next, sizeof(now));
      if (step + begin + BATCH < kRows) load(step + begin + BATCH, next);
#pragma unroll
      for (int i = begin; i < begin + BATCH; ++i) {
        Wide<float, kColumns> out[kOutputs];
        compute(widened(now, i - begin), out);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) out[o].at[k] *= by[o].multiplier;
          if (o < kLying) {
            encode(out[o], codes[o][i % 4]);
          } else {
            encode<true>(within(out[o]), codes[o][i % 4]);
          }
          if (o < kLying && i % 2 == 1) {
            store_pair<kVectors>(codes[o], i % 4 - 1, step + i - 1, outputs[o].q, part, columns);
          }
          if (o < kTransposed && i % 4 == 3) {
            place_group<kCodeSlots>(codes[o], (step + i) / 4, slots_of(o));
          }
        }
      }
    }
  }
#if GRADIENT
  __syncthreads();
#pragma unroll
  for (int o = 0; o < kTransposed; ++o) {
    store_tile<kVectors, kCodeSlots>(slots_of(o), outputs[o].qt, first, rows, columns);
  }
#endif
}

// clang-format off
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    quantize_gated(IF(GRADIENT, const Element* dh,)
                   const Given* a, IF(HAS_UP, const Given* up,)
                   const float* numbers,
                   IF_NOT(GRADIENT, Fp8* q_h, float* scale_h,)
                   Fp8* q_a, IF(GRADIENT, Fp8* qt_a,) float* scale_a,
                   IF(HAS_UP, Fp8* q_up, IF(GRADIENT, Fp8* qt_up,) float* scale_up,)
                   IF(GRADIENT, Fp8* qt_h, float* scale_h,)
                   long long rows, long long columns, long long group) {
  const float* bounds = numbers + GRADIENT * kArrays;
  const Inputs inputs = {IF(GRADIENT, dh, numbers,) {a, IF(HAS_UP, up)}};
  const Outputs outputs[kOutputs] = {
      IF_NOT(GRADIENT, {q_h, nullptr, scale_h},)
      {q_a, IF(GRADIENT, qt_a) IF_NOT(GRADIENT, nullptr), scale_a},
      IF(HAS_UP, {q_up, IF(GRADIENT, qt_up) IF_NOT(GRADIENT, nullptr), scale_up},)
      IF(GRADIENT, {nullptr, qt_h, scale_h})
  };
  // clang-format on
  bool aligned = VECTORS IF(GRADIENT, &&aligned_16(dh));
#pragma unroll
  for (int n = 0; n < kArrays; ++n) aligned = aligned && aligned_16(inputs.at[n]);
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    aligned = aligned && aligned_16(outputs[o].q) && aligned_16(outputs[o].qt);
  }
  if (aligned) {
    run<true>(inputs, bounds, outputs, rows, columns, group);
  } else {
    run<false>(inputs, bounds, outputs, rows, columns, group);
  }
}
