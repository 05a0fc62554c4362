// SPDX-License-Identifier: Apache-2.0
//
// The draws of a request, and the laws its drafts were drawn from.
#include "cpu/verify.h"

namespace dspark::cpu {

int32_t from_target(Request& q, int32_t i, DrawKind segment_kind) {
  const int32_t drawn =
      q.lane.empty ? -1 : sample_row(q.lane, row_draw(q.p, q.r, i, segment_kind)).token;
  if (drawn >= 0) return drawn;
  q.status |= DSPARK_EMPTY_SUPPORT;
  return lowest_allowed(q.lane);
}

// What plain decoding would emit at row i: rules greedy and match, whose draws know the position
// only.
int32_t target_choice(Request& q, int32_t i) {
  if (q.s.temperature == 0.0f && !q.lane.empty) return argmax(q.lane);
  return from_target(q, i, kTargetSegment);
}

int32_t bonus(Request& q, int32_t i) {
  const bool plain = q.s.temperature == 0.0f || q.s.rule == DSPARK_RULE_MATCH;
  return !plain ? from_target(q, i, kBonusSegment) : target_choice(q, i);
}

// A one-hot law reads nothing.
DraftLaw draft_law(const Request& q, int32_t i, int32_t token, DraftRow* row, double* log_q) {
  const dspark_rejection_sampler_params& p = q.p;
  if (!has_law(p, q.s)) return DraftLaw::kOneHot;
  *row = stored_law(p, q.r, q.s, i);
  DraftLook look{};
  if (p.support_ids != nullptr) row->vocab = list_length(row->targets, row->vocab, p.vocab_size);
  look.disorder = row->vocab < 0;
  look.nan = !look.disorder && draft_has_nan(q.lane, *row);
  look.listed = !look.disorder && has_column(*row, token);
  return judge_law(*row, p.draft_logit[q.r * p.gamma + i], look, log_q);
}

int32_t residual(Request& q, int32_t i, int32_t token, const DraftRow* row) {
  if (!q.lane.empty) {
    const RowDraw d = row_draw(q.p, q.r, i, kResidualSegment);
    const int32_t drawn = row == nullptr ? sample_without(q.lane, token, d).token
                                         : sample_residual(q.lane, *row, d).token;
    if (drawn >= 0) return drawn;
    q.status |= DSPARK_ZERO_RESIDUAL;
  }
  return from_target(q, i, kResidualSegment);
}

}  // namespace dspark::cpu
