// SPDX-License-Identifier: Apache-2.0
//
// The draft law on the M largest base logits, on CUDA: what launch.cu calls with topk_support > 0.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TOPK_H_
#define DSPARK_CUDA_MARKOV_LOOP_TOPK_H_

#include <stddef.h>

#include "dspark/markov_loop.h"

namespace dspark::cuda::topk {

size_t workspace(const dspark_markov_loop_params& p);
dspark_status run(const dspark_markov_loop_params& p, void* scratch, void* stream);

}  // namespace dspark::cuda::topk

#endif  // DSPARK_CUDA_MARKOV_LOOP_TOPK_H_
