// SPDX-License-Identifier: Apache-2.0
//
// The end of a tile that the CTAs of a cluster share. Each leaves its part in its own shared
// memory; behind one barrier of the cluster each folds a slice of the rows over all parts, in the
// order of their keys, and writes it out. A last barrier keeps the parts alive until all have been
// read.
//
// Nothing passes through global memory, so there are no counters and no slots, and nothing that
// CTAs of different clusters would have to wait for: the launch need not be cooperative.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_CLUSTER_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_CLUSTER_CUH_

#include "cuda/prim/cluster.h"
#include "cuda/prim/dependency.h"
#include "cuda/prim/memory.h"
#include "cuda/verify_attention/results.cuh"

namespace dspark::cuda::attention {

constexpr int kLineEntries = 128 / static_cast<int>(sizeof(int32_t));  // of a cache line

/// The kernel ahead has ended behind this. Before, lengths and pages of the cluster's request are
/// asked for: into L2, where a later write of them is seen as well.
__device__ __forceinline__ void start_cluster(const Args& args, int64_t r) {
  const Params& p = args.p;
  const int32_t rank = static_cast<int32_t>(blockIdx.x) % args.config.cluster;
  const int64_t column = (rank * int64_t{blockDim.x} + threadIdx.x) * kLineEntries;
  if (column < p.max_pages) prim::prefetch_l2(p.page_table + r * p.page_table_stride + column);
  if (threadIdx.x == 0) {
    prim::prefetch_l2(p.cu_seqlens + r);
    prim::prefetch_l2(p.kv_len + r);
  }
  prim::grid_dependency_wait();
}

/// Four values of a row, from the first `parts` CTAs of the cluster. `view` and `bad` are this
/// CTA's; `bad` becomes whether any of them has met a bad page. The factors of all parts are found
/// at once: one after another, as fold() has them, they would be a chain of exponentials.
__device__ __forceinline__ Running fold_cluster(const View& view, const int32_t* bad, int32_t parts,
                                                int32_t row, int32_t column, bool* any_bad) {
  Running part[kMaxCluster];
  int32_t found = 0;
#pragma unroll
  for (int i = 0; i < kMaxCluster; ++i) {
    part[i] = no_keys();
    if (i >= parts) continue;
    const auto rank = static_cast<uint32_t>(i);
    const float2 ms = *prim::map_shared(view.softmax + row, rank);
    const float4 v = *reinterpret_cast<const float4*>(
        prim::map_shared(view.values + row * view.pitch + column, rank));
    found |= *prim::map_shared(bad, rank);
    part[i] = {ms.x, ms.y, {v.x, v.y, v.z, v.w}};
  }
  *any_bad = found != 0;
  Running total = no_keys();
#pragma unroll
  for (int i = 0; i < kMaxCluster; ++i) total.max = fmaxf(total.max, part[i].max);
  const float base = total.max == -kInfinity ? 0.0f : total.max;  // only with NaN in the sum
#pragma unroll
  for (int i = 0; i < kMaxCluster; ++i) {
    if (part[i].max == -kInfinity && part[i].sum == 0.0f) continue;  // as fold(): no key of the row
    const float factor = prim::exp2_approx(part[i].max - base);
    total.sum = fma_f32(part[i].sum, factor, total.sum);
#pragma unroll
    for (int d = 0; d < 4; ++d) total.x[d] = fma_f32(part[i].x[d], factor, total.x[d]);
  }
  return total;
}

/// All threads of the cluster. `view` is this CTA's part, if it `has` one, and `bad` in its shared
/// memory says whether the part met a bad page.
__device__ __forceinline__ void merge_cluster(const Args& args, const Results& results,
                                              const Tile& t, const View& view, bool has,
                                              const int32_t* bad) {
  const int32_t columns = results.columns(), count = t.rows * columns;
  // The buffers of the part become one, the first.
  for (int32_t e = prim::thread_index(); has && view.count > 1 && e < count; e += blockDim.x) {
    const int32_t row = e / columns, column = (e - row * columns) * 4;
    const Running sum = view.load(row, column);
    *reinterpret_cast<float4*>(const_cast<float*>(view.values) + row * view.pitch + column) =
        make_float4(sum.x[0], sum.x[1], sum.x[2], sum.x[3]);
  }
  __syncwarp();  // whole warps arrive
  prim::cluster_arrive();
  prim::cluster_wait();
  const int32_t each = (count - 1) / args.config.cluster + 1;
  const int32_t begin = each * static_cast<int32_t>(prim::cluster_rank());
  const int32_t end = min(count, begin + each);
  for (int32_t e = begin + prim::thread_index(); e < end; e += blockDim.x) {
    const int32_t row = e / columns, column = e - row * columns;
    bool any_bad = false;
    const Running total = fold_cluster(view, bad, t.sharers, row, column * 4, &any_bad);
    results.finish(t, row, column, total, any_bad);
    if (e == 0) results.write_status(t, any_bad);  // thread 0, which writes it
  }
  __syncwarp();
  prim::cluster_arrive();
  prim::cluster_wait();
}

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_CLUSTER_CUH_
