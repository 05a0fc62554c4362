// SPDX-License-Identifier: Apache-2.0
//
// Verification as every backend decides it: the sampling parameters of a request, the law of each
// of its rows, the coins, what is known of a draft's law. Scalars only; what needs a whole row is
// the backend's.
#ifndef DSPARK_CORE_VERIFICATION_H_
#define DSPARK_CORE_VERIFICATION_H_

#include "core/philox.h"
#include "core/row_law.h"
#include "dspark/rejection_sampler.h"

namespace dspark {

using VerifyParams = dspark_rejection_sampler_params;

/// The sampling parameters of a request after illegal values were replaced by "off".
struct Sampling {
  int32_t rule;
  float temperature;  // 0 = greedy
  float draft_temperature;
  float min_p;
  float top_p;
  int32_t top_k;
  float wanted;  // drafts that the rule synthetic accepts on average
  float repetition;
  float presence;
  float frequency;
  int32_t anchor;      // -1: penalties do not count it
  int32_t min_tokens;  // rows below this emit no stop id
  int32_t cap;
  int32_t length;  // scheduled drafts; -1: there is no row
  int64_t first_row;
};

/// What is known of the law a draft was drawn from.
enum class DraftLaw {
  kOneHot,    ///< greedy, or nothing is stored
  kStored,    ///< log q(v) of every id
  kNone,      ///< a NaN or an infinite lse
  kDisorder,  ///< a list of ids that does not ascend or leaves the vocabulary
  kZero       ///< q of the drafted id is 0
};

namespace verification {

template <class T>
DSPARK_HD T legal(T value, bool good, T instead, int32_t* status) {
  if (!good) *status |= DSPARK_BAD_PARAM;
  return good ? value : instead;
}

DSPARK_HD float legal_temperature(const float* array, int64_t r, int32_t* status) {
  if (array == nullptr) return 0.0f;
  const float t = array[r];
  const bool good = t == 0.0f || (t >= 1e-3f && t - t == 0.0f);
  return legal(t, good, 0.0f, status);
}

DSPARK_HD void read_rows(const VerifyParams& p, int64_t r, Sampling* s, int32_t* status) {
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

DSPARK_HD float finite(const float* array, int64_t r, int32_t* status) {
  if (array == nullptr) return 0.0f;
  return legal(array[r], array[r] - array[r] == 0.0f, 0.0f, status);
}

DSPARK_HD void read_penalties(const VerifyParams& p, int64_t r, Sampling* s, int32_t* status) {
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

}  // namespace verification

/// The parameters of request r; what is wrong with them goes to *status.
DSPARK_HD Sampling read_sampling(const VerifyParams& p, int64_t r, int32_t* status) {
  using verification::legal;
  Sampling s{};
  const int32_t rule = p.rule == nullptr ? DSPARK_RULE_TOKEN : p.rule[r];
  s.rule = legal<int32_t>(rule, rule >= DSPARK_RULE_GREEDY && rule <= DSPARK_RULE_SYNTHETIC,
                          DSPARK_RULE_GREEDY, status);
  s.temperature = verification::legal_temperature(p.temperature, r, status);
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
                            : verification::legal_temperature(p.draft_temperature, r, status);
  s.top_k = p.top_k == nullptr ? 0 : p.top_k[r];
  const float top_p = p.top_p == nullptr ? 1.0f : p.top_p[r];
  s.top_p = legal(top_p, top_p > 0.0f && top_p <= 1.0f, 1.0f, status);
  const float min_p = p.min_p == nullptr ? 0.0f : p.min_p[r];
  s.min_p = legal(min_p, min_p >= 0.0f && min_p <= 1.0f, 0.0f, status);
  const int32_t cap = p.max_new_tokens == nullptr ? INT32_MAX : p.max_new_tokens[r];
  s.cap = legal(cap, cap >= 0, 0, status);
  verification::read_penalties(p, r, &s, status);
  verification::read_rows(p, r, &s, status);
  return s;
}

DSPARK_HD bool takes_part(const VerifyParams& p, int64_t r) {
  return p.active == nullptr || p.active[r] != 0;
}

/// Penalties of row i, which counts the drafts before it. Those are ids of the vocabulary where the
/// row counts: the walk ends at one that is none.
DSPARK_HD Penalties row_penalties(const VerifyParams& p, int64_t r, const Sampling& s, int32_t i) {
  Penalties law{};
  law.repetition = s.repetition;
  law.presence = s.presence;
  law.frequency = s.frequency;
  law.anchor = s.anchor;
  law.drafts = p.draft_tokens + r * p.draft_tokens_stride;
  law.num_drafts = i;
  if (p.output_counts != nullptr) law.counts = p.output_counts + r * p.output_counts_stride;
  if (p.prompt_mask != nullptr) law.prompt = p.prompt_mask + r * p.prompt_mask_stride;
  return law;
}

/// The law of row i after the processors.
DSPARK_HD RowLaw row_law(const VerifyParams& p, int64_t r, const Sampling& s, int32_t i) {
  const bool greedy = s.temperature == 0.0f;
  const int64_t row = s.first_row + i;
  RowLaw law{};
  law.logits = advance(p.target_logits, p.target_dtype, row * p.target_stride);
  if (p.token_mask != nullptr) {
    law.mask = p.token_mask + (p.mask_request_stride > 0
                                   ? r * p.mask_request_stride + i * p.mask_row_stride
                                   : row * p.mask_row_stride);
  }
  law.bias = p.logit_bias == nullptr ? nullptr : p.logit_bias + r * p.logit_bias_stride;
  if (i < s.min_tokens && p.stop_ids != nullptr) {
    law.stops = p.stop_ids + r * p.stop_ids_stride;
    law.num_stops = p.num_stop_ids;
  }
  law.penalties = row_penalties(p, r, s, i);
  law.dtype = p.target_dtype;
  law.vocab = p.vocab_size;
  law.temperature = greedy ? 1.0f : s.temperature;
  law.min_p = greedy ? 0.0f : s.min_p;
  law.top_p = greedy ? 1.0f : s.top_p;
  law.top_k = greedy ? 0 : s.top_k;
  return law;
}

/// The draft of row i; -1: there is none, or its id is none of the `vocab` target ids
/// (BAD_DRAFT_ID).
DSPARK_HD int32_t draft_of(const VerifyParams& p, int64_t r, const Sampling& s, int32_t i,
                           int32_t vocab, int32_t* status) {
  if (i == s.length) return -1;
  const int32_t draft = p.draft_tokens[r * p.draft_tokens_stride + i];
  if (draft >= 0 && draft < vocab) return draft;
  *status |= DSPARK_BAD_DRAFT_ID;
  return -1;
}

/// Where the numbers of one draw come from. The inner kind is the segment kind + 1.
struct RowDraw {
  uint64_t seed;
  int64_t position;
  uint32_t distance;
  uint32_t segment_kind;
  const uint64_t* forced;  // one 53-bit integer, with equal segment noise; or null
};

DSPARK_HD RowDraw row_draw(const VerifyParams& p, int64_t r, int32_t i, DrawKind segment_kind) {
  RowDraw d{};
  d.seed = p.seed[r];
  d.position = static_cast<int64_t>(static_cast<uint64_t>(p.position[r]) + 1u + i);
  d.distance = segment_kind == kTargetSegment ? 0u : static_cast<uint32_t>(i + 1);
  d.segment_kind = segment_kind;
  d.forced = p.debug_uniform == nullptr ? nullptr : p.debug_uniform + r * (p.gamma + 1) + i;
  return d;
}

/// The 53-bit integer of a draw of this kind.
DSPARK_HD uint64_t forced_or_u53(const RowDraw& d, uint32_t kind) {
  if (d.forced != nullptr) return *d.forced;
  return draw_u53(DrawStream{d.seed, d.position, d.distance, kind});
}

/// Whether the draw of row i, of the kind kAccept or kSynthetic, is below `ratio`, strictly, in 53
/// bits.
DSPARK_HD bool throw_coin(const VerifyParams& p, int64_t r, int32_t i, double ratio,
                          DrawKind kind) {
  const uint64_t u53 = forced_or_u53(row_draw(p, r, i, kResidualSegment), kind);
  return static_cast<double>(u53) * 1.1102230246251565e-16 < ratio;
}

/// Whether the law of the draft of row i is looked at, where its rule looks at all.
DSPARK_HD bool has_law(const VerifyParams& p, const Sampling& s) {
  return p.draft_logit != nullptr && s.draft_temperature != 0.0f;
}

/// The stored law of draft i. A law on M ids is a law on a draft vocabulary of M columns that
/// changes from slot to slot; its `vocab` is then M, of which the list may use less.
DSPARK_HD DraftRow stored_law(const VerifyParams& p, int64_t r, const Sampling& s, int32_t i) {
  const int64_t at = r * p.gamma + i;
  DraftRow row{};
  row.dtype = p.draft_dtype;
  row.temperature = static_cast<double>(s.draft_temperature);
  row.lse = static_cast<double>(p.draft_lse[at]);
  if (p.support_ids != nullptr) {
    row.logits = advance(p.support_logits, p.draft_dtype, at * p.support_size);
    row.targets = p.support_ids + at * p.support_size;
    row.vocab = p.support_size;
  } else {
    row.logits = advance(p.draft_logits, p.draft_dtype,
                         r * p.draft_request_stride + i * p.draft_slot_stride);
    row.targets = p.draft_to_target;
    row.vocab = p.draft_vocab_size;
  }
  return row;
}

/// Columns of a list of M = `size` ids: strictly ascending in [0, vocab), then negative ones only.
/// -1: it is none.
DSPARK_HD int32_t list_length(const int32_t* ids, int32_t size, int32_t vocab) {
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

/// First column of a row with ids of its own whose target id is >= id.
DSPARK_HD int32_t first_column(const DraftRow& row, int32_t id) {
  int32_t lo = 0;
  int32_t n = row.vocab;
  while (n > 0) {
    const int32_t half = n / 2;
    const bool below = row.targets[lo + half] < id;
    lo = below ? lo + half + 1 : lo;
    n = below ? n - half - 1 : half;
  }
  return lo;
}

/// Whether a target id has a column in a row that is in order.
DSPARK_HD bool has_column(const DraftRow& row, int32_t id) {
  const int32_t column = row.targets == nullptr ? id : first_column(row, id);
  return column < row.vocab && (row.targets == nullptr || row.targets[column] == id);
}

/// What a look at all columns of a draft row has found.
struct DraftLook {
  bool disorder;  // a list that is none
  bool nan;
  bool listed;  // the drafted id has a column
};

/// What the stored law of draft i with this logit says of it. A NaN anywhere in the row is looked
/// for before the coin: to find it only in a residual would make the emission depend on the draft.
DSPARK_HD DraftLaw judge_law(const DraftRow& row, float logit, const DraftLook& look,
                             double* log_q) {
  if (look.disorder) return DraftLaw::kDisorder;
  if (logit != logit || row.lse != row.lse || look.nan) return DraftLaw::kNone;
  if (logit == -__builtin_inff() || !look.listed) return DraftLaw::kZero;
  if (row.lse - row.lse != 0.0) return DraftLaw::kNone;
  const float largest = largest_finite(DSPARK_F32);
  const double z = static_cast<double>(logit > largest ? largest : logit);
  *log_q = z / row.temperature - row.lse;
  return DraftLaw::kStored;
}

DSPARK_HD bool is_stop(const VerifyParams& p, int64_t r, int32_t token) {
  if (p.stop_ids == nullptr) return false;
  const int32_t* ids = p.stop_ids + r * p.stop_ids_stride;
  for (int32_t j = 0; j < p.num_stop_ids; ++j) {
    if (ids[j] == token) return true;
  }
  return false;
}

/// Why the round ends behind the token that request r has emitted as its `emitted`-th, if it does
/// (STOPPED): a stop goes before the cap.
DSPARK_HD int32_t finish_of(const VerifyParams& p, int64_t r, const Sampling& s, int32_t token,
                            int32_t emitted, int32_t* status) {
  const bool stop = is_stop(p, r, token);
  if (!stop && emitted != s.cap) return DSPARK_FINISH_NONE;
  *status |= DSPARK_STOPPED;
  return stop ? DSPARK_FINISH_STOP : DSPARK_FINISH_LENGTH;
}

/// What the engine says of the draft of a row that nobody has read.
struct Told {
  double log_p;
  float log_p_raw;
};

/// False: nothing that can be used, or the law of the row is more than a softmax at T.
DSPARK_HD bool told_of(const VerifyParams& p, const Sampling& s, const RowLaw& law, int32_t i,
                       Told* told) {
  if (p.target_lse == nullptr || s.rule != DSPARK_RULE_TOKEN || p.top_logprobs > 0) return false;
  if (processed(law) || truncated(law)) return false;
  const int64_t row = s.first_row + i;
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

/// Probability that rule `synthetic` accepts draft i: floor(wanted) drafts always, the next one
/// with what is left. No other law with this mean on whole numbers has a smaller variance.
DSPARK_HD double synthetic_rate(const Sampling& s, int32_t i) {
  return static_cast<double>(s.wanted) - static_cast<double>(i);
}

/// min(1, exp(x)).
DSPARK_HD double ratio_of(double x) { return exp_f64(x < 0.0 ? x : 0.0); }

/// Rule `block`: h_i from log P_i and the share of p_i that the residual keeps, S_i = P_i share.
DSPARK_HD double chance_of(double log_reach, double share) {
  const double left = exp_f64(log_reach) * share;
  const double lost = -expm1_f64(log_reach);
  return left + lost > 0.0 ? left / (left + lost) : 1.0;
}

/// log p of an id with logit z in a row with this largest logit and this log of its mass.
DSPARK_HD double log_prob_of(float z, double top, double log_mass, float temperature) {
  return (static_cast<double>(z) - top) / static_cast<double>(temperature) - log_mass;
}

/// The same under the unprocessed row, of a logit as it came.
DSPARK_HD double raw_log_prob_of(float x, int32_t dtype, double top, double log_mass) {
  if (x != x || x == -__builtin_inff()) return -__builtin_inf();
  const float largest = largest_finite(dtype);
  return (static_cast<double>(x > largest ? largest : x) - top) - log_mass;
}

}  // namespace dspark

#endif  // DSPARK_CORE_VERIFICATION_H_
