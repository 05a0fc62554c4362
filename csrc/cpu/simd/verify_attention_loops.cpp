// SPDX-License-Identifier: Apache-2.0
//
// Compiled once per SIMD level. Both products go through one register tile, kRows rows times
// kChunks vectors: scores with lanes over the keys of a block (its keys are transposed once, for
// all rows that share it), values with lanes over the head. The accumulators are arrays of fixed
// size in fully unrolled loops, which the compiler keeps in registers: 16 of 32 with AVX-512, 8 of
// 16 below.
//
// The order of every sum is written out; nothing is left to a reduction clause, so that all tile
// shapes give the same bits.
#include "cpu/verify_attention_loops.h"

#include "core/dtype.h"
#include "core/math.h"

namespace dspark::cpu::DSPARK_SIMD {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMaxRows = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kMaxRows = 2;
#else
constexpr int kLanes = 4;
constexpr int kMaxRows = 2;
#endif
constexpr int kSums = 16;  // partial sums of a block's weights, at every level
constexpr float kInfinity = __builtin_inff();

// Without a fused instruction a library call a term would cost 20 times two roundings.
static inline __attribute__((always_inline)) float mul_add(float a, float b, float c) {
#if defined(__FMA__) || !defined(__x86_64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

static inline __attribute__((always_inline)) float sum_halves(float* t, int n) {
  for (int h = n / 2; h > 0; h /= 2) {
#pragma omp simd
    for (int l = 0; l < h; ++l) t[l] += t[l + h];
  }
  return t[0];
}

#if defined(__GNUC__) && !defined(__clang__)
using Vec __attribute__((vector_size(4 * kLanes), may_alias)) = float;
using Lane __attribute__((vector_size(4 * kLanes))) = int;

static constexpr int near_lane(int l, int h) { return (l & h) != 0 ? kLanes + l - h : l; }
static constexpr int far_lane(int l, int h) { return (l & h) != 0 ? kLanes + l : l + h; }

// Exchange the blocks off the diagonal of the h x h blocks of two rows.
template <int h>
static inline __attribute__((always_inline)) void exchange(float* a, float* b) {
#define DSPARK_FOUR(f, l) f(l, h), f((l) + 1, h), f((l) + 2, h), f((l) + 3, h)
#if defined(__AVX512F__)
#define DSPARK_ALL(f) {DSPARK_FOUR(f, 0), DSPARK_FOUR(f, 4), DSPARK_FOUR(f, 8), DSPARK_FOUR(f, 12)}
#elif defined(__AVX__)
#define DSPARK_ALL(f) {DSPARK_FOUR(f, 0), DSPARK_FOUR(f, 4)}
#else
#define DSPARK_ALL(f) \
  {                   \
    DSPARK_FOUR(f, 0) \
  }
#endif
  const Vec x = *reinterpret_cast<const Vec*>(a), y = *reinterpret_cast<const Vec*>(b);
  const Lane near = DSPARK_ALL(near_lane), far = DSPARK_ALL(far_lane);
  *reinterpret_cast<Vec*>(a) = __builtin_shuffle(x, y, near);
  *reinterpret_cast<Vec*>(b) = __builtin_shuffle(x, y, far);
#undef DSPARK_ALL
#undef DSPARK_FOUR
}

// v[i][l] and v[l][i] change places, in log2(kLanes) stages.
template <int h = kLanes / 2>
static inline __attribute__((always_inline)) void transpose_square(float (*v)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & h) == 0) exchange<h>(v[i], v[i + h]);
  }
  if constexpr (h > 1) transpose_square<h / 2>(v);
}
#else
static inline __attribute__((always_inline)) void transpose_square(float (*v)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    for (int l = 0; l < i; ++l) {
      const float x = v[i][l];
      v[i][l] = v[l][i];
      v[l][i] = x;
    }
  }
}
#endif

// Elements [c, c + kLanes) of kLanes rows to columns of `to`, [d, kBlock].
template <class Load>
static inline __attribute__((always_inline)) void transpose_tile(float* to, const void* const* rows,
                                                                 int c, const Load& load) {
  alignas(64) float v[kLanes][kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) v[i][l] = load(rows[i], c + l);
  }
  transpose_square(v);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) to[(c + i) * kBlock + l] = v[i][l];
  }
}

