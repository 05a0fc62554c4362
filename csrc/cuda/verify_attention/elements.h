// SPDX-License-Identifier: Apache-2.0
//
// Element types of a cache as the tensor cores take them.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_ELEMENTS_H_
#define DSPARK_CUDA_VERIFY_ATTENTION_ELEMENTS_H_

#include "core/dtype.h"
#include "cuda/prim/convert.h"
#include "cuda/prim/mma.h"

namespace dspark::cuda::attention {

/// bf16 or f16. Which of them is a predicate of the product, not another kernel: an instruction
/// that is skipped costs a slot of issue, of which there are plenty beside the memory.
struct TwoBytes {
  static constexpr int kBytes = 2;
  bool f16;

  __device__ explicit TwoBytes(int32_t dtype) : f16(dtype == DSPARK_F16) {}

  /// The exponent field: all ones for an infinity or NaN, as multiplied.
  __device__ __forceinline__ uint32_t exponent() const { return f16 ? 0x7c00u : 0x7f80u; }
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    return f16 ? prim::pack_f16(low, high) : prim::pack_bf16(low, high);
  }
  __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2]) const {
    if (f16) {
      prim::mma_f16(d, a, b);
    } else {
      prim::mma_bf16(d, a, b);
    }
  }
};

/// e4m3, multiplied as binary16, exactly.
struct OneByte {
  static constexpr int kBytes = 1;

  __device__ explicit OneByte(int32_t) {}

  __device__ __forceinline__ uint32_t exponent() const { return 0x7c00u; }
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    return prim::pack_f16(low, high);
  }
  __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2]) const {
    prim::mma_f16(d, a, b);
  }
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_ELEMENTS_H_
