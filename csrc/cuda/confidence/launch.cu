// SPDX-License-Identifier: Apache-2.0
#include "core/families.h"
#include "core/problems.h"

namespace dspark::cuda {

dspark_status confidence_workspace(const dspark_confidence_params&, size_t*) {
  return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                       "dspark_confidence: this build has no CUDA kernel of it");
}

dspark_status confidence(const dspark_confidence_params&, void*, void*) {
  return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                       "dspark_confidence: this build has no CUDA kernel of it");
}

}  // namespace dspark::cuda
