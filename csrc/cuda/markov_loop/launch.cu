// SPDX-License-Identifier: Apache-2.0
#include "core/families.h"
#include "core/problems.h"

namespace dspark::cuda {

dspark_status markov_loop_workspace(const dspark_markov_loop_params&, size_t*) {
  return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                       "dspark_markov_loop: this build has no CUDA kernel of it");
}

dspark_status markov_loop(const dspark_markov_loop_params&, void*, void*) {
  return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                       "dspark_markov_loop: this build has no CUDA kernel of it");
}

}  // namespace dspark::cuda
