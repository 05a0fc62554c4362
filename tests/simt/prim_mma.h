// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/mma.h (mma.cpp). Sums of products are formed in double and rounded
// once to float32: a GPU adds in an order and a width of its own, so a kernel must not depend on
// the last bits.
#ifndef DSPARK_TESTS_SIMT_PRIM_MMA_H_
#define DSPARK_TESTS_SIMT_PRIM_MMA_H_

#include "simt/cuda.h"

namespace dspark::simt {

void load_matrices(uint32_t* r, int count, const void* row, Site site);
void load_transposed(uint32_t* r, const void* row, Site site);
void multiply_bf16(float* d, const uint32_t* a, const uint32_t* b, Site site);
void multiply_f16(float* d, const uint32_t* a, const uint32_t* b, Site site);
void multiply_s8(int32_t* d, const uint32_t* a, const uint32_t* b, Site site);

}  // namespace dspark::simt

namespace dspark::prim {

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, DSPARK_SIMT_SITE) {
  simt::load_matrices(r, 4, row, site);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, DSPARK_SIMT_SITE) {
  simt::load_transposed(r, row, site);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row, DSPARK_SIMT_SITE) {
  simt::load_matrices(r, 2, row, site);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                     DSPARK_SIMT_SITE) {
  simt::multiply_bf16(d, a, b, site);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    DSPARK_SIMT_SITE) {
  simt::multiply_f16(d, a, b, site);
}
inline void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                   DSPARK_SIMT_SITE) {
  simt::multiply_s8(d, a, b, site);
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_MMA_H_
