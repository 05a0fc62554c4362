// SPDX-License-Identifier: Apache-2.0
//
// The pointwise half of the gated and the rnn head, in double through the shared exp: r values a
// step, so accuracy is free. NaN stays NaN: it has to reach z and set its status bit there.
//
// Included only by cpu/simd/markov_loop_loops.cpp.
#ifndef DSPARK_CPU_SIMD_MARKOV_HEADS_H_
#define DSPARK_CPU_SIMD_MARKOV_HEADS_H_

#include <stdint.h>

#include "core/math.h"

namespace dspark::cpu::DSPARK_SIMD {

static inline double sigmoid(double x) {
  if (x != x) return x;
  const double e = exp_f64(x > 0 ? -x : x);
  return x > 0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
}

static inline double tanh_f64(double x) {
  if (x != x) return x;
  const double t = expm1_f64(x > 0 ? -2.0 * x : 2.0 * x);
  const double y = -t / (2.0 + t);
  return x > 0 ? y : -y;
}

static void gate(const float* raw, const float* e, float* inner, int32_t n) {
  for (int32_t i = 0; i < n; ++i) inner[i] = static_cast<float>(sigmoid(raw[i])) * e[i];
}

// eq. 6: the output comes from the joint vector, so from the old state.
static void recur(const float* raw, float* state, float* inner, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    const double g = sigmoid(raw[i]);
    const double next = g * state[i] + (1.0 - g) * tanh_f64(raw[n + i]);
    state[i] = static_cast<float>(next);
    inner[i] = static_cast<float>(tanh_f64(raw[2 * n + i]));
  }
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_MARKOV_HEADS_H_
