// SPDX-License-Identifier: Apache-2.0
//
// How keys and values are laid out for the products of verify_attention: floats in panels two
// vectors wide, keys transposed.
//
// A square is transposed by loads first: 16 bytes each of the rows i, i + 4, i + 8, i + 12 make one
// vector, so that only the 4 x 4 squares of its quarters are left to shuffles, which have one port:
// 32 of them for 16 x 16 elements instead of 64.
//
// Included only by cpu/simd/verify_attention_loops.cpp. Everything is static, see level.h.
#ifndef DSPARK_CPU_SIMD_ATTENTION_LAYOUT_H_
#define DSPARK_CPU_SIMD_ATTENTION_LAYOUT_H_

#include "cpu/simd/attention_vec.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dspark::cpu::DSPARK_SIMD {

#if defined(__SSE2__)
DSPARK_LANES __m128 quarter(const void* row, int64_t byte) {
  return _mm_loadu_ps(reinterpret_cast<const float*>(static_cast<const char*>(row) + byte));
}
#endif

// 16 bytes of every fourth row.
DSPARK_LANES Vec load_quarters(const void* const* rows, int64_t byte) {
#if defined(__AVX512F__)
  __m512 v = _mm512_castps128_ps512(quarter(rows[0], byte));
  v = _mm512_insertf32x4(v, quarter(rows[4], byte), 1);
  v = _mm512_insertf32x4(v, quarter(rows[8], byte), 2);
  return _mm512_insertf32x4(v, quarter(rows[12], byte), 3);
#elif defined(__AVX__)
  const __m256 v = _mm256_castps128_ps256(quarter(rows[0], byte));
  return _mm256_insertf128_ps(v, quarter(rows[4], byte), 1);
#elif defined(__SSE2__)
  return quarter(rows[0], byte);
#else
  alignas(16) float v[kLanes];
  __builtin_memcpy(v, static_cast<const char*>(rows[0]) + byte, sizeof v);
  return vec_load(v);
#endif
}

// The 4 x 4 squares in the quarters of four vectors.
DSPARK_LANES void transpose_quarters(Vec (&v)[4]) {
#if defined(__AVX512F__)
#define DSPARK_DOUBLES(op, x, y) \
  _mm512_castpd_ps(_mm512_##op##_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)))
  const __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
  const __m512 c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
#elif defined(__AVX__)
#define DSPARK_DOUBLES(op, x, y) \
  _mm256_castpd_ps(_mm256_##op##_pd(_mm256_castps_pd(x), _mm256_castps_pd(y)))
  const __m256 a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
  const __m256 c = _mm256_unpacklo_ps(v[2], v[3]), d = _mm256_unpackhi_ps(v[2], v[3]);
#elif defined(__SSE2__)
#define DSPARK_DOUBLES(op, x, y) _mm_castpd_ps(_mm_##op##_pd(_mm_castps_pd(x), _mm_castps_pd(y)))
  const __m128 a = _mm_unpacklo_ps(v[0], v[1]), b = _mm_unpackhi_ps(v[0], v[1]);
  const __m128 c = _mm_unpacklo_ps(v[2], v[3]), d = _mm_unpackhi_ps(v[2], v[3]);
#endif
#if defined(DSPARK_DOUBLES)
  v[0] = DSPARK_DOUBLES(unpacklo, a, c);
  v[1] = DSPARK_DOUBLES(unpackhi, a, c);
  v[2] = DSPARK_DOUBLES(unpacklo, b, d);
  v[3] = DSPARK_DOUBLES(unpackhi, b, d);
#undef DSPARK_DOUBLES
#else
  for (int i = 0; i < 4; ++i) {
    for (int l = 0; l < i; ++l) {
      const float x = v[i][l];
      v[i][l] = v[l][i];
      v[l][i] = x;
    }
  }
#endif
}

// Four columns of 32 bits, `byte` bytes into kLanes rows.
DSPARK_LANES void load_columns(Vec (&v)[4], const void* const* rows, int64_t byte) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = load_quarters(rows + i, byte);
  transpose_quarters(v);
}

// Bits of a vector as integers, and back.
using Bits __attribute__((vector_size(4 * kLanes), may_alias)) = uint32_t;

// Elements [c, d) of kLanes rows, `at` elements into them, to columns of a panel.
template <class Load>
DSPARK_LANES void transpose_rest(float* to, const void* const* rows, int64_t at, int c, int d,
                                 const Load& load) {
  for (; c < d; ++c) {
    for (int l = 0; l < kLanes; ++l) to[c * kPanel + l] = load(rows[l], at + c);
  }
}

DSPARK_LANES void transpose_four(float* to, const void* const* rows, int64_t at) {
  Vec v[4];
  load_columns(v, rows, 4 * at);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) vec_store(to + i * kPanel, v[i]);
}

DSPARK_LANES void transpose_f32(float* to, const void* const* rows, int64_t at, int d) {
  int c = 0;
  for (; c + 4 <= d; c += 4) transpose_four(to + c * kPanel, rows, at + c);
  transpose_rest(to, rows, at, c, d, LoadF32());
}

