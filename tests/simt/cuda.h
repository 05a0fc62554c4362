// SPDX-License-Identifier: Apache-2.0
//
// CUDA's language for g++: what a kernel source sees in the place of CUDA's own headers. A CUDA
// thread is a fiber, the blocks of a grid are operating-system threads of which one runs at a time
// (runtime.h). `__shared__` variables are thread_local, hence one copy a block.
//
// Only what the kernels of csrc/cuda use is here, with the meaning that CUDA's manual gives it, and
// nothing weaker: an operation that CUDA leaves open is an error in the emulation.
#ifndef DSPARK_TESTS_SIMT_CUDA_H_
#define DSPARK_TESTS_SIMT_CUDA_H_

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simt/runtime.h"
#include "simt/vector_types.h"  // first: the runtime speaks of dim3

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (::dspark::simt::self()->thread_index)
#define blockIdx (::dspark::simt::self()->block_index)
#define blockDim (::dspark::simt::self()->block_dim)
#define gridDim (::dspark::simt::self()->grid_dim)
#define warpSize 32

#define DSPARK_DYNAMIC_SHARED(name) \
  unsigned char* name = static_cast<unsigned char*>(::dspark::simt::dynamic_shared())

#include "simt/atomics.h"
#include "simt/intrinsics.h"
#include "simt/warp.h"

namespace dspark::prim {

/// The address inside the block's shared window, as a kernel on a GPU sees it.
inline uint32_t shared_address(const void* pointer) { return simt::shared_offset(pointer); }

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_CUDA_H_
