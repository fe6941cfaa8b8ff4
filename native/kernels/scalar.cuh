// Functions that the text of a scalar function may call, in addition to CUDA's own.
#pragma once

#include "machine.cuh"

__device__ inline double reciprocal(double x) { return 1 / x; }

// exp(-x), where it would overflow a large number: sigmoid_of and sigmoid_slope share it. If
// APPROXIMATE (all arrays are of 16 bits) by the machine's own instruction, off by 2 + |x| units in
// the last place.
__device__ inline float exp_of_minus(float x) {
  return fminf(APPROXIMATE ? exp2_of(-1.44269504f * x) : expf(-x), 1e37f);
}
__device__ inline double exp_of_minus(double x) { return fmin(exp(-x), 1e300); }

// 1 / (1 + exp(-x))
template <typename T>
__device__ inline T sigmoid_of(T x) {
  return reciprocal(T(1) + exp_of_minus(x));
}

// The derivative of sigmoid_of, s (1 - s), without cancellation.
template <typename T>
__device__ inline T sigmoid_slope(T x) {
  const T s = sigmoid_of(x);
  return exp_of_minus(x) * s * s;
}

// log(1 + exp(x)), where exp(x) may overflow
template <typename T>
__device__ inline T softplus_of(T x) {
  return (x > T(0) ? x : T(0)) + T(log1p(exp(x > T(0) ? -x : x)));
}

// The normal distribution's density exp(-x²/2) / √(2π), and its share below x.
//
// If APPROXIMATE they share an exponential, and the share beyond |x| is the density times Mills'
// ratio, a polynomial of a reciprocal that is off by 5e-6 of it. CUDA's erfc has more digits than
// 16 bits hold, and takes longer than to read and write them.
template <typename T>
__device__ inline T normal_density(T x) {
  return T(0.39894228040143268) * T(exp(T(-0.5) * x * x));
}
template <typename T>
__device__ inline T normal_below(T x) {
  return T(0.5) * T(erfc(T(-0.70710678118654752) * x));
}
#if APPROXIMATE
__device__ inline float normal_density(float x) {
  return exp2_of(fmaf(-0.72134752f * x, x, -1.32574806f));
}
__device__ inline float normal_below(float x) {
  constexpr float kRatio[] = {-0.185312168f, 0.452319704f, 0.0394689855f,
                              0.334457045f,  0.301902091f, 0.310472666f};
  const float w = reciprocal(fmaf(0.31f, fabsf(x), 1.0f));
  float ratio = kRatio[0];
  for (int i = 1; i < 6; ++i) ratio = fmaf(ratio, w, kRatio[i]);
  const float beyond = normal_density(x) * ratio * w;
  return x < 0.0f ? beyond : 1.0f - beyond;
}
#endif
