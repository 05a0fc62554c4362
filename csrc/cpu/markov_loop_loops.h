// SPDX-License-Identifier: Apache-2.0
//
// What cpu/markov_loop.cpp and its hot loops (cpu/simd/markov_loop_loops.cpp) say to each other.
#ifndef DSPARK_CPU_MARKOV_LOOP_LOOPS_H_
#define DSPARK_CPU_MARKOV_LOOP_LOOPS_H_

#include <stdint.h>

#include "core/philox.h"
#include "core/sampler.h"
#include "cpu/dots.h"
#include "cpu/truncate.h"
#include "dspark/markov_loop.h"

namespace dspark::cpu {

/// Segments in one piece of work: one Philox call has the noise of four.
constexpr int kMarkovChunk = 4;

/// One active request at one step.
struct MarkovRow {
  int32_t request;    // its place in the caller's arrays
  int32_t top_k;      // <= 0: off
  float top_p;        // 1: off
  float temperature;  // 1 on greedy rows: the lse's temperature
  bool greedy;        //
  bool truncated;     // top-k or top-p cut the law; sampled rows only
  bool forced;        // debug_uniform: equal segment noise, `u53` given
  uint64_t u53;       // used when forced
  float quantum;      // s of the row's quantised vector at this step (int8 W2)
};

/// The best segment (sampled) or id (greedy) that one thread has seen for one row.
struct MarkovBest {
  uint64_t key;       // packed, 0 = none; see core/sampler.h
  int32_t nan;        // a logit was NaN
  float z[kSegment];  // logits of the segment behind `key`, -inf past the vocabulary
};

/// Scratch of one thread for a row with `topk_support` = M; all NULL without it.
struct MarkovSupport {
  uint64_t* heap;    // [M] the selection
  float* bias;       // [M]
  float* z;          // [M, kSegment] logits of the segments with a member
  int32_t* segment;  // [M] their numbers, ascending
  double* maxima;    // [M] their largest logits
  double* log_mass;  // [M]
};

/// Scratch of one thread.
struct MarkovThread {
  MarkovBest* best;  // [rows]
  float* bias;       // [rows, kSegment]
  Philox4* noise;    // [rows]
  uint64_t* bins;    // [kTruncateBins], or NULL without truncation
  MarkovSupport support;
};

/// One step of the loop, all rows.
struct MarkovStep {
  const dspark_markov_loop_params* params;
  int32_t slot;                 // k - 1
  int32_t num_rows;             //
  int32_t num_segments;         //
  const MarkovRow* rows;        // [num_rows]
  const float* const* vectors;  // [num_rows] r-vectors that W2 multiplies
  const int16_t* quantised;     // [num_rows, quantised_stride] the same for an int8 W2
  int64_t quantised_stride;     //
  double* log_mass;             // [num_rows, num_segments] log-mass of every segment
  float* row_z;                 // [num_rows, num_segments * kSegment] logits of truncated rows
};

/// What a row drew.
struct MarkovPick {
  int32_t column;  // draft column; 0 when `empty`
  int32_t nan;     // a logit was NaN
  bool empty;      // no logit above -inf
  float logit;     // z of the column
  float lse;       // log sum exp(z / T) over the support
};

struct MarkovLoops {
  /// See cpu/simd/dots.h.
  void (*dots)(const Dots& d);
  /// inner = sigmoid(raw) * e, n elements.
  void (*gate)(const float* raw, const float* e, float* inner, int32_t n);
  /// raw = [gate, candidate, output]: inner = tanh(output), state updated in place.
  void (*recur)(const float* raw, float* state, float* inner, int32_t n);
  /// Segments [kMarkovChunk * chunk, ...) of all rows: logits, log-masses, champions of the thread.
  void (*chunk)(const MarkovStep& step, int64_t chunk, const MarkovThread& thread);
  /// Combine the champions of all threads into the row's token, logit and lse.
  MarkovPick (*finish)(const MarkovStep& step, int32_t row, const MarkovThread* threads,
                       int32_t num_threads, uint64_t* bins);
  /// See cpu/simd/markov_support.h: the support of one row of U, and one step over it.
  int32_t (*select_support)(const dspark_markov_loop_params& p, int64_t offset, int32_t wanted,
                            uint64_t* heap);
  MarkovPick (*support)(const MarkovStep& step, int32_t row, const int32_t* columns, int32_t count,
                        const MarkovThread& thread);
};

namespace baseline {
extern const MarkovLoops kMarkovLoops;
}
namespace v3 {
extern const MarkovLoops kMarkovLoops;
}
namespace v4 {
extern const MarkovLoops kMarkovLoops;
}

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_MARKOV_LOOP_LOOPS_H_