// Two bf16 at a time, as one 32-bit element: half the exchanges, and they are widened on the way.
static inline __attribute__((always_inline)) void transpose_pairs(float* to,
                                                                  const void* const* rows, int c) {
  alignas(64) float v[kLanes][kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    __builtin_memcpy(v[i], static_cast<const uint16_t*>(rows[i]) + c, sizeof v[i]);
  }
  transpose_square(v);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t pair = bits_f32(v[i][l]);  // element c + 2 i in the low half
      to[(c + 2 * i) * kBlock + l] = float_from_bits(pair << 16);
      to[(c + 2 * i + 1) * kBlock + l] = float_from_bits(pair & 0xffff0000u);
    }
  }
}

template <class Load>
static inline __attribute__((always_inline)) void transpose_rows(float* to, const void* const* rows,
                                                                 int c, int d, const Load& load) {
  for (; c + kLanes <= d; c += kLanes) transpose_tile(to, rows, c, load);
  for (; c < d; ++c) {
    for (int l = 0; l < kLanes; ++l) to[c * kBlock + l] = load(rows[l], c);
  }
}

static void transpose(float* to, const void* const* rows, int32_t dtype, int begin, int end,
                      int d) {
  for (int n = begin / kLanes * kLanes; n < end; n += kLanes) {
    if (dtype == DSPARK_F32) {
      transpose_rows(to + n, rows + n, 0, d,
                     [](const void* row, int i) { return static_cast<const float*>(row)[i]; });
    } else if (dtype == DSPARK_BF16) {
      int c = 0;
      for (; c + 2 * kLanes <= d; c += 2 * kLanes) transpose_pairs(to + n, rows + n, c);
      transpose_rows(to + n, rows + n, c, d, [](const void* row, int i) {
        return bf16_to_f32(static_cast<const uint16_t*>(row)[i]);
      });
    } else if (dtype == DSPARK_F8_E4M3) {
      transpose_rows(to + n, rows + n, 0, d, [](const void* row, int i) {
        return f8_to_f32(static_cast<const uint8_t*>(row)[i]);
      });
    } else {
      transpose_rows(to + n, rows + n, 0, d, [](const void* row, int i) {
        return f16_to_f32(static_cast<const uint16_t*>(row)[i]);
      });
    }
  }
}

