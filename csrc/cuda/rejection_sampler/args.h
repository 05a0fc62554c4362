// SPDX-License-Identifier: Apache-2.0
//
// What the host tells the kernel: the call, how it is divided, and where things lie in the
// workspace. Everything here follows from sizes, so that a captured graph serves other contents.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_ARGS_H_
#define DSPARK_CUDA_REJECTION_SAMPLER_ARGS_H_

#include "core/verification.h"

namespace dspark::cuda::verify {

using Params = dspark_rejection_sampler_params;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxTeam = 8;  // CTAs of a cluster that every device of sm_90 and later has
constexpr int kBatch = 4;    // segments a warp scans at once

/// What one launch does.
enum class Phase : int32_t {
  kWhole,  // a team a request: it reads the rows as it comes to them
  kRows,   // a team a row: all rows at once, what they say goes to the workspace
  kDecide  // a team a request, behind kRows
};

/// What of a row stays in shared memory until it is decided.
enum class Keep : int32_t {
  kNothing,  // it is read again, out of L2
  kRaw,      // its elements as they came: calls without a processor
  kFloat     // its processed logits
};

/// How the work is divided.
struct Plan {
  int32_t team;          // CTAs that share a request or a row, 1..8
  int32_t segments;      // of the vocabulary
  int32_t slice;         // of which a CTA owns this many, the last one fewer
  Keep keep;             //
  int32_t shared_stats;  // whether the numbers of the segments lie in shared memory
  int32_t prefetch;      // whether the next row is asked for in L2 while this one is decided
  int32_t shared_bytes;  // dynamic shared memory of a CTA
  int32_t rows_at_once;  // kRows and kDecide instead of kWhole
};

/// What kRows leaves of a row, beside the numbers of its segments.
struct RowRecord {
  double mass, log_mass;
  double raw_top, raw_log_mass;
  float top;
  int32_t top_segment;
  Cut cut;
  float draft_logit;  // processed logit of the draft, before the cut
  float draft_raw;    // and as it came
  int32_t columns;    // of the draft's law
  int32_t nan, empty;
  DraftLook look;
};

/// Numbers of the segments of a row, or of the slice of it that a CTA owns.
struct Stats {
  float* max;
  float* sum;
  float* raw_max;
  float* raw_sum;
  float* residual;
};
constexpr int kStats = 5;

/// Those of a slice from segment `first` on, out of arrays of `length` segments for each owner.
DSPARK_HD Stats stats_at(float* base, int64_t owner, int32_t length, int32_t first) {
  float* x = base + owner * kStats * length + first;
  return Stats{x, x + length, x + 2 * length, x + 3 * length, x + 4 * length};
}

/// Places in the workspace.
struct Work {
  RowRecord* records;  // [R (gamma + 1)] with rows_at_once
  float* stats;        // [rows or R, kStats, segments], or null when shared memory has room
};

struct Args {
  Params p;
  Plan plan;
  Work work;
  Phase phase;
};

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_ARGS_H_
