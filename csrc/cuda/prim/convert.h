// SPDX-License-Identifier: Apache-2.0
//
// Conversions of two values at a time, and the one approximate function: 2^x of the special
// function unit. It must not decide a token; sums of attention weights may use it.
#ifndef DSPARK_CUDA_PRIM_CONVERT_H_
#define DSPARK_CUDA_PRIM_CONVERT_H_

#include "cuda/prim/platform.h"

#ifdef DSPARK_SIMT
#include "simt/prim_convert.h"
#else

namespace dspark::prim {

/// 2^x, relative error up to 2^-22; subnormal results are 0. 2^0 is exactly 1. PTX ISA 9.7.3.21
/// (ex2).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x, relative error up to 2^-23; of infinity 0. PTX ISA 9.7.3.15 (rcp).
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Two floats as bf16, to nearest even, `low` in the lower half. PTX ISA 9.7.9.22 (cvt).
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

/// Two floats as binary16, to nearest even, `low` in the lower half. PTX ISA 9.7.9.22 (cvt).
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

/// The e4m3 numbers in bits 0..7 and 8..15 as two binary16, exactly. One instruction from sm_89 on
/// (PTX ISA 9.7.9.22, cvt); before, the bits are moved: e4m3 with its exponent in binary16's place
/// is the number times 2^-8.
__device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t word;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(static_cast<uint16_t>(pair)));
  return word;
#else
  const uint32_t spread = __byte_perm(pair, 0, 0x1404);
  uint32_t word = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(word), "r"(0x5c005c00u));  // 2^8
  const uint32_t nan = ((spread & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
  return word | (nan >> 15) * 0x7fffu;
#endif
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_CONVERT_H_
