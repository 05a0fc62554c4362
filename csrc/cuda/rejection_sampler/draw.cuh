// SPDX-License-Identifier: Apache-2.0
//
// One token of a row: of p, of p without one id, of max(0, p - q), or the argmax.
//
// The segment is chosen by the team, each CTA with the keys of its slice, a segment a thread: that
// is where float64 logarithms are paid for, 1,187 of each kind at V = 151,936. What is inside the
// winner every CTA reads for itself, 128 logits out of L2, and so nobody waits for its owner.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_DRAW_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_DRAW_CUH_

#include "cuda/rejection_sampler/draft.cuh"

namespace dspark::cuda::verify {

enum class Source : int32_t {
  kTarget,    // p
  kWithout,   // p without the draft
  kResidual,  // max(0, p - q)
  kArgmax
};

/// What is drawn, and what came of it.
struct Draw {
  bool shares;  // only the share of p that the source keeps is wanted
  Source source;
  int32_t without;  // the id that kWithout leaves out
  RowDraw numbers;
  int32_t token;
  float z;        // its processed logit
  double share;   //
  bool had_none;  // the residual had no mass
  bool no_mass;   // nothing has mass: the token is the lowest that is allowed
};

struct DrawShared {
  float space[kWarps][kSegment];
  float without_sum;
  uint32_t lowest[kWarps];
};

/// Weights of a segment for the draw, relative to its largest logit; z on the way. A warp.
__device__ __forceinline__ void draw_weights(const Row& row, const Draw& d, int32_t s, float* space,
                                             float (&z)[4], float (&w)[4]) {
  segment_logits(row, s, false, z);
  segment_weights(z, segment_max(z), weight_scale(row.law.temperature), w);
  if (d.source == Source::kResidual) {
    float q[4];
    DraftWalk walk = start_walk(row.draft, s);
    if (draft_logits(row.draft, walk, s, space, q)) residual_weights(row, z, q, w);
  } else if (d.source == Source::kWithout) {
#pragma unroll
    for (int e = 0; e < 4; ++e) w[e] = id_of(s, e) == d.without ? 0.0f : w[e];
  }
}

/// Sum of segment `first + i` for this draw.
__device__ __forceinline__ float sum_for(const Row& row, const Draw& d, const DrawShared& shared,
                                         int32_t i) {
  if (d.source == Source::kResidual) return row.stats.residual[i];
  const bool patched = d.source == Source::kWithout && d.without / kSegment == row.first + i;
  return patched ? shared.without_sum : row.stats.sum[i];
}

/// This thread's part of the mass of the draw's sums.
__device__ __forceinline__ Masses draw_masses(const Row& row, const Draw& d,
                                              const DrawShared& shared) {
  Masses m{};
  const double temperature = static_cast<double>(row.law.temperature);
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < row.end - row.first; i += kThreads) {
    const float sum = sum_for(row, d, shared, i);
    add_exactly(relative_mass(sum, row.stats.max[i], row.top, temperature), &m.high, &m.low);
  }
  return m;
}

/// The best key of this thread's segments, 0 for none. The row's first segment has the number
/// `base` in the vocabulary.
__device__ __forceinline__ Key best_key(const Row& row, const Draw& d, const DrawShared& shared,
                                        int32_t base) {
  Key best{0};
  const RowDraw& n = d.numbers;
  const DrawStream stream{n.seed, n.position, n.distance, n.segment_kind};
  const double temperature = static_cast<double>(row.law.temperature);
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < row.end - row.first; i += kThreads) {
    const float sum = sum_for(row, d, shared, i);
    if (!(sum > 0.0f)) continue;
    const uint32_t s = static_cast<uint32_t>(base + row.first + i);
    const double noise = n.forced != nullptr ? 0.0 : segment_gumbel(stream, s);
    const double mass = log_f64(static_cast<double>(sum));
    const double key = static_cast<double>(row.stats.max[i]) / temperature + mass + noise;
    best.add(Key{pack_key(key, s)});
  }
  return best;
}

// Offset in a segment of the lowest lane and element with `mine`; -1: none.
__device__ __forceinline__ int32_t first_of(const bool (&mine)[4]) {
  int32_t first = -1;
#pragma unroll
  for (int e = 3; e >= 0; --e) {
    const uint32_t here = __ballot_sync(~0u, mine[e]);
    if (here != 0) first = 32 * e + __ffs(static_cast<int>(here)) - 1;
  }
  return first;
}

__device__ __forceinline__ int32_t last_of(const bool (&mine)[4]) {
  int32_t last = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const uint32_t here = __ballot_sync(~0u, mine[e]);
    if (here != 0) last = 32 * e + 31 - __clz(static_cast<int>(here));
  }
  return last;
}

