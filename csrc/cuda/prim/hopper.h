// SPDX-License-Identifier: Apache-2.0
//
// What the wrappers of Hopper's instructions share (mbarrier.h, bulk.h, wgmma.h, cluster.h,
// dependency.h). A translation unit is compiled for several architectures; a wrapper exists for all
// of them, and traps where the instruction does not: the launcher never chooses such a kernel
// there.
#ifndef DSPARK_CUDA_PRIM_HOPPER_H_
#define DSPARK_CUDA_PRIM_HOPPER_H_

#include "cuda/prim/platform.h"

// sm_90 and later: mbarriers that count bytes, bulk copies, clusters, griddepcontrol.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DSPARK_ASM_SM90(...) asm volatile(__VA_ARGS__)
#else
#define DSPARK_ASM_SM90(...) __trap()
#endif

// sm_90a alone: wgmma.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DSPARK_ASM_SM90A(...) asm volatile(__VA_ARGS__)
#else
#define DSPARK_ASM_SM90A(...) __trap()
#endif

// True in the passes that have them; elsewhere a branch that needs them is left out.
#if defined(DSPARK_SIMT) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define DSPARK_HAS_BULK 1
#else
#define DSPARK_HAS_BULK 0
#endif

// True in the passes that compile a kernel for wgmma; elsewhere such a kernel's body is left out.
#if defined(DSPARK_SIMT) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DSPARK_HAS_WGMMA 1
#else
#define DSPARK_HAS_WGMMA 0
#endif

#endif  // DSPARK_CUDA_PRIM_HOPPER_H_