// acc[m] += sum over n in [begin, end) of weight[m][n] row(n), columns [c, c + kChunks * kLanes).
template <int kRows, int kChunks, class Row>
static inline __attribute__((always_inline)) void product_tile(const float* weight, int stride,
                                                               int begin, int end, const Row& row,
                                                               int c, float* acc, int width) {
  float sum[kRows][kChunks * kLanes];
  for (int m = 0; m < kRows; ++m) {
#pragma omp simd
    for (int l = 0; l < kChunks * kLanes; ++l) sum[m][l] = acc[m * width + c + l];
  }
  for (int n = begin; n < end; ++n) {
    const float* x = row(n) + c;
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const float w = weight[m * stride + n];
#pragma GCC unroll 4
      for (int i = 0; i < kChunks; ++i) {
#pragma omp simd
        for (int l = 0; l < kLanes; ++l) {
          sum[m][i * kLanes + l] = mul_add(w, x[i * kLanes + l], sum[m][i * kLanes + l]);
        }
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
#pragma omp simd
    for (int l = 0; l < kChunks * kLanes; ++l) acc[m * width + c + l] = sum[m][l];
  }
}

// The tile over columns [c, last) of `acc`, last rounded up to a vector.
template <int kRows, class Row>
static inline __attribute__((always_inline)) void product(const float* weight, int stride,
                                                          int begin, int end, const Row& row, int c,
                                                          int last, float* acc, int width) {
  for (; c + 4 * kLanes <= last; c += 4 * kLanes) {
    product_tile<kRows, 4>(weight, stride, begin, end, row, c, acc, width);
  }
  for (; c < last; c += kLanes) {
    product_tile<kRows, 1>(weight, stride, begin, end, row, c, acc, width);
  }
}

// Scores of the keys [begin, end) of the block.
template <int kRows>
static void score_rows(const AttentionBlock& b, int row, int begin, int end) {
  float* scores = b.scores + row * kBlock;
  for (int i = 0; i < kRows * kBlock; ++i) scores[i] = 0.0f;
  const float* k = b.k;
  product<kRows>(
      b.q + row * b.width, b.width, 0, b.head_dim, [k](int d) { return k + d * kBlock; },
      begin / kLanes * kLanes, end, scores, kBlock);
}

// Weighted values of the keys [begin, end), which all rows see.
template <int kRows>
static void value_rows(const AttentionBlock& b, int row, int begin, int end) {
  const float* const* v = b.v;
  product<kRows>(
      b.scores + row * kBlock, kBlock, begin, end, [v](int n) { return v[n]; }, 0, b.width,
      b.state.acc + row * b.width, b.width);
}

static void score_rows_of(int rows, const AttentionBlock& b, int row, int begin, int end) {
  if constexpr (kMaxRows >= 4) {
    if (rows == 4) return score_rows<4>(b, row, begin, end);
    if (rows == 3) return score_rows<3>(b, row, begin, end);
  }
  if (rows == 2) return score_rows<2>(b, row, begin, end);
  score_rows<1>(b, row, begin, end);
}

static void value_rows_of(int rows, const AttentionBlock& b, int row, int begin, int end) {
  if constexpr (kMaxRows >= 4) {
    if (rows == 4) return value_rows<4>(b, row, begin, end);
    if (rows == 3) return value_rows<3>(b, row, begin, end);
  }
  if (rows == 2) return value_rows<2>(b, row, begin, end);
  value_rows<1>(b, row, begin, end);
}

// tanh through exp of the non-positive side; a polynomial where 1 - e would cancel.
static inline __attribute__((always_inline)) float tanh_f32(float x) {
  const float a = __builtin_fabsf(x);
  const float e = exp_f32(-2.0f * a);
  const float far = (1.0f - e) / (1.0f + e);
  const float z = x * x;
  float p = -8.86323553e-3f;  // Taylor to x^11: the next term is below 2^-25 for |x| < 0.35
  p = mul_add(p, z, 2.18694885e-2f);
  p = mul_add(p, z, -5.39682540e-2f);
  p = mul_add(p, z, 1.33333333e-1f);
  p = mul_add(p, z, -3.33333333e-1f);
  const float near = mul_add(p * z, a, a);
  const float y = a < 0.35f ? near : far;
  return x < 0.0f ? -y : y;
}

// Largest visible score of a row, after the cap; hidden ones become -inf. NaN is passed over here
// and poisons the weights later, as IEEE arithmetic would.
static float mask_row(const AttentionBlock& b, int row) {
  float* s = b.scores + row * kBlock;
  const int begin = b.begin[row], end = b.end[row];
  float lane[kSums];
#pragma omp simd
  for (int l = 0; l < kSums; ++l) lane[l] = -kInfinity;
  for (int n = begin / kSums * kSums; n < end; n += kSums) {
    if (b.soft_cap > 0.0f) {
#pragma omp simd
      for (int l = 0; l < kSums; ++l) s[n + l] = b.soft_cap * tanh_f32(s[n + l] / b.soft_cap);
    }
#pragma omp simd
    for (int l = 0; l < kSums; ++l) {
      const float x = (n + l >= begin) & (n + l < end) ? s[n + l] : -kInfinity;
      s[n + l] = x;
      lane[l] = x > lane[l] ? x : lane[l];
    }
  }
  for (int h = kSums / 2; h > 0; h /= 2) {
#pragma omp simd
    for (int l = 0; l < h; ++l) lane[l] = lane[l + h] > lane[l] ? lane[l + h] : lane[l];
  }
  return lane[0];
}

// Scores of one row to weights exp(score - max); what was summed before is rescaled.
static void weigh_row(const AttentionBlock& b, int row, float found) {
  float* s = b.scores + row * kBlock;
  const float old = b.state.max[row];
  const float max = found > old ? found : old;
  // With nothing but -inf so far every weight is 0; the subtraction must not make it NaN.
  const float base = max == -kInfinity ? 0.0f : max;
  float lane[kSums];
#pragma omp simd
  for (int l = 0; l < kSums; ++l) lane[l] = 0.0f;
  for (int n = b.begin[row] / kSums * kSums; n < b.end[row]; n += kSums) {
#pragma omp simd
    for (int l = 0; l < kSums; ++l) {
      const float w = exp_f32(s[n + l] - base);
      s[n + l] = w;
      lane[l] += w;
    }
  }
  const float alpha = exp_f32(old - base);
  b.state.max[row] = max;
  b.state.sum[row] = mul_add(b.state.sum[row], alpha, sum_halves(lane, kSums));
  if (alpha == 1.0f) return;
  float* acc = b.state.acc + row * b.width;
#pragma omp simd
  for (int i = 0; i < b.width; ++i) acc[i] *= alpha;
}

// Rows [row, row + rows) of the block: scores, weights, values. Keys that all rows see go through
// one tile; what only some see (the causal edge, the window's edge) goes row by row, in order.
static void tile(const AttentionBlock& b, int row, int rows) {
  int any_begin = kBlock, any_end = 0, all_begin = 0, all_end = kBlock;
  for (int m = row; m < row + rows; ++m) {
    const int begin = b.begin[m], end = b.end[m];
    if (begin < end && begin < any_begin) any_begin = begin;
    if (begin < end && end > any_end) any_end = end;
    if (begin > all_begin) all_begin = begin;
    if (end < all_end) all_end = end;
  }
  if (any_begin >= any_end) return;
  if (all_begin >= all_end) all_begin = all_end = kBlock;  // no common key: every row on its own
  score_rows_of(rows, b, row, any_begin, any_end);
  // Two passes over the rows: the long chain of one row's maximum hides behind the others'.
  float max[kMaxRows];
  for (int m = 0; m < rows; ++m) max[m] = mask_row(b, row + m);
  for (int m = row; m < row + rows; ++m) {
    if (b.begin[m] >= b.end[m]) continue;
    weigh_row(b, m, max[m - row]);
    const int stop = b.end[m] < all_begin ? b.end[m] : all_begin;
    if (b.begin[m] < stop) value_rows<1>(b, m, b.begin[m], stop);
  }
  if (all_begin < all_end) value_rows_of(rows, b, row, all_begin, all_end);
  for (int m = row; m < row + rows; ++m) {
    const int start = b.begin[m] > all_end ? b.begin[m] : all_end;
    if (start < b.end[m]) value_rows<1>(b, m, start, b.end[m]);
  }
}

static void block(const AttentionBlock& b) {
  for (int row = 0; row < b.rows;) {
    const int left = b.rows - row;
    // 3 + 3 + 3 rather than 4 + 4 + 1: three heads a group are common, and a row alone is slow.
    int rows = left % 4 == 0 || left == 7 || left > 9 ? 4 : left >= 3 ? 3 : left;
    if (rows > kMaxRows) rows = kMaxRows;
    tile(b, row, rows);
    row += rows;
  }
}

template <class Load>
static inline __attribute__((always_inline)) void widen_rows(float* to, int width, int64_t stride,
                                                             int count, int d, const Load& load) {
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
  } else if (dtype == DSPARK_F8_E4M3) {
    const auto* b = static_cast<const uint8_t*>(from);
    widen_rows(to, width, stride, count, d, [=](int64_t i) { return f8_to_f32(b[i]) * factor; });
  } else {
    widen_rows(to, width, stride, count, d, [=](int64_t i) { return f16_to_f32(h[i]) * factor; });
  }
}

