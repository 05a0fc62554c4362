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

// Rows [first, first + 4) against vectors [v, v + N). Fully unrolled: every sum is a register.
// kLines lines of memory behind `ahead` are asked for per 16 columns, which keeps the stream of the
// matrix going under the arithmetic. In a burst they would wait for each other, and it for them.
template <int N, int kLines, class T>
DSPARK_LANES void dot_block(const Dots& d, const T* const* rows, int first, int count, int v,
                            const char* ahead) {
  const float* const* vectors = d.vectors + v;
  const int length = d.length;
  F16 sum[kRows][N];
#pragma GCC unroll 4
  for (int a = 0; a < kRows; ++a) {
#pragma GCC unroll 4
    for (int b = 0; b < N; ++b) sum[a][b] = zeros();
  }
  int j = 0;
  for (; j + 16 <= length; j += 16) {
    if (ahead != nullptr) {
#pragma GCC unroll 4
      for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + kLines * 4 * j + 64 * i);
    }
    F16 x[N];
#pragma GCC unroll 4
    for (int b = 0; b < N; ++b) x[b] = load(vectors[b] + j);
#pragma GCC unroll 4
    for (int a = 0; a < kRows; ++a) {
      const F16 w = load(rows[a] + j);
#pragma GCC unroll 4
      for (int b = 0; b < N; ++b) sum[a][b] = fma(w, x[b], sum[a][b]);
    }
  }
  if (j < length) {
#pragma GCC unroll 4
    for (int a = 0; a < kRows; ++a) {
      const F16 w = load_part(rows[a] + j, length - j);
#pragma GCC unroll 4
      for (int b = 0; b < N; ++b) {
        sum[a][b] = fma(w, load_part(vectors[b] + j, length - j), sum[a][b]);
      }
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < N; ++b) {
    float* out = d.out + (v + b) * d.out_stride + first;
    if (count == kRows) {
      reduce4(sum[0][b], sum[1][b], sum[2][b], sum[3][b], out);
    } else {
      float part[kRows];
      reduce4(sum[0][b], sum[1][b], sum[2][b], sum[3][b], part);
      for (int a = 0; a < count; ++a) out[a] = part[a];
    }
  }
}

// Four rows against all vectors; rows[a] repeats the last row when fewer are left.
template <int kLines, class T>
static void dot_rows(const Dots& d, const T* const* rows, int first, int count, const char* ahead) {
  int v = 0;
  for (; v + kMaxVectors <= d.num_vectors; v += kMaxVectors) {
    dot_block<kMaxVectors, kLines>(d, rows, first, count, v, ahead);
    if (ahead != nullptr) ahead += 4 * kLines * d.length;
  }
  if (v > 0) ahead = nullptr;  // the passes so far have asked for enough
  if constexpr (kMaxVectors == 4) {
    if (d.num_vectors - v == 3) dot_block<3, kLines>(d, rows, first, count, v, ahead);
    if (d.num_vectors - v == 2) dot_block<2, kLines>(d, rows, first, count, v, ahead);
    if (d.num_vectors - v == 1) dot_block<1, kLines>(d, rows, first, count, v, ahead);
  }
}

template <class T>
struct RowBlock {
  const T* rows[kRows];
  int count;
};

template <class T>
DSPARK_LANES RowBlock<T> row_block(const Dots& d, int first) {
  RowBlock<T> block;
  block.count = d.num_rows - first < kRows ? d.num_rows - first : kRows;
  for (int a = 0; a < kRows; ++a) {
    const int at = first + (a < block.count ? a : block.count - 1);
    const int64_t row = d.gather == nullptr ? at : d.gather[at];
    block.rows[a] = static_cast<const T*>(d.matrix) + row * d.row_stride;
  }
  return block;
}

// All lines of a block of rows that do not follow each other in memory.
template <class T>
DSPARK_LANES void prefetch(const Dots& d, int first) {
  constexpr int kLine = 64 / sizeof(T);
  const int end = d.num_rows + d.num_ahead;
  for (int at = first; at < first + kRows && at < end; ++at) {
    const int64_t row = d.gather == nullptr ? at : d.gather[at];
    const T* x = static_cast<const T*>(d.matrix) + row * d.row_stride;
    for (int j = 0; j < d.length; j += kLine) __builtin_prefetch(x + j);
  }
}

template <class T>
DSPARK_LANES void widen_rows(const Dots& d, const RowBlock<T>& block, float (*wide)[kWidenLimit]) {
  for (int a = 0; a < block.count; ++a) {
    int j = 0;
    for (; j + 16 <= d.length; j += 16) store(wide[a] + j, load(block.rows[a] + j));
    if (j < d.length) {
      float tail[16];
      store(tail, load_part(block.rows[a] + j, d.length - j));
      for (int i = j; i < d.length; ++i) wide[a][i] = tail[i - j];
    }
  }
}

template <class T>
static void dot_matrix(const Dots& d) {
  constexpr int kLines = sizeof(T);  // of a block of four rows, per 16 columns
  const int end = d.num_rows + d.num_ahead;
  const int distance = d.length * static_cast<int>(sizeof(T)) < 256 ? 4 * kRows : 2 * kRows;
  const bool several = d.num_vectors > kMaxVectors;
  const bool dense = d.gather == nullptr && d.row_stride == d.length;
  // With several passes over the vectors, widening the rows once is cheaper than in every pass.
  const bool widen = sizeof(T) < 4 && several && d.length <= kWidenLimit;
  alignas(64) float wide[kRows][kWidenLimit];
  for (int first = 0; first < d.num_rows; first += kRows) {
    const RowBlock<T> block = row_block<T>(d, first);
    const int next = first + distance < end ? first + distance : end - 1;
    const T* ahead = static_cast<const T*>(d.matrix) + next * d.row_stride;
    const char* stream = dense ? reinterpret_cast<const char*>(ahead) : nullptr;
    if (!dense) prefetch<T>(d, first + distance);
    if (!several) {
      dot_rows<kLines>(d, block.rows, first, block.count, stream);
    } else if (!widen) {
      dot_rows<1>(d, block.rows, first, block.count, stream);
    } else {
      widen_rows(d, block, wide);
      const float* rows[kRows];
      for (int a = 0; a < kRows; ++a) rows[a] = wide[a < block.count ? a : block.count - 1];
      dot_rows<1>(d, rows, first, block.count, stream);
    }
  }
}

static void dots(const Dots& d) {
  if (d.dtype == DSPARK_F32) dot_matrix<float>(d);
  if (d.dtype == DSPARK_BF16) dot_matrix<Bf16>(d);
  if (d.dtype == DSPARK_F16) dot_matrix<Half>(d);
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_DOTS_H_
