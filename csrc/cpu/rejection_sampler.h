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
#include "core/sampler.h"

namespace dspark::cpu {

/// Segments a thread takes at a time when one row is shared among threads: 8192 ids.
constexpr int kChunk = 64;

/// Penalties of one row, and the tokens they count.
struct Penalties {
  float repetition;        // 1 = off
  float presence;          // 0 = off
  float frequency;         // 0 = off
  const int32_t* counts;   // [V] or null
  const uint32_t* prompt;  // [ceil(V / 32)] bit 1 = in the prompt, or null
  const int32_t* drafts;   // [num_drafts] ids in [0, V): drafts of this round before the row
  int32_t num_drafts;
  int32_t anchor;  // -1 = not counted
};

/// What decides the law of one row. Equal fields mean an equal law, whichever request asks.
struct RowLaw {
  const void* logits;    // [V]
  const uint32_t* mask;  // [ceil(V / 32)] bit 1 = allowed, or null
  const float* bias;     // [V] or null
  const int32_t* stops;  // [num_stops] ids that min-tokens forbids
  int32_t num_stops;
  Penalties penalties;
  int32_t dtype;
  int32_t vocab;
  float temperature;  // of the weights: T, or 1 on greedy rows
  float min_p;        // 0 = off
  float top_p;        // 1 = off
  int32_t top_k;      // <= 0 off
};

DSPARK_HD bool truncated(const RowLaw& law) {
  return law.min_p > 0.0f || law.top_p < 1.0f || law.top_k > 0;
}
DSPARK_HD bool penalised(const Penalties& p) {
  return p.repetition != 1.0f || p.presence != 0.0f || p.frequency != 0.0f;
}
DSPARK_HD bool processed(const RowLaw& law) {
  return law.mask != nullptr || law.bias != nullptr || law.num_stops > 0 ||
         penalised(law.penalties);
}
/// The log-probability of the unprocessed row needs sums of its own.
DSPARK_HD bool raw_differs(const RowLaw& law) { return processed(law) || law.temperature != 1.0f; }

/// The ids that keep their mass: a prefix of the order (logit descending, id ascending), given by
/// its last member.
struct Cut {
  float z;
  int32_t id;
};

/// A row's scratch. `sum` is relative to `max` of the same segment and to the temperature.
struct RowScratch {
  float* z;                   // [128 * segments] processed logits; written for truncated rows only
  float* max;                 // [segments] largest supported logit, -inf if none
  float* sum;                 // [segments] sum of exp((z - max) / T) over the support
  float* raw_max;             // [segments] the same for the unprocessed row at T = 1
  float* raw_sum;             // [segments]
  float* residual;            // [segments] sum of the residual weights, relative to `max`
  uint8_t* flags;             // [chunks] 1 = a NaN was met
  uint64_t* best;             // [chunks] best packed key
  uint64_t* order;            // [128 * segments] candidates of a truncation, as sortable keys
  uint64_t* histogram_mass;   // [kBuckets]
  uint32_t* histogram_count;  // [kBuckets]
};

/// The law of one draft slot: log q(v) = z / T - lse on the columns of the draft vocabulary.
struct DraftRow {
  const void* logits;      // [V_d]
  const int32_t* targets;  // [V_d] strictly increasing target ids, or null when V_d = V
  int32_t dtype;
  int32_t vocab;       // V_d
  double temperature;  // T of the draft
  double lse;
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
  /// Sum of sum[s] exp((max[s] - largest) / T) in ascending order in float64, 0 without mass. The
  /// largest maximum is returned apart, so that huge logits do not swallow the sum.
  double (*mass_sum)(const float* max, const float* sum, int32_t segments, double temperature,
                     float* largest);
  /// Best packed key max / T + log(sum) + Gumbel; 0 when no segment has mass.
  uint64_t (*best_key)(const float* max, const float* sum, double temperature,
                       const DrawStream& noise, bool equal_noise, int32_t begin, int32_t end);
  /// Add count and mass (grid 2^-40, relative to `top`) of ids with (top - z) scale < kBuckets.
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
/// `top` is the largest logit, `mass` the sum of exp((z - top) / T) over the row.
Cut find_cut(const RejectionLoops& loops, const RowView& row, int32_t segments, float top,
             double mass);

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_REJECTION_SAMPLER_H_
