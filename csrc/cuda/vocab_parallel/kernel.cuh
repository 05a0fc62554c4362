// SPDX-License-Identifier: Apache-2.0
//
// Verification by ranks that hold the vocabulary in pieces: three kernels, an exchange of the
// engine's between them. Rows are scanned and drawn from with the functions of rejection_sampler,
// on this rank's columns; what a token is decided by comes from core/shard_walk.h, where the
// numbers of all ranks are combined.
//
//   scan    a team of CTAs a row: its segments' maxima and sums, then 72 bytes about it
//   draw    a team a request: thread 0 of every CTA walks the rows in the exchanged numbers, the
//           team scans the one where the round ends and draws this rank's candidates
//   finish  a thread a request
//
// Traffic: this rank's columns once, and one row a request again. A team is no larger than fills
// the device; a shard of 19,000 ids is 148 segments, little more than a CTA takes in four steps.
#ifndef DSPARK_CUDA_VOCAB_PARALLEL_KERNEL_CUH_
#define DSPARK_CUDA_VOCAB_PARALLEL_KERNEL_CUH_

#include "core/shard_walk.h"
#include "cuda/rejection_sampler/draw.cuh"
#include "cuda/rejection_sampler/scan.cuh"

namespace dspark::cuda::shards {

using shard::Last;
using shard::Pending;
using shard::Place;
using shard::Walk;
using verify::Draw;
using verify::DrawShared;
using verify::kMinusInf;
using verify::kThreads;
using verify::Source;
using verify::Team;

constexpr int kFinishThreads = 64;

struct Args {
  dspark_vocab_parallel_params v;
  Place place;
  int32_t team;      // CTAs that share a row
  int32_t segments;  // of the shard
  int32_t slice;     // of which a CTA owns this many, the last one fewer
  float* stats;      // [rows or R, kStats, segments]
  int32_t* ids;      // [R, shard] columns of a law, numbered from the shard's first id
};

struct Shared {
  verify::TeamShared team;
  verify::Row row;
  Draw draw;
  DrawShared scratch;
  Walk walk;
  Last last;
  shard::Row known;
  float draft, draft_raw;
  bool works;
};

/// A logit as it came, without NaN and +inf.
__device__ __forceinline__ float raw_logit(const RowLaw& law, int32_t id) {
  return clean_logit(load_f32(law.logits, law.dtype, id), largest_finite(law.dtype));
}

/// Thread 0: this CTA's slice of a row, whose numbers `owner` keeps in the workspace.
__device__ __forceinline__ void lay_out(const Args& args, verify::Row& row, int32_t rank,
                                        int64_t owner) {
  verify::take_slice(row, rank, args.slice, args.segments);
  row.stats = verify::stats_at(args.stats, owner, args.segments, row.first);
  row.kept = nullptr;
  row.keep = verify::Keep::kNothing;
}

/// Scan the row: its maximum and masses on this rank, whether there is a NaN in it or, with `law`,
/// in the draft's.
__device__ __forceinline__ uint32_t scan_row(Team& team, verify::Row& row, bool law) {
  verify::Tops tops = verify::scan_slice(row);
  if (law && verify::draft_slice_nan(row.draft, team.rank, team.size)) {
    tops.found |= verify::kDraftNan;
  }
  tops = verify::combine(team, tops);
  if (threadIdx.x == 0) verify::take_target(row, tops);
  __syncthreads();
  return tops.found;
}

/// Key of this rank's candidate, whose segments are numbered as those of the whole vocabulary; its
/// token and logit in `d`. Key 0: no mass.
__device__ __forceinline__ uint64_t candidate(Team& team, const Args& args, const verify::Row& row,
                                              Draw& d, DrawShared& shared) {
  if (verify::warp_id() == 0) verify::look_inside(row, d, shared, 0);
  if (d.source == Source::kResidual) verify::residual_slice(row, shared.space[verify::warp_id()]);
  __syncthreads();
  const verify::Key best =
      verify::combine(team, verify::best_key(row, d, shared, args.place.first_segment));
  if (best.key != 0 && verify::warp_id() == 0) {
    const uint32_t s = packed_segment(best.key) - static_cast<uint32_t>(args.place.first_segment);
    verify::look_inside(row, d, shared, pack_key(0.0, s));
  }
  __syncthreads();
  return best.key;
}

__device__ __forceinline__ void begin(Draw& d, Source source, int32_t without,
                                      const RowDraw& numbers) {
  d = Draw{};
  d.source = source;
  d.without = without;
  d.numbers = numbers;
}

/// Thread 0: which row of which request, its law and what its draft asks for. Whether there is one.
__device__ __forceinline__ bool find_row(const Args& args, Shared& s, int64_t r, int32_t i) {
  const VerifyParams& p = args.v.call;
  s.walk = shard::start(p, r, false);
  if (!shard::has_rows(s.walk) || i > s.walk.s.length) return false;
  s.row.law = row_law(p, r, s.walk.s, i);
  s.row.draft = DraftRow{};
  s.draft = s.draft_raw = kMinusInf;
  if (i == s.walk.s.length) return true;
  const int32_t id = p.draft_tokens[r * p.draft_tokens_stride + i];
  const int32_t column = shard::local(args.v, args.place, id);
  if (column >= 0) {
    s.draft = verify::logit_before_cut(s.row.law, column);
    s.draft_raw = raw_logit(s.row.law, column);
  }
  if (shard::plain(s.walk) || !has_law(p, s.walk.s)) return true;
  s.row.draft = shard::shard_row(args.v, s.walk, i, args.place);
  return true;
}

/// Thread 0: what the team has found of its row.
__device__ __forceinline__ dspark_shard_scan record_of(const Args& args, const Shared& s,
                                                       const verify::Masses& m, uint32_t found,
                                                       int32_t lowest) {
  const verify::Row& row = s.row;
  const RowLaw& law = row.law;
  const bool differs = raw_differs(law);
  dspark_shard_scan x{};
  x.mass = m.high + m.low;
  x.raw_mass = differs ? m.raw_high + m.raw_low : x.mass;
  x.top = row.top;
  x.raw_top = static_cast<float>(row.raw_top);
  x.draft = s.draft;
  x.draft_raw = s.draft_raw;
  x.token = x.best = -1;
  x.token_logit = x.token_raw = x.best_raw = kMinusInf;
  x.lowest = shard::lowest_id(law, args.place, lowest);
  x.lowest_raw = raw_logit(law, lowest);
  x.nan = ((found & verify::kTargetNan) != 0 ? shard::kNanTarget : 0) |
          ((found & verify::kDraftNan) != 0 ? shard::kNanLaw : 0);
  return x;
}

__global__ void __launch_bounds__(kThreads, 2) scan_kernel(const __grid_constant__ Args args) {
  __shared__ Shared s;
  const VerifyParams& p = args.v.call;
  const int32_t index = static_cast<int32_t>(blockIdx.x) / args.team;
  const int32_t r = index / (p.gamma + 1), i = index % (p.gamma + 1);
  if (!takes_part(p, r)) return;
  Team team{&s.team, args.team, static_cast<int32_t>(blockIdx.x) % args.team, 0};
  if (threadIdx.x == 0) {
    lay_out(args, s.row, team.rank, index);
    s.works = find_row(args, s, r, i);
  }
  __syncthreads();
  if (!s.works) return;  // all of the team
  const uint32_t found = scan_row(team, s.row, s.row.draft.vocab > 0);
  const verify::Masses masses =
      verify::combine(team, verify::slice_masses(s.row, s.row.stats.sum, raw_differs(s.row.law)));
  const int32_t lowest = verify::lowest_allowed(s.row.law, s.scratch);
  const bool writes = team.rank == 0 && threadIdx.x == 0;
  dspark_shard_scan x{};
  if (writes) x = record_of(args, s, masses, found, lowest);
  if (threadIdx.x == 0) begin(s.draw, Source::kArgmax, -1, RowDraw{});
  __syncthreads();
  if (!s.row.empty && verify::warp_id() == 0) {
    const uint32_t segment = static_cast<uint32_t>(s.row.top_segment);
    verify::look_inside(s.row, s.draw, s.scratch, pack_key(0.0, segment));
  }
  __syncthreads();
  if (writes && !s.row.empty) {
    x.best = args.place.first_id + s.draw.token;
    x.best_raw = raw_logit(s.row.law, s.draw.token);
  }
  if (s.walk.s.rule == DSPARK_RULE_MATCH && s.walk.s.temperature != 0.0f) {
    if (threadIdx.x == 0) begin(s.draw, Source::kTarget, -1, row_draw(p, r, i, kTargetSegment));
    __syncthreads();
    x.key = candidate(team, args, s.row, s.draw, s.scratch);
    if (writes && x.key != 0) {
      x.token = args.place.first_id + s.draw.token;
      x.token_logit = s.draw.z;
      x.token_raw = raw_logit(s.row.law, s.draw.token);
    }
  }
  if (writes) args.v.scan[s.walk.s.first_row + i] = x;
  if (team.size > 1) team.barrier();  // a peer may still be reading this CTA's shared memory
}

/// The law of the draft on this rank's columns, its ids numbered from the shard's first one: the
/// first CTA copies them. Whole team; it is there behind the next barrier.
__device__ __forceinline__ void prepare_law(Team& team, const Args& args, Shared& s) {
  if (threadIdx.x == 0) s.row.draft = shard::shard_row(args.v, s.walk, s.last.row, args.place);
  __syncthreads();
  const int32_t* ids = s.row.draft.targets;
  if (ids == nullptr) return;
  int32_t* own = args.ids + s.walk.r * args.v.call.vocab_size;
  for (int32_t j = static_cast<int32_t>(threadIdx.x); team.rank == 0 && j < s.row.draft.vocab;
       j += kThreads) {
    own[j] = ids[j] - args.place.first_id;
  }
  team.barrier();
  if (threadIdx.x == 0) s.row.draft.targets = own;
}

/// Both candidates of the last row: of the residual where one is wanted, and of p.
__device__ __forceinline__ dspark_shard_draw draw_row(Team& team, const Args& args, Shared& s) {
  scan_row(team, s.row, false);
  if (threadIdx.x == 0) {  // as all ranks know it; the maxima of the segments stay this rank's
    s.row.top = s.known.top;
    s.row.mass = s.known.mass;
    s.row.log_mass = s.known.log_mass;
  }
  const bool residual = s.last.what == Pending::kResidual;
  if (residual && s.last.stored) prepare_law(team, args, s);
  const int32_t column = shard::local(args.v, args.place, s.last.draft);
  const Source left = s.last.stored ? Source::kResidual
                      : column >= 0 ? Source::kWithout
                                    : Source::kTarget;
  const DrawKind kind = s.last.what == Pending::kBonus ? kBonusSegment : kResidualSegment;
  dspark_shard_draw x = shard::no_draw();
#pragma unroll 1
  for (int which = residual ? 0 : 1; which < 2; ++which) {
    if (threadIdx.x == 0) {
      begin(s.draw, which == 0 ? left : Source::kTarget, column,
            row_draw(args.v.call, s.walk.r, s.last.row, kind));
    }
    __syncthreads();
    const uint64_t key = candidate(team, args, s.row, s.draw, s.scratch);
    const int32_t token = key != 0 ? args.place.first_id + s.draw.token : -1;
    const float z = key != 0 ? s.draw.z : kMinusInf;
    const float raw = key != 0 ? raw_logit(s.row.law, s.draw.token) : kMinusInf;
    if (which == 0) {  // constant places: an index would put the record into local memory
      x.key[0] = key, x.token[0] = token, x.logit[0] = z, x.raw[0] = raw;
    } else {
      x.key[1] = key, x.token[1] = token, x.logit[1] = z, x.raw[1] = raw;
    }
    __syncthreads();
  }
  return x;
}

__global__ void __launch_bounds__(kThreads, 2) draw_kernel(const __grid_constant__ Args args) {
  __shared__ Shared s;
  const VerifyParams& p = args.v.call;
  const int32_t r = static_cast<int32_t>(blockIdx.x) / args.team;
  if (!takes_part(p, r)) return;
  Team team{&s.team, args.team, static_cast<int32_t>(blockIdx.x) % args.team, 0};
  if (threadIdx.x == 0) {
    lay_out(args, s.row, team.rank, r);
    s.walk = shard::start(p, r, false);
    s.works = false;
    if (shard::has_rows(s.walk)) {
      s.last = shard::walk_rows(args.v, &s.walk, args.place, &s.known);
      s.works = s.last.what != Pending::kNothing;
    }
    if (s.works) s.row.law = row_law(p, r, s.walk.s, s.last.row);
  }
  __syncthreads();
  dspark_shard_draw x = shard::no_draw();
  if (s.works) x = draw_row(team, args, s);
  if (team.rank == 0 && threadIdx.x == 0) args.v.draw[r] = x;
  if (s.works && team.size > 1) team.barrier();
}

__global__ void __launch_bounds__(kFinishThreads, 1)
    finish_kernel(const __grid_constant__ Args args) {
  const int32_t r = static_cast<int32_t>(blockIdx.x * kFinishThreads + threadIdx.x);
  if (r >= args.v.call.num_requests || !takes_part(args.v.call, r)) return;
  shard::finish(args.v, r, args.place);
}

}  // namespace dspark::cuda::shards

#endif  // DSPARK_CUDA_VOCAB_PARALLEL_KERNEL_CUH_
