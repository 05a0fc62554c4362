// SPDX-License-Identifier: Apache-2.0
//
// exp and log that give the same bits on every backend: only IEEE add, multiply, divide, explicit
// fma and integer operations, so a token decided by them is decided alike on CPU and GPU. Compile
// with -ffp-contract=off (nvcc: -fmad=false for code that uses plain * and + next to these).
//
//   exp_f32: <= 1.1 ulp on [-87, 88], exactly 0 below -87, relative error < 1.3e-7
//   exp2_weight: relative error < 1.7e-7 on [-125, 0]
//   log_f64: <= 2 ulp for positive normal numbers
//   exp_f64: <= 2 ulp on [-708, 709], exactly 0 below -708
//   expm1_f64: <= 3 ulp for x <= 0
//   sin_cos_f64: <= 2^-51 absolute for |x| <= 2^33
#ifndef DSPARK_CORE_MATH_H_
#define DSPARK_CORE_MATH_H_

#include <stdint.h>

#include "core/macros.h"

namespace dspark {

DSPARK_HD float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DSPARK_HD double fma_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }

DSPARK_HD uint32_t bits_f32(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
DSPARK_HD float float_from_bits(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
DSPARK_HD uint64_t bits_f64(double x) {
  uint64_t u;
  __builtin_memcpy(&u, &x, 8);
  return u;
}
DSPARK_HD double double_from_bits(uint64_t u) {
  double x;
  __builtin_memcpy(&x, &u, 8);
  return x;
}

/// The larger one; `b` where `a` is NaN. `b` is no NaN. Of +0 and -0 it is either.
DSPARK_HD float max_f32(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}

/// e^x for x <= 88. Branch-free, so that a plain loop over it vectorises. -inf gives 0; the
/// caller keeps NaN out.
DSPARK_HD float exp_f32(float x) {
  const float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, on any ISA
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = fma_f32(clamped, 1.44269504f, kMagic);
  const float n = shifted - kMagic;
  float r = fma_f32(n, -0.693145752f, clamped);  // ln 2 in two parts; the first has 9 zero bits
  r = fma_f32(n, -1.42860677e-6f, r);
  float p = 1.98412698e-4f;  // Taylor: |r| <= ln(2) / 2, the next term is below 2^-27
  p = fma_f32(p, r, 1.38888889e-3f);
  p = fma_f32(p, r, 8.33333333e-3f);
  p = fma_f32(p, r, 4.16666667e-2f);
  p = fma_f32(p, r, 1.66666667e-1f);
  p = fma_f32(p, r, 0.5f);
  p = fma_f32(p, r, 1.0f);
  p = fma_f32(p, r, 1.0f);
  // n sits in the low bits of `shifted`; scale by 2^n through the exponent field.
  const uint32_t exponent = (bits_f32(shifted) + 127u) << 23;
  const float y = p * float_from_bits(exponent);
  return x < -87.0f ? 0.0f : y;
}

/// Below this, the weight 2^x counts as 0.
constexpr float kSmallestExponent = -125.0f;

/// 2^x for x <= 0, for weights: exactly 1 at 0, relative error < 1.7e-7. Below kSmallestExponent,
/// and for NaN, something in (0, 2^-124], which no sum of a weight 1 notices. Branch-free.
DSPARK_HD float exp2_weight(float x) {
  const float kMagic = 12582912.0f;  // 1.5 * 2^23
  const float clamped = max_f32(x, kSmallestExponent);
  const float shifted = clamped + kMagic;
  const float f = clamped - (shifted - kMagic);  // exact, |f| <= 1/2
  float p = 1.32647203e-3f;                      // minimax of degree 5 with 2^0 = 1
  p = fma_f32(p, f, 9.67151299e-3f);
  p = fma_f32(p, f, 5.55073395e-2f);
  p = fma_f32(p, f, 2.40222424e-1f);
  p = fma_f32(p, f, 6.93147004e-1f);
  p = fma_f32(p, f, 1.0f);
  return float_from_bits(bits_f32(p) + (bits_f32(shifted) << 23));
}

/// Natural logarithm of a positive normal double.
DSPARK_HD double log_f64(double x) {
  uint64_t u = bits_f64(x);
  // Bring the mantissa to [sqrt(1/2), sqrt(2)): 0x3fe6a09e667f3bcd is sqrt(1/2).
  const uint64_t offset = u - 0x3fe6a09e667f3bcdull;
  const int64_t e = static_cast<int64_t>(offset) >> 52;
  const double m = double_from_bits(u - (static_cast<uint64_t>(e) << 52));
  const double f = m - 1.0;  // exact
  const double s = f / (2.0 + f);
  const double z = s * s;
  // log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + ...), |s| <= 0.1716: twelve terms reach 2^-60.
  double p = 1.0 / 23.0;
  p = fma_f64(p, z, 1.0 / 21.0);
  p = fma_f64(p, z, 1.0 / 19.0);
  p = fma_f64(p, z, 1.0 / 17.0);
  p = fma_f64(p, z, 1.0 / 15.0);
  p = fma_f64(p, z, 1.0 / 13.0);
  p = fma_f64(p, z, 1.0 / 11.0);
  p = fma_f64(p, z, 1.0 / 9.0);
  p = fma_f64(p, z, 1.0 / 7.0);
  p = fma_f64(p, z, 1.0 / 5.0);
  p = fma_f64(p, z, 1.0 / 3.0);
  const double s2 = s + s;
  const double tail = s2 * z;
  const double r = fma_f64(tail, p, s2);
  const double k = static_cast<double>(e);
  const double hi = k * 0.69314718036912382;  // ln 2 split so that k * hi is exact
  return hi + fma_f64(k, 1.9082149292705877e-10, r);
}

/// e^x in double for -708 <= x <= 709, without a branch, so that a plain loop over it vectorises.
DSPARK_HD double exp_f64_core(double x) {
  const double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = fma_f64(x, 1.4426950408889634, kMagic);
  const double n = shifted - kMagic;
  double r = fma_f64(n, -0.69314718036912382, x);
  r = fma_f64(n, -1.9082149292705877e-10, r);
  double p = 1.0 / 6227020800.0;  // Taylor to r^13: |r| <= 0.3466, the next term is 2^-57
  p = fma_f64(p, r, 1.0 / 479001600.0);
  p = fma_f64(p, r, 1.0 / 39916800.0);
  p = fma_f64(p, r, 1.0 / 3628800.0);
  p = fma_f64(p, r, 1.0 / 362880.0);
  p = fma_f64(p, r, 1.0 / 40320.0);
  p = fma_f64(p, r, 1.0 / 5040.0);
  p = fma_f64(p, r, 1.0 / 720.0);
  p = fma_f64(p, r, 1.0 / 120.0);
  p = fma_f64(p, r, 1.0 / 24.0);
  p = fma_f64(p, r, 1.0 / 6.0);
  p = fma_f64(p, r, 0.5);
  p = fma_f64(p, r, 1.0);
  p = fma_f64(p, r, 1.0);
  const uint64_t exponent = (bits_f64(shifted) + 1023u) << 52;
  return p * double_from_bits(exponent);
}

/// e^x in double; exactly 0 below -708, +inf is never produced for x <= 709.
DSPARK_HD double exp_f64(double x) {
  if (!(x >= -708.0)) return 0.0;
  return exp_f64_core(x > 709.0 ? 709.0 : x);
}

/// e^x for x <= 0 without a branch; exactly 0 below -700, -inf included.
DSPARK_HD double exp_f64_nonpositive(double x) {
  const double y = exp_f64_core(x < -700.0 ? -700.0 : x);
  return x < -700.0 ? 0.0 : y;
}

/// e^x - 1 in double without cancellation near 0, for x <= 0.
DSPARK_HD double expm1_f64(double x) {
  if (x < -0.5) return exp_f64(x) - 1.0;
  // Taylor: |x| <= 0.5, seventeen terms reach 2^-62 relative.
  double p = 1.0 / 355687428096000.0;
  p = fma_f64(p, x, 1.0 / 20922789888000.0);
  p = fma_f64(p, x, 1.0 / 1307674368000.0);
  p = fma_f64(p, x, 1.0 / 87178291200.0);
  p = fma_f64(p, x, 1.0 / 6227020800.0);
  p = fma_f64(p, x, 1.0 / 479001600.0);
  p = fma_f64(p, x, 1.0 / 39916800.0);
  p = fma_f64(p, x, 1.0 / 3628800.0);
  p = fma_f64(p, x, 1.0 / 362880.0);
  p = fma_f64(p, x, 1.0 / 40320.0);
  p = fma_f64(p, x, 1.0 / 5040.0);
  p = fma_f64(p, x, 1.0 / 720.0);
  p = fma_f64(p, x, 1.0 / 120.0);
  p = fma_f64(p, x, 1.0 / 24.0);
  p = fma_f64(p, x, 1.0 / 6.0);
  p = fma_f64(p, x, 0.5);
  p = fma_f64(p, x, 1.0);
  return p * x;
}

/// Sine and cosine of |x| <= 2^33: angles of positions. Two explicit fma take the multiple of pi /
/// 2 away with one rounding each, because the difference is small; no table, no local memory.
DSPARK_HD void sin_cos_f64(double x, double* sine, double* cosine) {
  const double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = fma_f64(x, 0.63661977236758138, kMagic);
  const double n = shifted - kMagic;
  double r = fma_f64(n, -1.5707963267948966, x);
  r = fma_f64(n, -6.1232339957367660e-17, r);
  const double z = r * r;
  double s = 1.0 / 355687428096000.0;  // Taylor: |r| <= 0.7854, the next terms are below 2^-60
  s = fma_f64(s, z, -1.0 / 1307674368000.0);
  s = fma_f64(s, z, 1.0 / 6227020800.0);
  s = fma_f64(s, z, -1.0 / 39916800.0);
  s = fma_f64(s, z, 1.0 / 362880.0);
  s = fma_f64(s, z, -1.0 / 5040.0);
  s = fma_f64(s, z, 1.0 / 120.0);
  s = fma_f64(s, z, -1.0 / 6.0);
  s = fma_f64(s * z, r, r);
  double c = 1.0 / 20922789888000.0;
  c = fma_f64(c, z, -1.0 / 87178291200.0);
  c = fma_f64(c, z, 1.0 / 479001600.0);
  c = fma_f64(c, z, -1.0 / 3628800.0);
  c = fma_f64(c, z, 1.0 / 40320.0);
  c = fma_f64(c, z, -1.0 / 720.0);
  c = fma_f64(c, z, 1.0 / 24.0);
  c = fma_f64(c, z, -0.5);
  c = fma_f64(c, z, 1.0);
  const uint64_t quadrant = bits_f64(shifted);
  const double a = quadrant & 1u ? c : s;
  const double b = quadrant & 1u ? s : c;
  *sine = quadrant & 2u ? -a : a;
  *cosine = (quadrant + 1) & 2u ? -b : b;
}

/// e^x - 1 without cancellation near 0, for x <= 0. Branch-free; -inf gives -1.
DSPARK_HD float expm1_f32(float x) {
  const float inner = x < -0.5f ? -0.5f : x;
  float p = 2.75573192e-6f;  // Taylor: |x| <= 0.5, the next term is below 2^-30
  p = fma_f32(p, inner, 2.48015873e-5f);
  p = fma_f32(p, inner, 1.98412698e-4f);
  p = fma_f32(p, inner, 1.38888889e-3f);
  p = fma_f32(p, inner, 8.33333333e-3f);
  p = fma_f32(p, inner, 4.16666667e-2f);
  p = fma_f32(p, inner, 1.66666667e-1f);
  p = fma_f32(p, inner, 0.5f);
  p = fma_f32(p, inner, 1.0f);
  return x < -0.5f ? exp_f32(x) - 1.0f : p * inner;
}

}  // namespace dspark

#endif  // DSPARK_CORE_MATH_H_
