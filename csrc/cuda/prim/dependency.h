// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch: a kernel launched with LaunchConfig::programmatic may start while
// the one before it in the stream still runs. What it does before grid_dependency_wait() must not
// touch anything that the kernel before writes or still reads.
#ifndef DSPARK_CUDA_PRIM_DEPENDENCY_H_
#define DSPARK_CUDA_PRIM_DEPENDENCY_H_

#include "cuda/prim/hopper.h"

#ifdef DSPARK_SIMT
#include "simt/prim_dependency.h"
#else

namespace dspark::prim {

// Before sm_90 there is no early start, so both have nothing to do: no trap here.

/// Wait until the kernels before are complete and their writes visible (PTX ISA,
/// "griddepcontrol.wait"). Returns at once in a launch without the attribute.
__device__ __forceinline__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Allow the next kernel to start once all CTAs have said so or left (PTX ISA,
/// "griddepcontrol.launch_dependents").
__device__ __forceinline__ void grid_dependency_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_DEPENDENCY_H_
