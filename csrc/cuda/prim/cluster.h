// SPDX-License-Identifier: Apache-2.0
//
// Clusters: CTAs that run at the same time on one group of SMs and see each other's shared memory.
// A CTA's shared memory exists until it exits, so a CTA that others may still read must not leave
// before a last cluster_arrive() / cluster_wait().
#ifndef DSPARK_CUDA_PRIM_CLUSTER_H_
#define DSPARK_CUDA_PRIM_CLUSTER_H_

#include "cuda/prim/hopper.h"

#ifdef DSPARK_SIMT
#include "simt/prim_cluster.h"
#else

namespace dspark::prim {

/// This CTA's number inside its cluster (PTX ISA, "Special Registers", %cluster_ctarank).
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
  DSPARK_ASM_SM90("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// CTAs in this cluster (PTX ISA, "Special Registers", %cluster_nctarank).
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size = 0;
  DSPARK_ASM_SM90("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

/// Arrive at the cluster's barrier, release (PTX ISA, "barrier.cluster"). Whole warps, every thread
/// of the cluster, each followed by one cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
  DSPARK_ASM_SM90("barrier.cluster.arrive.release.aligned;" :: : "memory");
}

/// Wait for all threads of the cluster, acquire (PTX ISA, "barrier.cluster").
__device__ __forceinline__ void cluster_wait() {
  DSPARK_ASM_SM90("barrier.cluster.wait.acquire.aligned;" :: : "memory");
}

/// The same variable of the CTA `rank` of this cluster, for ordinary loads, stores and atomics (PTX
/// ISA, "mapa").
template <class T>
__device__ __forceinline__ T* map_shared(T* own, uint32_t rank) {
  uint64_t peer = 0;
  DSPARK_ASM_SM90("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(own), "r"(rank));
  return reinterpret_cast<T*>(peer);
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_CLUSTER_H_
