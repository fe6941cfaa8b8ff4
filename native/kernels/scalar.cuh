// Functions that the text of a scalar function may call, in addition to CUDA's own.
#pragma once

#include "machine.cuh"

// a / b, by the reciprocal that the machine approximates to about two units in the last place.
__device__ inline float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}
__device__ inline double quotient(double a, double b) { return a / b; }

// exp(-x), where it would overflow a large number: sigmoid_of and sigmoid_slope share it. If
// APPROXIMATE (all arrays are of 16 bits) by the machine's own instruction, off by 2 + |x| units in
// the last place.
__device__ inline float exp_of_minus(float x) {
#if APPROXIMATE && defined(__CUDA_ARCH__)
  return fminf(__expf(-x), 1e37f);
#else
  return fminf(expf(-x), 1e37f);
#endif
}
__device__ inline double exp_of_minus(double x) { return fmin(exp(-x), 1e300); }

// 1 / (1 + exp(-x))
template <typename T>
__device__ inline T sigmoid_of(T x) {
  return quotient(T(1), T(1) + exp_of_minus(x));
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