// Two bf16 are one element of 32 bits: half the shuffles, and they are widened on the way.
DSPARK_LANES void transpose_bf16(float* to, const void* const* rows, int64_t at, int d) {
  int c = 0;
  for (; c + 8 <= d; c += 8) {
    Vec v[4];
    load_columns(v, rows, 2 * (at + c));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Bits pair = reinterpret_cast<Bits&>(v[i]);  // element c + 2 i in the low half
      const Bits low = pair << 16, high = pair & 0xffff0000u;
      vec_store(to + (c + 2 * i) * kPanel, reinterpret_cast<const Vec&>(low));
      vec_store(to + (c + 2 * i + 1) * kPanel, reinterpret_cast<const Vec&>(high));
    }
  }
  transpose_rest(to, rows, at, c, d, LoadBf16());
}

// Other types are widened to rows of floats first.
template <class Load>
DSPARK_LANES void transpose_wide(float* to, const void* const* rows, int64_t at, int d,
                                 const Load& load) {
  constexpr int kColumns = 2 * kLanes;
  alignas(64) float wide[kLanes][kColumns];
  const void* wide_rows[kLanes];
  for (int l = 0; l < kLanes; ++l) wide_rows[l] = wide[l];
  int c = 0;
  for (; c + kColumns <= d; c += kColumns) {
    for (int l = 0; l < kLanes; ++l) {
      vec_store(wide[l], load.vec(rows[l], at + c));
      vec_store(wide[l] + kLanes, load.vec(rows[l], at + c + kLanes));
    }
    for (int i = 0; i < kColumns; i += 4) transpose_four(to + (c + i) * kPanel, wide_rows, i);
  }
  transpose_rest(to, rows, at, c, d, load);
}

// Elements [at, at + d) of the keys [begin, end) of a panel to its columns, [d, kPanel]. Keys up to
// the next multiple of kLanes on both sides are read.
static void transpose(float* to, const void* const* rows, int64_t at, int32_t dtype, int begin,
                      int end, int d) {
  for (int n = begin / kLanes * kLanes; n < end; n += kLanes) {
    if (dtype == DSPARK_F32) {
      transpose_f32(to + n, rows + n, at, d);
    } else if (dtype == DSPARK_BF16) {
      transpose_bf16(to + n, rows + n, at, d);
    } else if (dtype == DSPARK_F8_E4M3) {
      transpose_wide(to + n, rows + n, at, d, LoadF8());
    } else {
      transpose_wide(to + n, rows + n, at, d, LoadF16());
    }
  }
}

template <class Load>
DSPARK_LANES void widen_panel(float* to, const void* const* rows, int64_t at, int begin, int end,
                              int d, const Load& load) {
  for (int n = begin; n < end; ++n) {
    float* row = to + n * kPanel;
    if (d >= kPanel) {
      vec_store(row, load.vec(rows[n], at));
      vec_store(row + kLanes, load.vec(rows[n], at + kLanes));
    } else {
      for (int l = 0; l < kPanel; ++l) row[l] = l < d ? load(rows[n], at + l) : 0.0f;
    }
  }
}

// Elements [at, at + d) of the values [begin, end), padded with zeros, to a panel [kBlock, kPanel].
static void widen_values(float* to, const void* const* rows, int64_t at, int32_t dtype, int begin,
                         int end, int d) {
  if (dtype == DSPARK_F32) {
    widen_panel(to, rows, at, begin, end, d, LoadF32());
  } else if (dtype == DSPARK_BF16) {
    widen_panel(to, rows, at, begin, end, d, LoadBf16());
  } else if (dtype == DSPARK_F8_E4M3) {
    widen_panel(to, rows, at, begin, end, d, LoadF8());
  } else {
    widen_panel(to, rows, at, begin, end, d, LoadF16());
  }
}

template <class Load>
DSPARK_LANES void widen_rows(float* to, int width, int64_t stride, int count, int d,
                             const Load& load) {
  for (int n = 0; n < count; ++n) {
    float* row = to + static_cast<int64_t>(n) * width;
    const int64_t from = n * stride;
#pragma omp simd
    for (int i = 0; i < d; ++i) row[i] = load(from + i);
    for (int i = d; i < width; ++i) row[i] = 0.0f;
  }
}

static void widen(float* to, int width, const void* from, int32_t dtype, int64_t stride, int count,
                  int d, float factor) {
  const auto* f = static_cast<const float*>(from);
  const auto* h = static_cast<const uint16_t*>(from);
  if (dtype == DSPARK_F32) {
    widen_rows(to, width, stride, count, d, [=](int64_t i) { return f[i] * factor; });
  } else if (dtype == DSPARK_BF16) {
    widen_rows(to, width, stride, count, d, [=](int64_t i) { return bf16_to_f32(h[i]) * factor; });
  } else {
    widen_rows(to, width, stride, count, d, [=](int64_t i) { return f16_to_f32(h[i]) * factor; });
  }
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_ATTENTION_LAYOUT_H_
