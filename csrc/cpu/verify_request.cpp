// SPDX-License-Identifier: Apache-2.0
//
// The rules of verification for one request: row by row until a rejection, a stop or the bonus.
#include "cpu/verify.h"

namespace dspark::cpu {
namespace {

using Params = dspark_rejection_sampler_params;

// Rule `token` at row i. Returns the token to emit; *flag as in the results, -2: no draft here.
int32_t verify_token(Request& q, int32_t i, int32_t draft, int8_t* flag) {
  DraftRow row{};
  double log_q = 0.0;
  const DraftLaw law = draft_law(q, i, draft, &row, &log_q);
  if (law == DraftLaw::kZero) {
    q.status |= DSPARK_BAD_DRAFT_ID;
    *flag = -2;
    return bonus(q, i);
  }
  *flag = 0;
  if (law == DraftLaw::kNone || law == DraftLaw::kDisorder) {
    q.status |= law == DraftLaw::kNone ? DSPARK_NAN_DRAFT : DSPARK_BAD_DRAFT_ID;
    q.status |= DSPARK_FORCED_REJECT;
    return from_target(q, i, kResidualSegment);
  }
  const DraftRow* stored = law == DraftLaw::kStored ? &row : nullptr;
  const float z = logit_of(q.lane, draft);
  if (q.lane.empty || z == -__builtin_inff()) {
    q.status |= DSPARK_FORCED_REJECT;
    return residual(q, i, draft, stored);
  }
  if (!coin(q, i, ratio_of(log_prob(q.lane, z) - log_q))) {
    return residual(q, i, draft, stored);
  }
  *flag = 1;
  return draft;
}

void look(Request& q, int32_t i) {
  analyse(q.lane, row_law(q, i));
  if (q.lane.nan) q.status |= DSPARK_NAN_TARGET;
}

// Rule `token` at a row that was not read. True: the draft is accepted; false: the row is in the
// lane, with *token and *flag as verify_token has them.
bool verify_told(Request& q, int32_t i, int32_t draft, const Told& told, int32_t* token,
                 int8_t* flag) {
  DraftRow row{};
  double log_q = 0.0;
  const DraftLaw law = draft_law(q, i, draft, &row, &log_q);
  if (law != DraftLaw::kStored && law != DraftLaw::kOneHot) {
    look(q, i);
    *token = verify_token(q, i, draft, flag);
    return false;
  }
  *flag = coin(q, i, ratio_of(told.log_p - log_q)) ? 1 : 0;
  if (*flag == 1) return true;
  look(q, i);
  *token = residual(q, i, draft, law == DraftLaw::kStored ? &row : nullptr);
  return false;
}

int32_t verify_synthetic(Request& q, int32_t i, int32_t draft, int8_t* flag) {
  *flag = coin(q, i, synthetic_rate(q.s, i), kSynthetic) ? 1 : 0;
  return *flag == 1 ? draft : bonus(q, i);
}

// One row; true when the round goes on to the next.
bool step(Request& q, int32_t i) {
  const Params& p = q.p;
  int8_t* flags = p.accepted + q.r * p.gamma;
  const int32_t draft = draft_at(q, i);
  Told told{};
  const bool known = draft >= 0 && told_of(p, q.s, row_law(q, i), i, &told);
  if (!known) look(q, i);
  if (draft < 0) {
    record(q, i, bonus(q, i));
    emit(q);
    return false;
  }
  int32_t token = -1;
  int8_t flag = 0;
  bool unread = false;
  if (known) {
    unread = verify_told(q, i, draft, told, &token, &flag);
  } else if (q.s.rule == DSPARK_RULE_TOKEN) {
    token = verify_token(q, i, draft, &flag);
  } else if (q.s.rule == DSPARK_RULE_SYNTHETIC) {
    token = verify_synthetic(q, i, draft, &flag);
  } else {
    token = target_choice(q, i);
    flag = token == draft && !q.lane.empty ? 1 : 0;
  }
  flags[i] = flag;
  q.accepted += flag == 1 ? 1 : 0;
  if (flag == 0) mark_unobserved(q, i + 1);
  if (unread) {
    const int64_t at = q.r * (p.gamma + 1) + i;
    p.tokens[at] = draft;
    p.logprob[at] = static_cast<float>(told.log_p);
    p.logprob_raw[at] = told.log_p_raw;
  } else {
    record(q, i, token);
  }
  return !emit(q) && flag == 1;
}

void clear_results(const Params& p, int64_t r) {
  for (int64_t j = r * p.gamma; j < (r + 1) * p.gamma; ++j) p.accepted[j] = -2;
  p.next_anchor[r] = -1;
}

// Rows from `first` on emit nothing.
void clear_rows(const Params& p, int64_t r, int32_t first) {
  const int64_t n = p.top_logprobs;
  for (int64_t j = (r * (p.gamma + 1) + first) * n; j < (r + 1) * (p.gamma + 1) * n; ++j) {
    p.top_ids[j] = p.top_ids_raw[j] = -1;
    p.top_logprob[j] = p.top_logprob_raw[j] = 0.0f;
  }
  for (int64_t j = r * (p.gamma + 1) + first; j < (r + 1) * (p.gamma + 1); ++j) {
    p.tokens[j] = -1;
    p.logprob[j] = 0.0f;
    p.logprob_raw[j] = 0.0f;
  }
}

}  // namespace

void record(const Request& q, int32_t i, int32_t token) {
  const Params& p = q.p;
  const int64_t at = q.r * (p.gamma + 1) + i;
  p.tokens[at] = token;
  const float z = q.lane.empty ? -__builtin_inff() : logit_of(q.lane, token);
  p.logprob[at] = z == -__builtin_inff() ? z : static_cast<float>(log_prob(q.lane, z));
  p.logprob_raw[at] = static_cast<float>(raw_log_prob(q.lane, token));
  const int64_t n = p.top_logprobs;
  if (n == 0) return;
  list_top(q.lane, false, {p.top_ids + at * n, p.top_logprob + at * n, p.top_logprobs});
  list_top(q.lane, true, {p.top_ids_raw + at * n, p.top_logprob_raw + at * n, p.top_logprobs});
}

bool emit(Request& q) {
  const Params& p = q.p;
  const int32_t token = p.tokens[q.r * (p.gamma + 1) + q.emitted];
  p.next_anchor[q.r] = token;
  q.emitted += 1;
  q.finish = finish_of(p, q.r, q.s, token, q.emitted, &q.status);
  return q.finish != DSPARK_FINISH_NONE;
}

void mark_unobserved(const Request& q, int32_t i) {
  for (int32_t j = i; j < q.s.length; ++j) q.p.accepted[q.r * q.p.gamma + j] = -1;
}

void verify_request(const Params& p, int64_t r, Lane& lane) {
  if (!takes_part(p, r)) return;
  clear_results(p, r);
  int32_t status = 0;
  const Sampling s = read_sampling(p, r, &status);
  Request q{p, r, lane, s, status, 0, 0, DSPARK_FINISH_NONE};
  if (s.cap > 0 && s.length >= 0) {
    if (s.rule == DSPARK_RULE_SYNTHETIC) q.status |= DSPARK_SYNTHETIC;
    if (s.rule == DSPARK_RULE_BLOCK) {
      verify_block(q);
    } else {
      for (int32_t i = 0; step(q, i); ++i) continue;
    }
  }
  clear_rows(p, r, q.emitted);
  p.num_accepted[r] = q.accepted;
  p.num_emitted[r] = q.emitted;
  p.finish[r] = q.finish;
  p.status[r] = q.status;
}

}  // namespace dspark::cpu