/// Inverse CDF inside one segment (core/sampler.h, inner_pick); where all integers are 0, the last
/// id with weight.
__device__ __forceinline__ int32_t pick_inside(const float (&w)[4], uint64_t u53) {
  uint64_t through[4];
  uint64_t total = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    uint64_t sum = weight_integer(w[e]);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint64_t below = __shfl_up_sync(~0u, sum, d);
      if (lane_id() >= d) sum += below;
    }
    through[e] = total + sum;
    total += __shfl_sync(~0u, sum, 31);
  }
  bool mine[4];
  const uint64_t target = cdf_target(u53, total);
#pragma unroll
  for (int e = 0; e < 4; ++e) mine[e] = total == 0 ? w[e] > 0.0f : through[e] > target;
  return total == 0 ? last_of(mine) : first_of(mine);
}

/// The token inside segment s from its logits and weights. A warp.
__device__ __forceinline__ void pick_token(const Row& row, Draw& d, int32_t s, const float (&z)[4],
                                           const float (&w)[4]) {
  int32_t offset;
  if (d.source == Source::kArgmax) {
    const bool best[4] = {z[0] == row.top, z[1] == row.top, z[2] == row.top, z[3] == row.top};
    offset = first_of(best);
  } else {
    offset = pick_inside(w, forced_or_u53(d.numbers, d.numbers.segment_kind + 1));
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (offset != lane_id() + 32 * e) continue;
    d.token = s * kSegment + offset;
    d.z = z[e];
  }
}

/// The lowest id that mask and min-tokens allow, else 0. Whole block.
__device__ __forceinline__ int32_t lowest_allowed(const RowLaw& law, DrawShared& shared) {
  const int32_t words = (law.vocab + 31) / 32;
#pragma unroll 1
  for (int32_t first = 0; first < words; first += kThreads) {
    const int32_t word = first + static_cast<int32_t>(threadIdx.x);
    uint32_t bits = word >= words ? 0u : law.mask == nullptr ? ~0u : law.mask[word];
    if (word == words - 1 && law.vocab % 32 != 0) bits &= (1u << law.vocab % 32) - 1;
#pragma unroll 1
    for (int32_t j = 0; j < law.num_stops; ++j) {
      const int32_t id = law.stops[j];
      if (id >= 0 && id >> 5 == word) bits &= ~(1u << (id & 31));
    }
    const uint32_t id =
        static_cast<uint32_t>(word) * 32 + static_cast<uint32_t>(__ffs(static_cast<int>(bits))) - 1;
    const uint32_t least = __reduce_min_sync(~0u, bits != 0 ? id : ~0u);
    if (lane_id() == 0) shared.lowest[warp_id()] = least;
    __syncthreads();
    uint32_t lowest = ~0u;
    for (int w = 0; w < kWarps; ++w) lowest = min(lowest, shared.lowest[w]);
    if (lowest != ~0u) return static_cast<int32_t>(lowest);
    __syncthreads();  // everybody has read before the next words
  }
  return 0;
}

/// Warp 0 looks into one segment: before the keys to sum it without the draft, behind them, with
/// the winner's key, for the token.
__device__ __forceinline__ void look_inside(const Row& row, Draw& d, DrawShared& shared,
                                            uint64_t best) {
  const bool sums = best == 0;
  if (sums && d.source != Source::kWithout) return;
  const int32_t s = sums ? d.without / kSegment : static_cast<int32_t>(packed_segment(best));
  float z[4], w[4];
  draw_weights(row, d, s, shared.space[0], z, w);
  if (sums) {
    const float sum = segment_sum(w);
    if (lane_id() == 0) shared.without_sum = sum;
  } else {
    pick_token(row, d, s, z, w);
  }
}

/// Nothing has mass. Whole block.
__device__ __forceinline__ void take_lowest(const Row& row, Draw& d, DrawShared& shared) {
  const int32_t token = lowest_allowed(row.law, shared);
  if (threadIdx.x != 0) return;
  d.no_mass = true;
  d.token = token;
  d.z = kMinusInf;
}

/// Draw, or find the share. Whole team; the result is in `d` behind it, in all CTAs.
__device__ __forceinline__ void draw_token(Team& team, const Row& row, Draw& d,
                                           DrawShared& shared) {
  uint64_t best = 0;
  if (d.source == Source::kArgmax) best = pack_key(0.0, static_cast<uint32_t>(row.top_segment));
#pragma unroll 1
  while (!row.empty) {
    if (warp_id() == 0) look_inside(row, d, shared, best);
    if (best != 0) return;
    if (d.source == Source::kResidual) residual_slice(row, shared.space[warp_id()]);
    if (d.source != Source::kTarget) __syncthreads();  // new sums
    if (d.shares) {
      const Masses m = combine(team, draw_masses(row, d, shared));
      if (threadIdx.x == 0) d.share = (m.high + m.low) / row.mass;
      return;
    }
    best = combine(team, best_key(row, d, shared, 0)).key;
    if (best != 0) continue;
    if (d.source == Source::kTarget) break;
    __syncthreads();
    if (threadIdx.x == 0) {
      d.source = Source::kTarget;
      d.had_none = true;
    }
    __syncthreads();
  }
  take_lowest(row, d, shared);
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_DRAW_CUH_
