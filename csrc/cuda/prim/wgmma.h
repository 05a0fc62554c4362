// SPDX-License-Identifier: Apache-2.0
//
// wgmma: a warpgroup (four warps, the first a multiple of four) multiplies A [64, K] by B [N, K]^T,
// both in shared memory, into accumulators in registers, asynchronously.
//
//   wgmma_fence(); wgmma_bf16<N>(d, a, b) ... ; wgmma_commit(); ... wgmma_wait<0>(); wgmma_hold(d);
//
// Operands are K-major: rows of 128 bytes (64 bf16 or f16, 128 int8) with the 128-byte swizzle of
// bulk.h, 8 rows to a block of 1024 bytes; the descriptor of k + 16 (k + 32 for int8) is the first
// one advanced by 32 bytes. They are read by the async proxy at any time up to the wait: a stage
// may be freed after wgmma_wait() only, and operands made by ordinary stores need
// fence_proxy_async(). Thread t of warp w holds in d[4 j + e] the row 16 w + t / 4 + 8 (e / 2) and
// the column 8 j + 2 (t % 4) + e % 2.
//
// With A in registers (16-bit types): a[0] and a[2] are two elements each of the row 16 w + t / 4,
// of the columns 2 (t % 4) and 8 + 2 (t % 4), the lower one in the lower half; a[1] and a[3] are
// those of the row 8 further down. So accumulators d[8 i .. 8 i + 7] of one product, packed in
// pairs, are A of the next one's columns from 16 i on. They too must stay as they are up to the
// wait. B is then MN-major, [K, N] as it lies: rows of 128 bytes with 64 columns, in tiles of 64
// columns (wgmma_descriptor_mn).
#ifndef DSPARK_CUDA_PRIM_WGMMA_H_
#define DSPARK_CUDA_PRIM_WGMMA_H_

#include <type_traits>

#include "cuda/prim/hopper.h"

#ifdef DSPARK_SIMT
#include "simt/prim_wgmma.h"
#else

namespace dspark::prim {

/// Order accesses of registers and shared memory before the first wgmma of a batch (PTX ISA,
/// "wgmma.fence").
__device__ __forceinline__ void wgmma_fence() {
  DSPARK_ASM_SM90A("wgmma.fence.sync.aligned;" :: : "memory");
}

/// Close a group of wgmma (PTX ISA, "wgmma.commit_group").
__device__ __forceinline__ void wgmma_commit() {
  DSPARK_ASM_SM90A("wgmma.commit_group.sync.aligned;" :: : "memory");
}

/// Wait until at most `kPending` groups are under way (PTX ISA, "wgmma.wait_group").
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  DSPARK_ASM_SM90A("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// After the wait: the compiler must not read the accumulators earlier. No instruction.
template <class T, int kCount>
__device__ __forceinline__ void wgmma_hold(T (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(d[i])::"memory");
    } else {
      asm volatile("" : "+r"(d[i])::"memory");
    }
  }
}

/// Descriptor of an operand (PTX ISA, "Matrix descriptor format"): its address, 1024 bytes between
/// blocks of 8 rows, 128-byte swizzle. `tile` is a multiple of 1024.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile) {
  constexpr uint64_t kBlockStride = static_cast<uint64_t>(1024 >> 4) << 32;
  constexpr uint64_t kSwizzle128 = static_cast<uint64_t>(1) << 62;
  constexpr uint64_t kUnused = static_cast<uint64_t>(1) << 16;  // the other stride: K fits the row
  return (shared_address(tile) & 0x3ffffu) >> 4 | kUnused | kBlockStride | kSwizzle128;
}

/// Descriptor of an MN-major B: K rows of 64 columns, `tile_bytes` to the same rows of the next 64.
/// In the table of strides (PTX ISA, "Strides", MN-major with a swizzle) the leading dimension's
/// offset is the one between such tiles, the stride dimension's the one from 8 rows of K to the
/// next 8: 1024 bytes. 16 rows further along K are 2048 bytes (wgmma_advance). `tile` is a multiple
/// of 1024.
__device__ __forceinline__ uint64_t wgmma_descriptor_mn(const void* tile, uint32_t tile_bytes) {
  constexpr uint64_t kBlockStride = static_cast<uint64_t>(1024 >> 4) << 32;
  constexpr uint64_t kSwizzle128 = static_cast<uint64_t>(1) << 62;
  return (shared_address(tile) & 0x3ffffu) >> 4 | static_cast<uint64_t>(tile_bytes >> 4) << 16 |
         kBlockStride | kSwizzle128;
}

/// The same operand, `bytes` further along K (K-major: a multiple of 32, below 128; MN-major: of
/// 2048).
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Operand lists: `c` is the constraint of one accumulator ("+f" or "+r").
#define DSPARK_D4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define DSPARK_D8(c, d, i) DSPARK_D4(c, d, i), DSPARK_D4(c, d, i + 4)
#define DSPARK_D16(c, d, i) DSPARK_D8(c, d, i), DSPARK_D8(c, d, i + 8)
#define DSPARK_D32(c, d, i) DSPARK_D16(c, d, i), DSPARK_D16(c, d, i + 16)
#define DSPARK_D64(c, d, i) DSPARK_D32(c, d, i), DSPARK_D32(c, d, i + 32)
#define DSPARK_D128(c, d, i) DSPARK_D64(c, d, i), DSPARK_D64(c, d, i + 64)
#define DSPARK_R4 "%0,%1,%2,%3"
#define DSPARK_R8 DSPARK_R4 ",%4,%5,%6,%7"
#define DSPARK_R16 DSPARK_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define DSPARK_R32 \
  DSPARK_R16       \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DSPARK_R64                                                   \
  DSPARK_R32                                                         \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DSPARK_R128                                                              \
  DSPARK_R64                                                                     \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// One instruction (PTX ISA, "wgmma.mma_async"): `count` accumulators, then the descriptors and the
