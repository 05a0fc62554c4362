// SPDX-License-Identifier: Apache-2.0
//
// top_logprobs: the n likeliest ids of a row, under its law and as it came.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_LIST_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_LIST_CUH_

#include "cuda/rejection_sampler/select.cuh"

namespace dspark::cuda::verify {

struct ListShared {
  uint64_t keys[DSPARK_MAX_TOP_LOGPROBS];
  uint32_t count;
};

/// Where ids gather: the first CTA of the team.
struct Gathered {
  uint64_t* keys;
  uint32_t* count;
};
__device__ __forceinline__ Gathered gathering(const Team& team, ListShared& list) {
  if (team.size == 1) return Gathered{list.keys, &list.count};
  return Gathered{prim::map_shared(list.keys, 0), prim::map_shared(&list.count, 0)};
}

/// Behind a selection, over the segments that it has left something of. The ids of a list gather;
/// a row that was cut gets the numbers of its segments anew.
__device__ __forceinline__ void apply_cut(const Row& row, const Wanted& w, const Cut& cut,
                                          bool lists, const Gathered& to) {
  const float scale = weight_scale(row.law.temperature);
#pragma unroll 1
  for (int32_t s = row.first + warp_id(); s < row.end; s += kWarps) {
    const int32_t i = s - row.first;
    const bool outside = w.maxima != nullptr && w.maxima[i] < cut.z;
    if (outside && lists) continue;
    float z[4], m = kMinusInf, sum = 0.0f;
    if (!outside) segment_logits(row, s, w.raw, z);
    if (lists) {
      uint32_t hits = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool in = z[e] != kMinusInf && inside(cut, z[e], id_of(s, e));
        hits |= in ? 1u << e : 0u;
      }
      uint32_t at = hits != 0 ? atomicAdd(to.count, static_cast<uint32_t>(__popc(hits))) : 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((hits >> e & 1u) != 0 && at < DSPARK_MAX_TOP_LOGPROBS) {
          to.keys[at++] = rank_key(z[e], id_of(s, e));
        }
      }
      continue;
    }
    if (!outside) {
      float weights[4];
      m = segment_max(z);
      segment_weights(z, m, scale, weights);
      sum = segment_sum(weights);
    }
    __syncwarp();  // everybody has read the maximum
    if (lane_id() == 0) {
      row.stats.max[i] = m;
      row.stats.sum[i] = sum;
    }
  }
}

/// What is listed of a row: its law, or the row as it came.
__device__ __forceinline__ Wanted listed(const Row& row, bool raw, int32_t n) {
  const float lowest = -largest_finite(DSPARK_F32);
  const float* maxima = row.stats.max;
  if (raw && raw_differs(row.law)) maxima = row.stats.raw_max;
  // A truncation has cut the maxima that an unprocessed row would need.
  if (raw && !raw_differs(row.law) && row.cuts) maxima = nullptr;
  return Wanted{raw, maxima, lowest, raw ? static_cast<float>(row.raw_top) : row.top, n, 1.0f};
}

/// Write the ids that have gathered, at most n, at ids[0..n), log-probabilities beside them. The
/// first CTA of the team writes.
__device__ __forceinline__ void list_ids(const Team& team, ListShared& list, const Row& row,
                                         const Wanted& w, int32_t* ids, float* logprob) {
  const int32_t n = static_cast<int32_t>(w.k);
  const int32_t size = static_cast<int32_t>(list.count), j = static_cast<int32_t>(threadIdx.x);
  if (team.rank == 0 && j < size) {
    const uint64_t key = list.keys[j];
    int32_t place = 0;
    for (int32_t k = 0; k < size; ++k) place += list.keys[k] < key ? 1 : 0;
    const float z = cut_at(key).z;
    const double value = w.raw ? raw_log_prob_of(z, row.law.dtype, row.raw_top, row.raw_log_mass)
                               : log_prob_of(z, row.top, row.log_mass, row.law.temperature);
    ids[place] = cut_at(key).id;
    logprob[place] = static_cast<float>(value);
  } else if (team.rank == 0 && j < n) {
    ids[j] = -1;
    logprob[j] = kMinusInf;
  }
  __syncthreads();
  if (threadIdx.x == 0) list.count = 0;
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_LIST_CUH_
