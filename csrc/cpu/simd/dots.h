// SPDX-License-Identifier: Apache-2.0
//
// out[v][i] = row_i . vector_v for a few rows of a matrix in any element type and any number of
// fp32 vectors. The matrix is read once, whatever the number of vectors: W2 is the traffic of the
// Markov loop. A dot product has 16 partial sums (element j goes to sum j % 16), so its bits depend
// on neither blocking, batch size nor processor.
//
// Included only by cpu/simd/*_loops.cpp.
#ifndef DSPARK_CPU_SIMD_DOTS_H_
#define DSPARK_CPU_SIMD_DOTS_H_

#include "cpu/dots.h"
#include "cpu/simd/vec.h"

namespace dspark::cpu::DSPARK_SIMD {

constexpr int kRows = 4;           // rows of the matrix in one block
constexpr int kWidenLimit = 1024;  // longest row that is widened to fp32 ahead: 4 of them are 16 KB

template <int N, class T>
DSPARK_LANES void dot_block(const T* const* rows, const float* const* vectors, int length,
                            float (*out)[kRows]) {
  F16 sum[kRows][N];
  for (int a = 0; a < kRows; ++a) {
    for (int b = 0; b < N; ++b) sum[a][b] = zeros();
  }
  int j = 0;
  for (; j + 16 <= length; j += 16) {
    F16 v[N];
#pragma GCC unroll 4
    for (int b = 0; b < N; ++b) v[b] = load(vectors[b] + j);
#pragma GCC unroll 4
    for (int a = 0; a < kRows; ++a) {
      const F16 w = load(rows[a] + j);
#pragma GCC unroll 4
      for (int b = 0; b < N; ++b) sum[a][b] = fma(w, v[b], sum[a][b]);
    }
  }
  if (j < length) {
#pragma GCC unroll 4
    for (int b = 0; b < N; ++b) {
      const F16 v = load_part(vectors[b] + j, length - j);
#pragma GCC unroll 4
      for (int a = 0; a < kRows; ++a) {
        sum[a][b] = fma(load_part(rows[a] + j, length - j), v, sum[a][b]);
      }
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < N; ++b) reduce4(sum[0][b], sum[1][b], sum[2][b], sum[3][b], out[b]);
}

template <class T>
static void dot_vectors(const T* const* rows, const float* const* vectors, int count, int length,
                        float (*out)[kRows]) {
  if constexpr (kMaxVectors == 4) {
    if (count == 4) return dot_block<4>(rows, vectors, length, out);
    if (count == 3) return dot_block<3>(rows, vectors, length, out);
    if (count == 2) return dot_block<2>(rows, vectors, length, out);
  }
  dot_block<1>(rows, vectors, length, out);
}

// Four rows against all vectors; rows[a] repeats the last row when fewer are left.
template <class T>
static void dot_rows(const Dots& d, const T* const* rows, int first, int count) {
  for (int v = 0; v < d.num_vectors; v += kMaxVectors) {
    const int n = d.num_vectors - v < kMaxVectors ? d.num_vectors - v : kMaxVectors;
    float sums[kMaxVectors][kRows];
    dot_vectors(rows, d.vectors + v, n, d.length, sums);
    for (int b = 0; b < n; ++b) {
      float* out = d.out + (v + b) * d.out_stride + first;
      for (int a = 0; a < count; ++a) out[a] = sums[b][a];
    }
  }
}

template <class T>
static void dot_matrix(const Dots& d) {
  const T* matrix = static_cast<const T*>(d.matrix);
  // With several passes over the vectors, widening the rows once is cheaper than in every pass.
  const bool ahead = d.num_vectors > kMaxVectors && d.length <= kWidenLimit;
  float wide[kRows][kWidenLimit];
  for (int first = 0; first < d.num_rows; first += kRows) {
    const int count = d.num_rows - first < kRows ? d.num_rows - first : kRows;
    const T* rows[kRows];
    const float* wide_rows[kRows];
    for (int a = 0; a < kRows; ++a) {
      const int row = first + (a < count ? a : count - 1);
      rows[a] = matrix + row * d.row_stride;
      wide_rows[a] = wide[a < count ? a : count - 1];
    }
    if (!ahead) {
      dot_rows(d, rows, first, count);
      continue;
    }
    for (int a = 0; a < count; ++a) {
      int j = 0;
      for (; j + 16 <= d.length; j += 16) store(wide[a] + j, load(rows[a] + j));
      if (j < d.length) {
        float tail[16];
        store(tail, load_part(rows[a] + j, d.length - j));
        for (int i = j; i < d.length; ++i) wide[a][i] = tail[i - j];
      }
    }
    dot_rows(d, wide_rows, first, count);
  }
}

template <>
void dot_matrix<float>(const Dots& d) {
  const float* matrix = static_cast<const float*>(d.matrix);
  for (int first = 0; first < d.num_rows; first += kRows) {
    const int count = d.num_rows - first < kRows ? d.num_rows - first : kRows;
    const float* rows[kRows];
    for (int a = 0; a < kRows; ++a) {
      rows[a] = matrix + (first + (a < count ? a : count - 1)) * d.row_stride;
    }
    dot_rows(d, rows, first, count);
  }
}

static void dots(const Dots& d) {
  if (d.dtype == DSPARK_F32) dot_matrix<float>(d);
  if (d.dtype == DSPARK_BF16) dot_matrix<Bf16>(d);
  if (d.dtype == DSPARK_F16) dot_matrix<Half>(d);
  if (d.dtype == DSPARK_I8) dot_matrix<int8_t>(d);
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_DOTS_H_
