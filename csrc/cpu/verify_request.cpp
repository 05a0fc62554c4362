// SPDX-License-Identifier: Apache-2.0
//
// The rules of verification for one request: row by row until a rejection, a stop or the bonus.
#include "core/dtype.h"
#include "core/math.h"
#include "core/philox.h"
#include "cpu/request.h"

namespace dspark::cpu {
namespace {

using Params = dspark_rejection_sampler_params;

constexpr float kSmallestTemperature = 1e-3f;
constexpr int32_t kNoCap = INT32_MAX;

// The sampling parameters of a request after illegal values were replaced by "off".
struct Sampling {
  int32_t rule;
  float temperature;  // 0 = greedy
  float draft_temperature;
  float min_p;
  float top_p;
  int32_t top_k;
  int32_t cap;
  int32_t length;  // scheduled drafts; -1: there is no row
  int64_t first_row;
};

struct Request {
  const Params& p;
  int64_t r;
  Lane& lane;
  Sampling s;
  int32_t status;
  int32_t accepted;
  int32_t emitted;
  int32_t finish;
};

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

Sampling read_sampling(const Params& p, int64_t r, int32_t* status) {
  Sampling s{};
  const int32_t rule = p.rule == nullptr ? DSPARK_RULE_TOKEN : p.rule[r];
  s.rule = legal<int32_t>(
      rule, rule == DSPARK_RULE_GREEDY || rule == DSPARK_RULE_TOKEN || rule == DSPARK_RULE_MATCH,
      DSPARK_RULE_GREEDY, status);
  s.temperature = legal_temperature(p.temperature, r, status);
  if (s.rule == DSPARK_RULE_GREEDY) s.temperature = 0.0f;
  if (s.temperature == 0.0f) s.rule = DSPARK_RULE_GREEDY;
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
  read_rows(p, r, &s, status);
  return s;
}

RowLaw row_law(const Request& q, int32_t i) {
  const Params& p = q.p;
  const Sampling& s = q.s;
  const bool greedy = s.rule == DSPARK_RULE_GREEDY;
  const int64_t row = s.first_row + i;
  RowLaw law{};
  law.logits = advance(p.target_logits, p.target_dtype, row * p.target_stride);
  if (p.token_mask != nullptr) {
    law.mask = p.token_mask + (p.mask_request_stride > 0
                                   ? q.r * p.mask_request_stride + i * p.mask_row_stride
                                   : row * p.mask_row_stride);
  }
  law.bias = p.logit_bias == nullptr ? nullptr : p.logit_bias + q.r * p.logit_bias_stride;
  law.dtype = p.target_dtype;
  law.vocab = p.vocab_size;
  law.temperature = greedy ? 1.0f : s.temperature;
  law.min_p = greedy ? 0.0f : s.min_p;
  law.top_p = greedy ? 1.0f : s.top_p;
  law.top_k = greedy ? 0 : s.top_k;
  return law;
}

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

// Strictly below `ratio`, in 53 bits.
bool coin(const Request& q, int32_t i, double ratio) {
  const RowDraw d = row_draw(q, i, kResidualSegment);
  const DrawStream stream{d.seed, d.position, d.distance, kAccept};
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
  if (q.s.rule == DSPARK_RULE_GREEDY && !q.lane.empty) return argmax(q.lane);
  return from_target(q, i, kTargetSegment);
}

int32_t bonus(Request& q, int32_t i) {
  return q.s.rule == DSPARK_RULE_TOKEN ? from_target(q, i, kBonusSegment) : target_choice(q, i);
}

enum class DraftLaw { kOneHot, kStored, kNone, kDisorder, kZero };

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

// Writes one emitted token; true when the round ends behind it. A stop id goes before the cap.
bool emit(Request& q, int32_t token) {
  const Params& p = q.p;
  const int64_t at = q.r * (p.gamma + 1) + q.emitted;
  p.tokens[at] = token;
  const float z = q.lane.empty ? -__builtin_inff() : logit_of(q.lane, token);
  p.logprob[at] = z == -__builtin_inff() ? z : static_cast<float>(log_prob(q.lane, z));
  p.logprob_raw[at] = static_cast<float>(raw_log_prob(q.lane, token));
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

// One row; true when the round goes on to the next.
bool step(Request& q, int32_t i) {
  const Params& p = q.p;
  int8_t* flags = p.accepted + q.r * p.gamma;
  analyse(q.lane, row_law(q, i));
  if (q.lane.nan) q.status |= DSPARK_NAN_TARGET;
  if (i == q.s.length) {
    emit(q, bonus(q, i));
    return false;
  }
  const int32_t draft = p.draft_tokens[q.r * p.draft_tokens_stride + i];
  if (draft < 0 || draft >= p.vocab_size) {
    q.status |= DSPARK_BAD_DRAFT_ID;
    emit(q, bonus(q, i));
    return false;
  }
  int32_t token;
  int8_t flag;
  if (q.s.rule == DSPARK_RULE_TOKEN) {
    token = verify_token(q, i, draft, &flag);
  } else {
    token = target_choice(q, i);
    flag = token == draft && !q.lane.empty ? 1 : 0;
  }
  flags[i] = flag;
  q.accepted += flag == 1 ? 1 : 0;
  if (flag == 0) {
    for (int32_t j = i + 1; j < q.s.length; ++j) flags[j] = -1;
  }
  return !emit(q, token) && flag == 1;
}

void clear_results(const Params& p, int64_t r) {
  for (int64_t j = r * (p.gamma + 1); j < (r + 1) * (p.gamma + 1); ++j) {
    p.tokens[j] = -1;
    p.logprob[j] = 0.0f;
    p.logprob_raw[j] = 0.0f;
  }
  for (int64_t j = r * p.gamma; j < (r + 1) * p.gamma; ++j) p.accepted[j] = -2;
  p.next_anchor[r] = -1;
}

}  // namespace

void verify_request(const Params& p, int64_t r, Lane& lane) {
  if (p.active != nullptr && p.active[r] == 0) return;
  clear_results(p, r);
  int32_t status = 0;
  const Sampling s = read_sampling(p, r, &status);
  Request q{p, r, lane, s, status, 0, 0, DSPARK_FINISH_NONE};
  if (s.cap > 0) {
    for (int32_t i = 0; i <= s.length; ++i) {
      if (!step(q, i)) break;
    }
  }
  p.num_accepted[r] = q.accepted;
  p.num_emitted[r] = q.emitted;
  p.finish[r] = q.finish;
  p.status[r] = q.status;
}

}  // namespace dspark::cpu
