// SPDX-License-Identifier: Apache-2.0
//
// confidence: raw logits to conditional acceptance and survival (eq. 7), one launch.
//
// A request has 16 lanes, one a draft position: each computes its c_k in double through the shared
// exp, then all of them walk the product in ascending order by shuffles, so that a_k has the bits
// of the sequential product of the CPU backend whatever the batch is.
//
// Traffic: 12 bytes a position (logit in, c and a out), at most 8,192 positions: 96 KB, 0.02 us of
// an H200's memory. The floor is the launch itself, about 2 us; inside a chain of launches the
// kernel is expected to take as long as an empty one. Engines with the drafter's own head get
// the logit from markov_loop, which forms it for nothing.
#ifndef DSPARK_CUDA_CONFIDENCE_KERNEL_CUH_
#define DSPARK_CUDA_CONFIDENCE_KERNEL_CUH_

#include "core/survival.h"
#include "cuda/prim/platform.h"

namespace dspark::cuda {

constexpr int kConfidenceLanes = DSPARK_MAX_GAMMA;  // lanes of one request
constexpr int kConfidenceThreads = 128;
constexpr int kConfidenceRequests = kConfidenceThreads / kConfidenceLanes;

static_assert(32 % kConfidenceLanes == 0, "a request's lanes lie in one warp");

__global__ void __launch_bounds__(kConfidenceThreads)
    confidence_kernel(const __grid_constant__ dspark_confidence_params p) {
  const int k = static_cast<int>(threadIdx.x) % kConfidenceLanes;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kConfidenceRequests +
                    static_cast<int>(threadIdx.x) / kConfidenceLanes;
  const bool active = r < p.num_requests && (p.active == nullptr || p.active[r] != 0);
  const bool mine = active && k < p.gamma;  // every lane takes part in the shuffles

  int32_t status = 0;
  const float c = mine ? conditional_acceptance(p, r, k, &status) : 1.0f;
  float product = 1.0f;
  for (int j = 0; j < p.gamma; ++j) {
    const float factor = __shfl_sync(0xffffffffu, c, j, kConfidenceLanes);
    if (j <= k) product *= factor;
  }
  for (int step = kConfidenceLanes / 2; step > 0; step /= 2) {
    status |= __shfl_xor_sync(0xffffffffu, status, step, kConfidenceLanes);
  }
  if (!mine) return;
  p.conditional[r * p.gamma + k] = c;
  p.survival[r * p.gamma + k] = product;
  if (k == 0) p.status[r] = status;
}

}  // namespace dspark::cuda

#endif  // DSPARK_CUDA_CONFIDENCE_KERNEL_CUH_
