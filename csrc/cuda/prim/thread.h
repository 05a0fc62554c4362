// SPDX-License-Identifier: Apache-2.0
#ifndef DSPARK_CUDA_PRIM_THREAD_H_
#define DSPARK_CUDA_PRIM_THREAD_H_

#include "cuda/prim/platform.h"

namespace dspark::prim {

/// threadIdx.x, read anew at each call (PTX ISA, "Special Registers", %tid). What follows from it
/// is computed where it stands, instead of before a loop that has no registers to keep it in.
__device__ __forceinline__ uint32_t thread_index() {
#ifdef DSPARK_SIMT
  return threadIdx.x;
#else
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
#endif
}

}  // namespace dspark::prim

#endif  // DSPARK_CUDA_PRIM_THREAD_H_
