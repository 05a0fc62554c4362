// SPDX-License-Identifier: Apache-2.0
//
// Vectors of floats as wide as the level has them, and the elements of a cache as such vectors.
// Included only by cpu/simd/verify_attention_loops.cpp. Everything is static, see level.h.
#ifndef DSPARK_CPU_SIMD_ATTENTION_VEC_H_
#define DSPARK_CPU_SIMD_ATTENTION_VEC_H_

#include "core/dtype.h"
#include "core/math.h"
#include "cpu/simd/vec.h"
#include "cpu/verify_attention_loops.h"

namespace dspark::cpu::DSPARK_SIMD {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kPanel = 2 * kLanes;
static_assert(kWidthAlign % kPanel == 0 && kBlock % kPanel == 0, "panels are whole");

// Without a fused instruction a library call a term would cost 20 times two roundings.
DSPARK_LANES float mul_add(float a, float b, float c) {
#if defined(__FMA__) || !defined(__x86_64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

using Vec __attribute__((vector_size(4 * kLanes), may_alias)) = float;
using LooseVec __attribute__((vector_size(4 * kLanes), may_alias, aligned(4))) = float;

DSPARK_LANES Vec vec_load(const float* x) { return *reinterpret_cast<const LooseVec*>(x); }
DSPARK_LANES void vec_store(float* x, Vec v) { *reinterpret_cast<LooseVec*>(x) = v; }

// What mul_add() does, lane by lane: x times w plus sum.
DSPARK_LANES Vec vec_mul_add(float w, Vec x, Vec sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(_mm512_set1_ps(w), x, sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(_mm256_set1_ps(w), x, sum);
#elif defined(__x86_64__)
  return x * w + sum;
#else
  for (int l = 0; l < kLanes; ++l) sum[l] = mul_add(w, x[l], sum[l]);
  return sum;
#endif
}

// Elements of a row as floats: one, or a vector of them.
struct LoadF32 {
  float operator()(const void* row, int64_t i) const { return static_cast<const float*>(row)[i]; }
  Vec vec(const void* row, int64_t i) const { return vec_load(static_cast<const float*>(row) + i); }
};

template <class Load>
DSPARK_LANES Vec vec_of(const Load& load, const void* row, int64_t i) {
  alignas(64) float x[kLanes];
#pragma omp simd
  for (int l = 0; l < kLanes; ++l) x[l] = load(row, i + l);
  return *reinterpret_cast<const Vec*>(x);
}

struct LoadBf16 {
  float operator()(const void* row, int64_t i) const {
    return bf16_to_f32(static_cast<const uint16_t*>(row)[i]);
  }
  Vec vec(const void* row, int64_t i) const {
#if defined(__AVX512F__)
    const auto* h = static_cast<const uint16_t*>(row) + i;
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(h));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(__AVX2__)
    const auto* h = static_cast<const uint16_t*>(row) + i;
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(h));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
    return vec_of(*this, row, i);
#endif
  }
};

struct LoadF16 {
  float operator()(const void* row, int64_t i) const {
    return f16_to_f32(static_cast<const uint16_t*>(row)[i]);
  }
  Vec vec(const void* row, int64_t i) const {
#if defined(__AVX512F__)
    const auto* h = static_cast<const uint16_t*>(row) + i;
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(h)));
#elif defined(__AVX2__) && defined(__F16C__)
    const auto* h = static_cast<const uint16_t*>(row) + i;
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h)));
#else
    return vec_of(*this, row, i);
#endif
  }
};

// E4M3 is binary16 without its three lowest exponents: the byte, sign apart, moved up by 7 bits is
// a binary16 of 2^-8 times the value, subnormal ones included. Only NaN looks like 480 then.
struct LoadF8 {
  float operator()(const void* row, int64_t i) const {
    return f8_to_f32(static_cast<const uint8_t*>(row)[i]);
  }
  Vec vec(const void* row, int64_t i) const {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const auto* b = static_cast<const uint8_t*>(row) + i;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i half = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m128i size = _mm_and_si128(bytes, _mm_set1_epi8(0x7f));
    const __mmask16 number = _mm_cmpneq_epi8_mask(size, _mm_set1_epi8(0x7f));
    return _mm512_mask_mul_ps(_mm512_set1_ps(__builtin_nanf("")), number, _mm512_cvtph_ps(half),
                              _mm512_set1_ps(256.0f));
#elif defined(__AVX2__) && defined(__F16C__)
    const auto* b = static_cast<const uint8_t*>(row) + i;
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b));
    const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    const __m128i half = _mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m256 x = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    const __m256 nan = _mm256_cmp_ps(size, _mm256_set1_ps(480.0f), _CMP_EQ_OQ);
    return _mm256_or_ps(x, nan);
#else
    return vec_of(*this, row, i);
#endif
  }
};

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_ATTENTION_VEC_H_
