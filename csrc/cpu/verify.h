// SPDX-License-Identifier: Apache-2.0
//
// One request of the CPU rejection sampler as its rules see it. verify_request.cpp reads the
// request and walks its rows, verify_draws.cpp draws and knows the drafts' laws, verify_block.cpp
// holds the rule that looks at all rows before it decides.
#ifndef DSPARK_CPU_VERIFY_H_
#define DSPARK_CPU_VERIFY_H_

#include "cpu/request.h"

namespace dspark::cpu {

/// A request on its way through the rows.
struct Request {
  const dspark_rejection_sampler_params& p;
  int64_t r;
  Lane& lane;
  Sampling s;
  int32_t status;
  int32_t accepted;
  int32_t emitted;
  int32_t finish;
};

/// The law of row i after the processors.
inline RowLaw row_law(const Request& q, int32_t i) { return row_law(q.p, q.r, q.s, i); }
inline bool coin(const Request& q, int32_t i, double ratio, DrawKind kind = kAccept) {
  return throw_coin(q.p, q.r, i, ratio, kind);
}
/// A token of p itself.
int32_t from_target(Request& q, int32_t i, DrawKind segment_kind);
/// What plain decoding would emit at row i: rules greedy and match.
int32_t target_choice(Request& q, int32_t i);
/// The token behind the last draft.
int32_t bonus(Request& q, int32_t i);
/// The law that draft i was drawn from.
DraftLaw draft_law(const Request& q, int32_t i, int32_t token, DraftRow* row, double* log_q);
/// One token of max(0, p - q), p being the law in the lane; `row` null: q is one-hot at `token`.
int32_t residual(Request& q, int32_t i, int32_t token, const DraftRow* row);

inline int32_t draft_at(Request& q, int32_t i) {
  return draft_of(q.p, q.r, q.s, i, q.p.vocab_size, &q.status);
}
/// Write the token of row i with its log-probabilities under the law in the lane.
void record(const Request& q, int32_t i, int32_t token);
/// Count the token of row q.emitted as emitted; true when the round ends behind it.
bool emit(Request& q);
/// Flag -1 for the scheduled drafts from i on: they lie behind a rejection.
void mark_unobserved(const Request& q, int32_t i);

/// Rule `block` for all rows of the request.
void verify_block(Request& q);

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_VERIFY_H_