static void merge(const AttentionState& total, const AttentionState& part, int row, int width,
                  bool starts) {
  float* x = total.acc + static_cast<int64_t>(row) * width;
  const float* y = part.acc + static_cast<int64_t>(row) * width;
  if (starts) {
    total.max[row] = part.max[row];
    total.sum[row] = part.sum[row];
    for (int i = 0; i < width; ++i) x[i] = y[i];
    return;
  }
  const float a = total.max[row], b = part.max[row];
  const float max = a > b ? a : b;
  const float base = max == -kInfinity ? 0.0f : max;
  const float fa = exp_f32(a - base), fb = exp_f32(b - base);
  total.max[row] = max;
  total.sum[row] = mul_add(part.sum[row], fb, total.sum[row] * fa);
#pragma omp simd
  for (int i = 0; i < width; ++i) x[i] = mul_add(y[i], fb, x[i] * fa);
}

static void finish(void* out, int32_t dtype, const AttentionState& state, int row, int width, int d,
                   float scale) {
  const float* x = state.acc + static_cast<int64_t>(row) * width;
  // Nothing but scores of -inf is as good as no key: 0 / 1, not 0 / 0.
  const float sum = state.sum[row] == 0.0f ? 1.0f : state.sum[row];
  auto* f = static_cast<float*>(out);
  auto* h = static_cast<uint16_t*>(out);
  if (dtype == DSPARK_F32) {
#pragma omp simd
    for (int i = 0; i < d; ++i) f[i] = x[i] / sum * scale;
  } else if (dtype == DSPARK_BF16) {
#pragma omp simd
    for (int i = 0; i < d; ++i) h[i] = f32_to_bf16(x[i] / sum * scale);
  } else {
#pragma omp simd
    for (int i = 0; i < d; ++i) h[i] = f32_to_f16(x[i] / sum * scale);
  }
}

const VerifyAttentionLoops verify_attention_loops = {widen, transpose, block, merge, finish};

}  // namespace dspark::cpu::DSPARK_SIMD
