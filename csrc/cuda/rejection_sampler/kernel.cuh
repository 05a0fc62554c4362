// SPDX-License-Identifier: Apache-2.0
//
// rejection_sampler: target logits and drafts in, tokens out.
//
// A team of 1 to 8 CTAs, a cluster, takes a request through its rows. A CTA owns a contiguous range
// of segments of 128 ids. A row is read once from memory: the pass leaves a maximum and a weight
// sum a segment, and everything else (lse, coin, argmax, residual, truncations, the draw) works on
// these or on the few segments that still matter, out of shared memory or L2. Thread 0 of every CTA
// knows the rules (walk.cuh) and says what the team does next; rows behind the first rejection are
// not read.
//
// Few requests cannot fill a GPU row by row. Then a first launch gives every row a team, and leaves
// what it found in the workspace; the second one, started early, decides and reads again only the
// segments of the last row. Which of the two it is follows from sizes. What one thread decides, all
// wait for, so it asks no memory: records and drafts' logits lie in shared memory by then, and the
// other warps ask for the first row's slice in L2 while it reads the request.
//
// Traffic: the visited rows once, and once those of stored draft laws; the row of a residual again
// out of shared memory (a slice of it fits there when the team is large enough) or L2. The floor is
// the logits once: 18.1 us at R = 32, gamma = 7, V = 151,936 in bf16 on one H200 (4.3 TB/s), 8.1 us
// of the rows that are visited at three acceptances in four. What the pass costs is the weight, 12
// operations that have the same bits on every backend: docs/rejection_sampler.md has the model.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_KERNEL_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_KERNEL_CUH_

#include "cuda/prim/dependency.h"
#include "cuda/rejection_sampler/list.cuh"
#include "cuda/rejection_sampler/scan.cuh"
#include "cuda/rejection_sampler/walk.cuh"

