// SPDX-License-Identifier: Apache-2.0
//
// Verification by ranks that hold the vocabulary in pieces, on the CPU. A lane holds this rank's
// columns of a row as ever; what differs is where the normalisation comes from. `combine` puts the
// numbers of all ranks into the lane, and the code of verify_draws.cpp then knows p(x) and throws
// the coins. The walk over a request's rows needs nothing but those numbers, so the second and the
// third call both do it and no state is kept between them.
#include <cstddef>

#include "core/families.h"
#include "cpu/parallel.h"
#include "cpu/verify.h"

namespace dspark::cpu {
namespace {

using Params = dspark_vocab_parallel_params;
using Scan = dspark_shard_scan;

constexpr float kNegInf = -__builtin_inff();
constexpr int32_t kNanTarget = 1;
constexpr int32_t kNanLaw = 2;

// An id with its processed and its unprocessed logit.
struct Choice {
  int32_t id;
  float z;
  float raw;
};

// Where the shard lies in the vocabulary.
struct Place {
  int32_t first_id;
  int32_t first_segment;
  int32_t vocab;  // of all ranks
};

Place place_of(const Params& v) {
  Place place{};
  for (int32_t k = 0; k < v.num_ranks; ++k) {
    if (k == v.rank) place.first_id = place.vocab;
    if (k < v.rank) place.first_segment += (v.shard_sizes[k] + kSegment - 1) / kSegment;
    place.vocab += v.shard_sizes[k];
  }
  return place;
}

// Column of a target id; -1: another rank has it.
int32_t local(const Params& v, const Place& place, int32_t id) {
  const int32_t column = id - place.first_id;
  return column >= 0 && column < v.call.vocab_size ? column : -1;
}

// Whether the token of a row is chosen without a look at the draft.
bool plain(const Request& q) { return q.s.temperature == 0.0f || q.s.rule == DSPARK_RULE_MATCH; }

// The stored law of draft i on all ids; vocab < 0: its list of ids is out of order.
DraftRow whole_row(const Request& q, int32_t i, const Place& place) {
  DraftRow row = stored_law(q.p, q.r, q.s, i);
  if (q.p.support_ids != nullptr) row.vocab = support_count(row.targets, row.vocab, place.vocab);
  return row;
}

// The same on this rank's ids: columns with ids of their own are cut to the shard and numbered from
// its first id.
DraftRow shard_row(const Request& q, int32_t i, const Place& place) {
  DraftRow row = whole_row(q, i, place);
  if (row.targets == nullptr || row.vocab < 0) return row;
  // A truncation's scratch, which no row here needs: at most one id a column of the shard.
  int32_t* ids = reinterpret_cast<int32_t*>(q.lane.row.scratch.order);
  int32_t begin = 0;
  while (begin < row.vocab && row.targets[begin] < place.first_id) ++begin;
  int32_t n = 0;
  const int32_t end = place.first_id + q.p.vocab_size;
  for (; begin + n < row.vocab && row.targets[begin + n] < end; ++n) {
    ids[n] = row.targets[begin + n] - place.first_id;
  }
  row.logits = advance(row.logits, row.dtype, begin);
  row.targets = ids;
  row.vocab = n;
  return row;
}

void describe_lowest(const Lane& lane, const Place& place, Scan* out) {
  const RowLaw& law = lane.row.law;
  int32_t id = 0;
  while (id < law.vocab && law.mask != nullptr && (law.mask[id >> 5] >> (id & 31) & 1u) == 0) ++id;
  out->lowest = id < law.vocab ? place.first_id + id : -1;
  out->lowest_raw = raw_logit(lane, id < law.vocab ? id : 0);
}

// Row i of a request, which is in the lane.
Scan describe(const Params& v, const Request& q, int32_t i, const Place& place) {
  const Lane& lane = q.lane;
  Scan out{};
  out.mass = lane.mass;
  out.top = lane.top;
  out.raw_top = static_cast<float>(lane.raw_top);
  out.raw_mass = lane.raw_mass;
  out.draft = out.draft_raw = out.token_logit = out.token_raw = out.best_raw = kNegInf;
  out.token = out.best = -1;
  out.nan = lane.nan ? kNanTarget : 0;
  describe_lowest(lane, place, &out);
  if (!lane.empty) {
    const int32_t best = argmax(lane);
    out.best = place.first_id + best;
    out.best_raw = raw_logit(lane, best);
  }
  if (q.s.temperature != 0.0f && q.s.rule == DSPARK_RULE_MATCH) {
    const Drawn drawn = sample_row(lane, row_draw(q.p, q.r, i, kTargetSegment));
    out.key = drawn.key;
    if (drawn.key != 0) {
      out.token = place.first_id + drawn.token;
      out.token_logit = logit_of(lane, drawn.token);
      out.token_raw = raw_logit(lane, drawn.token);
    }
  }
  if (i == q.s.length) return out;
  const int32_t draft = q.p.draft_tokens[q.r * q.p.draft_tokens_stride + i];
  const int32_t column = draft < 0 ? -1 : local(v, place, draft);
  if (column >= 0) {
    out.draft = logit_of(lane, column);
    out.draft_raw = raw_logit(lane, column);
  }
  if (plain(q) || !has_law(q.p, q.s)) return out;
  const DraftRow row = shard_row(q, i, place);
  if (row.vocab >= 0 && draft_has_nan(lane, row)) out.nan |= kNanLaw;
  return out;
}

// What all ranks know of a row beside its normalisation.
struct Known {
  Choice draft;
  Choice token;   // rule match
  Choice best;    // of the whole row; id -1: it is empty
  Choice lowest;  // lowest allowed id, else 0
  bool nan_law;
};

// A mass relative to `top` as one relative to `largest`.
double moved(double mass, float top, float largest, double temperature) {
  if (top == kNegInf) return 0.0;
  const double x = (static_cast<double>(top) - static_cast<double>(largest)) / temperature;
  return mass * exp_f64_nonpositive(x);
}

// Puts the normalisation of the whole row into the lane: the same bits on every rank.
Known combine(const Params& v, Request& q, int32_t i) {
  const Scan* scans = v.scans + q.s.first_row + i;  // of rank k: scans[k * num_rows]
  const int64_t stride = v.call.num_rows;
  Known known{{-1, kNegInf, kNegInf},
              {-1, kNegInf, kNegInf},
              {-1, kNegInf, kNegInf},
              {-1, kNegInf, kNegInf},
              false};
  Lane& lane = q.lane;
  lane.valid = false;
  lane.row.law = row_law(q, i);
  lane.top = kNegInf;
  lane.nan = false;
  float raw_top = kNegInf;
  uint64_t key = 0;
  for (int32_t k = 0; k < v.num_ranks; ++k) {
    const Scan& s = scans[k * stride];
    if (s.top > lane.top) known.best = Choice{s.best, s.top, s.best_raw};  // first of equals
    lane.top = s.top > lane.top ? s.top : lane.top;
    raw_top = s.raw_top > raw_top ? s.raw_top : raw_top;
    lane.nan |= (s.nan & kNanTarget) != 0;
    known.nan_law |= (s.nan & kNanLaw) != 0;
    known.draft.z = s.draft > known.draft.z ? s.draft : known.draft.z;
    known.draft.raw = s.draft_raw > known.draft.raw ? s.draft_raw : known.draft.raw;
    if (s.key > key) known.token = Choice{s.token, s.token_logit, s.token_raw};
    key = s.key > key ? s.key : key;
    if (known.lowest.id < 0 && s.lowest >= 0) {
      known.lowest = Choice{s.lowest, kNegInf, s.lowest_raw};
    }
  }
  if (known.lowest.id < 0) known.lowest = Choice{0, kNegInf, scans[0].lowest_raw};
  const double temperature = static_cast<double>(lane.row.law.temperature);
  double mass = 0.0;
  double raw_mass = 0.0;
  for (int32_t k = 0; k < v.num_ranks; ++k) {
    const Scan& s = scans[k * stride];
    mass += moved(s.mass, s.top, lane.top, temperature);
    raw_mass += moved(s.raw_mass, s.raw_top, raw_top, 1.0);
  }
  normalise(lane, mass);
  normalise_raw(lane, raw_top, raw_mass);
  return known;
}

// Write a token of row i with its log-probabilities; true when the round ends behind it.
bool put(Request& q, int32_t i, const Choice& y) {
  const int64_t at = q.r * (q.p.gamma + 1) + i;
  q.p.tokens[at] = y.id;
  q.p.logprob[at] = y.z == kNegInf ? kNegInf : static_cast<float>(log_prob(q.lane, y.z));
  q.p.logprob_raw[at] = static_cast<float>(
      raw_log_prob_of(y.raw, q.p.target_dtype, q.lane.raw_top, q.lane.raw_log_mass));
  return emit(q);
}

// What is still to be drawn when the coins have been thrown.
enum class Pending { kNothing, kResidual, kRefused, kBonus };
struct Last {
  Pending what;
  int32_t row;
  int32_t draft;
  DraftLaw law;
};

// The draft of row i; -1: there is none.
int32_t draft_here(Request& q, int32_t i, const Place& place) {
  if (i == q.s.length) return -1;
  const int32_t draft = q.p.draft_tokens[q.r * q.p.draft_tokens_stride + i];
  if (draft >= 0 && draft < place.vocab) return draft;
  q.status |= DSPARK_BAD_DRAFT_ID;
  return -1;
}

// What is known of the law of draft i, a NaN on any rank included.
DraftLaw known_law(const Request& q, int32_t i, int32_t draft, bool nan, const Place& place,
                   double* log_q) {
  if (!has_law(q.p, q.s)) return DraftLaw::kOneHot;
  const DraftRow row = whole_row(q, i, place);
  DraftLook look{};
  look.disorder = row.vocab < 0;
  look.nan = nan;
  look.listed = !look.disorder && has_column(row, draft);
  return judge_law(row, q.p.draft_logit[q.r * q.p.gamma + i], look, log_q);
}

// Row i of a greedy request or one of rule match; true when the round goes on.
bool step_plain(Request& q, int32_t i, int32_t draft, const Known& known) {
  const bool empty = q.lane.empty;
  const Choice y = empty ? known.lowest : q.s.temperature == 0.0f ? known.best : known.token;
  if (empty) q.status |= DSPARK_EMPTY_SUPPORT;
  const bool accepted = draft >= 0 && y.id == draft && !empty;
  if (draft >= 0) {
    q.p.accepted[q.r * q.p.gamma + i] = accepted ? 1 : 0;
    q.accepted += accepted ? 1 : 0;
    if (!accepted) mark_unobserved(q, i + 1);
  }
  return !put(q, i, y) && accepted;
}

// The rows of a request, up to the one whose token is to be drawn; the lane then knows it.
Last walk(const Params& v, Request& q, const Place& place, Known* known) {
  for (int32_t i = 0;; ++i) {
    *known = combine(v, q, i);
    if (q.lane.nan) q.status |= DSPARK_NAN_TARGET;
    const int32_t draft = draft_here(q, i, place);
    if (plain(q)) {
      if (step_plain(q, i, draft, *known)) continue;
      return Last{Pending::kNothing, i, -1, DraftLaw::kOneHot};
    }
    if (draft < 0) return Last{Pending::kBonus, i, -1, DraftLaw::kOneHot};
    double log_q = 0.0;
    const DraftLaw law = known_law(q, i, draft, known->nan_law, place, &log_q);
    const Verdict verdict = judge(q, i, law, known->draft.z, log_q);
    if (verdict == Verdict::kEnded) return Last{Pending::kBonus, i, -1, law};
    q.p.accepted[q.r * q.p.gamma + i] = verdict == Verdict::kAccepted ? 1 : 0;
    if (verdict != Verdict::kAccepted) {
      mark_unobserved(q, i + 1);
      const bool refused = verdict == Verdict::kRefused;
      return Last{refused ? Pending::kRefused : Pending::kResidual, i, draft, law};
    }
    q.accepted += 1;
    if (put(q, i, Choice{draft, known->draft.z, known->draft.raw})) {
      return Last{Pending::kNothing, i, -1, law};
    }
  }
}

void keep(const Lane& lane, const Drawn& drawn, const Place& place, int j, dspark_shard_draw* out) {
  if (drawn.key == 0) return;
  out->key[j] = drawn.key;
  out->token[j] = place.first_id + drawn.token;
  out->logit[j] = logit_of(lane, drawn.token);
  out->raw[j] = raw_logit(lane, drawn.token);
}

// This rank's candidates for the row that `last` names.
dspark_shard_draw candidates(const Params& v, Request& q, const Last& last, const Place& place) {
  dspark_shard_draw out{{0, 0}, {-1, -1}, {kNegInf, kNegInf}, {kNegInf, kNegInf}};
  if (last.what == Pending::kNothing) return out;
  analyse(q.lane, row_law(q, last.row));
  combine(v, q, last.row);
  const DrawKind kind = last.what == Pending::kBonus ? kBonusSegment : kResidualSegment;
  const RowDraw d = row_draw(q.p, q.r, last.row, kind);
  if (last.what == Pending::kResidual && last.law == DraftLaw::kStored) {
    keep(q.lane, sample_residual(q.lane, shard_row(q, last.row, place), d), place, 0, &out);
  } else if (last.what == Pending::kResidual) {
    const int32_t column = local(v, place, last.draft);
    const Drawn drawn = column < 0 ? sample_row(q.lane, d) : sample_without(q.lane, column, d);
    keep(q.lane, drawn, place, 0, &out);
  }
  keep(q.lane, sample_row(q.lane, d), place, 1, &out);
  return out;
}

// The winner among the ranks' candidates: the token of the last row.
void close_round(const Params& v, Request& q, const Last& last, const Known& known) {
  const dspark_shard_draw* draws = v.draws + q.r;
  const int64_t stride = v.call.num_requests;
  Choice y[2] = {known.lowest, known.lowest};
  uint64_t key[2] = {0, 0};
  for (int32_t k = 0; k < v.num_ranks; ++k) {
    const dspark_shard_draw& d = draws[k * stride];
    for (int j = 0; j < 2; ++j) {
      if (d.key[j] <= key[j]) continue;
      key[j] = d.key[j];
      y[j] = Choice{d.token[j], d.logit[j], d.raw[j]};
    }
  }
  const bool left = last.what == Pending::kResidual && key[0] != 0;
  if (last.what == Pending::kResidual && !left && !q.lane.empty) q.status |= DSPARK_ZERO_RESIDUAL;
  const int j = left ? 0 : 1;
  if (q.lane.empty || key[j] == 0) q.status |= DSPARK_EMPTY_SUPPORT;
  put(q, last.row, q.lane.empty || key[j] == 0 ? known.lowest : y[j]);
}

// body(q, place) for every request that has rows to verify; `rest` for the active ones besides.
template <class Body, class Rest>
void over_requests(const Params& v, void* scratch, const Body& body, const Rest& rest) {
  const dspark_rejection_sampler_params& p = v.call;
  const Lanes lanes = set_up_lanes(p, scratch);
  const Place place = place_of(v);
  parallel_for(lanes.count, p.num_requests, [&](int64_t r, int thread) {
    if (!takes_part(p, r)) return;
    Lane& lane = lanes.at(thread);
    lane.first_segment = place.first_segment;
    int32_t status = 0;
    Sampling s = read_sampling(p, r, &status);
    if (s.rule == DSPARK_RULE_BLOCK || s.rule == DSPARK_RULE_SYNTHETIC) {
      status |= DSPARK_BAD_PARAM;
      s.rule = DSPARK_RULE_GREEDY;
      s.temperature = 0.0f;
    }
    Request q{p, r, lane, s, status, 0, 0, DSPARK_FINISH_NONE};
    if (s.cap > 0 && s.length >= 0) {
      body(q, place);
    } else {
      rest(q);
    }
  });
}

}  // namespace

size_t vocab_parallel_workspace(const Params& v) { return lanes_bytes(v.call); }

void vocab_parallel_scan(const Params& v, void* scratch) {
  const auto body = [&](Request& q, const Place& place) {
    for (int32_t i = 0; i <= q.s.length; ++i) {
      analyse(q.lane, row_law(q, i));
      v.scan[q.s.first_row + i] = describe(v, q, i, place);
    }
  };
  over_requests(v, scratch, body, [](Request&) {});
}

void vocab_parallel_draw(const Params& v, void* scratch) {
  const auto body = [&](Request& q, const Place& place) {
    Known known;
    clear_results(q.p, q.r);
    const Last last = walk(v, q, place, &known);
    v.draw[q.r] = candidates(v, q, last, place);
  };
  const auto rest = [&](Request& q) {
    v.draw[q.r] = dspark_shard_draw{{0, 0}, {-1, -1}, {kNegInf, kNegInf}, {kNegInf, kNegInf}};
  };
  over_requests(v, scratch, body, rest);
}

void vocab_parallel_finish(const Params& v, void* scratch) {
  const auto body = [&](Request& q, const Place& place) {
    Known known;
    clear_results(q.p, q.r);
    const Last last = walk(v, q, place, &known);
    if (last.what != Pending::kNothing) close_round(v, q, last, known);
    close_request(q);
  };
  const auto rest = [](Request& q) {
    clear_results(q.p, q.r);
    close_request(q);
  };
  over_requests(v, scratch, body, rest);
}

}  // namespace dspark::cpu
