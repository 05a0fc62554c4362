// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory that run beside the thread (sm_80 on). PTX ISA 9.7.9.25.3.
//
// cp_async_wait() makes a thread's own copies visible to that thread; other threads see them behind
// a barrier that follows the wait.
#ifndef DSPARK_CUDA_PRIM_ASYNC_H_
#define DSPARK_CUDA_PRIM_ASYNC_H_

#include "cuda/prim/platform.h"

#ifdef DSPARK_SIMT
#include "simt/prim_async.h"
#else

namespace dspark::prim {

/// Start a copy of 16 bytes, both addresses 16-byte aligned. The bytes from `src_bytes` (0..16) on
/// become zero and are not read. cp.async.cg: through L2 only.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, int src_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(src_bytes)
               : "memory");
}

/// Close a group: the copies this thread started since the last one. cp.async.commit_group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Wait until at most the kPending youngest groups of this thread are unfinished.
/// cp.async.wait_group.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_ASYNC_H_
