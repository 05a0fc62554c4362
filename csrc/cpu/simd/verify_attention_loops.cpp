// SPDX-License-Identifier: Apache-2.0
//
// Compiled once per SIMD level. Both products go through one register tile, up to kTileRows rows
// times two vectors: scores with lanes over the keys of a block (its keys are transposed once, for
// all rows that share it), values with lanes over the head. The accumulators are arrays of fixed
// size in fully unrolled loops, which the compiler keeps in registers: 16 of 32 with AVX-512, 8 of
// 16 below.
//
// What a tile runs along lies in panels two vectors wide, one behind the other, so that a panel
// stays in the first-level cache while all rows pass over it: 16 KB of keys, 8 KB of values for a
// head of 128. (Rows of a cache are often 4 KB apart and would evict each other.) The next block is
// asked for a few lines at a time between the tiles.
//
// The order of every sum is written out; nothing is left to a reduction clause, so that all tile
// shapes give the same bits.
#include "cpu/verify_attention_loops.h"

#include "core/dtype.h"
#include "core/math.h"
#include "cpu/simd/vec.h"

namespace dspark::cpu::DSPARK_SIMD {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 8;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kTileRows = 4;
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 4;
#endif
constexpr int kPanel = 2 * kLanes;
static_assert(kWidthAlign % kPanel == 0 && kBlock % kPanel == 0, "panels are whole");
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
  float operator()(const void* row, int i) const { return static_cast<const float*>(row)[i]; }
  Vec vec(const void* row, int i) const { return vec_load(static_cast<const float*>(row) + i); }
};

template <class Load>
DSPARK_LANES Vec vec_of(const Load& load, const void* row, int i) {
  alignas(64) float x[kLanes];
#pragma omp simd
  for (int l = 0; l < kLanes; ++l) x[l] = load(row, i + l);
  return *reinterpret_cast<const Vec*>(x);
}

struct LoadBf16 {
  float operator()(const void* row, int i) const {
    return bf16_to_f32(static_cast<const uint16_t*>(row)[i]);
  }
  Vec vec(const void* row, int i) const { return vec_of(*this, row, i); }
};

struct LoadF16 {
  float operator()(const void* row, int i) const {
    return f16_to_f32(static_cast<const uint16_t*>(row)[i]);
  }
  Vec vec(const void* row, int i) const {
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
  float operator()(const void* row, int i) const {
    return f8_to_f32(static_cast<const uint8_t*>(row)[i]);
  }
  Vec vec(const void* row, int i) const {
#if defined(__AVX512BW__)
    const auto* b = static_cast<const uint8_t*>(row) + i;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i half = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m512 x = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
    const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(480.0f), _CMP_EQ_OQ);
    return _mm512_mask_blend_ps(nan, x, _mm512_set1_ps(__builtin_nanf("")));
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

#if defined(__GNUC__) && !defined(__clang__)
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

// Elements [c, c + kLanes) of kLanes rows to columns of a panel.
template <class Load>
static inline __attribute__((always_inline)) void transpose_tile(float* to, const void* const* rows,
                                                                 int c, const Load& load) {
  alignas(64) float v[kLanes][kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    *reinterpret_cast<Vec*>(v[i]) = load.vec(rows[i], c);
  }
  transpose_square(v);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) to[(c + i) * kPanel + l] = v[i][l];
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
      to[(c + 2 * i) * kPanel + l] = float_from_bits(pair << 16);
      to[(c + 2 * i + 1) * kPanel + l] = float_from_bits(pair & 0xffff0000u);
    }
  }
}

template <class Load>
static inline __attribute__((always_inline)) void transpose_rows(float* to, const void* const* rows,
                                                                 int c, int d, const Load& load) {
  for (; c + kLanes <= d; c += kLanes) transpose_tile(to, rows, c, load);
  for (; c < d; ++c) {
    for (int l = 0; l < kLanes; ++l) to[c * kPanel + l] = load(rows[l], c);
  }
}

static void transpose(float* panels, const void* const* rows, int32_t dtype, int begin, int end,
                      int d) {
  for (int n = begin / kLanes * kLanes; n < end; n += kLanes) {
    float* to = panels + n / kPanel * kPanel * d + n % kPanel;
    if (dtype == DSPARK_F32) {
      transpose_rows(to, rows + n, 0, d, LoadF32());
    } else if (dtype == DSPARK_BF16) {
      int c = 0;
      for (; c + 2 * kLanes <= d; c += 2 * kLanes) transpose_pairs(to, rows + n, c);
      transpose_rows(to, rows + n, c, d, LoadBf16());
    } else if (dtype == DSPARK_F8_E4M3) {
      transpose_rows(to, rows + n, 0, d, LoadF8());
    } else {
      transpose_rows(to, rows + n, 0, d, LoadF16());
    }
  }
}

