// SPDX-License-Identifier: Apache-2.0
//
// The one categorical sampler: draft, residual, bonus and target rows all use it.
//
// The vocabulary is cut into segments of 128 ids, wherever the padding, the grid or a shard
// boundary may lie. A segment has the log-mass L = m / T + log(sum of w), w_i = exp((z_i - m) / T).
// The segment with the largest key L + Gumbel wins, which is an exact draw in proportion to the
// masses; inside it the token follows by inverse CDF on 64-bit integers, which is exact and free of
// rounding past the end. A max-reduction over packed keys is all a parallel backend has to
// exchange.
#ifndef DSPARK_CORE_SAMPLER_H_
#define DSPARK_CORE_SAMPLER_H_

#include <stdint.h>

#include "core/macros.h"
#include "core/math.h"

namespace dspark {

constexpr int kSegment = 128;

/// A float64 as an unsigned integer of the same order (-inf lowest). NaN must not come in.
DSPARK_HD uint64_t ordered_f64(double x) {
  const uint64_t u = bits_f64(x);
  return u >> 63 ? ~u : u | 0x8000000000000000ull;
}

/// A float32 as an unsigned integer of the same order; -0 and +0 are equal. NaN must not come in.
DSPARK_HD uint32_t ordered_f32(float x) {
  const uint32_t u = bits_f32(x + 0.0f);
  return u >> 31 ? ~u : u | 0x80000000u;
}

/// The float32 behind such an integer; of the zeros, +0.
DSPARK_HD float from_ordered_f32(uint32_t key) {
  return float_from_bits(key >> 31 ? key & 0x7fffffffu : ~key);
}

/// Key of a segment and its number in one integer: the larger wins, ties go to the lower segment.
/// 45 bits of the ordered key, 19 bits of ~segment: V up to 67 million ids.
DSPARK_HD uint64_t pack_key(double key, uint32_t segment) {
  return (ordered_f64(key) & ~0x7ffffull) | (~segment & 0x7ffffu);
}
DSPARK_HD uint32_t packed_segment(uint64_t packed) {
  return ~static_cast<uint32_t>(packed) & 0x7ffffu;
}

/// Weight in (0, 1] as an integer on the grid 2^-55: 128 of them stay below 2^63.
DSPARK_HD uint64_t weight_integer(float w) {
  return static_cast<uint64_t>(static_cast<double>(w) * 36028797018963968.0);
}

/// floor(u53 * total / 2^53): the point of the inverse CDF, always below `total`.
DSPARK_HD uint64_t cdf_target(uint64_t u53, uint64_t total) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(u53 << 11, total);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(u53 << 11) * total >> 64);
#endif
}

/// Sum of 128 weights by halves (64, 32, ... 1): the same bits for every SIMD width and for a warp.
DSPARK_HD float halving_sum(const float* w) {
#if defined(__CUDA_ARCH__) || !defined(__GNUC__)
  float t[kSegment / 2];
  for (int i = 0; i < 64; ++i) t[i] = w[i] + w[i + 64];
  for (int i = 0; i < 32; ++i) t[i] += t[i + 32];
  for (int i = 0; i < 16; ++i) t[i] += t[i + 16];
  for (int i = 0; i < 8; ++i) t[i] += t[i + 8];
  for (int i = 0; i < 4; ++i) t[i] += t[i + 4];
  t[0] += t[2];
  t[1] += t[3];
  return t[0] + t[1];
#else
  // The same tree on explicit vectors: left to itself the compiler goes through memory here.
  typedef float Lanes16 __attribute__((vector_size(64)));
  typedef float Lanes8 __attribute__((vector_size(32)));
  typedef float Lanes4 __attribute__((vector_size(16)));
  Lanes16 a[8];
  Lanes8 b[2];
  Lanes4 c[2];
  __builtin_memcpy(a, w, sizeof a);
  const Lanes16 sixteen = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
  __builtin_memcpy(b, &sixteen, sizeof b);
  const Lanes8 eight = b[0] + b[1];
  __builtin_memcpy(c, &eight, sizeof c);
  const Lanes4 four = c[0] + c[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

/// Offset inside a segment drawn by inverse CDF from its 128 weights; -1 when all are zero.
DSPARK_HD int inner_pick(const float* w, uint64_t u53) {
  uint64_t total = 0;
  for (int i = 0; i < kSegment; ++i) total += weight_integer(w[i]);
  if (total == 0) return -1;
  const uint64_t target = cdf_target(u53, total);
  uint64_t sum = 0;
  for (int i = 0; i < kSegment; ++i) {
    sum += weight_integer(w[i]);
    if (sum > target) return i;
  }
  return -1;
}

/// log(exp(a) + exp(b)) in float64; -inf counts as no mass.
DSPARK_HD double log_add(double a, double b) {
  const double hi = a > b ? a : b;
  const double lo = a > b ? b : a;
  if (!(lo > -1e300)) return hi;
  return hi + log_f64(1.0 + exp_f64(lo - hi));
}

}  // namespace dspark

#endif  // DSPARK_CORE_SAMPLER_H_
