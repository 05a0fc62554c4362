// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/cluster.h (cluster.cpp).
#ifndef DSPARK_TESTS_SIMT_PRIM_CLUSTER_H_
#define DSPARK_TESTS_SIMT_PRIM_CLUSTER_H_

#include <type_traits>

#include "simt/cuda.h"

namespace dspark::simt {

uint32_t cluster_size();
void cluster_arrive(Site site);
void cluster_wait(Site site);
void* map_shared(void* own, uint32_t rank, Site site);

}  // namespace dspark::simt

namespace dspark::prim {

inline uint32_t cluster_size() { return simt::cluster_size(); }
inline uint32_t cluster_rank() { return blockIdx.x % simt::cluster_size(); }
inline void cluster_arrive(DSPARK_SIMT_SITE) {
  if (!simt::left_out("cluster_arrive", site)) simt::cluster_arrive(site);
}
inline void cluster_wait(DSPARK_SIMT_SITE) {
  if (!simt::left_out("cluster_wait", site)) simt::cluster_wait(site);
}
template <class T>
T* map_shared(T* own, uint32_t rank, DSPARK_SIMT_SITE) {
  return static_cast<T*>(simt::map_shared(const_cast<std::remove_const_t<T>*>(own), rank, site));
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_CLUSTER_H_
