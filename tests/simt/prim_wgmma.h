// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/wgmma.h (wgmma.cpp). The operands are read at the wait, the last
// moment that the architecture allows, and the accumulators hold garbage until then.
#ifndef DSPARK_TESTS_SIMT_PRIM_WGMMA_H_
#define DSPARK_TESTS_SIMT_PRIM_WGMMA_H_

#include "simt/cuda.h"

namespace dspark::simt {

enum class MatrixType { kBf16, kF16, kS8 };

/// One wgmma of one thread; `d` are its `columns / 2` accumulators. With `a` the thread's registers
/// of A are there, and B is MN-major.
struct Wgmma {
  MatrixType type;
  int columns;
  uint64_t desc_a, desc_b;
  bool accumulate;
  void* d;
  Site site;
  const uint32_t* a = nullptr;
  uint32_t a_then[4] = {};  // when it was issued
};
void wgmma_issue(const Wgmma& operation);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending, Site site);
void wgmma_hold(const void* d, Site site);
uint64_t wgmma_descriptor(const void* tile, uint32_t leading_bytes, Site site);

}  // namespace dspark::simt

namespace dspark::prim {

inline void wgmma_fence(DSPARK_SIMT_SITE) {
  if (!simt::left_out("wgmma_fence", site)) simt::wgmma_fence();
}
inline void wgmma_commit() { simt::wgmma_commit(); }
template <int kPending>
void wgmma_wait(DSPARK_SIMT_SITE) {
  if (!simt::left_out("wgmma_wait", site)) simt::wgmma_wait(kPending, site);
}
template <class T, int kCount>
void wgmma_hold(T (&d)[kCount], DSPARK_SIMT_SITE) {
  simt::wgmma_hold(d, site);
}
inline uint64_t wgmma_descriptor(const void* tile, DSPARK_SIMT_SITE) {
  return simt::wgmma_descriptor(tile, 16, site);
}
inline uint64_t wgmma_descriptor_mn(const void* tile, uint32_t tile_bytes, DSPARK_SIMT_SITE) {
  return simt::wgmma_descriptor(tile, tile_bytes, site);
}
inline uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

template <int N>
void wgmma_bf16(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, bool accumulate = true,
                DSPARK_SIMT_SITE) {
  simt::wgmma_issue({simt::MatrixType::kBf16, N, desc_a, desc_b, accumulate, d, site});
}
template <int N>
void wgmma_f16(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, bool accumulate = true,
               DSPARK_SIMT_SITE) {
  simt::wgmma_issue({simt::MatrixType::kF16, N, desc_a, desc_b, accumulate, d, site});
}
template <int N>
void wgmma_bf16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t desc_b, bool accumulate = true,
                DSPARK_SIMT_SITE) {
  simt::wgmma_issue({simt::MatrixType::kBf16, N, 0, desc_b, accumulate, d, site, a});
}
template <int N>
void wgmma_f16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t desc_b, bool accumulate = true,
               DSPARK_SIMT_SITE) {
  simt::wgmma_issue({simt::MatrixType::kF16, N, 0, desc_b, accumulate, d, site, a});
}
template <int N>
void wgmma_s8(int32_t (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, bool accumulate = true,
              DSPARK_SIMT_SITE) {
  simt::wgmma_issue({simt::MatrixType::kS8, N, desc_a, desc_b, accumulate, d, site});
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_WGMMA_H_
