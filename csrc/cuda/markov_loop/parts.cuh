// SPDX-License-Identifier: Apache-2.0
//
// r-vectors as 16-bit operands of the tensor cores. A float32 is the exact sum of three bf16
// numbers of 8 significant bits, so with a 16-bit W2 every product is exact and only the sum
// rounds. Rows of a 16-bit W1 need one part where W2 has the same dtype, two otherwise.
//
// binary16 has more bits and little range: a vector is scaled by a power of two to below 2^15
// first, and the dot product is scaled back. What is lost is below 2^-39 of the largest element.
#ifndef DSPARK_CUDA_MARKOV_LOOP_PARTS_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_PARTS_CUH_

#include "core/dtype.h"
#include "core/math.h"
#include "cuda/prim/platform.h"

namespace dspark::cuda::markov {

/// The leading part of x in a 16-bit dtype; x becomes what it leaves. Infinity and NaN are in the
/// first part.
template <int32_t kDtype>
__device__ __forceinline__ uint16_t take_part(float& x) {
  const uint32_t bits = bits_f32(x);
  // bf16: cut off, which cannot overflow as rounding could. A NaN keeps a bit of its payload.
  const uint16_t part = kDtype == DSPARK_BF16
                            ? static_cast<uint16_t>(bits >> 16 | (x != x ? 0x40u : 0u))
                            : f32_to_f16(x);
  const float taken = kDtype == DSPARK_BF16 ? bf16_to_f32(part) : f16_to_f32(part);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  x = finite ? x - taken : 0.0f;
  return part;
}

/// The power of two that brings a vector to [2^14, 2^15), from the bits of its largest finite
/// magnitude; at most 2^100, so that its inverse is a normal number.
__device__ __forceinline__ float f16_scale(uint32_t largest) {
  const int32_t wanted = 14 + 127 - static_cast<int32_t>(largest >> 23);
  const int32_t exponent = wanted > 100 ? 100 : wanted;
  return float_from_bits(static_cast<uint32_t>(127 + exponent) << 23);
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_PARTS_CUH_