// flag as operands %a, %b, %p, and what follows the flag: scales and transposes of 16-bit types.
#define DSPARK_WGMMA(shape, types, tail, count, a, b, p, c)                         \
  DSPARK_ASM_SM90A("{\n.reg .pred add;\nsetp.ne.b32 add, %" #p                      \
                   ", 0;\n"                                                         \
                   "wgmma.mma_async.sync.aligned." shape types " {" DSPARK_R##count \
                   "}, %" #a ", %" #b ", add" tail                                  \
                   ";\n}" : DSPARK_D##count(c, d, 0) : "l"(desc_a),                 \
                   "l"(desc_b), "r"(static_cast<int>(accumulate)))
#define DSPARK_WGMMA_ALL(k, types, tail, c)                           \
  static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 128); \
  if constexpr (N == 8) {                                             \
    DSPARK_WGMMA("m64n8" k, types, tail, 4, 4, 5, 6, c);              \
  } else if constexpr (N == 16) {                                     \
    DSPARK_WGMMA("m64n16" k, types, tail, 8, 8, 9, 10, c);            \
  } else if constexpr (N == 32) {                                     \
    DSPARK_WGMMA("m64n32" k, types, tail, 16, 16, 17, 18, c);         \
  } else if constexpr (N == 64) {                                     \
    DSPARK_WGMMA("m64n64" k, types, tail, 32, 32, 33, 34, c);         \
  } else {                                                            \
    DSPARK_WGMMA("m64n128" k, types, tail, 64, 64, 65, 66, c);        \
  }

// The same with A in the registers %a0 .. %a3 and an MN-major B.
#define DSPARK_WGMMA_REGISTERS(shape, types, count, a0, a1, a2, a3, b, p)           \
  DSPARK_ASM_SM90A("{\n.reg .pred add;\nsetp.ne.b32 add, %" #p                      \
                   ", 0;\n"                                                         \
                   "wgmma.mma_async.sync.aligned." shape types " {" DSPARK_R##count \
                   "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b                 \
                   ", add, 1, 1, 1;\n}" : DSPARK_D##count("+f", d, 0) : "r"(a[0]),  \
                   "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b),                    \
                   "r"(static_cast<int>(accumulate)))
#define DSPARK_WGMMA_REGISTERS_ALL(types)                                           \
  static_assert(N == 64 || N == 128 || N == 256);                                   \
  if constexpr (N == 64) {                                                          \
    DSPARK_WGMMA_REGISTERS("m64n64k16", types, 32, 32, 33, 34, 35, 36, 37);         \
  } else if constexpr (N == 128) {                                                  \
    DSPARK_WGMMA_REGISTERS("m64n128k16", types, 64, 64, 65, 66, 67, 68, 69);        \
  } else {                                                                          \
    DSPARK_WGMMA_REGISTERS("m64n256k16", types, 128, 128, 129, 130, 131, 132, 133); \
  }

/// d = A B^T (+ d), 64 x N x 16, bf16 operands, float32 accumulators.
template <int N>
__device__ __forceinline__ void wgmma_bf16(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b,
                                           bool accumulate = true) {
  DSPARK_WGMMA_ALL("k16", ".f32.bf16.bf16", ", 1, 1, 0, 0", "+f")
}

/// d = A B^T (+ d), 64 x N x 16, f16 operands, float32 accumulators.
template <int N>
__device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b,
                                          bool accumulate = true) {
  DSPARK_WGMMA_ALL("k16", ".f32.f16.f16", ", 1, 1, 0, 0", "+f")
}

/// d = A B^T (+ d), 64 x N x 32, int8 operands, exact int32 accumulators.
template <int N>
__device__ __forceinline__ void wgmma_s8(int32_t (&d)[N / 2], uint64_t desc_a, uint64_t desc_b,
                                         bool accumulate = true) {
  DSPARK_WGMMA_ALL("k32", ".s32.s8.s8", "", "+r")
}

/// d = A B (+ d), 64 x N x 16, A in registers, B MN-major, bf16 operands, float32 accumulators.
template <int N>
__device__ __forceinline__ void wgmma_bf16(float (&d)[N / 2], const uint32_t (&a)[4],
                                           uint64_t desc_b, bool accumulate = true) {
  DSPARK_WGMMA_REGISTERS_ALL(".f32.bf16.bf16")
}

/// d = A B (+ d), 64 x N x 16, A in registers, B MN-major, f16 operands, float32 accumulators.
template <int N>
__device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], const uint32_t (&a)[4],
                                          uint64_t desc_b, bool accumulate = true) {
  DSPARK_WGMMA_REGISTERS_ALL(".f32.f16.f16")
}

#undef DSPARK_WGMMA_REGISTERS_ALL
#undef DSPARK_WGMMA_REGISTERS
#undef DSPARK_WGMMA_ALL
#undef DSPARK_WGMMA
#undef DSPARK_R128
#undef DSPARK_R64
#undef DSPARK_R32
#undef DSPARK_R16
#undef DSPARK_R8
#undef DSPARK_R4
#undef DSPARK_D128
#undef DSPARK_D64
#undef DSPARK_D32
#undef DSPARK_D16
#undef DSPARK_D8
#undef DSPARK_D4

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_WGMMA_H_
