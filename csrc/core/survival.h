// SPDX-License-Identifier: Apache-2.0
//
// One confidence logit to one conditional acceptance, the same bits on both backends (eq. 7).
#ifndef DSPARK_CORE_SURVIVAL_H_
#define DSPARK_CORE_SURVIVAL_H_

#include "core/math.h"
#include "dspark/confidence.h"

namespace dspark {

// sigmoid through exp of the non-positive side, so that it saturates to exactly 0 and 1.
DSPARK_HD double sigmoid_f64(double x) {
  const double e = exp_f64(x > 0 ? -x : x);
  return x > 0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
}

/// c_k of slot `k` of request `r`. A NaN counts as 0; trouble is added to `status`.
DSPARK_HD float conditional_acceptance(const dspark_confidence_params& p, int64_t r, int k,
                                       int32_t* status) {
  const float x = p.logit != nullptr ? p.logit[r * p.logit_stride + k]
                                     : p.probability[r * p.probability_stride + k];
  if (x != x) {
    *status |= DSPARK_NAN_CONFIDENCE;
    return 0.0f;
  }
  if (p.logit == nullptr) return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x;
  const float tau = p.temperature == nullptr ? 1.0f : p.temperature[k];
  if (!(tau > 0.0f) || tau - tau != 0.0f) {
    *status |= DSPARK_BAD_PARAM;
    return 0.0f;
  }
  return static_cast<float>(sigmoid_f64(static_cast<double>(x) / static_cast<double>(tau)));
}

}  // namespace dspark

#endif  // DSPARK_CORE_SURVIVAL_H_