// acc[m] (+)= sum over n in [begin, end) of weight[m][n] row(n), kPanel columns.
template <int kRows, bool kAdd, class Row>
static inline __attribute__((always_inline)) void product(const float* weight, int stride,
                                                          int begin, int end, const Row& row,
                                                          float* acc, int width) {
  Vec sum[kRows][2];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    sum[m][0] = kAdd ? vec_load(acc + m * width) : Vec{};
    sum[m][1] = kAdd ? vec_load(acc + m * width + kLanes) : Vec{};
  }
  for (int n = begin; n < end; ++n) {
    const float* x = row(n);
    const Vec x0 = vec_load(x), x1 = vec_load(x + kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const float w = weight[m * stride + n];
      sum[m][0] = vec_mul_add(w, x0, sum[m][0]);
      sum[m][1] = vec_mul_add(w, x1, sum[m][1]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    vec_store(acc + m * width, sum[m][0]);
    vec_store(acc + m * width + kLanes, sum[m][1]);
  }
}

// Scores of a panel of keys.
template <int kRows>
static void score_rows(const AttentionBlock& b, int row, int panel) {
  const float* k = b.k + panel * kPanel * b.head_dim;
  product<kRows, false>(
      b.q + row * b.width, b.width, 0, b.head_dim, [k](int d) { return k + d * kPanel; },
      b.scores + row * kBlock + panel * kPanel, kBlock);
}

// Weighted values of the keys [begin, end), which all rows see: a panel of columns.
template <int kRows>
static void value_rows(const AttentionBlock& b, int row, int begin, int end, int panel) {
  const float* const* v = b.v;
  const int64_t offset = static_cast<int64_t>(panel) * b.panel_stride;
  product<kRows, true>(
      b.scores + row * kBlock, kBlock, begin, end, [v, offset](int n) { return v[n] + offset; },
      b.state.acc + row * b.width + panel * kPanel, b.width);
}

template <int kRows = kTileRows>
static void score_rows_of(int rows, const AttentionBlock& b, int row, int panel) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return score_rows<kRows>(b, row, panel);
    score_rows_of<kRows - 1>(rows, b, row, panel);
  }
}

template <int kRows = kTileRows>
static void value_rows_of(int rows, const AttentionBlock& b, int row, int begin, int end,
                          int panel) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return value_rows<kRows>(b, row, begin, end, panel);
    value_rows_of<kRows - 1>(rows, b, row, begin, end, panel);
  }
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

// Some rows of a block that go through the products together, and the keys they see.
struct Tile {
  int row, rows;
  int any_begin, any_end;  // keys that some row sees
  int all_begin, all_end;  // keys that all see
};

static Tile tile_at(const AttentionBlock& b, int row, int rows) {
  Tile t = {row, rows, kBlock, 0, 0, kBlock};
  for (int m = row; m < row + rows; ++m) {
    const int begin = b.begin[m], end = b.end[m];
    if (begin < end && begin < t.any_begin) t.any_begin = begin;
    if (begin < end && end > t.any_end) t.any_end = end;
    if (begin > t.all_begin) t.all_begin = begin;
    if (end < t.all_end) t.all_end = end;
  }
  if (t.all_begin >= t.all_end) t.all_begin = t.all_end = kBlock;  // every row on its own
  return t;
}

// Rows of the next tile: equal shares rather than a full tile and a rest, since a row alone is
// slow.
static int tile_rows(int left) {
  const int tiles = (left + kTileRows - 1) / kTileRows;
  return (left + tiles - 1) / tiles;
}

// Values of a tile. Keys that all rows see go through one tile; what only some see (the causal
// edge, the window's edge) goes row by row, in order.
static void add_values(const AttentionBlock& b, const Tile& t, int panel) {
  for (int m = t.row; m < t.row + t.rows; ++m) {
    const int stop = b.end[m] < t.all_begin ? b.end[m] : t.all_begin;
    if (b.begin[m] < stop) value_rows<1>(b, m, b.begin[m], stop, panel);
  }
  if (t.all_begin < t.all_end) {
    value_rows_of(t.rows, b, t.row, t.all_begin, t.all_end, panel);
  }
  for (int m = t.row; m < t.row + t.rows; ++m) {
    const int start = b.begin[m] > t.all_end ? b.begin[m] : t.all_end;
    if (start < b.end[m]) value_rows<1>(b, m, start, b.end[m], panel);
  }
}

