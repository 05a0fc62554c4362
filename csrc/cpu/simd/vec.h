// SPDX-License-Identifier: Apache-2.0
//
// Sixteen float lanes, one interface over AVX-512, AVX2 and plain loops. Dot products that decide
// tokens are written on it, because a vectoriser is free to choose the number of partial sums and
// here that number is part of the result: 16 of them, added by halves, on every processor.
//
// Included only by cpu/simd/*_loops.cpp. Everything is static, see level.h.
#ifndef DSPARK_CPU_SIMD_VEC_H_
#define DSPARK_CPU_SIMD_VEC_H_

#include <stdint.h>

#include "core/dtype.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push  // GCC's own header trips it (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

namespace dspark::cpu::DSPARK_SIMD {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

#define DSPARK_LANES static inline __attribute__((always_inline))

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};
DSPARK_LANES F16 zeros() { return {_mm512_setzero_ps()}; }
DSPARK_LANES F16 load(const float* x) { return {_mm512_loadu_ps(x)}; }
DSPARK_LANES F16 load(const Bf16* x) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
DSPARK_LANES F16 load(const Half* x) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))};
}
DSPARK_LANES void store(float* x, F16 a) { _mm512_storeu_ps(x, a.v); }
DSPARK_LANES F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/// Nearest binary16, ties to even, and back.
DSPARK_LANES F16 round_half(F16 a) {
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}

// Lanes i and i + 8 of a and of b: [a's eight sums, b's eight sums].
DSPARK_LANES __m512 fold8(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
/// out[i] = the sixteen lanes of the i-th argument, added by halves (8, 4, 2, 1).
DSPARK_LANES void reduce4(F16 a, F16 b, F16 c, F16 d, float* out) {
  const __m512 ab = fold8(a.v, b.v);
  const __m512 cd = fold8(c.v, d.v);
  const __m512 fours =
      _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  const __m512 twos = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0x0e));
  const __m512 ones = _mm512_add_ps(twos, _mm512_permute_ps(twos, 0x01));
  const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(lanes, ones)));
}
constexpr int kMaxVectors = 4;  // 4 rows x 4 vectors: 16 of the 32 registers hold sums

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct F16 {
  __m256 lo, hi;
};
DSPARK_LANES F16 zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
DSPARK_LANES F16 load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
DSPARK_LANES __m128i load8(const void* x) {
  return _mm_loadu_si128(static_cast<const __m128i*>(x));
}
DSPARK_LANES __m256 widen(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
DSPARK_LANES F16 load(const Bf16* x) { return {widen(load8(x)), widen(load8(x + 8))}; }
DSPARK_LANES F16 load(const Half* x) {
  return {_mm256_cvtph_ps(load8(x)), _mm256_cvtph_ps(load8(x + 8))};
}
DSPARK_LANES void store(float* x, F16 a) {
  _mm256_storeu_ps(x, a.lo);
  _mm256_storeu_ps(x + 8, a.hi);
}
DSPARK_LANES F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
DSPARK_LANES F16 round_half(F16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(a.lo, kNearest)),
          _mm256_cvtph_ps(_mm256_cvtps_ph(a.hi, kNearest))};
}
DSPARK_LANES __m128 fold(F16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
DSPARK_LANES void reduce4(F16 a, F16 b, F16 c, F16 d, float* out) {
  __m128 x = fold(a), y = fold(b), z = fold(c), w = fold(d);
  _MM_TRANSPOSE4_PS(x, y, z, w);
  _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(x, z), _mm_add_ps(y, w)));
}
constexpr int kMaxVectors = 1;  // 4 rows x 1 vector: 8 of the 16 registers hold sums

#else

struct F16 {
  float v[16];
};
DSPARK_LANES F16 zeros() { return F16{}; }
DSPARK_LANES float widen(float x) { return x; }
DSPARK_LANES float widen(Bf16 x) { return bf16_to_f32(x.bits); }
DSPARK_LANES float widen(Half x) { return f16_to_f32(x.bits); }
template <class T>
DSPARK_LANES F16 load(const T* x) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = widen(x[i]);
  return r;
}
DSPARK_LANES void store(float* x, F16 a) {
  for (int i = 0; i < 16; ++i) x[i] = a.v[i];
}
DSPARK_LANES F16 fma(F16 a, F16 b, F16 c) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = fma_f32(a.v[i], b.v[i], c.v[i]);
  return r;
}
DSPARK_LANES F16 round_half(F16 a) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = f16_to_f32(f32_to_f16(a.v[i]));
  return r;
}
DSPARK_LANES float reduce(F16 a) {
  for (int i = 0; i < 8; ++i) a.v[i] += a.v[i + 8];
  for (int i = 0; i < 4; ++i) a.v[i] += a.v[i + 4];
  return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
}
DSPARK_LANES void reduce4(F16 a, F16 b, F16 c, F16 d, float* out) {
  out[0] = reduce(a);
  out[1] = reduce(b);
  out[2] = reduce(c);
  out[3] = reduce(d);
}
constexpr int kMaxVectors = 1;

#endif

/// The first `count` < 16 elements, zeros behind; nothing past them is read.
template <class T>
DSPARK_LANES F16 load_part(const T* x, int count) {
  T padded[16] = {};
  for (int i = 0; i < count; ++i) padded[i] = x[i];
  return load(padded);
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_VEC_H_
