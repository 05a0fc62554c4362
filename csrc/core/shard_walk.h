// SPDX-License-Identifier: Apache-2.0
//
// Verification by ranks that hold the vocabulary in pieces (dspark/vocab_parallel.h), as every
// backend decides it. The walk over a request's rows needs nothing but the numbers of the first
// exchange, so the second and the third call both do it and no state is kept between them. Scalars
// only; to scan a row and to draw from it is the backend's.
#ifndef DSPARK_CORE_SHARD_WALK_H_
#define DSPARK_CORE_SHARD_WALK_H_

#include "core/verification.h"
#include "dspark/vocab_parallel.h"

namespace dspark::shard {

using Params = dspark_vocab_parallel_params;

constexpr int32_t kNanTarget = 1;
constexpr int32_t kNanLaw = 2;

/// Where a shard lies in the vocabulary.
struct Place {
  int32_t first_id;
  int32_t first_segment;
  int32_t vocab;  // of all ranks
};

/// Host: the sizes lie there.
inline Place place_of(const Params& v) {
  Place place{};
  for (int32_t k = 0; k < v.num_ranks; ++k) {
    if (k == v.rank) place.first_id = place.vocab;
    if (k < v.rank) place.first_segment += segments_of(v.shard_sizes[k]);
    place.vocab += v.shard_sizes[k];
  }
  return place;
}

/// An id with its processed and its unprocessed logit.
struct Choice {
  int32_t id;
  float z;
  float raw;
};
DSPARK_HD Choice no_choice() { return Choice{-1, -__builtin_inff(), -__builtin_inff()}; }

/// A row as all ranks know it.
struct Row {
  float temperature;
  float top, raw_top;
  double mass, log_mass, raw_log_mass;
  bool empty, nan, nan_law;
  Choice draft;   // the draft that the row verifies; its id is not set
  Choice token;   // rule match
  Choice best;    // the argmax
  Choice lowest;  // lowest allowed id, else 0
};

/// A request on its way through the rows.
struct Walk {
  int64_t r;
  Sampling s;
  int32_t status, accepted, emitted, finish;
  bool writes;  // whether this thread writes the results
};

/// What is still to be drawn when the coins have been thrown.
enum class Pending : int32_t { kNothing, kResidual, kRefused, kBonus };
struct alignas(16) Last {  // copied whole: 16 bytes in one access
  Pending what;
  int32_t row;
  int32_t draft;
  bool stored;  // kResidual: the law of the draft is stored, not one-hot
};

/// Column of a target id; -1: another rank has it.
DSPARK_HD int32_t local(const Params& v, const Place& place, int32_t id) {
  const int32_t column = id < place.first_id ? -1 : id - place.first_id;
  return column < v.call.vocab_size ? column : -1;
}

/// The lowest allowed id of a shard whose `column` is the lowest that its mask allows, or 0; -1:
/// there is none.
DSPARK_HD int32_t lowest_id(const RowLaw& law, const Place& place, int32_t column) {
  const bool none = law.mask != nullptr && (law.mask[column >> 5] >> (column & 31) & 1u) == 0;
  return none ? -1 : place.first_id + column;
}

/// Parameters of request r: rules block and synthetic need rows that no rank has.
DSPARK_HD Walk start(const VerifyParams& p, int64_t r, bool writes) {
  Walk w{};
  w.r = r;
  w.writes = writes;
  w.s = read_sampling(p, r, &w.status);
  if (w.s.rule == DSPARK_RULE_BLOCK || w.s.rule == DSPARK_RULE_SYNTHETIC) {
    w.status |= DSPARK_BAD_PARAM;
    w.s.rule = DSPARK_RULE_GREEDY;
    w.s.temperature = 0.0f;
  }
  return w;
}
DSPARK_HD bool has_rows(const Walk& w) { return w.s.cap > 0 && w.s.length >= 0; }

/// Whether the token of a row is chosen without a look at the draft.
DSPARK_HD bool plain(const Walk& w) {
  return w.s.temperature == 0.0f || w.s.rule == DSPARK_RULE_MATCH;
}

/// A mass relative to `top` as one relative to `largest`.
DSPARK_HD double moved(double mass, float top, float largest, double temperature) {
  if (top == -__builtin_inff()) return 0.0;
  const double x = (static_cast<double>(top) - static_cast<double>(largest)) / temperature;
  return mass * exp_f64_nonpositive(x);
}

DSPARK_HD void take(const dspark_shard_scan& s, uint64_t* key, Row* row) {
  if (s.top > row->top) row->best = Choice{s.best, s.top, s.best_raw};  // the first of equals
  row->top = s.top > row->top ? s.top : row->top;
  row->raw_top = s.raw_top > row->raw_top ? s.raw_top : row->raw_top;
  row->nan = row->nan || (s.nan & kNanTarget) != 0;
  row->nan_law = row->nan_law || (s.nan & kNanLaw) != 0;
  row->draft.z = s.draft > row->draft.z ? s.draft : row->draft.z;
  row->draft.raw = s.draft_raw > row->draft.raw ? s.draft_raw : row->draft.raw;
  if (s.key > *key) row->token = Choice{s.token, s.token_logit, s.token_raw};
  *key = s.key > *key ? s.key : *key;
  if (row->lowest.id < 0 && s.lowest >= 0) {
    row->lowest = Choice{s.lowest, -__builtin_inff(), s.lowest_raw};
  }
}

/// Row i from the numbers of all ranks: the same bits on each of them.
DSPARK_HD Row combine(const Params& v, const Walk& w, int32_t i) {
  const dspark_shard_scan* scans = v.scans + w.s.first_row + i;  // of rank k: k * num_rows behind
  const int64_t stride = v.call.num_rows;
  Row row{};
  row.temperature = w.s.temperature == 0.0f ? 1.0f : w.s.temperature;
  row.top = row.raw_top = -__builtin_inff();
  row.draft = row.token = row.best = row.lowest = no_choice();
  uint64_t key = 0;
  for (int32_t k = 0; k < v.num_ranks; ++k) take(scans[k * stride], &key, &row);
  if (row.lowest.id < 0) row.lowest = Choice{0, -__builtin_inff(), scans[0].lowest_raw};
  double raw_mass = 0.0;
  for (int32_t k = 0; k < v.num_ranks; ++k) {
    const dspark_shard_scan& s = scans[k * stride];
    row.mass += moved(s.mass, s.top, row.top, static_cast<double>(row.temperature));
    raw_mass += moved(s.raw_mass, s.raw_top, row.raw_top, 1.0);
  }
  row.empty = row.mass == 0.0;
  row.log_mass = log_mass_of(row.mass);
  row.raw_log_mass = log_mass_of(raw_mass);
  return row;
}

/// The stored law of draft i on the ids of all ranks; vocab < 0: its list is out of order.
DSPARK_HD DraftRow whole_row(const VerifyParams& p, const Walk& w, int32_t i, int32_t vocab) {
  DraftRow row = stored_law(p, w.r, w.s, i);
  if (p.support_ids != nullptr) row.vocab = list_length(row.targets, row.vocab, vocab);
  return row;
}

/// The same on this rank's ids. Columns with ids of their own are cut to the shard; the ids stay
/// those of the whole vocabulary.
DSPARK_HD DraftRow shard_row(const Params& v, const Walk& w, int32_t i, const Place& place) {
  DraftRow row = whole_row(v.call, w, i, place.vocab);
  if (row.targets == nullptr || row.vocab < 0) return row;
  const int32_t begin = first_column(row, place.first_id);
  const int32_t end = first_column(row, place.first_id + v.call.vocab_size);
  row.logits = advance(row.logits, row.dtype, begin);
  row.targets += begin;
  row.vocab = end - begin;
  return row;
}

/// What is known of the law of draft i, a NaN on any rank included.
DSPARK_HD DraftLaw law_of(const VerifyParams& p, const Walk& w, int32_t i, int32_t draft,
                          const Row& known, int32_t vocab, double* log_q) {
  if (!has_law(p, w.s)) return DraftLaw::kOneHot;
  const DraftRow row = whole_row(p, w, i, vocab);
  DraftLook look{};
  look.disorder = row.vocab < 0;
  look.nan = known.nan_law;
  // Without ids of its own the row has a column for each target id, of which this rank has a part.
  look.listed = !look.disorder && (row.targets == nullptr || has_column(row, draft));
  return judge_law(row, p.draft_logit[w.r * p.gamma + i], look, log_q);
}

/// Write a token of row i and count it; true when the round ends behind it.
DSPARK_HD bool emit(const VerifyParams& p, Walk* w, int32_t i, const Row& row, const Choice& y) {
  const int64_t at = w->r * (p.gamma + 1) + i;
  const double log_p = log_prob_of(y.z, row.top, row.log_mass, row.temperature);
  const double raw = raw_log_prob_of(y.raw, p.target_dtype, row.raw_top, row.raw_log_mass);
  if (w->writes) {
    p.tokens[at] = y.id;
    p.logprob[at] = y.z == -__builtin_inff() ? y.z : static_cast<float>(log_p);
    p.logprob_raw[at] = static_cast<float>(raw);
    p.next_anchor[w->r] = y.id;
  }
  w->emitted += 1;
  w->finish = finish_of(p, w->r, w->s, y.id, w->emitted, &w->status);
  return w->finish != DSPARK_FINISH_NONE;
}

/// Flag draft i; behind a refused one the scheduled drafts are not observed.
DSPARK_HD void flag(const VerifyParams& p, Walk* w, int32_t i, bool accepted) {
  w->accepted += accepted ? 1 : 0;
  if (!w->writes) return;
  p.accepted[w->r * p.gamma + i] = accepted ? 1 : 0;
  for (int32_t j = i + 1; !accepted && j < w->s.length; ++j) p.accepted[w->r * p.gamma + j] = -1;
}

/// Row i of a greedy request or one of rule match; true when the round goes on.
DSPARK_HD bool step_plain(const VerifyParams& p, Walk* w, int32_t i, int32_t draft,
                          const Row& row) {
  const Choice y = row.empty ? row.lowest : w->s.temperature == 0.0f ? row.best : row.token;
  if (row.empty) w->status |= DSPARK_EMPTY_SUPPORT;
  const bool accepted = draft >= 0 && y.id == draft && !row.empty;
  if (draft >= 0) flag(p, w, i, accepted);
  return !emit(p, w, i, row, y) && accepted;
}

/// Row i of rule token, which has a draft. kNothing: it is accepted.
DSPARK_HD Last step_token(const VerifyParams& p, Walk* w, int32_t i, int32_t draft, const Row& row,
                          int32_t vocab) {
  double log_q = 0.0;
  const DraftLaw law = law_of(p, *w, i, draft, row, vocab, &log_q);
  Last last{Pending::kResidual, i, draft, law == DraftLaw::kStored};
  if (law == DraftLaw::kZero) {
    w->status |= DSPARK_BAD_DRAFT_ID;
    last.what = Pending::kBonus;
    return last;
  }
  if (law == DraftLaw::kNone || law == DraftLaw::kDisorder) {
    w->status |= law == DraftLaw::kNone ? DSPARK_NAN_DRAFT : DSPARK_BAD_DRAFT_ID;
    w->status |= DSPARK_FORCED_REJECT;
    last.what = Pending::kRefused;
  } else if (row.empty || row.draft.z == -__builtin_inff()) {
    w->status |= DSPARK_FORCED_REJECT;
  } else {
    const double log_p = log_prob_of(row.draft.z, row.top, row.log_mass, row.temperature);
    if (throw_coin(p, w->r, i, ratio_of(log_p - log_q), kAccept)) last.what = Pending::kNothing;
  }
  flag(p, w, i, last.what == Pending::kNothing);
  return last;
}

/// The rows of a request up to the one, *row, whose token is still to be drawn.
DSPARK_HD Last walk_rows(const Params& v, Walk* w, const Place& place, Row* row) {
  const VerifyParams& p = v.call;
  for (int32_t i = 0;; ++i) {
    *row = combine(v, *w, i);
    if (row->nan) w->status |= DSPARK_NAN_TARGET;
    const int32_t draft = draft_of(p, w->r, w->s, i, place.vocab, &w->status);
    if (plain(*w)) {
      if (step_plain(p, w, i, draft, *row)) continue;
      return Last{Pending::kNothing, i, -1, false};
    }
    if (draft < 0) return Last{Pending::kBonus, i, -1, false};
    const Last last = step_token(p, w, i, draft, *row, place.vocab);
    if (last.what != Pending::kNothing) return last;
    if (emit(p, w, i, *row, Choice{draft, row->draft.z, row->draft.raw})) return last;
  }
}

DSPARK_HD dspark_shard_draw no_draw() {
  return dspark_shard_draw{{0, 0},
                           {-1, -1},
                           {-__builtin_inff(), -__builtin_inff()},
                           {-__builtin_inff(), -__builtin_inff()}};
}

/// The largest key of column j of the second exchange, and what it chose; 0: none has mass.
DSPARK_HD uint64_t best_draw(const Params& v, const Walk& w, int j, Choice* y) {
  uint64_t key = 0;
  for (int32_t k = 0; k < v.num_ranks; ++k) {
    const dspark_shard_draw& d = v.draws[k * static_cast<int64_t>(v.call.num_requests) + w.r];
    if (d.key[j] <= key) continue;
    key = d.key[j];
    *y = Choice{d.token[j], d.logit[j], d.raw[j]};
  }
  return key;
}

/// The winner among the ranks' candidates: the token of the last row.
DSPARK_HD void take_draws(const Params& v, Walk* w, const Last& last, const Row& row) {
  Choice y = row.lowest;
  uint64_t key = 0;
  if (last.what == Pending::kResidual) {
    key = best_draw(v, *w, 0, &y);
    if (key == 0 && !row.empty) w->status |= DSPARK_ZERO_RESIDUAL;
  }
  if (key == 0) key = best_draw(v, *w, 1, &y);
  if (row.empty || key == 0) {
    w->status |= DSPARK_EMPTY_SUPPORT;
    y = row.lowest;
  }
  emit(v.call, w, last.row, row, y);
}

/// The results of a request that has emitted nothing yet, and what closes them. One thread.
DSPARK_HD void clear(const VerifyParams& p, const Walk& w) {
  for (int32_t j = 0; j < p.gamma; ++j) p.accepted[w.r * p.gamma + j] = -2;
  p.next_anchor[w.r] = -1;
}
DSPARK_HD void close(const VerifyParams& p, const Walk& w) {
  for (int64_t j = w.r * (p.gamma + 1) + w.emitted; j < (w.r + 1) * (p.gamma + 1); ++j) {
    p.tokens[j] = -1;
    p.logprob[j] = p.logprob_raw[j] = 0.0f;
  }
  p.num_accepted[w.r] = w.accepted;
  p.num_emitted[w.r] = w.emitted;
  p.finish[w.r] = w.finish;
  p.status[w.r] = w.status;
}

/// The third call for one request.
DSPARK_HD void finish(const Params& v, int64_t r, const Place& place) {
  Walk w = start(v.call, r, true);
  clear(v.call, w);
  if (has_rows(w)) {
    Row row;
    const Last last = walk_rows(v, &w, place, &row);
    if (last.what != Pending::kNothing) take_draws(v, &w, last, row);
  }
  close(v.call, w);
}

}  // namespace dspark::shard

#endif  // DSPARK_CORE_SHARD_WALK_H_
