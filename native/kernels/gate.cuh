// The gate of a gated norm: activation(z), which multiplies the norm's input (GATE_BEFORE) or its
// result (GATE_AFTER). It is silu(z) = z · sigmoid(z), or sigmoid(z) if GATE_SIGMOID.
// Kernels whose macros do not name a gate have none.
#pragma once

#ifndef GATE_BEFORE
#define GATE_BEFORE 0
#endif
#ifndef GATE_AFTER
#define GATE_AFTER 0
#endif

#if GATE_BEFORE || GATE_AFTER
#define HAS_GATE 1
#include "scalar.cuh"
#include "vector.cuh"

template <typename T>
__device__ inline T gate_of(T z) {
  return sigmoid_of(z) IF_NOT(GATE_SIGMOID, *z);
}

// Its derivative.
template <typename T>
__device__ inline T gate_slope(T z) {
  return IF_NOT(GATE_SIGMOID, sigmoid_of(z) + z*) sigmoid_slope(z);
}
#else
#define HAS_GATE 0
#endif
