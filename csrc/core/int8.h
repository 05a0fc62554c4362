// SPDX-License-Identifier: Apache-2.0
//
// The bias of an int8 W2, exactly. W2 has rows of signed bytes w_v with a float scale each; the
// fp32 r-vector x that W2 multiplies is put on a grid of its own, a power of two:
//
//   s    = 2^e, e the smallest integer >= -100 with max|x_j| <= 32512 s
//   q_j  = x_j / s rounded to the nearest integer, ties to even           |q_j| <= 32512
//   dot  = sum_j q_j w_vj, an exact integer
//   bias = float(dot) * (s * scale_v)        each of the three rounded once, to nearest even
//
// and z = U + bias in fp32 as for any other W2. The sum is an integer, so no order of summation, no
// tile shape and no batch can change a bit of it: every backend has the same biases.
//
// * A vector with a NaN or an infinity has s = NaN and q = 0: all its biases are NaN, which reaches
//   z and sets DSPARK_NAN_DRAFT. A vector of zeros has s = 2^-100, q = 0 and biases 0 * scale_v.
// * x_j / s is exact (a multiplication by a power of two); below 2^-101 it rounds to 0, whether or
//   not the process flushes subnormal numbers: that is what the bound on e is for.
// * 32512 = 127 * 256: q = 256 hi + lo with hi and lo in the range of a signed byte, so the dot
//   product can run on 8-bit matrix units as 256 dot(hi) + dot(lo).
// * No overflow: |dot| <= 32512 * 128 * r <= 2,130,706,432 < 2^31 for r <= 512, and with it every
//   partial sum, whatever its order. Longer vectors are summed in pieces of 512 in 64 bits.
//
// The quantisation of x is off by at most s / 2 <= max|x| / 32512 (e above its bound) an element.
// Losslessness does not depend on it: q is the law of exactly these z.
#ifndef DSPARK_CORE_INT8_H_
#define DSPARK_CORE_INT8_H_

#include <stdint.h>

#include "core/macros.h"
#include "core/math.h"

namespace dspark {

constexpr int kInt8Columns = 512;  // products that fit in 32 bits together

/// Bits of |x|: they order like the magnitudes, NaN above infinity, so a maximum finds both.
DSPARK_HD uint32_t int8_magnitude(float x) { return bits_f32(x) & 0x7fffffffu; }

/// s for the largest int8_magnitude() of a vector.
DSPARK_HD float int8_quantum(uint32_t largest) {
  if (largest >= 0x7f800000u) return float_from_bits(0x7fc00000u);
  // largest = m 2^x with 1 <= m < 2, and 32512 = (1 + 0x7e0000 / 2^23) 2^14.
  const int32_t above = (largest & 0x7fffffu) > 0x7e0000u ? 1 : 0;
  const int32_t exponent = static_cast<int32_t>(largest >> 23) - 127 - 14 + above;
  return float_from_bits(static_cast<uint32_t>((exponent < -100 ? -100 : exponent) + 127) << 23);
}

/// 1 / s, or 0 for s = NaN.
DSPARK_HD float int8_inverse(float quantum) {
  return quantum == quantum ? float_from_bits(0x7f000000u - bits_f32(quantum)) : 0.0f;
}

/// q of one element.
DSPARK_HD int32_t int8_quantise(float x, float inverse) {
  if (inverse == 0.0f) return 0;
  const float shifted = x * inverse + 12582912.0f;  // 1.5 * 2^23: the adder rounds to an integer
  return static_cast<int32_t>(bits_f32(shifted) - 0x4b400000u);
}

/// The two planes of q.
DSPARK_HD int32_t int8_high(int32_t q) { return (q + 128) >> 8; }
DSPARK_HD int32_t int8_low(int32_t q) { return q - 256 * int8_high(q); }

/// The bias from float(dot).
DSPARK_HD float int8_bias(float dot, float quantum, float scale) { return dot * (quantum * scale); }

}  // namespace dspark

#endif  // DSPARK_CORE_INT8_H_
