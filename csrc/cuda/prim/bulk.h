// SPDX-License-Identifier: Apache-2.0
//
// Bulk copies (the tensor memory accelerator): one thread asks for up to a whole tile, the copy
// engine writes it to shared memory and tells an mbarrier how many bytes have landed.
//
// Two rules that the hardware does not check and the emulation does:
// * The copy engine and wgmma read and write shared memory through the *async proxy*. Ordinary
//   stores that they are to see, and ordinary accesses before the engine overwrites the same bytes,
//   need fence_proxy_async() by the threads that made the stores, before the barrier between.
// * The bytes expected at the mbarrier are those of the full box, also where it lies outside of the
//   tensor and is filled with zeros.
#ifndef DSPARK_CUDA_PRIM_BULK_H_
#define DSPARK_CUDA_PRIM_BULK_H_

#include <cstdint>

#include "cuda/prim/hopper.h"
#include "dspark/types.h"

namespace dspark::prim {

/// What the L2 cache should do with the lines that a copy reads.
enum class CacheHint {
  kNormal,
  kEvictFirst,  ///< read once: leave the cache to the others
  kEvictLast    ///< read again in the next step: stay
};

/// Element type of a tensor map.
enum class TensorType { kBf16, kF16, kI8 };

constexpr uint32_t tensor_element_bytes(TensorType type) { return type == TensorType::kI8 ? 1 : 2; }

/// A row-major matrix in global memory as the copy engine sees it, cut into boxes of `box_rows`
/// rows by 128 bytes; or an array of four dimensions, whose boxes lie in the first two. A kernel
/// takes it by value, as `const __grid_constant__ TensorMap` or in such a structure.
/// In shared memory a box has rows of 128 bytes whose 16-byte pieces are swizzled: piece p of row i
/// lies at p ^ (i & 7), the layout that wgmma reads without bank conflicts. In an array of four
/// dimensions whose innermost has 64 bytes the rows of a box have them too, and piece p of row i
/// lies at p ^ (i >> 1 & 3).
struct alignas(64) TensorMap {
  uint64_t words[16];
};

constexpr int kBoxRowBytes = 128;       ///< bytes of a box's row: the width of the swizzle
constexpr int kNarrowBoxRowBytes = 64;  ///< of rows that are not longer
constexpr int kBoxAlignment = 1024;     ///< of a box in shared memory: one period of the swizzle

/// Host: describe `rows` x `columns` elements at `data`, `row_bytes` apart. `data` must be a
/// multiple of 16, `row_bytes` too and below 2^40, `box_rows` 1..256. DSPARK_UNSUPPORTED when the
/// matrix cannot be described, DSPARK_CUDA_ERROR when the driver has no such call.
dspark_status make_tensor_map_2d(TensorMap* map, TensorType type, const void* data, uint64_t rows,
                                 uint64_t columns, uint64_t row_bytes, uint32_t box_rows);

/// Host: describe an array of `sizes` elements (innermost first), `strides` bytes apart in the
/// second, third and fourth dimension, in any order, at `data`. A box is `box_rows` of the second
/// dimension (1..256) by 128 bytes of the first, or by all of it if that is 64 bytes. `data` and
/// strides must be multiples of 16, strides below 2^40. Errors as for a matrix.
dspark_status make_tensor_map_4d(TensorMap* map, TensorType type, const void* data,
                                 const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                                 uint32_t box_rows);

}  // namespace dspark::prim

#ifdef DSPARK_SIMT
#include "simt/prim_bulk.h"
#else

namespace dspark::prim {

/// An L2 policy for copies (PTX ISA, "createpolicy"). Not volatile: made once, outside of loops.
__device__ __forceinline__ uint64_t cache_policy(CacheHint hint) {
  uint64_t policy = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (hint == CacheHint::kEvictFirst) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else if (hint == CacheHint::kEvictLast) {
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
#endif
  return policy;
}

/// Copy `bytes` (a multiple of 16, both addresses too) to shared memory; `barrier` counts them
/// (PTX ISA, "cp.async.bulk").
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier, CacheHint hint) {
  DSPARK_ASM_SM90(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier)),
      "l"(cache_policy(hint)) : "memory");
}

/// Bring `bytes` (a multiple of 16, the address too) into L2 (PTX ISA, "cp.async.bulk.prefetch").
__device__ __forceinline__ void bulk_prefetch_l2(const void* global, uint32_t bytes) {
  DSPARK_ASM_SM90(
      "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
      "r"(bytes) : "memory");
}

/// Fetch the map itself, some time before its first use (PTX ISA, "prefetch").
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  DSPARK_ASM_SM90("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Copy the box at column `x`, row `y` to shared memory, swizzled; `barrier` counts its bytes (PTX
/// ISA, "cp.async.bulk.tensor").
__device__ __forceinline__ void tensor_load_2d(void* shared, const TensorMap& map,
                                               uint64_t* barrier, int32_t x, int32_t y,
                                               CacheHint hint) {
  DSPARK_ASM_SM90(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "l"(cache_policy(hint)) : "memory");
}

/// The same for the box at `x` of the first dimension, `y` of the second, in `z` and `w`. The
/// destination is named shared::cta: for shared::cluster the compiler calls a check on sm_120,
/// where it has no use, and takes a stack for it.
__device__ __forceinline__ void tensor_load_4d(void* shared, const TensorMap& map,
                                               uint64_t* barrier, int32_t x, int32_t y, int32_t z,
                                               int32_t w, CacheHint hint) {
  DSPARK_ASM_SM90(
      "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)),
      "l"(cache_policy(hint)) : "memory");
}

/// Order this thread's ordinary accesses to shared memory before later ones of the async proxy
/// (PTX ISA, "membar / fence", fence.proxy).
__device__ __forceinline__ void fence_proxy_async() {
  DSPARK_ASM_SM90("fence.proxy.async.shared::cta;" :: : "memory");
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_BULK_H_
