// SPDX-License-Identifier: Apache-2.0
//
// Barriers of a part of the block. `id` is 1..15 (0 is __syncthreads'), `threads` a multiple of 32:
// how many take part, arrivals included. Whole warps call. PTX ISA 9.7.13.1 (barrier).
#ifndef DSPARK_CUDA_PRIM_BARRIER_H_
#define DSPARK_CUDA_PRIM_BARRIER_H_

#include "cuda/prim/platform.h"

#ifdef DSPARK_SIMT
#include "simt/prim_barrier.h"
#else

namespace dspark::prim {

/// Arrive, and wait until `threads` have arrived: their writes before it are seen behind it.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrive without waiting.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_BARRIER_H_
