// SPDX-License-Identifier: Apache-2.0
//
// The CPU rejection sampler between its two halves: rejection_sampler.cpp knows one row and draws
// from it; verify_request.cpp walks the rows of a request and knows the rules.
#ifndef DSPARK_CPU_REQUEST_H_
#define DSPARK_CPU_REQUEST_H_

#include "core/verification.h"
#include "cpu/rejection_sampler.h"

namespace dspark::cpu {

/// Scratch and state of one worker. Requests that share a row (stride 0) and its parameters find
/// it analysed already.
struct Lane {
  RowView row;
  const RejectionLoops* loops;
  int32_t segments;
  int32_t first_segment;  // its number in the whole vocabulary, of which a rank may have a part
  int threads;            // that share one row
  bool valid;             // `row` and what follows are of `row.law`
  bool nan;               // a logit or biased logit is NaN
  bool empty;             // no id has mass
  float top;              // largest processed logit
  double mass;            // sum of exp((z - top) / T) over the support
  double raw_top;         // of the unprocessed row at T = 1, as in RowView
  double raw_log_mass;
  double raw_mass;
};

/// Scan a row, apply its truncation and fill the lane.
void analyse(Lane& lane, const RowLaw& law);
/// Set what log_prob() divides by: a mass relative to lane.top, and that of the unprocessed row.
void normalise(Lane& lane, double mass);
void normalise_raw(Lane& lane, float top, double mass);
/// Whether any column of a stored draft row is NaN.
bool draft_has_nan(const Lane& lane, const DraftRow& draft);
/// Processed logit of an id; -inf outside the support.
float logit_of(const Lane& lane, int32_t token);
/// log p of an id whose processed logit is z.
double log_prob(const Lane& lane, float z);
double raw_log_prob(const Lane& lane, int32_t token);
/// Logit of an id as it came, without NaN and +inf.
float raw_logit(const Lane& lane, int32_t token);
/// Largest logit, lowest id. The row is not empty.
int32_t argmax(const Lane& lane);
/// The n likeliest ids with their log-probabilities, under p or under the unprocessed row.
struct TopList {
  int32_t* ids;    // [n] -1 behind the last
  float* logprob;  // [n] -inf behind the last
  int32_t n;       // 0..DSPARK_MAX_TOP_LOGPROBS
};
void list_top(const Lane& lane, bool raw, const TopList& list);
/// The token of a row without mass.
int32_t lowest_allowed(const Lane& lane);

/// A draw: the key of its segment, the largest of all, and the id. Key 0, id -1: no mass.
struct Drawn {
  uint64_t key;
  int32_t token;
};

/// Draws from p, from p without `token`, from max(0, p - q).
Drawn sample_row(const Lane& lane, const RowDraw& d);
Drawn sample_without(const Lane& lane, int32_t token, const RowDraw& d);
Drawn sample_residual(const Lane& lane, const DraftRow& draft, const RowDraw& d);

/// Share of p that max(0, p - q) keeps, and that p without `token` keeps.
double residual_share(const Lane& lane, const DraftRow& draft);
double share_without(const Lane& lane, int32_t token);

/// The lanes of a call in its scratch memory. Requests go to lanes side by side, or a single lane
/// has all threads for each row.
struct Lanes {
  char* base;
  size_t stride;
  int count;
  Lane& at(int i) const { return *reinterpret_cast<Lane*>(base + static_cast<size_t>(i) * stride); }
};
size_t lanes_bytes(const dspark_rejection_sampler_params& p);
Lanes set_up_lanes(const dspark_rejection_sampler_params& p, void* scratch);

/// All of one request: reads its drafts and rows, writes its results.
void verify_request(const dspark_rejection_sampler_params& p, int64_t r, Lane& lane);

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_REQUEST_H_
