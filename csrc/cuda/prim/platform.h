// SPDX-License-Identifier: Apache-2.0
//
// The language that kernels are written in. nvcc reads CUDA C++; with DSPARK_SIMT, g++ reads the
// same text and takes CUDA's names (threadIdx, __syncthreads, __shfl_sync, atomicAdd, uint4, ...)
// from tests/simt, which runs kernels on the CPU and checks them.
//
// A kernel source obeys four rules, so that one text serves both:
//   * PTX appears in csrc/cuda/prim alone, each wrapper with an emulation;
//   * a kernel starts through prim::launch (launch.h), never through <<<>>>;
//   * dynamic shared memory comes from DSPARK_DYNAMIC_SHARED;
//   * a loop that waits for another thread calls prim::ld_acquire or prim::ld_relaxed in each turn.
#ifndef DSPARK_CUDA_PRIM_PLATFORM_H_
#define DSPARK_CUDA_PRIM_PLATFORM_H_

#include <stddef.h>
#include <stdint.h>

#ifdef DSPARK_SIMT
#include "simt/cuda.h"
#else

#include <cuda_runtime.h>

/// Declare `name`, an unsigned char* to the launch's dynamic shared memory, 1024-byte aligned.
#define DSPARK_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

namespace dspark::prim {

/// The 32-bit address of something in shared memory, as PTX's .shared operands want it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_PLATFORM_H_
