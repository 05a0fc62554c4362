// SPDX-License-Identifier: Apache-2.0
//
// The kernels of tile_wgmma.cuh are compiled apart from the others (kernel_wgmma.cu).
#ifndef DSPARK_CUDA_MARKOV_LOOP_KERNEL_WGMMA_H_
#define DSPARK_CUDA_MARKOV_LOOP_KERNEL_WGMMA_H_

#include "cuda/markov_loop/args.h"

namespace dspark::cuda::markov {

/// The kernel for a configuration and a W2 of this dtype.
Kernel wgmma_kernel(const Config& c, int32_t w2_dtype);

/// Describe W2 to the copy engine, in `args.w2_map`.
dspark_status describe_w2(Args& args);

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_KERNEL_WGMMA_H_
