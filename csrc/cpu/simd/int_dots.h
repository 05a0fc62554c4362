// SPDX-License-Identifier: Apache-2.0
//
// float(dot) of rows of an int8 matrix with 16-bit integer vectors: the exact integer of
// core/int8.h, so neither lanes nor blocking are part of the result. As in dots.h the matrix is
// read once, whatever the number of vectors.
//
// Included only by cpu/simd/*_loops.cpp.
#ifndef DSPARK_CPU_SIMD_INT_DOTS_H_
#define DSPARK_CPU_SIMD_INT_DOTS_H_

#include "core/int8.h"
#include "cpu/dots.h"
#include "cpu/simd/vec.h"

namespace dspark::cpu::DSPARK_SIMD {

// Lanes32: 32 integers of 16 bits. Sums: 32-bit sums of their products.
#if defined(__AVX512BW__)

struct Lanes32 {
  __m512i v;
};
struct Sums {
  __m512i v;
};
DSPARK_LANES Sums no_sums() { return {_mm512_setzero_si512()}; }
DSPARK_LANES Lanes32 load32(const int16_t* x) { return {_mm512_loadu_si512(x)}; }
DSPARK_LANES Lanes32 load32(const int8_t* x) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))};
}
DSPARK_LANES Sums multiply_add(Lanes32 a, Lanes32 b, Sums c) {
  return {_mm512_add_epi32(c.v, _mm512_madd_epi16(a.v, b.v))};
}
DSPARK_LANES __m512i fold8(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}
DSPARK_LANES void reduce4(Sums a, Sums b, Sums c, Sums d, int32_t* out) {
  const __m512i ab = fold8(a.v, b.v);
  const __m512i cd = fold8(c.v, d.v);
  const __m512i fours =
      _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
  const __m512i twos = _mm512_add_epi32(fours, _mm512_shuffle_epi32(fours, _MM_PERM_BADC));
  const __m512i ones = _mm512_add_epi32(twos, _mm512_shuffle_epi32(twos, _MM_PERM_CDAB));
  const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i packed = _mm512_permutexvar_epi32(lanes, ones);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(packed));
}
constexpr int kIntVectors = 4;  // 4 rows x 4 vectors: 16 of the 32 registers hold sums

#elif defined(__AVX2__)

struct Lanes32 {
  __m256i lo, hi;
};
struct Sums {
  __m256i v;
};
DSPARK_LANES Sums no_sums() { return {_mm256_setzero_si256()}; }
DSPARK_LANES Lanes32 load32(const int16_t* x) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16))};
}
DSPARK_LANES Lanes32 load32(const int8_t* x) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 16)))};
}
DSPARK_LANES Sums multiply_add(Lanes32 a, Lanes32 b, Sums c) {
  const __m256i lo = _mm256_madd_epi16(a.lo, b.lo);
  return {_mm256_add_epi32(_mm256_add_epi32(c.v, lo), _mm256_madd_epi16(a.hi, b.hi))};
}
DSPARK_LANES void reduce4(Sums a, Sums b, Sums c, Sums d, int32_t* out) {
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a.v, b.v), _mm256_hadd_epi32(c.v, d.v));
  const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), sum);
}
constexpr int kIntVectors = 2;  // 4 rows x 2 vectors: 8 of the 16 registers hold sums

#else

struct Lanes32 {
  int16_t v[32];
};
struct Sums {
  int32_t v[4];
};
DSPARK_LANES Sums no_sums() { return Sums{}; }
template <class T>
DSPARK_LANES Lanes32 load32(const T* x) {
  Lanes32 r;
  for (int i = 0; i < 32; ++i) r.v[i] = x[i];
  return r;
}
DSPARK_LANES Sums multiply_add(const Lanes32& a, const Lanes32& b, Sums c) {
  for (int i = 0; i < 32; ++i) c.v[i % 4] += int32_t{a.v[i]} * b.v[i];
  return c;
}
DSPARK_LANES int32_t reduce(const Sums& a) { return a.v[0] + a.v[1] + a.v[2] + a.v[3]; }
DSPARK_LANES void reduce4(const Sums& a, const Sums& b, const Sums& c, const Sums& d,
                          int32_t* out) {
  out[0] = reduce(a);
  out[1] = reduce(b);
  out[2] = reduce(c);
  out[3] = reduce(d);
}
constexpr int kIntVectors = 1;

