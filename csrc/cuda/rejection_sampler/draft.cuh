// SPDX-License-Identifier: Apache-2.0
//
// The stored law of a draft: a row of logits, of a reduced vocabulary perhaps, or a list of ids.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_DRAFT_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_DRAFT_CUH_

#include "cuda/rejection_sampler/row.cuh"

namespace dspark::cuda::verify {

/// First column whose target id is >= id, by the lanes of a warp: 32 places a step.
__device__ __forceinline__ int32_t lower_column(const int32_t* targets, int32_t n, int32_t id) {
  int32_t low = 0, size = n;  // the answer is in low .. low + size
  while (size > 0) {
    const int32_t step = (size + 31) / 32;
    const int32_t at = low + lane_id() * step;
    const bool below = at < low + size && targets[at] < id;
    const int32_t count = __popc(__ballot_sync(~0u, below));
    if (count == 0) return low;
    const int32_t end = low + size;
    low += (count - 1) * step + 1;
    size = step - 1 < end - low ? step - 1 : end - low;
  }
  return low;
}

/// Whether this thread finds a NaN in its columns of the row.
__device__ __forceinline__ bool draft_slice_nan(const DraftRow& draft, int32_t rank, int32_t team) {
  const int32_t segments = segments_of(draft.vocab);
  const int32_t slice = (segments + team - 1) / team;
  const int32_t last = (rank + 1) * slice < segments ? (rank + 1) * slice : segments;
  bool nan = false;
#pragma unroll 1
  for (int32_t s = rank * slice + warp_id() * kBatch; s < last; s += kWarps * kBatch) {
    Batch b = load_batch(draft.logits, draft.dtype, draft.vocab, s, last);
    const uint32_t infinity = draft.dtype == DSPARK_F32    ? 0x7f800000u
                              : draft.dtype == DSPARK_BF16 ? 0x7f80u
                                                           : 0x7c00u;
    const uint32_t magnitude = draft.dtype == DSPARK_F32 ? 0x7fffffffu : 0x7fffu;
#pragma unroll
    for (int e = 0; e < 4 * kBatch; ++e) nan |= (b.bits[e / 4][e % 4] & magnitude) > infinity;
  }
  return nan;
}

/// What this thread finds in its ids of a list, which should be strictly ascending in [0, V), then
/// negative.
__device__ __forceinline__ void look_at_list(const DraftRow& draft, int32_t vocab, int32_t token,
                                             const Team& team, Tops* tops) {
  const int32_t first = team.rank * kThreads + static_cast<int32_t>(threadIdx.x);
#pragma unroll 1
  for (int32_t j = first; j < draft.vocab; j += team.size * kThreads) {
    const int32_t id = draft.targets[j];
    if (id < 0) continue;
    const int32_t before = j == 0 ? -1 : draft.targets[j - 1];
    if (id >= vocab || (j > 0 && (before < 0 || before >= id))) tops->found |= kDisorder;
    const float q = load_f32(draft.logits, draft.dtype, j);
    if (q != q) tops->found |= kDraftNan;
    if (id == token) tops->found |= kListed;
    tops->columns = static_cast<uint32_t>(j) + 1;
  }
}

/// The same of a row of the draft vocabulary.
__device__ __forceinline__ void look_at_row(const DraftRow& draft, int32_t token, const Team& team,
                                            Tops* tops) {
  tops->columns = static_cast<uint32_t>(draft.vocab);
  if (draft_slice_nan(draft, team.rank, team.size)) tops->found |= kDraftNan;
  bool listed = token < draft.vocab;
  if (draft.targets != nullptr && team.rank == 0 && warp_id() == 0) {
    const int32_t column = lower_column(draft.targets, draft.vocab, token);
    listed = column < draft.vocab && draft.targets[column] == token;
  } else if (draft.targets != nullptr) {
    listed = false;
  }
  if (listed) tops->found |= kListed;
}

/// Draft logits of the segments that a warp visits in ascending order.
struct DraftWalk {
  int32_t column;  // the first one at or behind the next segment
};

__device__ __forceinline__ DraftWalk start_walk(const DraftRow& draft, int32_t segment) {
  if (draft.targets == nullptr) return DraftWalk{0};
  return DraftWalk{lower_column(draft.targets, draft.vocab, segment * kSegment)};
}

/// Draft logits of the ids of segment s, -inf where the draft has no column; false without any
/// column. `space` holds 128 floats of this warp.
__device__ __forceinline__ bool draft_logits(const DraftRow& draft, DraftWalk& walk, int32_t s,
                                             float* space, float (&q)[4]) {
  const float largest = largest_finite(draft.dtype);
  if (draft.targets == nullptr) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t id = id_of(s, e);
      const uint32_t bits = load_bits(draft.logits, draft.dtype, id, id < draft.vocab);
      q[e] = clean_logit(widen(bits, draft.dtype), largest);
    }
    return true;
  }
  const int32_t first = s * kSegment, limit = first + kSegment;
  // A lane clears and reads four places that are its own outside of the two barriers.