namespace dspark::cuda::verify {

struct Shared {
  TeamShared team;
  Walk walk;
  Row row;
  Draw draw;
  DrawShared scratch;
  SelectShared select;
  ListShared list;
};

/// Thread 0, once: the slice of this CTA and its memory. `owner` of its numbers is the request, or
/// the row with rows_at_once.
__device__ __forceinline__ void lay_out(const Args& args, Shared& s, int32_t rank, int64_t owner,
                                        unsigned char* memory) {
  const Plan& plan = args.plan;
  Row& row = s.row;
  take_slice(row, rank, plan.slice, plan.segments);
  float* numbers = reinterpret_cast<float*>(memory);
  if (plan.shared_stats != 0) {
    row.stats = stats_at(numbers, 0, plan.slice, 0);
    numbers += kStats * plan.slice;
  } else {
    row.stats = stats_at(args.work.stats, owner, plan.segments, row.first);
  }
  row.keep = plan.keep;
  row.kept = plan.keep == Keep::kNothing ? nullptr : numbers;
  s.list.count = 0;
}

/// The slice of the first row that will be read, as far as that is known without its request. All
/// warps but the first.
__device__ __forceinline__ void prefetch_first(const Args& args, int32_t rank, int32_t r,
                                               int32_t i) {
  const Params& p = args.p;
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 32;
  if (thread < 0 || p.target_lse != nullptr) return;
  const int64_t number = int64_t{p.cu_seqlens[r]} + i;
  if (number < 0 || number >= p.cu_seqlens[r + 1] || number >= p.num_rows) return;
  const int32_t first = rank * args.plan.slice;
  prefetch_slice(p, number, first, first + args.plan.slice, thread, kThreads - 32);
}

/// What kRows has left of the request's rows, all at once into shared memory. Whole block.
__device__ __forceinline__ void fetch_records(const Args& args, int64_t r, unsigned char* memory) {
  const int32_t rows = args.p.gamma + 1;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(args.work.records + r * rows);
  uint32_t* to = reinterpret_cast<uint32_t*>(memory);
  const int32_t words = rows * static_cast<int32_t>(sizeof(RowRecord) / sizeof(uint32_t));
  for (int32_t j = static_cast<int32_t>(threadIdx.x); j < words; j += kThreads) to[j] = from[j];
}

/// A row's record, instead of a scan. Thread 0.
__device__ __forceinline__ void recall(const Args& args, Shared& s, const unsigned char* memory) {
  Row& row = s.row;
  const int64_t at = s.walk.r * (args.p.gamma + 1) + s.walk.i;
  const RowRecord& x = reinterpret_cast<const RowRecord*>(memory)[s.walk.i];
  row.stats = stats_at(args.work.stats, at, args.plan.segments, row.first);
  row.nan = x.nan != 0;
  row.empty = x.empty != 0;
  row.cuts = truncated(row.law) && !row.empty;
  row.cut = x.cut;
  row.top = x.top;
  row.top_segment = x.top_segment;
  row.mass = x.mass;
  row.log_mass = x.log_mass;
  row.raw_top = x.raw_top;
  row.raw_log_mass = x.raw_log_mass;
  row.look = x.look;
  row.draft.vocab = x.columns;
  s.walk.draft_z = x.draft_logit;
  s.walk.draft_raw = x.draft_raw;
}

/// kDecide: whether the walk has asked for a row, which is there. Thread 0.
__device__ __forceinline__ bool recalled(const Args& args, Shared& s, const unsigned char* memory) {
  if (args.phase != Phase::kDecide || s.walk.op != Op::kScan) return false;
  recall(args, s, memory);
  return true;
}

__device__ __forceinline__ void publish(const Args& args, const Shared& s) {
  const Row& row = s.row;
  RowRecord& x = args.work.records[s.walk.r * (args.p.gamma + 1) + s.walk.i];
  x = RowRecord{row.mass,         row.log_mass,    row.raw_top,     row.raw_log_mass,
                row.top,          row.top_segment, row.cut,         s.walk.draft_z,
                s.walk.draft_raw, row.draft.vocab, row.nan ? 1 : 0, row.empty ? 1 : 0,
                row.look};
}

/// Thread 0: what the team has found in its slices.
__device__ __forceinline__ void take_tops(Shared& s, const Tops& t) {
  Row& row = s.row;
  if (s.walk.scan_draft) {
    row.look.disorder = (t.found & kDisorder) != 0;
    row.look.nan = (t.found & kDraftNan) != 0;
    row.look.listed = (t.found & kListed) != 0;
    row.draft.vocab = static_cast<int32_t>(t.columns);
  }
  if (!s.walk.scan_target) return;
  take_target(row, t);
}

/// Op::kScan: read the row of the walk, and the law of its draft. Whether it is to be truncated.
__device__ __forceinline__ bool scan_row(Team& team, const Args& args, Shared& s) {
  Row& row = s.row;
  const bool target = s.walk.scan_target, law = s.walk.scan_draft;
  Tops tops{};
  if (target && threadIdx.x == kThreads - 1 && s.walk.draft >= 0) {
    s.walk.draft_z = logit_before_cut(row.law, s.walk.draft);
    s.walk.draft_raw = load_f32(row.law.logits, row.law.dtype, s.walk.draft);
  }
  if (target) tops = scan_slice(row);
  if (law && args.p.support_ids != nullptr) {
    look_at_list(row.draft, args.p.vocab_size, s.walk.draft, team, &tops);
  } else if (law) {
    look_at_row(row.draft, s.walk.draft, team, &tops);
  }
  if (target && args.plan.prefetch != 0 && s.walk.i < s.walk.s.length) {
    prefetch_slice(args.p, s.walk.s.first_row + s.walk.i + 1, row.first, row.end,
                   static_cast<int32_t>(threadIdx.x), kThreads);
  }
  tops = combine(team, tops);
  if (threadIdx.x == 0) take_tops(s, tops);
  __syncthreads();
  return target && truncated(row.law) && !row.empty;
}

/// The normalisation of the row, and the first time that of the unprocessed row. Thread 0 has them
/// at once, the others behind the next barrier.
__device__ __forceinline__ void find_masses(Team& team, Row& row, bool first) {
  const bool raw = first && raw_differs(row.law);
  const Masses m = combine(team, slice_masses(row, row.stats.sum, raw));
  if (threadIdx.x == 0) {
    row.mass = m.high + m.low;
    row.log_mass = log_mass_of(row.mass);
    if (first) row.raw_log_mass = raw ? log_mass_of(m.raw_high + m.raw_low) : row.log_mass;
  }
}

/// What the truncations of the row keep.
__device__ __forceinline__ Wanted truncation(const Row& row) {
  const RowLaw& law = row.law;
  const float low = law.min_p > 0.0f ? smallest_kept(row.top, law.temperature, law.min_p)
                                     : -largest_finite(DSPARK_F32);
  return Wanted{false, row.stats.max, low, row.top, law.top_k > 0 ? law.top_k : 0, law.top_p};
}

/// Cut the row off, or list its likeliest ids, as it came and under its law.
__device__ __forceinline__ void select_in_row(Team& team, const Args& args, Shared& s, bool lists) {
  Row& row = s.row;
  const Params& p = args.p;
  const int64_t at = (s.walk.r * (p.gamma + 1) + s.walk.i) * p.top_logprobs;
  if (!lists) __syncthreads();  // the masses are there
#pragma unroll 1
  for (int raw = lists ? 1 : 0; raw >= 0; --raw) {
    const Wanted wanted = lists ? listed(row, raw != 0, p.top_logprobs) : truncation(row);
    const Cut cut = select_ids(team, s.select, row, wanted, args.plan.segments);
    if (!lists) {  // the search has read the cut that it left for the last time
      if (threadIdx.x == 0) {
        row.cut = cut;
        row.cuts = true;
      }
      __syncthreads();
    }
    apply_cut(row, wanted, cut, lists, gathering(team, s.list));
    if (lists) {
      team.barrier();
      list_ids(team, s.list, row, wanted, (raw != 0 ? p.top_ids_raw : p.top_ids) + at,
               (raw != 0 ? p.top_logprob_raw : p.top_logprob) + at);
    }
    __syncthreads();
  }
}

/// Rows from the first one that emitted nothing on say so. The first CTA of the team.
__device__ __forceinline__ void clear_rows(const Params& p, int64_t r, int32_t first) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int64_t n = p.top_logprobs;
  const int64_t row = r * (p.gamma + 1);
  for (int64_t j = (row + first) * n + thread; j < (row + p.gamma + 1) * n; j += kThreads) {
    p.top_ids[j] = p.top_ids_raw[j] = -1;
    p.top_logprob[j] = p.top_logprob_raw[j] = 0.0f;
  }
  if (thread < first || thread > p.gamma) return;
  p.tokens[row + thread] = -1;
  p.logprob[row + thread] = 0.0f;
  p.logprob_raw[row + thread] = 0.0f;
}

