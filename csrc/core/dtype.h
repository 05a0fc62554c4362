// SPDX-License-Identifier: Apache-2.0
//
// bfloat16 and binary16 as bits, with round-to-nearest-even conversions that every backend shares.
#ifndef DSPARK_CORE_DTYPE_H_
#define DSPARK_CORE_DTYPE_H_

#include <stddef.h>
#include <stdint.h>

#include "core/macros.h"
#include "core/math.h"
#include "dspark/types.h"

namespace dspark {

DSPARK_HD float bf16_to_f32(uint16_t h) { return float_from_bits(static_cast<uint32_t>(h) << 16); }

/// Nearest bf16, ties to even; NaN stays NaN.
DSPARK_HD uint16_t f32_to_bf16(float x) {
  const uint32_t u = bits_f32(x);
  const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u | u >> 16 : rounded);
}

DSPARK_HD float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t body = h & 0x7fffu;
  // Normal arithmetic only, so that a process that flushes subnormals gets the same bits.
  const float tiny = float_from_bits(0x38800000u | body << 13) - 6.103515625e-05f;  // 2^-14
  const uint32_t normal = (body << 13) + (body >= 0x7c00u ? 0x70000000u : 0x38000000u);
  return float_from_bits(sign | (body < 0x400u ? bits_f32(tiny) : normal));
}

/// Nearest binary16, ties to even; overflow gives infinity, NaN stays NaN.
DSPARK_HD uint16_t f32_to_f16(float x) {
  const uint32_t u = bits_f32(x);
  const uint32_t sign = u >> 16 & 0x8000u;
  const uint32_t body = u & 0x7fffffffu;
  if (body > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (body >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (body < 0x38800000u) {  // subnormal result: let the adder round at 2^-24
    const float rounded = float_from_bits(body) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_f32(rounded) - 0x3f000000u));
  }
  const uint32_t rebased = body - 0x38000000u;
  return static_cast<uint16_t>(sign | (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13);
}

/// Largest finite value of a floating dtype.
DSPARK_HD float largest_finite(int32_t dtype) {
  return dtype == DSPARK_F16 ? 65504.0f
                             : float_from_bits(dtype == DSPARK_BF16 ? 0x7f7f0000u : 0x7f7fffffu);
}

/// Round an fp32 value to `dtype` and back, once. Infinities that the rounding makes stay.
DSPARK_HD float round_to_dtype(float x, int32_t dtype) {
  if (dtype == DSPARK_BF16) return bf16_to_f32(f32_to_bf16(x));
  if (dtype == DSPARK_F16) return f16_to_f32(f32_to_f16(x));
  return x;
}

/// Element `i` of an array of a floating dtype.
DSPARK_HD float load_f32(const void* data, int32_t dtype, int64_t i) {
  if (dtype == DSPARK_BF16) return bf16_to_f32(static_cast<const uint16_t*>(data)[i]);
  if (dtype == DSPARK_F16) return f16_to_f32(static_cast<const uint16_t*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

DSPARK_HD void store_f32(void* data, int32_t dtype, int64_t i, float x) {
  if (dtype == DSPARK_BF16) {
    static_cast<uint16_t*>(data)[i] = f32_to_bf16(x);
  } else if (dtype == DSPARK_F16) {
    static_cast<uint16_t*>(data)[i] = f32_to_f16(x);
  } else {
    static_cast<float*>(data)[i] = x;
  }
}

DSPARK_HD int64_t dtype_bytes(int32_t dtype) {
  return dtype == DSPARK_F32 ? 4 : dtype == DSPARK_I8 ? 1 : 2;
}

/// `data` advanced by `elements` of `dtype`.
DSPARK_HD const void* advance(const void* data, int32_t dtype, int64_t elements) {
  return static_cast<const char*>(data) + elements * dtype_bytes(dtype);
}

}  // namespace dspark

#endif  // DSPARK_CORE_DTYPE_H_
