// SPDX-License-Identifier: Apache-2.0
//
// The draws of a request, and the laws its drafts were drawn from.
#include "core/dtype.h"
#include "core/math.h"
#include "cpu/verify.h"

namespace dspark::cpu {
namespace {

using Params = dspark_rejection_sampler_params;

RowDraw row_draw(const Request& q, int32_t i, DrawKind segment_kind) {
  const Params& p = q.p;
  RowDraw d{};
  d.seed = p.seed[q.r];
  d.position = static_cast<int64_t>(static_cast<uint64_t>(p.position[q.r]) + 1u + i);
  d.distance = segment_kind == kTargetSegment ? 0u : static_cast<uint32_t>(i + 1);
  d.segment_kind = segment_kind;
  d.forced = p.debug_uniform == nullptr ? nullptr : p.debug_uniform + q.r * (p.gamma + 1) + i;
  return d;
}

// Columns of a list of M ids: strictly ascending in [0, V), then negative ones only. -1: it is
// none.
int32_t support_count(const int32_t* ids, int32_t size, int32_t vocab) {
  int32_t n = 0;
  while (n < size && ids[n] >= 0) ++n;
  for (int32_t j = 0; j < n; ++j) {
    if (ids[j] >= vocab || (j > 0 && ids[j] <= ids[j - 1])) return -1;
  }
  for (int32_t j = n; j < size; ++j) {
    if (ids[j] >= 0) return -1;
  }
  return n;
}

bool has_column(const DraftRow& row, int32_t token) {
  if (row.targets == nullptr) return token < row.vocab;
  int32_t lo = 0;
  int32_t n = row.vocab;
  while (n > 0) {
    const int32_t half = n / 2;
    const bool below = row.targets[lo + half] < token;
    lo = below ? lo + half + 1 : lo;
    n = below ? n - half - 1 : half;
  }
  return lo < row.vocab && row.targets[lo] == token;
}

// A law on M ids is a law on a draft vocabulary of M columns that changes from slot to slot.
DraftRow draft_row(const Request& q, int32_t i) {
  const Params& p = q.p;
  const int64_t at = q.r * p.gamma + i;
  DraftRow row{};
  row.dtype = p.draft_dtype;
  row.temperature = static_cast<double>(q.s.draft_temperature);
  row.lse = static_cast<double>(p.draft_lse[at]);
  if (p.support_ids != nullptr) {
    row.logits = advance(p.support_logits, p.draft_dtype, at * p.support_size);
    row.targets = p.support_ids + at * p.support_size;
    row.vocab = support_count(row.targets, p.support_size, p.vocab_size);
  } else {
    row.logits = advance(p.draft_logits, p.draft_dtype,
                         q.r * p.draft_request_stride + i * p.draft_slot_stride);
    row.targets = p.draft_to_target;
    row.vocab = p.draft_vocab_size;
  }
  return row;
}

}  // namespace

// Strictly below `ratio`, in 53 bits.
bool coin(const Request& q, int32_t i, double ratio, DrawKind kind) {
  const RowDraw d = row_draw(q, i, kResidualSegment);
  const DrawStream stream{d.seed, d.position, d.distance, kind};
  const uint64_t u53 = d.forced != nullptr ? *d.forced : draw_u53(stream);
  return static_cast<double>(u53) * 1.1102230246251565e-16 < ratio;
}

int32_t from_target(Request& q, int32_t i, DrawKind segment_kind) {
  const int32_t drawn = q.lane.empty ? -1 : sample_row(q.lane, row_draw(q, i, segment_kind));
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

// The law that draft i was drawn from. A one-hot law reads nothing. A NaN anywhere in a stored row
// is looked for before the coin: to find it only in a residual would make the emission depend on
// the draft.
DraftLaw draft_law(const Request& q, int32_t i, int32_t token, DraftRow* row, double* log_q) {
  const Params& p = q.p;
  if (p.draft_logit == nullptr || q.s.draft_temperature == 0.0f) return DraftLaw::kOneHot;
  const float logit = p.draft_logit[q.r * p.gamma + i];
  *row = draft_row(q, i);
  if (row->vocab < 0) return DraftLaw::kDisorder;
  if (logit != logit || row->lse != row->lse || draft_has_nan(q.lane, *row)) {
    return DraftLaw::kNone;
  }
  if (logit == -__builtin_inff() || !has_column(*row, token)) return DraftLaw::kZero;
  if (row->lse - row->lse != 0.0) return DraftLaw::kNone;
  const float largest = largest_finite(DSPARK_F32);
  const double z = static_cast<double>(logit > largest ? largest : logit);
  *log_q = z / row->temperature - row->lse;
  return DraftLaw::kStored;
}

int32_t residual(Request& q, int32_t i, int32_t token, const DraftRow* row) {
  if (!q.lane.empty) {
    const RowDraw d = row_draw(q, i, kResidualSegment);
    const int32_t drawn =
        row == nullptr ? sample_without(q.lane, token, d) : sample_residual(q.lane, *row, d);
    if (drawn >= 0) return drawn;
    q.status |= DSPARK_ZERO_RESIDUAL;
  }
  return from_target(q, i, kResidualSegment);
}

}  // namespace dspark::cpu
