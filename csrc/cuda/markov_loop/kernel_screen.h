// SPDX-License-Identifier: Apache-2.0
//
// The kernels of the exact greedy screen (kernel_screen.cu): a file of their own to compile.
#ifndef DSPARK_CUDA_MARKOV_LOOP_KERNEL_SCREEN_H_
#define DSPARK_CUDA_MARKOV_LOOP_KERNEL_SCREEN_H_

#include "cuda/markov_loop/args.h"

namespace dspark::cuda::markov {

/// The kernel of a configuration whose source is kScreen.
Kernel screen_kernel(const Config& c);

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_KERNEL_SCREEN_H_
