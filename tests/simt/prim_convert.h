// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/convert.h. 2^x and 1 / x are the C library's: a
// GPU gives other last bits.
#ifndef DSPARK_TESTS_SIMT_PRIM_CONVERT_H_
#define DSPARK_TESTS_SIMT_PRIM_CONVERT_H_

#include <math.h>

#include "core/dtype.h"
#include "simt/cuda.h"

namespace dspark::prim {

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}

inline float reciprocal_approx(float x) { return 1.0f / x; }

inline uint32_t pack_bf16(float low, float high) {
  return f32_to_bf16(low) | static_cast<uint32_t>(f32_to_bf16(high)) << 16;
}

inline uint32_t pack_f16(float low, float high) {
  return f32_to_f16(low) | static_cast<uint32_t>(f32_to_f16(high)) << 16;
}

inline uint32_t e4m3_to_f16(uint32_t pair) {
  uint32_t word = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t byte = pair >> 8 * i & 0xffu, body = byte & 0x7fu;
    const float scaled = f16_to_f32(static_cast<uint16_t>(body << 7)) * 256.0f;
    const uint32_t half = body == 0x7fu ? 0x7fffu : f32_to_f16(scaled);
    word |= (half | (byte & 0x80u) << 8) << 16 * i;
  }
  return word;
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_CONVERT_H_
