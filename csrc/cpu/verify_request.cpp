// SPDX-License-Identifier: Apache-2.0
//
// The rules of verification for one request: row by row until a rejection, a stop or the bonus.
#include "core/dtype.h"
#include "core/math.h"
#include "cpu/verify.h"

namespace dspark::cpu {
namespace {

using Params = dspark_rejection_sampler_params;

constexpr float kSmallestTemperature = 1e-3f;
constexpr int32_t kNoCap = INT32_MAX;

template <class T>
T legal(T value, bool good, T instead, int32_t* status) {
  if (!good) *status |= DSPARK_BAD_PARAM;
  return good ? value : instead;
}

float legal_temperature(const float* array, int64_t r, int32_t* status) {
  if (array == nullptr) return 0.0f;
  const float t = array[r];
  const bool good = t == 0.0f || (t >= kSmallestTemperature && t - t == 0.0f);
  return legal(t, good, 0.0f, status);
}

void read_rows(const Params& p, int64_t r, Sampling* s, int32_t* status) {
  const int64_t first = p.cu_seqlens[r];
  const int64_t last = p.cu_seqlens[r + 1];
  const int64_t rows = first >= 0 && last <= p.num_rows ? last - first : 0;
  const int64_t wanted = p.draft_len[r];
  int64_t length = wanted < 0 ? 0 : wanted > p.gamma ? p.gamma : wanted;
  length = length < rows - 1 ? length : rows - 1;
  s->first_row = first;
  s->length = length < 0 ? -1 : static_cast<int32_t>(length);
  if (s->cap > 0 && length != wanted) *status |= DSPARK_BAD_PARAM;
}

float finite(const float* array, int64_t r, int32_t* status) {
  if (array == nullptr) return 0.0f;
  return legal(array[r], array[r] - array[r] == 0.0f, 0.0f, status);
}

void read_penalties(const Params& p, int64_t r, Sampling* s, int32_t* status) {
  const float repetition = p.repetition_penalty == nullptr ? 1.0f : p.repetition_penalty[r];
  const bool good = repetition > 0.0f && repetition - repetition == 0.0f;
  s->repetition = legal(repetition, good, 1.0f, status);
  s->presence = finite(p.presence_penalty, r, status);
  s->frequency = finite(p.frequency_penalty, r, status);
  const int32_t least = p.min_tokens_left == nullptr ? 0 : p.min_tokens_left[r];
  s->min_tokens = legal(least, least >= 0, 0, status);
  s->anchor = p.anchor == nullptr ? -1 : p.anchor[r];
  if (s->anchor < p.vocab_size) return;
  const bool on = s->repetition != 1.0f || s->presence != 0.0f || s->frequency != 0.0f;
  if (on) *status |= DSPARK_BAD_DRAFT_ID;
  s->anchor = -1;
}

Sampling read_sampling(const Params& p, int64_t r, int32_t* status) {
  Sampling s{};
  const int32_t rule = p.rule == nullptr ? DSPARK_RULE_TOKEN : p.rule[r];
  s.rule = legal<int32_t>(rule, rule >= DSPARK_RULE_GREEDY && rule <= DSPARK_RULE_SYNTHETIC,
                          DSPARK_RULE_GREEDY, status);
  s.temperature = legal_temperature(p.temperature, r, status);
  if (s.rule == DSPARK_RULE_GREEDY) s.temperature = 0.0f;
  if (s.rule == DSPARK_RULE_SYNTHETIC) {
    const float mean = p.synthetic_acceptance == nullptr ? 0.0f : p.synthetic_acceptance[r];
    const bool good = mean >= 1.0f && mean <= static_cast<float>(p.gamma + 1);
    s.wanted = legal(mean, good, 1.0f, status) - 1.0f;
  } else if (s.temperature == 0.0f) {
    s.rule = DSPARK_RULE_GREEDY;
  }
  s.draft_temperature = p.draft_temperature == nullptr
                            ? s.temperature
                            : legal_temperature(p.draft_temperature, r, status);
  s.top_k = p.top_k == nullptr ? 0 : p.top_k[r];
  const float top_p = p.top_p == nullptr ? 1.0f : p.top_p[r];
  s.top_p = legal(top_p, top_p > 0.0f && top_p <= 1.0f, 1.0f, status);
  const float min_p = p.min_p == nullptr ? 0.0f : p.min_p[r];
  s.min_p = legal(min_p, min_p >= 0.0f && min_p <= 1.0f, 0.0f, status);
  const int32_t cap = p.max_new_tokens == nullptr ? kNoCap : p.max_new_tokens[r];
  s.cap = legal(cap, cap >= 0, 0, status);
  read_penalties(p, r, &s, status);
  read_rows(p, r, &s, status);
  return s;
}

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
  const double difference = log_prob(q.lane, z) - log_q;
  if (!coin(q, i, exp_f64(difference < 0.0 ? difference : 0.0))) {
    return residual(q, i, draft, stored);
  }
  *flag = 1;
  return draft;
}

bool is_stop(const Params& p, int64_t r, int32_t token) {
  if (p.stop_ids == nullptr) return false;
  const int32_t* ids = p.stop_ids + r * p.stop_ids_stride;
  for (int32_t j = 0; j < p.num_stop_ids; ++j) {
    if (ids[j] == token) return true;
  }
  return false;
}

// What the engine says of the draft of a row that nobody has read.
struct Told {
  double log_p;
  float log_p_raw;
};

// False: nothing that can be used, or the law of the row is more than a softmax at T.
bool told_of(const Request& q, int32_t i, Told* told) {
  const Params& p = q.p;
  if (p.target_lse == nullptr || q.s.rule != DSPARK_RULE_TOKEN || p.top_logprobs > 0) return false;
  const RowLaw law = row_law(q, i);
  if (processed(law) || truncated(law)) return false;
  const int64_t row = q.s.first_row + i;
  const float z = p.target_logit[row];
  const float lse = p.target_lse[row];
  if (z - z != 0.0f || lse - lse != 0.0f) return false;
  told->log_p =
      static_cast<double>(z) / static_cast<double>(law.temperature) - static_cast<double>(lse);
  told->log_p_raw = static_cast<float>(told->log_p);
  if (law.temperature == 1.0f) return true;
  told->log_p_raw = p.target_lse_raw == nullptr ? __builtin_nanf("") : z - p.target_lse_raw[row];
  return true;
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
  const double difference = told.log_p - log_q;
  *flag = coin(q, i, exp_f64(difference < 0.0 ? difference : 0.0)) ? 1 : 0;
  if (*flag == 1) return true;
  look(q, i);
  *token = residual(q, i, draft, law == DraftLaw::kStored ? &row : nullptr);
  return false;
}

// Rule `synthetic` at row i: floor(wanted) drafts always, the next one with the probability that is
// left. No other law with this mean on whole numbers has a smaller variance.
int32_t verify_synthetic(Request& q, int32_t i, int32_t draft, int8_t* flag) {
  const double rate = static_cast<double>(q.s.wanted) - static_cast<double>(i);
  *flag = coin(q, i, rate, kSynthetic) ? 1 : 0;
  return *flag == 1 ? draft : bonus(q, i);
}

// One row; true when the round goes on to the next.
bool step(Request& q, int32_t i) {
  const Params& p = q.p;
  int8_t* flags = p.accepted + q.r * p.gamma;
  const int32_t draft = draft_at(q, i);
  Told told{};
  const bool known = draft >= 0 && told_of(q, i, &told);
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

// Row i counts the drafts before it: those are valid ids, or the walk would have ended there.
Penalties row_penalties(const Request& q, int32_t i) {
  const Params& p = q.p;
  const Sampling& s = q.s;
  Penalties law{};
  law.repetition = s.repetition;
  law.presence = s.presence;
  law.frequency = s.frequency;
  law.anchor = s.anchor;
  law.drafts = p.draft_tokens + q.r * p.draft_tokens_stride;
  law.num_drafts = i;
  if (p.output_counts != nullptr) law.counts = p.output_counts + q.r * p.output_counts_stride;
  if (p.prompt_mask != nullptr) law.prompt = p.prompt_mask + q.r * p.prompt_mask_stride;
  return law;
}

}  // namespace

int32_t draft_at(Request& q, int32_t i) {
  if (i == q.s.length) return -1;
  const int32_t draft = q.p.draft_tokens[q.r * q.p.draft_tokens_stride + i];
  if (draft >= 0 && draft < q.p.vocab_size) return draft;
  q.status |= DSPARK_BAD_DRAFT_ID;
  return -1;
}

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

// A stop id goes before the cap.
bool emit(Request& q) {
  const Params& p = q.p;
  const int32_t token = p.tokens[q.r * (p.gamma + 1) + q.emitted];
  p.next_anchor[q.r] = token;
  q.emitted += 1;
  if (is_stop(p, q.r, token)) {
    q.finish = DSPARK_FINISH_STOP;
  } else if (q.emitted == q.s.cap) {
    q.finish = DSPARK_FINISH_LENGTH;
  }
  if (q.finish != DSPARK_FINISH_NONE) q.status |= DSPARK_STOPPED;
  return q.finish != DSPARK_FINISH_NONE;
}

void mark_unobserved(const Request& q, int32_t i) {
  for (int32_t j = i; j < q.s.length; ++j) q.p.accepted[q.r * q.p.gamma + j] = -1;
}

RowLaw row_law(const Request& q, int32_t i) {
  const Params& p = q.p;
  const Sampling& s = q.s;
  const bool greedy = s.temperature == 0.0f;
  const int64_t row = s.first_row + i;
  RowLaw law{};
  law.logits = advance(p.target_logits, p.target_dtype, row * p.target_stride);
  if (p.token_mask != nullptr) {
    law.mask = p.token_mask + (p.mask_request_stride > 0
                                   ? q.r * p.mask_request_stride + i * p.mask_row_stride
                                   : row * p.mask_row_stride);
  }
  law.bias = p.logit_bias == nullptr ? nullptr : p.logit_bias + q.r * p.logit_bias_stride;
  if (i < s.min_tokens && p.stop_ids != nullptr) {
    law.stops = p.stop_ids + q.r * p.stop_ids_stride;
    law.num_stops = p.num_stop_ids;
  }
  law.penalties = row_penalties(q, i);
  law.dtype = p.target_dtype;
  law.vocab = p.vocab_size;
  law.temperature = greedy ? 1.0f : s.temperature;
  law.min_p = greedy ? 0.0f : s.min_p;
  law.top_p = greedy ? 1.0f : s.top_p;
  law.top_k = greedy ? 0 : s.top_k;
  return law;
}

void verify_request(const Params& p, int64_t r, Lane& lane) {
  if (p.active != nullptr && p.active[r] == 0) return;
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
