// SPDX-License-Identifier: Apache-2.0
//
// Verification by ranks that hold the vocabulary in pieces, on the CPU. A lane holds this rank's
// columns of a row as ever; what differs is where the normalisation comes from: core/shard_walk.h
// has combined it from all ranks.
#include <cstddef>

#include "core/families.h"
#include "core/shard_walk.h"
#include "cpu/parallel.h"
#include "cpu/request.h"

namespace dspark::cpu {
namespace {

using Params = dspark_vocab_parallel_params;
using Scan = dspark_shard_scan;
using shard::Last;
using shard::Pending;
using shard::Place;
using shard::Walk;

constexpr float kNegInf = -__builtin_inff();

// The law of draft i on this rank's columns, its ids numbered from the first one.
DraftRow local_row(const Params& v, const Walk& w, int32_t i, const Place& place, Lane& lane) {
  DraftRow row = shard::shard_row(v, w, i, place);
  if (row.targets == nullptr || row.vocab < 0) return row;
  // A truncation's scratch, which no row here needs: at most one id a column of the shard.
  int32_t* ids = reinterpret_cast<int32_t*>(lane.row.scratch.order);
  for (int32_t j = 0; j < row.vocab; ++j) ids[j] = row.targets[j] - place.first_id;
  row.targets = ids;
  return row;
}

// Row i of a request, which is in the lane.
Scan describe(const Params& v, const Walk& w, int32_t i, const Place& place, Lane& lane) {
  const dspark_rejection_sampler_params& p = v.call;
  Scan out{};
  out.mass = lane.mass;
  out.top = lane.top;
  out.raw_top = static_cast<float>(lane.raw_top);
  out.raw_mass = lane.raw_mass;
  out.draft = out.draft_raw = out.token_logit = out.token_raw = out.best_raw = kNegInf;
  out.token = out.best = -1;
  out.nan = lane.nan ? shard::kNanTarget : 0;
  const int32_t lowest = lowest_allowed(lane);
  out.lowest = shard::lowest_id(lane.row.law, place, lowest);
  out.lowest_raw = raw_logit(lane, lowest);
  if (!lane.empty) {
    const int32_t best = argmax(lane);
    out.best = place.first_id + best;
    out.best_raw = raw_logit(lane, best);
  }
  if (w.s.temperature != 0.0f && w.s.rule == DSPARK_RULE_MATCH) {
    const Drawn drawn = sample_row(lane, row_draw(p, w.r, i, kTargetSegment));
    out.key = drawn.key;
    if (drawn.key != 0) {
      out.token = place.first_id + drawn.token;
      out.token_logit = logit_of(lane, drawn.token);
      out.token_raw = raw_logit(lane, drawn.token);
    }
  }
  if (i == w.s.length) return out;
  const int32_t column = shard::local(v, place, p.draft_tokens[w.r * p.draft_tokens_stride + i]);
  if (column >= 0) {
    out.draft = logit_of(lane, column);
    out.draft_raw = raw_logit(lane, column);
  }
  if (shard::plain(w) || !has_law(p, w.s)) return out;
  const DraftRow row = local_row(v, w, i, place, lane);
  if (row.vocab >= 0 && draft_has_nan(lane, row)) out.nan |= shard::kNanLaw;
  return out;
}

void keep(const Lane& lane, const Drawn& drawn, const Place& place, int j, dspark_shard_draw* out) {
  if (drawn.key == 0) return;
  out->key[j] = drawn.key;
  out->token[j] = place.first_id + drawn.token;
  out->logit[j] = logit_of(lane, drawn.token);
  out->raw[j] = raw_logit(lane, drawn.token);
}

// This rank's candidates for the row that `last` names, normalised as all ranks know it.
dspark_shard_draw candidates(const Params& v, const Walk& w, const Last& last,
                             const shard::Row& known, const Place& place, Lane& lane) {
  dspark_shard_draw out = shard::no_draw();
  if (last.what == Pending::kNothing) return out;
  analyse(lane, row_law(v.call, w.r, w.s, last.row));
  lane.valid = false;
  lane.top = known.top;
  normalise(lane, known.mass);
  const DrawKind kind = last.what == Pending::kBonus ? kBonusSegment : kResidualSegment;
  const RowDraw d = row_draw(v.call, w.r, last.row, kind);
  if (last.what == Pending::kResidual && last.stored) {
    const DraftRow law = local_row(v, w, last.row, place, lane);
    keep(lane, sample_residual(lane, law, d), place, 0, &out);
  } else if (last.what == Pending::kResidual) {
    const int32_t column = shard::local(v, place, last.draft);
    const Drawn drawn = column < 0 ? sample_row(lane, d) : sample_without(lane, column, d);
    keep(lane, drawn, place, 0, &out);
  }
  keep(lane, sample_row(lane, d), place, 1, &out);
  return out;
}

// body(r, place, lane) for every request that takes part.
template <class Body>
void over_requests(const Params& v, void* scratch, const Body& body) {
  const Lanes lanes = set_up_lanes(v.call, scratch);
  const Place place = shard::place_of(v);
  parallel_for(lanes.count, v.call.num_requests, [&](int64_t r, int thread) {
    Lane& lane = lanes.at(thread);
    lane.first_segment = place.first_segment;
    if (takes_part(v.call, r)) body(r, place, lane);
  });
}

}  // namespace

size_t vocab_parallel_workspace(const Params& v) { return lanes_bytes(v.call); }

void vocab_parallel_scan(const Params& v, void* scratch) {
  over_requests(v, scratch, [&](int64_t r, const Place& place, Lane& lane) {
    const Walk w = shard::start(v.call, r, false);
    for (int32_t i = 0; shard::has_rows(w) && i <= w.s.length; ++i) {
      analyse(lane, row_law(v.call, r, w.s, i));
      v.scan[w.s.first_row + i] = describe(v, w, i, place, lane);
    }
  });
}

void vocab_parallel_draw(const Params& v, void* scratch) {
  over_requests(v, scratch, [&](int64_t r, const Place& place, Lane& lane) {
    Walk w = shard::start(v.call, r, false);
    v.draw[r] = shard::no_draw();
    if (!shard::has_rows(w)) return;
    shard::Row row;
    const Last last = shard::walk_rows(v, &w, place, &row);
    v.draw[r] = candidates(v, w, last, row, place, lane);
  });
}

void vocab_parallel_finish(const Params& v, void* scratch) {
  over_requests(v, scratch,
                [&](int64_t r, const Place& place, Lane&) { shard::finish(v, r, place); });
}

}  // namespace dspark::cpu
