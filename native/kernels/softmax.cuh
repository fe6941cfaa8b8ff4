// Logits under a soft cap, their exponentials, and the gradient of a vector of them.
#pragma once

#include "vector.cuh"

using Compute = COMPUTE_TYPE;
using Vector = Wide<Compute, VECTOR>;

// exp(x - y), of y as `scaled` gives it.
//
// If APPROXIMATE (logits of 16 bits) a power of two: one multiply-add, and the machine's
// instruction. y · log2 e is rounded once for all x, which moves them alike and by less than the
// rounding of such logits does.
#if APPROXIMATE
constexpr float kLog2E = 1.44269504f;

__device__ inline float scaled(float y) { return kLog2E * y; }

__device__ inline float exponential(float x, float scaled_y) {
  return exp2_of(fmaf(kLog2E, x, -scaled_y));
}
#else
__device__ inline Compute scaled(Compute y) { return y; }
__device__ inline Compute exponential(Compute x, Compute y) { return exp(x - y); }
#endif

__device__ inline Vector capped(const Packed<Z_TYPE, VECTOR>& packed, Compute softcap) {
  Vector c = widen_all<Compute>(packed);
#if SOFTCAP
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) c.at[k] = softcap * tanh(c.at[k] / softcap);
#endif
  return c;
}

// (a · exp(c_k - most) - b · t_k) · dc_k/dz_k, with the target t_k = [k = at]; if SMOOTHING
// t_k = rest · [k = at] + share. `at` may lie outside of the vector.
__device__ inline Vector gradient(const Packed<Z_TYPE, VECTOR>& packed, Compute a, Compute b,
                                  Compute scaled_most, int at, Compute softcap, Compute rest,
                                  Compute share) {
  const Vector c = capped(packed, softcap);
  Vector out;
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) out.at[k] = a * exponential(c.at[k], scaled_most);
#if SMOOTHING
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) out.at[k] -= b * share;
  b *= rest;
#endif
  if (at >= 0 && at < VECTOR) {
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) out.at[k] -= k == at ? b : Compute(0);
  }
#if SOFTCAP
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) {
    const Compute ratio = c.at[k] / softcap;
    out.at[k] *= 1 - ratio * ratio;
  }
#endif
  return out;
}