#pragma unroll
  for (int e = 0; e < 4; ++e) space[lane_id() + 32 * e] = kMinusInf;
  __syncwarp();
  bool any = false;
#pragma unroll 1
  for (bool more = true; more;) {
    const int32_t c = walk.column + lane_id();
    const int32_t id = c < draft.vocab ? draft.targets[c] : limit;
    if (id < limit && id >= first) space[id - first] = load_f32(draft.logits, draft.dtype, c);
    const uint32_t here = __ballot_sync(~0u, id < limit);
    walk.column += __popc(here);
    any |= here != 0;
    more = here == ~0u;
  }
  __syncwarp();
#pragma unroll
  for (int e = 0; e < 4; ++e) q[e] = clean_logit(space[lane_id() + 32 * e], largest);
  return any;
}

/// Weights times -expm1(min(0, log q - log p)). The difference is formed in float64, so that q
/// close to p leaves what is really there; only then is it narrowed.
__device__ __forceinline__ void residual_weights(const Row& row, const float (&z)[4],
                                                 const float (&q)[4], float (&w)[4]) {
  const double inverse_p = 1.0 / static_cast<double>(row.law.temperature);
  const double inverse_q = 1.0 / row.draft.temperature;
  const double top = static_cast<double>(row.top);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const double lp = (static_cast<double>(z[e]) - top) * inverse_p - row.log_mass;
    const double lq = static_cast<double>(q[e]) * inverse_q - row.draft.lse;
    const float d = static_cast<float>(lq - lp);
    const float factor = d < 0.0f ? -expm1_f32(d) : 0.0f;
    w[e] = z[e] == kMinusInf ? 0.0f : w[e] * factor;
  }
}

/// Sums of the residual weights of this CTA's slice. A warp has a stretch of neighbours.
__device__ __forceinline__ void residual_slice(const Row& row, float* space) {
  const float scale = weight_scale(row.law.temperature);
  const int32_t stretch = (row.end - row.first + kWarps - 1) / kWarps;
  const int32_t first = row.first + warp_id() * stretch;
  const int32_t end = first + stretch < row.end ? first + stretch : row.end;
  if (first >= end) return;
  DraftWalk walk = start_walk(row.draft, first);
#pragma unroll 1
  for (int32_t s = first; s < end; ++s) {
    const int32_t i = s - row.first;
    float q[4], z[4], w[4];
    const float m = row.stats.max[i];
    // Without a column q is 0 in the segment and p stays as it is: most segments of a list.
    const bool touched = draft_logits(row.draft, walk, s, space, q);
    float sum = row.stats.sum[i];
    if (touched) {
      segment_logits(row, s, false, z);
      segment_weights(z, m, scale, w);
      residual_weights(row, z, q, w);
      sum = segment_sum(w);
    }
    if (lane_id() == 0) row.stats.residual[i] = sum;
  }
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_DRAFT_CUH_