__global__ void __launch_bounds__(kThreads, 2)
    rejection_sampler_kernel(const __grid_constant__ Args args) {
  DSPARK_DYNAMIC_SHARED(memory);
  __shared__ Shared s;
  const bool rows = args.phase == Phase::kRows, decides = args.phase == Phase::kDecide;
  if (rows) prim::grid_dependency_launch();
  const int32_t size = args.plan.team;
  const int32_t index = static_cast<int32_t>(blockIdx.x) / size;
  const int32_t r = rows ? index / (args.p.gamma + 1) : index;
  if (!takes_part(args.p, r)) {
    if (decides) prim::grid_dependency_wait();  // it must not end before the one ahead
    return;
  }
  Team team{&s.team, size, static_cast<int32_t>(blockIdx.x) % size, 0};
  const Walker walker{args.p, s.walk, s.row, s.draw, team.rank == 0, rows};
  if (threadIdx.x == 0) {
    lay_out(args, s, team.rank, index, memory);
    s.walk.r = r;
    s.walk.i = rows ? index % (args.p.gamma + 1) : 0;
    s.walk.turn = Turn::kStart;
  }
  if (!decides) prefetch_first(args, team.rank, r, rows ? index % (args.p.gamma + 1) : 0);
#pragma unroll 1
  for (bool begins = true;; begins = false) {
    if (threadIdx.x == 0) {
      do {
        walker.advance();
      } while (!begins && recalled(args, s, memory));
    }
    if (decides && begins) {  // the request has been read beside the launch ahead
      prim::grid_dependency_wait();
      fetch_records(args, r, memory);
    }
    __syncthreads();
    const Op op = s.walk.op;
    if (op == Op::kDone) break;
    const bool lists = op == Op::kList;
    bool cuts = false;
    if (decides && threadIdx.x == 0) recalled(args, s, memory);
    if (op == Op::kScan && !decides) cuts = scan_row(team, args, s);
    const bool scans = op == Op::kScan && s.walk.scan_target && !decides;
#pragma unroll 1
    for (bool first = true; scans || lists; first = false) {
      if (scans) find_masses(team, s.row, first);
      if (!first || !(cuts || lists)) break;
      select_in_row(team, args, s, lists);
    }
    if (op == Op::kDraw) draw_token(team, s.row, s.draw, s.scratch);
    __syncthreads();  // all have seen what was asked for
  }
  if (rows && team.rank == 0 && threadIdx.x == 0 && s.walk.turn == Turn::kPublish) {
    publish(args, s);
  }
  if (!rows && team.rank == 0) clear_rows(args.p, r, s.walk.emitted);
  if (team.size > 1) team.barrier();  // a peer may still be reading this CTA's shared memory
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_KERNEL_CUH_
