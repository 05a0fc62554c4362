// SPDX-License-Identifier: Apache-2.0
//
// The pointwise half of the gated and the rnn head (core/heads.h) over r units.
//
// Included only by cpu/simd/markov_loop_loops.cpp.
#ifndef DSPARK_CPU_SIMD_MARKOV_HEADS_H_
#define DSPARK_CPU_SIMD_MARKOV_HEADS_H_

#include <stdint.h>

#include "core/heads.h"

namespace dspark::cpu::DSPARK_SIMD {

static void gate(const float* raw, const float* e, float* inner, int32_t n) {
  for (int32_t i = 0; i < n; ++i) inner[i] = gate_unit(raw[i], e[i]);
}

static void recur(const float* raw, float* state, float* inner, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    state[i] = next_state(raw[i], raw[n + i], state[i]);
    inner[i] = output_unit(raw[2 * n + i]);
  }
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_MARKOV_HEADS_H_
