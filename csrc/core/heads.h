// SPDX-License-Identifier: Apache-2.0
//
// The pointwise half of the gated and the rnn head, in double through the shared exp: r values a
// step, so accuracy is free. NaN stays NaN: it has to reach z and set its status bit there.
#ifndef DSPARK_CORE_HEADS_H_
#define DSPARK_CORE_HEADS_H_

#include "core/math.h"

namespace dspark {

DSPARK_HD double sigmoid_f64(double x) {
  if (x != x) return x;
  const double e = exp_f64(x > 0 ? -x : x);
  return x > 0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
}

DSPARK_HD double tanh_f64(double x) {
  if (x != x) return x;
  const double t = expm1_f64(x > 0 ? -2.0 * x : 2.0 * x);
  const double y = -t / (2.0 + t);
  return x > 0 ? y : -y;
}

/// gated: inner = sigmoid(raw) e.
DSPARK_HD float gate_unit(float raw, float e) { return static_cast<float>(sigmoid_f64(raw)) * e; }

/// rnn (eq. 6): the next state of one unit.
DSPARK_HD float next_state(float gate, float candidate, float state) {
  const double g = sigmoid_f64(gate);
  return static_cast<float>(g * state + (1.0 - g) * tanh_f64(candidate));
}
/// rnn: what W2 multiplies; from the joint vector, so from the old state.
DSPARK_HD float output_unit(float output) { return static_cast<float>(tanh_f64(output)); }

}  // namespace dspark

#endif  // DSPARK_CORE_HEADS_H_
