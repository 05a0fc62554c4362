// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/mbarrier.h (mbarrier.cpp).
#ifndef DSPARK_TESTS_SIMT_PRIM_MBARRIER_H_
#define DSPARK_TESTS_SIMT_PRIM_MBARRIER_H_

#include "simt/cuda.h"

namespace dspark::simt {

void mbarrier_init(uint64_t* barrier, uint32_t count, Site site);
void mbarrier_init_fence();
void mbarrier_invalidate(uint64_t* barrier, Site site);
void mbarrier_arrive(uint64_t* barrier, uint32_t bytes, Site site);
void mbarrier_wait(uint64_t* barrier, uint32_t parity, Site site);

}  // namespace dspark::simt

namespace dspark::prim {

inline void mbarrier_init(uint64_t* barrier, uint32_t count, DSPARK_SIMT_SITE) {
  simt::mbarrier_init(barrier, count, site);
}
inline void mbarrier_init_fence(DSPARK_SIMT_SITE) {
  if (!simt::left_out("mbarrier_init_fence", site)) simt::mbarrier_init_fence();
}
inline void mbarrier_invalidate(uint64_t* barrier, DSPARK_SIMT_SITE) {
  simt::mbarrier_invalidate(barrier, site);
}
inline void mbarrier_arrive(uint64_t* barrier, DSPARK_SIMT_SITE) {
  if (!simt::left_out("mbarrier_arrive", site)) simt::mbarrier_arrive(barrier, 0, site);
}
inline void mbarrier_expect(uint64_t* barrier, uint32_t bytes, DSPARK_SIMT_SITE) {
  simt::mbarrier_arrive(barrier, bytes, site);
}
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity, DSPARK_SIMT_SITE) {
  if (!simt::left_out("mbarrier_wait", site)) simt::mbarrier_wait(barrier, parity, site);
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_MBARRIER_H_
