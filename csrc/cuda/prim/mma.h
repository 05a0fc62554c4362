// SPDX-License-Identifier: Apache-2.0
//
// Matrix products of one warp (sm_80 on). All 32 lanes call together.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA 9.7.14.5):
//   16-bit A 16 x 16: a[0] rows g, columns 2t..2t+1; a[1] rows g + 8; a[2], a[3] the same with
//     columns + 8. B 16 x 8: b[0] rows 2t..2t+1, column g; b[1] rows + 8.
//   8-bit  A 16 x 32: a[0] rows g, columns 4t..4t+3; a[1] rows g + 8; a[2], a[3] columns + 16.
//     B 32 x 8: b[0] rows 4t..4t+3, column g; b[1] rows + 16.
//   C and D 16 x 8: d[0], d[1] row g, columns 2t, 2t + 1; d[2], d[3] row g + 8.
#ifndef DSPARK_CUDA_PRIM_MMA_H_
#define DSPARK_CUDA_PRIM_MMA_H_

#include "cuda/prim/platform.h"

#ifdef DSPARK_SIMT
#include "simt/prim_mma.h"
#else

namespace dspark::prim {

/// Read four 8 x 8 matrices of 16-bit elements from shared memory: lanes 8i..8i+7 give the 16-byte
/// aligned addresses of the rows of matrix i; r[i] of a lane holds elements 2t, 2t + 1 of row g.
/// PTX ISA 9.7.14.5.15 (ldmatrix).
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

/// Four matrices, each transposed on the way: r[i] of a lane holds elements 2t, 2t + 1 of column g.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

/// As ldmatrix_x4 for two matrices; the addresses of lanes 0..15 count.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

/// D += A B, bf16 inputs, float32 sums. PTX ISA 9.7.14.5.14 (mma.m16n8k16).
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// D += A B, binary16 inputs, float32 sums. PTX ISA 9.7.14.5.14 (mma.m16n8k16).
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// D += A B, signed 8-bit inputs, exact int32 sums. PTX ISA 9.7.14.5.14 (mma.m16n8k32).
__device__ __forceinline__ void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4],
                                       const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_MMA_H_
