// SPDX-License-Identifier: Apache-2.0
//
// What the emulations of Hopper's primitives share.
#ifndef DSPARK_TESTS_SIMT_HOPPER_H_
#define DSPARK_TESTS_SIMT_HOPPER_H_

#include "simt/runtime.h"

namespace dspark::simt {

// ---- mbarriers that count the bytes of copies (mbarrier.cpp)
// --------------------------------------

/// A copy starts: is the barrier there, and known to the copy engine? Returns its phase.
uint64_t mbarrier_copy_started(uint64_t* barrier, Site site);
/// The copy's bytes have landed, and with them what `agent` did.
void mbarrier_copy_landed(uint64_t* barrier, uint64_t phase, uint32_t bytes,
                          const check::AgentPtr& agent, Site site);

// ---- the async proxy (proxy.cpp)
// ------------------------------------------------------------------
//
// Shared memory as copy engine and tensor core see it. An ordinary store reaches them only through
// fence_proxy_async() of the thread that made it (a barrier between the two is the race checker's
// business).

/// The running thread has stored to shared memory: called by the checked build for every store.
void proxy_ordinary_store(const void* data, size_t bytes);
/// fence_proxy_async() of the running thread.
void proxy_fence();
/// The async proxy reads or overwrites: an error where a store waits for its fence.
void proxy_async_access(const void* data, size_t bytes, const char* what, Site site);

}  // namespace dspark::simt

#endif  // DSPARK_TESTS_SIMT_HOPPER_H_
