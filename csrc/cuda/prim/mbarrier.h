// SPDX-License-Identifier: Apache-2.0
//
// mbarrier objects: 8 bytes of shared memory that count arrivals and the bytes of asynchronous
// copies. A phase ends when `count` arrivals and all expected bytes are in; the object then starts
// the next phase by itself. Parity: the first phase is 0, the next 1, then 0 again. Waiting for the
// parity of the phase *before* the current one returns at once, so a producer that waits for
// parity 1 passes through a fresh object.
#ifndef DSPARK_CUDA_PRIM_MBARRIER_H_
#define DSPARK_CUDA_PRIM_MBARRIER_H_

#include "cuda/prim/hopper.h"

#ifdef DSPARK_SIMT
#include "simt/prim_mbarrier.h"
#else

namespace dspark::prim {

/// Start an object at phase 0 (PTX ISA, "mbarrier.init"). One thread; the others may use it after
/// mbarrier_init_fence() by that thread and a barrier.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t count) {
  DSPARK_ASM_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                  "r"(count) : "memory");
}

/// Make the inits visible to the copy engine and to the cluster (PTX ISA, "membar / fence",
/// fence.mbarrier_init). A barrier alone orders them for ordinary accesses only.
__device__ __forceinline__ void mbarrier_init_fence() {
  DSPARK_ASM_SM90("fence.mbarrier_init.release.cluster;" :: : "memory");
}

/// End an object's life, before its memory is used otherwise (PTX ISA, "mbarrier.inval").
__device__ __forceinline__ void mbarrier_invalidate(uint64_t* barrier) {
  DSPARK_ASM_SM90("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Arrive: release.cta (PTX ISA, "mbarrier.arrive").
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  DSPARK_ASM_SM90(
      "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Expect `bytes` of asynchronous copies in this phase, and arrive (PTX ISA, "mbarrier.arrive",
/// .expect_tx).
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  DSPARK_ASM_SM90(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes) : "memory");
}

/// Wait for the end of the phase with this parity: acquire.cta (PTX ISA, "mbarrier.try_wait").
/// What the phase's copies wrote is then visible.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  DSPARK_ASM_SM90(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity) : "memory");
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_MBARRIER_H_
