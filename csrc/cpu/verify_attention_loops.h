// SPDX-License-Identifier: Apache-2.0
//
// The hot loops of verify_attention, one table per SIMD level.
//
// Everything a row of the result depends on is fixed by absolute positions: keys come in blocks of
// kBlock that start at multiples of kBlock, a score is summed over the head in order, the weights
// of a block are summed over fixed lanes, values are added in ascending order of their position.
// How many rows share a block, and which, changes no bit.
#ifndef DSPARK_CPU_VERIFY_ATTENTION_LOOPS_H_
#define DSPARK_CPU_VERIFY_ATTENTION_LOOPS_H_

#include <cstdint>

namespace dspark::cpu {

constexpr int kBlock = 64;          // keys in a block
constexpr int kWidthAlign = 32;     // floats: a head is padded with zeros to a multiple of this
constexpr int kMaxBlockRows = 64;   // rows whose tiles a block keeps at a time
constexpr int kPanelFloats = 4096;  // what the tiles of a block run along at a time
constexpr int kAheadBytes = 256;    // of the next block, asked for at once

/// Online softmax of a few rows: weights 2^(score - max), their sum, and the weighted values.
struct AttentionState {
  float* max;  // [rows] -inf before the first key; in units of log 2, as all scores
  float* sum;  // [rows]
  float* acc;  // [rows, width]
};

/// Query rows of one KV head against one block of keys.
struct AttentionBlock {
  int rows;  // query rows: tokens times heads of the group
  int head_dim;
  int width;                  // padded head size
  float soft_cap;             // 0 = none; in units of log 2
  const float* q;             // [rows, width] queries, scaled to scores in units of log 2
  const int* begin;           // [rows] first visible key of the block
  const int* end;             // [rows] one past the last; begin >= end: the row sees none
  int first, last;            // keys that some row sees; those around them repeat one of them
  const void* const* k_rows;  // [kBlock] rows of the cache
  const void* const* v_rows;  // [kBlock]
  int64_t at;                 // element of a row where the head begins
  int32_t cache_dtype;        // of the rows
  bool direct;                // values are float32 and used where they lie
  float* panel;               // [kPanelFloats] scratch: what the tiles run along
  float* scores;              // [rows, kBlock] scratch
  AttentionState state;       // updated
  const void* const* ahead;   // [ahead_count] what the next block will read, kAheadBytes each
  int ahead_count;
};

struct VerifyAttentionLoops {
  /// `count` rows of `d` elements, `stride` apart, to float rows of `width`, times `factor`.
  void (*widen)(float* to, int width, const void* from, int32_t dtype, int64_t stride, int count,
                int d, float factor);
  void (*block)(const AttentionBlock& b);
  /// Row `row` of `part`, whose keys come later, into `total`; with `starts`, `total` has none yet.
  void (*merge)(const AttentionState& total, const AttentionState& part, int row, int width,
                bool starts);
  /// acc / sum * scale of row `row` to `d` elements of `out`.
  void (*finish)(void* out, int32_t dtype, const AttentionState& state, int row, int width, int d,
                 float scale);
};

namespace baseline {
extern const VerifyAttentionLoops verify_attention_loops;
}
namespace v3 {
extern const VerifyAttentionLoops verify_attention_loops;
}
namespace v4 {
extern const VerifyAttentionLoops verify_attention_loops;
}

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_VERIFY_ATTENTION_LOOPS_H_
