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
  int threads;     // that share one row
  bool valid;      // `row` and what follows are of `row.law`
  bool nan;        // a logit or biased logit is NaN
  bool empty;      // no id has mass
  float top;       // largest processed logit
  double mass;     // sum of exp((z - top) / T) over the support
  double raw_top;  // of the unprocessed row at T = 1, as in RowView
  double raw_log_mass;
};

/// Scan a row, apply its truncation and fill the lane.
void analyse(Lane& lane, const RowLaw& law);
/// Whether any column of a stored draft row is NaN.
bool draft_has_nan(const Lane& lane, const DraftRow& draft);
/// Processed logit of an id; -inf outside the support.
float logit_of(const Lane& lane, int32_t token);
/// log p of an id whose processed logit is z.
double log_prob(const Lane& lane, float z);
double raw_log_prob(const Lane& lane, int32_t token);
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

/// Draws from p, from p without `token`, from max(0, p - q). -1: there is no mass.
int32_t sample_row(const Lane& lane, const RowDraw& d);
int32_t sample_without(const Lane& lane, int32_t token, const RowDraw& d);
int32_t sample_residual(const Lane& lane, const DraftRow& draft, const RowDraw& d);

/// Share of p that max(0, p - q) keeps, and that p without `token` keeps.
double residual_share(const Lane& lane, const DraftRow& draft);
double share_without(const Lane& lane, int32_t token);

/// All of one request: reads its drafts and rows, writes its results.
void verify_request(const dspark_rejection_sampler_params& p, int64_t r, Lane& lane);

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_REQUEST_H_
