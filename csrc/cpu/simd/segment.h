// SPDX-License-Identifier: Apache-2.0
//
// The 128 logits of one segment: maximum, weights, log-mass. The arithmetic of the categorical
// sampler (core/sampler.h) in loops that vectorise; the bits are the same at every width.
//
// Included only by cpu/simd/*_loops.cpp.
#ifndef DSPARK_CPU_SIMD_SEGMENT_H_
#define DSPARK_CPU_SIMD_SEGMENT_H_

#include <stdint.h>

#include "core/sampler.h"

namespace dspark::cpu::DSPARK_SIMD {

constexpr float kMinusInf = -__builtin_inff();

static inline float segment_max(const float* z) {
  float t[kSegment / 2];
  for (int i = 0; i < 64; ++i) t[i] = z[i] > z[i + 64] ? z[i] : z[i + 64];
  for (int i = 0; i < 32; ++i) t[i] = t[i] > t[i + 32] ? t[i] : t[i + 32];
  for (int i = 0; i < 16; ++i) t[i] = t[i] > t[i + 16] ? t[i] : t[i + 16];
  float m = t[0];
  for (int i = 1; i < 16; ++i) m = t[i] > m ? t[i] : m;
  return m + 0.0f;  // +0 and -0 are equal logits: keep one of them
}

/// w = exp((z - largest) / temperature), largest finite.
static inline void segment_weights(const float* z, float largest, float temperature, float* w) {
  for (int i = 0; i < kSegment; ++i) w[i] = exp_f32((z[i] - largest) / temperature);
}

/// log of the sum of exp(z / T) over the segment, -inf when it has no mass.
static inline double segment_log_mass(const float* z, float largest, float temperature) {
  if (largest == kMinusInf) return static_cast<double>(kMinusInf);
  alignas(64) float w[kSegment];
  segment_weights(z, largest, temperature, w);
  return static_cast<double>(largest) / static_cast<double>(temperature) +
         log_f64(static_cast<double>(halving_sum(w)));
}

/// log of the sum of exp(log_mass), added in ascending order in float64.
static double log_sum(const double* log_mass, int32_t n) {
  double largest = log_mass[0];
  for (int32_t s = 1; s < n; ++s) largest = log_mass[s] > largest ? log_mass[s] : largest;
  if (largest == static_cast<double>(kMinusInf)) return largest;
  double sum = 0.0;
  for (int32_t first = 0; first < n; first += 64) {
    const int32_t count = n - first < 64 ? n - first : 64;
    double e[64];
    for (int32_t i = 0; i < count; ++i) e[i] = exp_f64(log_mass[first + i] - largest);
    for (int32_t i = 0; i < count; ++i) sum += e[i];
  }
  return largest + log_f64(sum);
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_SEGMENT_H_
