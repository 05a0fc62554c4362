// SPDX-License-Identifier: Apache-2.0
//
// R * gamma <= 8192 values: no SIMD level and no threads, a scalar loop in double is at the floor
// of a call already.
#include "core/families.h"
#include "core/survival.h"

namespace dspark::cpu {

size_t confidence_workspace(const dspark_confidence_params&) { return 0; }

void confidence(const dspark_confidence_params& p, void*) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    if (p.active != nullptr && p.active[r] == 0) continue;
    int32_t status = 0;
    float product = 1.0f;
    for (int k = 0; k < p.gamma; ++k) {
      const float c = conditional_acceptance(p, r, k, &status);
      product *= c;
      p.conditional[r * p.gamma + k] = c;
      p.survival[r * p.gamma + k] = product;
    }
    p.status[r] = status;
  }
}

}  // namespace dspark::cpu
