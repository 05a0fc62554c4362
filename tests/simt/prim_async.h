// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/async.h. Between the copy's start and the wait, the destination holds
// garbage; when the bytes arrive is DSPARK_SIMT_ASYNC's choice.
#ifndef DSPARK_TESTS_SIMT_PRIM_ASYNC_H_
#define DSPARK_TESTS_SIMT_PRIM_ASYNC_H_

#include "simt/cuda.h"

namespace dspark::prim {

inline void cp_async_16(void* shared, const void* global, int src_bytes = 16, DSPARK_SIMT_SITE) {
  simt::copy_async(shared, global, 16, static_cast<unsigned>(src_bytes), site);
}
inline void cp_async_commit() { simt::commit_async_copies(); }
template <int kPending>
inline void cp_async_wait(DSPARK_SIMT_SITE) {
  if (!simt::left_out("cp_async_wait", site)) simt::wait_async_copies(kPending);
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_ASYNC_H_