// Asks for the lines of the next block in `steps` portions.
class Ahead {
 public:
  Ahead(const AttentionBlock& b, int steps)
      : b_(b), portion_(steps > 0 ? (b.ahead_rows * b.ahead_lines + steps - 1) / steps : 0) {}

  inline __attribute__((always_inline)) void step() {
    for (int i = 0; i < portion_ && row_ < b_.ahead_rows; ++i) {
      __builtin_prefetch(static_cast<const char*>(b_.ahead[row_]) + 64 * line_, 0, 2);
      if (++line_ == b_.ahead_lines) {
        line_ = 0;
        ++row_;
      }
    }
  }

 private:
  const AttentionBlock& b_;
  int portion_, row_ = 0, line_ = 0;
};

// Rows [first, last) of a block, at most kMaxBlockRows.
static void block_rows(const AttentionBlock& b, int first, int last) {
  Tile tiles[kMaxBlockRows];
  int count = 0;
  for (int row = first; row < last; ++count) {
    const int rows = tile_rows(last - row);
    tiles[count] = tile_at(b, row, rows);
    row += rows;
  }
  Ahead ahead(b, first == 0 ? count * (kBlock + b.width) / kPanel : 0);
  for (int panel = 0; panel < kBlock / kPanel; ++panel) {
    for (int i = 0; i < count; ++i) {
      const Tile& t = tiles[i];
      ahead.step();
      if (t.any_begin >= (panel + 1) * kPanel || t.any_end <= panel * kPanel) continue;
      score_rows_of(t.rows, b, t.row, panel);
    }
  }
  // Two passes over the rows: the long chain of one row's maximum hides behind the others'.
  float max[kMaxBlockRows];
  for (int m = first; m < last; ++m) {
    if (b.begin[m] < b.end[m]) max[m - first] = mask_row(b, m);
  }
  for (int m = first; m < last; ++m) {
    if (b.begin[m] < b.end[m]) weigh_row(b, m, max[m - first]);
  }
  for (int panel = 0; panel < b.width / kPanel; ++panel) {
    for (int i = 0; i < count; ++i) {
      ahead.step();
      if (tiles[i].any_begin < tiles[i].any_end) add_values(b, tiles[i], panel);
    }
  }
}

static void block(const AttentionBlock& b) {
  for (int first = 0; first < b.rows; first += kMaxBlockRows) {
    block_rows(b, first, b.rows - first < kMaxBlockRows ? b.rows : first + kMaxBlockRows);
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

template <class Load>
static inline __attribute__((always_inline)) void widen_to_panels(float* panels,
                                                                  const void* const* rows,
                                                                  int begin, int end, int d,
                                                                  const Load& load) {
  for (int n = begin; n < end; ++n) {
    const void* row = rows[n];
    float* to = panels + n * kPanel;
    int c = 0;
    for (; c + kPanel <= d; c += kPanel, to += kBlock * kPanel) {
      vec_store(to, load.vec(row, c));
      vec_store(to + kLanes, load.vec(row, c + kLanes));
    }
    if (c == d) continue;
    for (int l = 0; l < kPanel; ++l) to[l] = c + l < d ? load(row, c + l) : 0.0f;
  }
}

// Rows [begin, end) of a block of values to panels of columns.
static void widen_panels(float* panels, const void* const* rows, int32_t dtype, int begin, int end,
                         int d) {
  if (dtype == DSPARK_F32) {
    widen_to_panels(panels, rows, begin, end, d, LoadF32());
  } else if (dtype == DSPARK_BF16) {
    widen_to_panels(panels, rows, begin, end, d, LoadBf16());
  } else if (dtype == DSPARK_F8_E4M3) {
    widen_to_panels(panels, rows, begin, end, d, LoadF8());
  } else {
    widen_to_panels(panels, rows, begin, end, d, LoadF16());
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

const VerifyAttentionLoops verify_attention_loops = {kPanel, widen, widen_panels, transpose,
                                                     block,  merge, finish};

}  // namespace dspark::cpu::DSPARK_SIMD
