// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/bulk.h (bulk.cpp). Between a copy's start and the end of the
// mbarrier's phase the destination holds garbage, whenever the bytes arrive.
#ifndef DSPARK_TESTS_SIMT_PRIM_BULK_H_
#define DSPARK_TESTS_SIMT_PRIM_BULK_H_

#include "simt/hopper.h"

namespace dspark::simt {

void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, Site site);
/// The box at `corner` of an array of `rank` dimensions.
void tensor_load(void* shared, const prim::TensorMap& map, uint64_t* barrier, uint32_t rank,
                 const int32_t (&corner)[4], Site site);
void bulk_prefetch(const void* global, uint32_t bytes, Site site);

}  // namespace dspark::simt

namespace dspark::prim {

inline void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                      CacheHint, DSPARK_SIMT_SITE) {
  simt::bulk_load(shared, global, bytes, barrier, site);
}
inline void bulk_prefetch_l2(const void* global, uint32_t bytes, DSPARK_SIMT_SITE) {
  simt::bulk_prefetch(global, bytes, site);
}
inline void prefetch_tensor_map(const TensorMap&) {}
inline void tensor_load_2d(void* shared, const TensorMap& map, uint64_t* barrier, int32_t x,
                           int32_t y, CacheHint, DSPARK_SIMT_SITE) {
  simt::tensor_load(shared, map, barrier, 2, {x, y, 0, 0}, site);
}
inline void tensor_load_4d(void* shared, const TensorMap& map, uint64_t* barrier, int32_t x,
                           int32_t y, int32_t z, int32_t w, CacheHint, DSPARK_SIMT_SITE) {
  simt::tensor_load(shared, map, barrier, 4, {x, y, z, w}, site);
}
inline void fence_proxy_async(DSPARK_SIMT_SITE) {
  if (!simt::left_out("fence_proxy_async", site)) simt::proxy_fence();
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_BULK_H_
