// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/barrier.h.
#ifndef DSPARK_TESTS_SIMT_PRIM_BARRIER_H_
#define DSPARK_TESTS_SIMT_PRIM_BARRIER_H_

#include "simt/cuda.h"

namespace dspark::prim {

inline void barrier_sync(int id, int threads, DSPARK_SIMT_SITE) {
  if (!simt::left_out("barrier_sync", site)) simt::named_barrier(id, threads, true, site);
}
inline void barrier_arrive(int id, int threads, DSPARK_SIMT_SITE) {
  if (!simt::left_out("barrier_arrive", site)) simt::named_barrier(id, threads, false, site);
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_BARRIER_H_
