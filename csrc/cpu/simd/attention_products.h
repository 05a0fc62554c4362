// SPDX-License-Identifier: Apache-2.0
//
// The two products of verify_attention through one register tile: up to kTileRows rows times two
// vectors. The accumulators are arrays of fixed size in fully unrolled loops, which the compiler
// keeps in registers: 16 of 32 with AVX-512, 12 of 16 with AVX2, 8 of 16 below.
//
// The next block is asked for inside the products, a line or two every few terms: they leave the
// memory idle, and a burst between them would wait for it.
//
// Included only by cpu/simd/verify_attention_loops.cpp. Everything is static, see level.h.
#ifndef DSPARK_CPU_SIMD_ATTENTION_PRODUCTS_H_
#define DSPARK_CPU_SIMD_ATTENTION_PRODUCTS_H_

#include "cpu/simd/attention_vec.h"

namespace dspark::cpu::DSPARK_SIMD {

#if defined(__AVX512F__)
constexpr int kTileRows = 8;
#elif defined(__AVX__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTerms = 8;  // of a product, between two requests for the next block

// Asks for the next block in about `steps` portions.
class Ahead {
 public:
  Ahead(const AttentionBlock& b, int steps)
      : next_(b.ahead),
        last_(b.ahead + (b.ahead_count > 0 ? b.ahead_count - 1 : 0)),
        portion_(steps > 0 ? (b.ahead_count + steps - 1) / steps : 0) {}

  // Past the end the last piece is asked for again: cheaper than a branch.
  inline __attribute__((always_inline)) void step() {
    for (int i = 0; i < portion_; ++i) {
      const char* at = static_cast<const char*>(*next_);
      next_ += next_ < last_;
#pragma GCC unroll 4
      for (int byte = 0; byte < kAheadBytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
    }
  }

 private:
  const void* const* next_;
  const void* const* last_;
  int portion_;
};

// acc[m] (+)= sum over n in [begin, end) of weight[m][n] row(n), kPanel columns.
template <int kRows, bool kAdd, class Row>
DSPARK_LANES void product(const float* weight, int stride, int begin, int end, const Row& row,
                          float* acc, int width, Ahead& ahead) {
  Vec sum[kRows][2];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    sum[m][0] = kAdd ? vec_load(acc + m * width) : Vec{};
    sum[m][1] = kAdd ? vec_load(acc + m * width + kLanes) : Vec{};
  }
  const auto term = [&](int n) __attribute__((always_inline)) {
    const float* x = row(n);
    const Vec x0 = vec_load(x), x1 = vec_load(x + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const float w = weight[m * stride + n];
      sum[m][0] = vec_mul_add(w, x0, sum[m][0]);
      sum[m][1] = vec_mul_add(w, x1, sum[m][1]);
    }
  };
  int n = begin;
  for (; n + kTerms <= end; n += kTerms) {
    ahead.step();
#pragma GCC unroll 8
    for (int i = 0; i < kTerms; ++i) term(n + i);
  }
#pragma GCC unroll 1
  for (; n < end; ++n) term(n);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    vec_store(acc + m * width, sum[m][0]);
    vec_store(acc + m * width + kLanes, sum[m][1]);
  }
}

// Adds the terms [from, from + depth) of the head to the scores of a panel of keys.
template <int kRows>
static void score_rows(const AttentionBlock& b, int row, int panel, int from, int depth,
                       Ahead& ahead) {
  const float* k = b.panel;
  product<kRows, true>(
      b.q + row * b.width + from, b.width, 0, depth, [k](int d) { return k + d * kPanel; },
      b.scores + row * kBlock + panel * kPanel, kBlock, ahead);
}

// Weighted values of the keys [begin, end), which all rows see: a panel of columns.
template <int kRows>
static void value_rows(const AttentionBlock& b, int row, int begin, int end, int panel,
                       Ahead& ahead) {
  const float* weight = b.scores + row * kBlock;
  float* acc = b.state.acc + row * b.width + panel * kPanel;
  if (b.direct) {
    const void* const* v = b.v_rows;
    const int64_t at = b.at + panel * kPanel;
    const auto found = [v, at](int n) { return static_cast<const float*>(v[n]) + at; };
    product<kRows, true>(weight, kBlock, begin, end, found, acc, b.width, ahead);
  } else {
    const float* v = b.panel;
    const auto laid = [v](int n) { return v + n * kPanel; };
    product<kRows, true>(weight, kBlock, begin, end, laid, acc, b.width, ahead);
  }
}

template <int kRows = kTileRows>
static void score_rows_of(int rows, const AttentionBlock& b, int row, int panel, int from,
                          int depth, Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return score_rows<kRows>(b, row, panel, from, depth, ahead);
    score_rows_of<kRows - 1>(rows, b, row, panel, from, depth, ahead);
  }
}

template <int kRows = kTileRows>
static void value_rows_of(int rows, const AttentionBlock& b, int row, int begin, int end, int panel,
                          Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return value_rows<kRows>(b, row, begin, end, panel, ahead);
    value_rows_of<kRows - 1>(rows, b, row, begin, end, panel, ahead);
  }
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
static void add_values(const AttentionBlock& b, const Tile& t, int panel, Ahead& ahead) {
  for (int m = t.row; m < t.row + t.rows; ++m) {
    const int stop = b.end[m] < t.all_begin ? b.end[m] : t.all_begin;
    if (b.begin[m] < stop) value_rows<1>(b, m, b.begin[m], stop, panel, ahead);
  }
  if (t.all_begin < t.all_end) {
    value_rows_of(t.rows, b, t.row, t.all_begin, t.all_end, panel, ahead);
  }
  for (int m = t.row; m < t.row + t.rows; ++m) {
    const int start = b.begin[m] > t.all_end ? b.begin[m] : t.all_end;
    if (start < b.end[m]) value_rows<1>(b, m, start, b.end[m], panel, ahead);
  }
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_ATTENTION_PRODUCTS_H_
