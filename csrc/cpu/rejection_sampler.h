// SPDX-License-Identifier: Apache-2.0
//
// Inside of the CPU rejection sampler: one logits row as its hot loops see it, and the table of
// those loops (cpu/simd/rejection_sampler_loops.cpp, compiled once a SIMD level).
//
// A row is scanned once: every segment of 128 ids leaves its maximum and the halving sum of its
// weights. Everything else (argmax, lse, draws, truncation bounds) works on these two numbers per
// segment, so it costs V / 128 steps.
#ifndef DSPARK_CPU_REJECTION_SAMPLER_H_
#define DSPARK_CPU_REJECTION_SAMPLER_H_

#include <stdint.h>

#include "core/philox.h"
#include "core/row_law.h"

namespace dspark::cpu {

/// Segments a thread takes at a time when one row is shared among threads: 8192 ids.
constexpr int kChunk = 64;

/// A row's scratch. `sum` is relative to `max` of the same segment and to the temperature.
struct RowScratch {
  float* z;             // [128 * segments] processed logits; written for truncated rows only
  float* max;           // [segments] largest supported logit, -inf if none
  float* sum;           // [segments] sum of exp((z - max) / T) over the support
  float* raw_max;       // [segments] the same for the unprocessed row at T = 1
  float* raw_sum;       // [segments]
  float* residual;      // [segments] sum of the residual weights, relative to `max`
  uint8_t* flags;       // [chunks] 1 = a NaN was met
  uint64_t* best;       // [chunks] best packed key
  uint64_t* order;      // [128 * segments] candidates of a truncation, as sortable keys
  uint64_t* histogram;  // [kBuckets] masses
};

struct RowView {
  RowLaw law;
  Cut cut;
  // log p = (z - top) / T - log_mass. Apart, because a huge logit would swallow the mass: two ids
  // at +inf have p = 1/2 each.
  double top;       // largest logit of the support
  double log_mass;  // log of the sum of exp((z - top) / T) over the support
  RowScratch scratch;
};

constexpr int kBuckets = 2048;

/// Hot loops. `begin`, `end` count segments.
struct RejectionLoops {
  /// Fill max, sum, raw_max, raw_sum (and z of truncated rows); true if a NaN was met.
  bool (*scan)(const RowView& row, int32_t begin, int32_t end);
  /// Recompute max and sum over the ids inside `row.cut`, from scratch.z.
  void (*restrict_support)(const RowView& row, int32_t begin, int32_t end);
  /// Whether columns [begin, end) of a draft row hold a NaN.
  bool (*draft_nan)(const DraftRow& draft, int32_t begin, int32_t end);
  /// Fill scratch.residual.
  void (*residual)(const RowView& row, const DraftRow& draft, int32_t begin, int32_t end);
  /// Processed logits of one segment, -inf outside the support.
  void (*segment)(const RowView& row, int32_t segment, float* z);
  /// Logits of one segment as they came, without NaN and +inf.
  void (*raw_segment)(const RowView& row, int32_t segment, float* x);
  /// Weights of one segment relative to its maximum, times the residual factor if `draft`.
  void (*weights)(const RowView& row, const DraftRow* draft, int32_t segment, float* w);
  /// Exact sum of sum[s] exp((max[s] - largest) / T), 0 without mass. The largest maximum is
  /// returned apart, so that huge logits do not swallow the sum.
  double (*mass_sum)(const float* max, const float* sum, int32_t segments, double temperature,
                     float* largest);
  /// Best packed key max / T + log(sum) + Gumbel; 0 when no segment has mass. The arrays begin at
  /// segment `first` of the vocabulary, which numbers the noise and is what the key names.
  uint64_t (*best_key)(const float* max, const float* sum, double temperature,
                       const DrawStream& noise, bool equal_noise, int32_t first, int32_t begin,
                       int32_t end);
  /// Add the mass of ids with (top - z) scale < kBuckets, in grid_mass().
  void (*histogram)(const RowView& row, float top, float scale, int32_t begin, int32_t end);
};

namespace baseline {
extern const RejectionLoops rejection_loops;
}
namespace v3 {
extern const RejectionLoops rejection_loops;
}
namespace v4 {
extern const RejectionLoops rejection_loops;
}

/// Last member of the support of a truncated row: min-p, then top-k, then top-p on the mass left.
/// top-p keeps ids, in order, until their grid_mass() reaches the share top_p: of `mass`, the sum
/// of exp((z - top) / T) over the row, or behind another truncation of the masses that it left.
Cut find_cut(const RejectionLoops& loops, const RowView& row, int32_t segments, float top,
             double mass);

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_REJECTION_SAMPLER_H_
