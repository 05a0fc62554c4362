// SPDX-License-Identifier: Apache-2.0
//
// Rule `block` (Sun et al., arXiv 2403.10444): how many drafts are accepted is decided over all of
// them together. Drafts 1..i are the accepted prefix with a probability that only depends on them:
//
//   P_0 = 1,  P_i = min(1, P_{i-1} p(x_i) / q(x_i)),
//   S_i = sum max(P_i p_i - q_{i+1}, 0),  h_i = S_i / (S_i + 1 - P_i),  h_l = P_l,
//
// and the largest i with u_i < h_i is taken (h_0 = 1). Behind it comes one token of the residual
// max(P_i p_i - q_{i+1}, 0), or of p_l. Averaged over x_{i+1}, P_{i+1} is P_i - S_i, which makes
// Pr(at least i accepted | x_1..x_i) equal to P_i from the last i to the first.
#include "core/math.h"
#include "cpu/verify.h"

namespace dspark::cpu {
namespace {

constexpr double kMinusInf = -__builtin_inf();

// Why the walk over the rows ended.
enum class End {
  kBonus,    // all drafts seen, or no draft at this row: a token of p
  kRefused,  // the draft here has no valid law, or p has no mass: a token of p
  kNever     // P is 0 behind this row
};

// What the walk leaves: rows 0..last were seen.
struct Walk {
  int32_t last;
  End end;
  double log_reach[DSPARK_MAX_GAMMA + 1];  // log P_i
  double chance[DSPARK_MAX_GAMMA + 1];     // h_i
};

// The draft's law in units of P_i: max(0, P p - q) = P max(0, p - q / P).
DraftRow relative_to(const DraftRow& row, double log_reach) {
  DraftRow scaled = row;
  scaled.lse += log_reach;
  return scaled;
}

void refuse(Request& q, DraftLaw law) {
  if (law == DraftLaw::kNone) q.status |= DSPARK_NAN_DRAFT;
  if (law == DraftLaw::kDisorder) q.status |= DSPARK_BAD_DRAFT_ID;
  q.status |= DSPARK_FORCED_REJECT;
}

// Row i, whose law is in the lane, when drafts 1..i have P_i > 0. Returns whether row i + 1 counts.
bool visit(Request& q, int32_t i, Walk* walk) {
  walk->last = i;
  walk->end = End::kBonus;
  walk->chance[i] = exp_f64(walk->log_reach[i]);
  const int32_t draft = draft_at(q, i);
  if (draft < 0) return false;
  DraftRow row{};
  double log_q = 0.0;
  const DraftLaw law = draft_law(q, i, draft, &row, &log_q);
  if (law == DraftLaw::kZero) {
    q.status |= DSPARK_BAD_DRAFT_ID;
    return false;
  }
  if (law == DraftLaw::kNone || law == DraftLaw::kDisorder || q.lane.empty) {
    refuse(q, law);
    walk->end = End::kRefused;
    return false;
  }
  const bool stored = law == DraftLaw::kStored;
  const DraftRow scaled = relative_to(row, walk->log_reach[i]);
  if (i > 0) {
    const double share = stored ? residual_share(q.lane, scaled) : share_without(q.lane, draft);
    walk->chance[i] = chance_of(walk->log_reach[i], share);
  }
  record(q, i, draft);
  const float z = logit_of(q.lane, draft);
  if (z == -__builtin_inff()) {
    q.status |= DSPARK_FORCED_REJECT;
    walk->end = End::kNever;
    return false;
  }
  const double reach = walk->log_reach[i] + log_prob(q.lane, z) - log_q;
  walk->log_reach[i + 1] = reach < 0.0 ? reach : 0.0;
  if (exp_f64(walk->log_reach[i + 1]) > 0.0) return true;
  walk->end = End::kNever;
  return false;
}

Walk walk_rows(Request& q) {
  Walk walk{};
  for (int32_t i = 0;; ++i) {
    analyse(q.lane, row_law(q, i));
    if (q.lane.nan) q.status |= DSPARK_NAN_TARGET;
    if (!visit(q, i, &walk)) return walk;
  }
}

// The token behind the accepted drafts; the lane holds row i again.
int32_t last_token(Request& q, int32_t i, const Walk& walk) {
  if (i == walk.last && walk.end == End::kBonus) return bonus(q, i);
  if (i == walk.last && walk.end == End::kRefused) return from_target(q, i, kResidualSegment);
  const int32_t draft = draft_at(q, i);
  DraftRow row{};
  double log_q = 0.0;
  const bool stored = draft_law(q, i, draft, &row, &log_q) == DraftLaw::kStored;
  const DraftRow scaled = relative_to(row, walk.log_reach[i]);
  return residual(q, i, draft, stored ? &scaled : nullptr);
}

}  // namespace

void verify_block(Request& q) {
  int8_t* flags = q.p.accepted + q.r * q.p.gamma;
  const Walk walk = walk_rows(q);
  int32_t accepted = walk.last;
  while (accepted > 0 && !coin(q, accepted - 1, walk.chance[accepted])) --accepted;
  for (int32_t i = 0; i < accepted; ++i) {
    flags[i] = 1;
    q.accepted += 1;
    if (emit(q)) return;
  }
  if (accepted < walk.last || walk.end != End::kBonus) {
    flags[accepted] = 0;
    mark_unobserved(q, accepted + 1);
  }
  analyse(q.lane, row_law(q, accepted));
  record(q, accepted, last_token(q, accepted, walk));
  emit(q);
}

}  // namespace dspark::cpu
