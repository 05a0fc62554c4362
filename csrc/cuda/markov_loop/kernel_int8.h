// SPDX-License-Identifier: Apache-2.0
//
// The kernels of the full law with an int8 W2 (kernel_int8.cu): a file of their own to compile.
#ifndef DSPARK_CUDA_MARKOV_LOOP_KERNEL_INT8_H_
#define DSPARK_CUDA_MARKOV_LOOP_KERNEL_INT8_H_

#include "cuda/markov_loop/args.h"

namespace dspark::cuda::markov {

/// The kernel of a configuration whose source is kInt or kImma.
Kernel int8_kernel(const Config& c);

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_KERNEL_INT8_H_
