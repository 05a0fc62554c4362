// SPDX-License-Identifier: Apache-2.0
//
// Compiled once per SIMD level. Both products go through one register tile: scores with lanes over
// the keys of a block (its keys are transposed once, for all rows that share it), values with lanes
// over the head.
//
// What a tile runs along is laid out in a panel two vectors wide just before all rows pass over it:
// at most 16 KB of keys, 8 KB of values, always in the same memory, so that it stays in the
// first-level cache. (Rows of a cache are often 4 KB apart and would evict each other.)
//
// Scores are in units of log 2, so that a weight is 2^(score - maximum).
//
// The order of every sum is written out; nothing is left to a reduction clause, so that all tile
// shapes give the same bits.
#include "cpu/verify_attention_loops.h"

#include "cpu/simd/attention_layout.h"
#include "cpu/simd/attention_products.h"
#include "cpu/simd/attention_vec.h"

namespace dspark::cpu::DSPARK_SIMD {

constexpr int kDepth = 128;  // elements of a head in a part of a panel of keys
static_assert(kDepth * kPanel <= kPanelFloats && kBlock * kPanel <= kPanelFloats, "panels fit");
constexpr int kSums = 16;  // partial sums of a block's weights, at every level
constexpr float kInfinity = __builtin_inff();

// 2^x for x <= 0: relative error < 1.8e-7, exactly 1 at 0 and 0 below -125; NaN stays NaN.
DSPARK_LANES float power_of_two(float x) {
  const float kMagic = 12582912.0f + 127.0f;  // 1.5 * 2^23, and the bias of the exponent
  const float clamped = x < -125.0f ? -125.0f : x;
  const float shifted = clamped + kMagic;
  const float f = clamped - (shifted - kMagic);  // exact, |f| <= 1/2
  float p = 1.32647203e-3f;                      // minimax of degree 5 with 2^0 = 1
  p = mul_add(p, f, 9.67151299e-3f);
  p = mul_add(p, f, 5.55073395e-2f);
  p = mul_add(p, f, 2.40222424e-1f);
  p = mul_add(p, f, 6.93147004e-1f);
  p = mul_add(p, f, 1.0f);
  const float y = p * float_from_bits(bits_f32(shifted) << 23);
  return x < -125.0f ? 0.0f : y;
}

// tanh through exp of the non-positive side; a polynomial where 1 - e would cancel.
DSPARK_LANES float tanh_f32(float x) {
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
  alignas(64) float lane[kSums];
#pragma omp simd
  for (int l = 0; l < kSums; ++l) lane[l] = -kInfinity;
  const bool whole = begin <= 0 && end >= kBlock && !(b.soft_cap > 0.0f);
  for (int n = begin / kSums * kSums; n < end; n += kSums) {
    if (whole) {
#pragma omp simd
      for (int l = 0; l < kSums; ++l) lane[l] = s[n + l] > lane[l] ? s[n + l] : lane[l];
      continue;
    }
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

// What the rows of a block share in passing: maxima and how much older sums shrink.
struct Shift {
  float base[kMaxBlockRows];   // subtracted from the scores: the new maximum, or 0 if it is -inf
  float alpha[kMaxBlockRows];  // 2^(old maximum - new maximum)
};

// Scores of one row to weights 2^(score - base); returns their sum.
static float weigh_row(const AttentionBlock& b, int row, float base) {
  float* s = b.scores + row * kBlock;
  alignas(64) float lane[kSums];
#pragma omp simd
  for (int l = 0; l < kSums; ++l) lane[l] = 0.0f;
  for (int n = b.begin[row] / kSums * kSums; n < b.end[row]; n += kSums) {
#pragma omp simd
    for (int l = 0; l < kSums; ++l) {
      const float w = power_of_two(s[n + l] - base);
      s[n + l] = w;
      lane[l] += w;
    }
  }
  for (int h = kSums / 2; h > 0; h /= 2) {
#pragma omp simd
    for (int l = 0; l < h; ++l) lane[l] += lane[l + h];
  }
  return lane[0];
}

// Scores of the rows [first, last) to weights; what was summed before is rescaled.
static void weigh_rows(const AttentionBlock& b, int first, int last) {
  const int rows = last - first;
  float* max = b.state.max + first;
  Shift shift;
  float found[kMaxBlockRows];
  // Passes over all rows: the long chain of one row hides behind the others'.
  for (int m = 0; m < rows; ++m) {
    const bool seen = b.begin[first + m] < b.end[first + m];
    found[m] = seen ? mask_row(b, first + m) : -kInfinity;
  }
#pragma omp simd
  for (int m = 0; m < rows; ++m) {
    const float old = max[m];
    const float top = found[m] > old ? found[m] : old;
    // With nothing but -inf so far every weight is 0; the subtraction must not make it NaN.
    const float base = top == -kInfinity ? 0.0f : top;
    max[m] = top;
    shift.base[m] = base;
    shift.alpha[m] = power_of_two(old - base);
  }
  for (int m = 0; m < rows; ++m) {
    const int row = first + m;
    if (b.begin[row] >= b.end[row]) continue;
    const float sum = weigh_row(b, row, shift.base[m]), alpha = shift.alpha[m];
    b.state.sum[row] = mul_add(b.state.sum[row], alpha, sum);
    if (alpha == 1.0f) continue;
    float* acc = b.state.acc + row * b.width;
#pragma omp simd
    for (int i = 0; i < b.width; ++i) acc[i] *= alpha;
  }
}

// Scores of the tiles, added up in parts of kDepth elements of a head.
static void add_scores(const AttentionBlock& b, const Tile* tiles, int count, Ahead& ahead) {
  for (int i = 0; i < count; ++i) {
    float* s = b.scores + tiles[i].row * kBlock;
    for (int n = 0; n < tiles[i].rows * kBlock; ++n) s[n] = 0.0f;
  }
  for (int from = 0; from < b.head_dim; from += kDepth) {
    const int depth = b.head_dim - from < kDepth ? b.head_dim - from : kDepth;
    for (int panel = b.first / kPanel; panel * kPanel < b.last; ++panel) {
      const int key = panel * kPanel;
      const int begin = b.first > key ? b.first - key : 0;
      const int end = b.last - key < kPanel ? b.last - key : kPanel;
      transpose(b.panel, b.k_rows + key, b.at + from, b.cache_dtype, begin, end, depth);
      for (int i = 0; i < count; ++i) {
        const Tile& t = tiles[i];
        if (t.any_begin >= key + kPanel || t.any_end <= key) continue;
        score_rows_of(t.rows, b, t.row, panel, from, depth, ahead);
      }
    }
  }
}

// Rows [first, last) of a block, at most kMaxBlockRows.
static void block_rows(const AttentionBlock& b, int first, int last) {
  Tile tiles[kMaxBlockRows];
  int count = 0;
  for (int row = first; row < last; ++count) {
    const int rows = tile_rows(last - row);
    tiles[count] = tile_at(b, row, rows);
    row += rows;
  }
  const int terms = kBlock / kPanel * b.head_dim + b.width / kPanel * kBlock;
  Ahead ahead(b, first == 0 ? count * terms / kTerms : 0);
  add_scores(b, tiles, count, ahead);
  weigh_rows(b, first, last);
  for (int panel = 0; panel * kPanel < b.head_dim; ++panel) {
    const int at = panel * kPanel;
    if (!b.direct) {
      widen_values(b.panel, b.v_rows, b.at + at, b.cache_dtype, b.first, b.last, b.head_dim - at);
    }
    for (int i = 0; i < count; ++i) {
      if (tiles[i].any_begin < tiles[i].any_end) add_values(b, tiles[i], panel, ahead);
    }
  }
}

static void block(const AttentionBlock& b) {
  for (int first = 0; first < b.rows; first += kMaxBlockRows) {
    block_rows(b, first, b.rows - first < kMaxBlockRows ? b.rows : first + kMaxBlockRows);
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
  const float fa = power_of_two(a - base), fb = power_of_two(b - base);
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

const VerifyAttentionLoops verify_attention_loops = {widen, block, merge, finish};

}  // namespace dspark::cpu::DSPARK_SIMD
