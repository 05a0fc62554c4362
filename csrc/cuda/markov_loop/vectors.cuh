// SPDX-License-Identifier: Apache-2.0
//
// The r-vectors that W2 multiplies: rows of W1 (vanilla), or the head's inner vectors, which
// heads.cuh leaves in the workspace.
#ifndef DSPARK_CUDA_MARKOV_LOOP_VECTORS_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_VECTORS_CUH_

#include "core/dtype.h"
#include "cuda/markov_loop/args.h"
#include "cuda/markov_loop/shared.cuh"

namespace dspark::cuda::markov {

/// W1[x_{k-1}] of a row, element j; 0 where x_{k-1} is no row of W1.
__device__ __forceinline__ float embedding(const Params& p, const Shared& s, int32_t row,
                                           int32_t j) {
  const int32_t id = s.previous[row];
  return known(p, id) ? load_f32(p.w1, p.w1_dtype, id * p.w1_stride + j) : 0.0f;
}

/// A float of the workspace that another CTA wrote during this launch: past L1.
__device__ __forceinline__ float load_shared_f32(const float* x) {
  return float_from_bits(prim::ld_relaxed(reinterpret_cast<const uint32_t*>(x)));
}

/// Element j of what W2 multiplies for a row.
__device__ __forceinline__ float vector_element(const Args& args, const Shared& s, int32_t row,
                                                int32_t j) {
  const Params& p = args.p;
  if (p.head == DSPARK_HEAD_VANILLA) return embedding(p, s, row, j);
  return load_shared_f32(args.work.inner + int64_t{row} * p.rank + j);
}

/// Sum over the 16 lanes of a half-warp by halves (8, 4, 2, 1): the order of the CPU backend.
__device__ __forceinline__ float sum_half_warp(float x) {
  for (int d = 8; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_VECTORS_CUH_
