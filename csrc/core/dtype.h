// SPDX-License-Identifier: Apache-2.0
//
// bfloat16, binary16 and FP8 E4M3 as bits, with round-to-nearest-even conversions that every
// backend shares.
//
// A value of a cache in FP8 is scale * element. It is written as f32_to_f8(x / scale): one IEEE
// division, one rounding. load_f32() and store_f32() are for the floating dtypes of everything
// else; load_kv() and store_kv() take the dtypes of a cache and leave the scale to their caller.
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

/// The value of an E4M3 byte, exactly; 0x7f and 0xff are NaN.
DSPARK_HD float f8_to_f32(uint8_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x80u) << 24;
  const uint32_t body = h & 0x7fu;
  const float tiny = float_from_bits(0x3c800000u | body << 20) - 0.015625f;  // 2^-6
  const uint32_t normal = body == 0x7fu ? 0x7fc00000u : (body << 20) + 0x3c000000u;
  return float_from_bits(sign | (body < 8u ? bits_f32(tiny) : normal));
}

/// Nearest E4M3, ties to even; what lies beyond 448 becomes 448 (infinity too), NaN stays NaN.
DSPARK_HD uint8_t f32_to_f8(float x) {
  const uint32_t u = bits_f32(x);
  const uint32_t sign = u >> 24 & 0x80u;
  const uint32_t body = u & 0x7fffffffu;
  const float rounded = float_from_bits(body) + 16384.0f;  // subnormal result: round at 2^-9
  const uint32_t tiny = bits_f32(rounded) - 0x46800000u;
  const uint32_t rebased = body - 0x3c000000u;
  const uint32_t normal = (rebased + 0x7ffffu + (rebased >> 20 & 1u)) >> 20;
  uint32_t code = body < 0x3c800000u ? tiny : normal;
  code = body >= 0x43e00000u ? 0x7eu : code;
  code = body > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>(sign | code);
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
  return dtype == DSPARK_F32 ? 4 : dtype >= DSPARK_I8 ? 1 : 2;
}

/// Element `i` of a cache, without its scale.
DSPARK_HD float load_kv(const void* data, int32_t dtype, int64_t i) {
  if (dtype == DSPARK_F8_E4M3) return f8_to_f32(static_cast<const uint8_t*>(data)[i]);
  return load_f32(data, dtype, i);
}

DSPARK_HD void store_kv(void* data, int32_t dtype, int64_t i, float x) {
  if (dtype == DSPARK_F8_E4M3) {
    static_cast<uint8_t*>(data)[i] = f32_to_f8(x);
  } else {
    store_f32(data, dtype, i, x);
  }
}

/// The scale of KV head `head`: `scale` is an array with `stride` 1, one value with `stride` 0, or
/// NULL for 1.
DSPARK_HD float kv_scale(const float* scale, int32_t stride, int32_t head) {
  return scale == nullptr ? 1.0f : scale[static_cast<int64_t>(stride) * head];
}

/// Whether a scale is a positive finite number, the only ones that mean something.
DSPARK_HD bool is_kv_scale(float scale) { return scale > 0.0f && scale - scale == 0.0f; }

/// `data` advanced by `elements` of `dtype`.
DSPARK_HD const void* advance(const void* data, int32_t dtype, int64_t elements) {
  return static_cast<const char*>(data) + elements * dtype_bytes(dtype);
}

}  // namespace dspark

#endif  // DSPARK_CORE_DTYPE_H_
