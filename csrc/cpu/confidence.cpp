// SPDX-License-Identifier: Apache-2.0
//
// R * gamma <= 8192 values: no SIMD level and no threads, a scalar loop in double is at the floor
// of a call already.
#include "core/families.h"
#include "core/math.h"

namespace dspark::cpu {
namespace {

// sigmoid through exp of the non-positive side, so that it saturates to exactly 0 and 1.
double sigmoid(double x) {
  const double e = exp_f64(x > 0 ? -x : x);
  return x > 0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
}

float conditional_of(const dspark_confidence_params& p, int64_t r, int k, int32_t* status) {
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
  return static_cast<float>(sigmoid(static_cast<double>(x) / static_cast<double>(tau)));
}

}  // namespace

size_t confidence_workspace(const dspark_confidence_params&) { return 0; }

void confidence(const dspark_confidence_params& p, void*) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    if (p.active != nullptr && p.active[r] == 0) continue;
    int32_t status = 0;
    float product = 1.0f;
    for (int k = 0; k < p.gamma; ++k) {
      const float c = conditional_of(p, r, k, &status);
      product *= c;
      p.conditional[r * p.gamma + k] = c;
      p.survival[r * p.gamma + k] = product;
    }
    p.status[r] = status;
  }
}

}  // namespace dspark::cpu
