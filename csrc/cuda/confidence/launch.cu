// SPDX-License-Identifier: Apache-2.0
#include "core/families.h"
#include "cuda/confidence/kernel.cuh"
#include "cuda/prim/launch.h"

namespace dspark::cuda {

dspark_status confidence_workspace(const dspark_confidence_params&, size_t* bytes) {
  *bytes = 0;
  return ok_status();
}

dspark_status confidence(const dspark_confidence_params& p, void*, void* stream) {
  if (p.num_requests == 0) return ok_status();
  prim::LaunchConfig config{};
  config.grid = dim3((p.num_requests + kConfidenceRequests - 1) / kConfidenceRequests);
  config.block = dim3(kConfidenceThreads);
  config.stream = stream;
  return prim::launch("confidence", confidence_kernel, config, p);
}

}  // namespace dspark::cuda
