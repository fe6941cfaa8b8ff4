// What the text of a scalar function (native/scalar.py) may call besides CUDA's own functions.
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

// 1 / (1 + exp(-x))
template <typename T>
__device__ inline T sigmoid_of(T x) {
  return quotient(T(1), T(1) + T(exp(-x)));
}

// log(1 + exp(x)), where exp(x) may overflow
template <typename T>
__device__ inline T softplus_of(T x) {
  return (x > T(0) ? x : T(0)) + T(log1p(exp(x > T(0) ? -x : x)));
}