#endif

/// The first `count` < 32 elements, zeros behind; nothing past them is read.
DSPARK_LANES Lanes32 load32_part(const int8_t* x, int count) {
  int8_t padded[32] = {};
  for (int i = 0; i < count; ++i) padded[i] = x[i];
  return load32(padded);
}

constexpr int kIntRows = 4;  // rows of the matrix in one block

// part[b][a] = row a . vector (v + b) over columns [begin, end), end - begin <= kInt8Columns.
template <int N>
DSPARK_LANES void int_columns(const IntDots& d, const int8_t* const* rows, int v, int begin,
                              int end, int32_t (*part)[kIntRows]) {
  const int16_t* x = d.vectors + v * d.vector_stride;  // zeros behind the last column
  Sums sum[kIntRows][N];
#pragma GCC unroll 4
  for (int a = 0; a < kIntRows; ++a) {
#pragma GCC unroll 4
    for (int b = 0; b < N; ++b) sum[a][b] = no_sums();
  }
  int j = begin;
  for (; j + 32 <= end; j += 32) {
#pragma GCC unroll 4
    for (int a = 0; a < kIntRows; ++a) {
      const Lanes32 w = load32(rows[a] + j);
#pragma GCC unroll 4
      for (int b = 0; b < N; ++b) {
        sum[a][b] = multiply_add(w, load32(x + b * d.vector_stride + j), sum[a][b]);
      }
    }
  }
  if (j < end) {
#pragma GCC unroll 4
    for (int a = 0; a < kIntRows; ++a) {
      const Lanes32 w = load32_part(rows[a] + j, end - j);
#pragma GCC unroll 4
      for (int b = 0; b < N; ++b) {
        sum[a][b] = multiply_add(w, load32(x + b * d.vector_stride + j), sum[a][b]);
      }
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < N; ++b) reduce4(sum[0][b], sum[1][b], sum[2][b], sum[3][b], part[b]);
}

template <int N>
DSPARK_LANES void int_block(const IntDots& d, const int8_t* const* rows, int first, int count,
                            int v) {
  int32_t part[N][kIntRows];
  if (d.length <= kInt8Columns) {
    int_columns<N>(d, rows, v, 0, d.length, part);
    for (int b = 0; b < N; ++b) {
      float* out = d.out + (v + b) * d.out_stride + first;
      for (int a = 0; a < count; ++a) out[a] = static_cast<float>(part[b][a]);
    }
    return;
  }
  int64_t total[N][kIntRows] = {};
  for (int begin = 0; begin < d.length; begin += kInt8Columns) {
    const int left = d.length - begin;
    int_columns<N>(d, rows, v, begin, begin + (left < kInt8Columns ? left : kInt8Columns), part);
    for (int b = 0; b < N; ++b) {
      for (int a = 0; a < kIntRows; ++a) total[b][a] += part[b][a];
    }
  }
  for (int b = 0; b < N; ++b) {
    float* out = d.out + (v + b) * d.out_stride + first;
    for (int a = 0; a < count; ++a) out[a] = static_cast<float>(total[b][a]);
  }
}

static void int_dots(const IntDots& d) {
  for (int first = 0; first < d.num_rows; first += kIntRows) {
    const int count = d.num_rows - first < kIntRows ? d.num_rows - first : kIntRows;
    const int8_t* rows[kIntRows];
    for (int a = 0; a < kIntRows; ++a) {
      const int at = first + (a < count ? a : count - 1);
      const int64_t row = d.gather == nullptr ? at : d.gather[at];
      rows[a] = d.matrix + row * d.row_stride;
    }
    for (int at = first + 4 * kIntRows; at < first + 5 * kIntRows && at < d.num_rows; ++at) {
      const int64_t row = d.gather == nullptr ? at : d.gather[at];
      const int8_t* next = d.matrix + row * d.row_stride;
      for (int j = 0; j < d.length; j += 64) __builtin_prefetch(next + j);
    }
    int v = 0;
    for (; v + kIntVectors <= d.num_vectors; v += kIntVectors) {
      int_block<kIntVectors>(d, rows, first, count, v);
    }
    for (; v < d.num_vectors; ++v) int_block<1>(d, rows, first, count, v);
  }
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_INT_DOTS_H_
